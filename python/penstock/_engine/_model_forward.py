"""The model's own forward, patched: which pass it belongs to, and what is kept of it where it will be computed again."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Dict, Iterator, Optional, Tuple

import torch
from torch import nn

from ._accumulation import Forward, Part
from ._autograd_settings import AutogradSettings
from ._backward_pass import BackwardPass
from ._changing import Changing
from ._entering import Entering
from ._lazy_logits import LazyLogits, is_lazy
from ._modules import switch_off_checkpointing, without_cache
from ._open_pass import OpenPass, PassFailed
from ._passes import Passes
from ._saved_inputs import SavedInputs
from ._stages import Stages
from ._tree import counted, map_tensors, tensors_of


class ModelForward:
    """Makes this forward, and those of modules between the model and its blocks.

    A ``Part`` is called in the place of the model's forward: a module below the model that has all of its parameters, or the model with
    another forward, which Lightning's training_step is.
    """

    # Set by the engine: begins the pass, then calls ``train``.
    on_training_forward: Callable[[Tuple[Any, ...], Dict[str, Any], Optional[Part]], Any]

    # Set by Runtime: what the model has in the place of its own.
    patched: Callable[..., Any]

    _original: Callable[..., Any]

    def __init__(
        self,
        model: nn.Module,
        stages: Stages,
        open_pass: OpenPass,
        entering: Entering,
        backward: BackwardPass,
        passes: Passes,
        changing: Changing,
        saved: SavedInputs,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """dtype: of weights. device: where the model is computed."""
        self._model = model
        self._stages = stages
        self._open, self._here = open_pass, open_pass.here
        self._entering = entering
        self._backward = backward
        self._passes = passes
        self._changing = changing
        self._saved = saved
        self._dtype, self._device = dtype, device

    def of_model(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """What takes the place of the model's own forward, `original`."""
        self._original = original
        return lambda *args, **kwargs: self.called(args, kwargs)

    def called(self, args: Tuple[Any, ...], kwargs: Dict[str, Any], part: Optional[Part] = None) -> Any:
        """A forward of the model, or of `part`: one of a step, of an evaluation, or within another one."""
        driver = self._here.driver
        if driver is not None and self._here.inside_model:
            return self._forward_in(part)(*args, **kwargs)  # the model calls itself
        if driver is not None and driver.trains and driver.forward_at == 0 and self._here.awaited:
            self._here.awaited = False
            self._refuse_lost_gradients(args, kwargs)
            driver.counts = counted(args, kwargs)
            if part is None and driver.forward is not None:
                part = driver.forward.part
            return self._inside(args, self.without_cache(kwargs, part), self._forward_in(part))
        if torch.is_grad_enabled() and (self._model.training or self._stages.trains):
            self._refuse_lost_gradients(args, kwargs)
            if self._stages.trains:
                return self.on_training_forward(args, kwargs, part)
        return self.evaluate(args, kwargs, self._forward_in(part))

    def _forward_in(self, part: Optional[Part]) -> Callable[..., Any]:
        return self._original if part is None else part.forward

    def _refuse_lost_gradients(self, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> None:
        goes_all_the_way = self._stages.trains and self._stages.first_trained == 0
        if goes_all_the_way or not any(tensor.requires_grad for tensor in tensors_of((args, kwargs))):
            return
        if not self._stages.trains:
            raise PassFailed(
                "what goes into the model requires a gradient, and an engine of which nothing trains makes none: give it to the model as a "
                "parameter, or detach it"
            )
        raise PassFailed(
            f"what goes into the model requires a gradient, and backward ends at {self._stages.uses[self._stages.first_trained].name}, the first block "
            "that trains, since nothing that went into the first forward required one. Detach it, or make a new engine whose first "
            "forward has it so"
        )

    def train(self, args: Tuple[Any, ...], kwargs: Dict[str, Any], part: Optional[Part] = None) -> Any:
        """The model's forward, or that of `part`, of the training pass that has begun."""
        driver = self._open.drivers[0]
        driver.counts = counted(args, kwargs)
        with self._passes.given_up_on_error():
            driver.remembers = self._forward_of(args, kwargs, part)
            out = self._inside(args, self.without_cache(kwargs, part), self._forward_in(part))
            self._changing.note(driver.remembers)
            return driver.remembers.ended(out)

    def evaluate(self, args: Tuple[Any, ...], kwargs: Dict[str, Any], forward: Callable[..., Any]) -> Any:
        """A forward by itself, without gradients."""
        with self._passes.evaluation():
            return self._inside(args, kwargs, forward)

    def of_part(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """What takes the place of the forward of a module that has blocks below it: it may be called without the model, as an encoder."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            trains = self._stages.trains and torch.is_grad_enabled() and self._model.training
            if trains or self._here.inside_model:
                return original(*args, **kwargs)
            return self.evaluate(args, kwargs, original)

        return forward

    def of_whole(self, module: nn.Module, original: Callable[..., Any]) -> Callable[..., Any]:
        """What takes the place of the forward of a module that has all parameters: called without the model, it is the model, as what peft's
        model generates with is, or what a LightningModule trains.
        """
        part = Part(module, original)
        return lambda *args, **kwargs: self.called(args, kwargs, part)

    def for_accumulation(self, args: Tuple[Any, ...], kwargs: Dict[str, Any], part: Optional[Part] = None) -> Tuple[Forward, Any, float]:
        """A training forward whose backward is made by ``VerticalOrder.repeat``: (it, its outputs, the scale of gradients)."""
        forward = self._forward_of(args, self.without_cache(kwargs, part) if self._model.training else kwargs, part)
        switch_off_checkpointing(self._passes.checkpointing)
        with self._passes.evaluation() as driver, self.hooks_told():
            driver.forward = forward
            out = self._inside(forward.args, forward.kwargs, self._forward_in(part))
            self._changing.last = self._changing.note(forward)
            outputs = forward.outputs(out)
            forward.keep_attributes()
        return forward, outputs, driver.loss_gradient

    def without_cache(self, kwargs: Dict[str, Any], part: Optional[Part]) -> Dict[str, Any]:
        """These arguments of the model, or of `part`, and no cache of keys and values."""
        return without_cache(self._forward_in(part), kwargs)

    def _forward_of(self, args: Tuple[Any, ...], kwargs: Dict[str, Any], part: Optional[Part]) -> Forward:
        return Forward(self._model, args, kwargs, AutogradSettings(), self._changing.of_all(), part)

    @contextlib.contextmanager
    def in_its_place(self) -> Iterator[None]:
        """Within, the model has the patched forward, whatever else was put in its place, or around it."""
        held = self._model.forward
        self._model.forward = self.patched  # type: ignore[method-assign]
        try:
            yield
        finally:
            self._model.forward = held  # type: ignore[method-assign]

    def again(self, forward: Forward) -> Any:
        """This forward is made again, by the thread of its driver; what it gives."""
        module = self._model if forward.part is None else forward.part.module
        return module(*forward.args, **self.without_cache(forward.kwargs, forward.part))

    @contextlib.contextmanager
    def hooks_told(self) -> Iterator[None]:
        """Within, a forward that is computed again knows what hooks of modules are given: a loss may be made of it."""
        handles = []
        for module in self._model.modules():
            if module is not self._model and (module._forward_hooks or module._forward_pre_hooks):
                handles.append(module.register_forward_pre_hook(lambda called, args: self._told("input", called, args)))
                module._forward_pre_hooks.move_to_end(handles[-1].id, last=False)
                handles.append(module.register_forward_hook(lambda called, _, out: self._told("result", called, out)))
                module._forward_hooks.move_to_end(handles[-1].id, last=False)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _told(self, what: str, module: nn.Module, value: Any) -> Any:
        driver = self._here.driver
        if driver is None or driver.forward is None or not self._here.inside_model:
            return value
        value = map_tensors(value, lambda tensor: tensor.whole("a hook") if isinstance(tensor, LazyLogits) else tensor)
        call = driver.hooked.get((what, id(module)), 0)
        driver.hooked[what, id(module)] = call + 1
        if not driver.trains:
            return driver.forward.told(value, (what, id(module), call))
        for number, tensor in enumerate(tensors_of(value)):
            key = (what, id(module), call, number)
            if driver.forward.wants(key):
                driver.forward.found[key] = tensor
                if tensor.requires_grad and driver.at is not None:
                    tensor.register_hook(lambda _, stage=driver.at: self._backward.enter(driver, stage))
        return value

    def _inside(self, args: Tuple[Any, ...], kwargs: Dict[str, Any], forward: Callable[..., Any]) -> Any:
        if self._stages.has_residents:
            self._entering.pass_by(self._here.driver, 1)  # type: ignore[arg-type]
        driver = self._here.driver
        assert driver is not None
        self._here.inside_model = True
        if self._dtype != torch.float32 or self._device.type != "cpu":
            args, kwargs = map_tensors((args, kwargs), self._taken_in)
        if driver.trains:
            self._saved.begin((args, kwargs))
        try:
            with driver.held:
                out = forward(*args, **kwargs)
                if driver.lazy:
                    out = map_tensors(out, lambda tensor: _outliving(tensor, driver.forward is not None) if is_lazy(tensor) else tensor)
        finally:
            self._here.inside_model = False
        if driver.trains:
            self._saved.check()
        return self._entering.apart(0, out) if self._stages.has_residents else out

    # As DeepSpeed does with 16-bit weights: what comes in is of their type, and where they are.
    def _taken_in(self, tensor: torch.Tensor) -> torch.Tensor:
        cast = tensor.is_floating_point() and self._dtype != torch.float32
        return tensor.to(self._device, self._dtype if cast else tensor.dtype)


# Of an evaluation, whose weights go: logits that the model itself has used, for a loss, are rarely asked for once more.
def _outliving(logits: torch.Tensor, kept: bool) -> torch.Tensor:
    assert isinstance(logits, LazyLogits)
    if not kept and not logits.source.is_used:
        return logits.whole()
    logits.source.outlive()
    return logits
