"""The first forward of a model, which shows the order of its blocks."""

from __future__ import annotations

import copy
import functools
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterator, Mapping, Optional, Sequence, Tuple

import torch
from torch import nn

from .._lightning import unlogged
from ._device import give_back_cache, tell_of_offload
from ._given import Given
from ._hidden import Read, hide_copies, show_copies
from ._modules import move_buffers, parts_with_all_parameters, replace_forward, restore_forward, switch_off_checkpointing, without_cache
from ._run import Run
from ._tensor_memory import StepTensors
from ._trace import Use, settled, trace, with_other_modes
from ._tree import counted, map_tensors, tensors_of


@dataclass(frozen=True)
class Shown:
    """By the first forward."""

    uses: Sequence[Use]
    changing: Sequence[nn.Module]  # their attributes are changed by a forward
    input_gradients: bool  # wanted of what went into the model
    tokens: int = 0  # of its batch; 0: not known


class FirstForward:
    """Takes the place of the module's forward until it has been called once. Owns the functions that it replaces.

    prepare: takes the parameters over, for the forward itself to follow. Where it raises, the next forward is the first one.
    """

    def __init__(self, given: Given, run: Run, prepare: Callable[[Shown], None]) -> None:
        self._given = given
        self._module = given.module
        self._run = run
        self._prepare = prepare
        self._input_gradients = False
        self._all_of_it: Sequence[Tuple[nn.Module, Any]] = []
        self._looks = False  # at a call that is not the module's own forward, and may call that

    def wait(self) -> None:
        """Replaces the module's forward: the next call is taken for the first forward."""
        previous = self._module.forward

        def first_forward(*args: Any, **kwargs: Any) -> Any:
            if self._looks:
                return previous(*args, **kwargs)
            if self._run.runtime is None:
                self.look(args, kwargs)
                return self._module(*args, **kwargs)
            # Lightning has put this one back, which it found before the first forward.
            return self._run.runtime.forward_of_model(*args, **kwargs)

        self._previous_forward = replace_forward(self._module, first_forward)
        self.forward_of_model = self._module.forward
        self._all_of_it = [(part, replace_forward(part, self._first_forward_of(part))) for part in parts_with_all_parameters(self._module)]

    # Of a module that has all parameters, and is called without the model: peft's generates so, and a LightningModule trains it.
    def _first_forward_of(self, part: nn.Module) -> Callable[..., Any]:
        def first_forward(*args: Any, **kwargs: Any) -> Any:
            self.look(args, kwargs, part)
            return part(*args, **kwargs)

        return first_forward

    def stop(self) -> None:
        """The module has its own forward again."""
        restore_forward(self._module, self._previous_forward)
        for part, previous in self._all_of_it:
            restore_forward(part, previous)
        self._all_of_it = []

    def look(self, args: Tuple[Any, ...], kwargs: Dict[str, Any], call: Optional[Callable[..., Any]] = None) -> None:
        """Finds the order of the blocks, and hands the parameters over to the engine. call: in the place of the module, which it may call."""
        module, device = self._module, self._given.settings.device
        self.stop()
        for parameter in module.parameters():
            show_copies(parameter)  # of a closed engine, whose NaN pass through the forward that is traced
        try:
            self._given.look_at_parameters()
            if switch_off_checkpointing(module.modules()):
                self._given.settings.asks_for_host = True
                tell_of_offload(self._given.settings)
            if module.training:
                kwargs = without_cache(getattr(call or module, "forward", call), kwargs)  # type: ignore[arg-type]
            move_buffers(module, device)
            self._given.pieces.install()
            with self._inputs_of_the_models_type() as take_in, unlogged():

                def forward() -> Any:
                    return _apart_for(module, args, kwargs) if call is None else self._look_at(call, *take_in(args, kwargs))

                tensors = StepTensors(device, is_exact=not self._given.settings.engine_device) if self._given.settings.counts_tensors else None
                once_more = functools.partial(trace, module, self._given.blocks, forward, device, tensors, self._given.pieces)
                traced = with_other_modes(module, self._given.blocks, once_more(), once_more)
                if tensors is not None:
                    self._given.settings.step_tensor_bytes = tensors.bytes(self._given.settings.forwards, traced.uses)
                    give_back_cache(device)
                    for note in tensors.notes if self._given.settings.engine_device else ():
                        warnings.warn(note, stacklevel=3)
                flops = self._flops_of(forward) if self._given.settings.flops_profiler["enabled"] else None
            self._given.blocks, uses = settled(module, self._given.blocks, traced)
            self._prepare(Shown(uses, traced.changing, self._input_gradients, counted(args, kwargs)[0]))
            if flops is not None and self._run.watch is not None:
                self._run.watch.counts_flops(*flops)
        except BaseException:
            if not self._run.begun:
                self._given.pieces.remove()
                for name, parameter in module.named_parameters() if self._given.values_are_gone else ():
                    hide_copies(parameter, name, _closed_value)
                move_buffers(module, torch.device("cpu"))
                self.wait()
            raise

    def _look_at(self, call: Callable[..., Any], args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
        held = self._module.__dict__.get("forward")
        self._looks = True
        try:
            return _apart_for(call, args, kwargs)
        finally:
            self._looks = False
            restore_forward(self._module, held)  # also where Lightning has put another back

    # Of the first forward: (matrix products' FLOPs, tokens or samples); None where torch does not count.
    def _flops_of(self, forward: Callable[[], Any]) -> Optional[Tuple[float, int]]:
        try:
            from torch.utils.flop_counter import FlopCounterMode
        except ImportError:
            warnings.warn("flops_profiler: this torch counts no FLOPs (2.1 and newer do)", stacklevel=2)
            return None
        units = []
        own = self._module.forward

        def counting(*args: Any, **kwargs: Any) -> Any:
            tokens, samples = counted(args, kwargs)
            units.append(tokens or samples)
            return own(*args, **kwargs)

        previous = replace_forward(self._module, counting)
        try:
            with FlopCounterMode(display=False) as counter:
                trace(self._module, self._given.blocks, forward, self._given.settings.device, pieces=self._given.pieces)
        finally:
            restore_forward(self._module, previous)
        return float(counter.get_total_flops()), sum(units)

    # As later forwards take them in (Runtime._taken_in). A model of several types does what it does with them.
    @contextmanager
    def _inputs_of_the_models_type(self) -> Iterator[Callable[..., Tuple[Tuple[Any, ...], Dict[str, Any]]]]:
        types = set(self._given.dtypes.values())
        cast_to = types.pop() if len(types) == 1 and self._given.settings.dtype != "fp32" else None
        own = self._module.forward

        def taken_in(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(self._given.settings.device, tensor.dtype if cast_to is None or not tensor.is_floating_point() else cast_to)

        def take_in(args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Tuple[Tuple[Any, ...], Dict[str, Any]]:
            self._input_gradients |= any(tensor.requires_grad for tensor in tensors_of((args, kwargs)))
            return map_tensors((args, kwargs), taken_in)  # type: ignore[no-any-return]

        def forward(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = take_in(args, kwargs)
            return own(*args, **kwargs)

        previous = replace_forward(self._module, forward)
        try:
            yield take_in
        finally:
            restore_forward(self._module, previous)


# What a model's forward may change, as generate()'s cache of keys and values: tracing changes a copy, since the forward itself follows.
def _apart(given: Any) -> Any:
    if given is None or isinstance(given, (torch.Tensor, nn.Module, str, bytes, int, float, list, tuple, dict)):
        return given
    try:
        return copy.deepcopy(given)
    except Exception:  # noqa: B902 - it is as its owner made it
        return given


def _apart_for(module: Callable[..., Any], args: Tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return module(*(_apart(each) for each in args), **{name: _apart(each) for name, each in kwargs.items()})


def _closed_value(_: nn.Parameter, __: bool) -> Read:
    raise RuntimeError("this model's engine was closed, and its values went with it")
