"""The order in which a model uses its blocks, from one forward in which nothing is changed."""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Set, Tuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ._attributes import Attributes, Hooks, merged
from ._blocks import RESIDENT, Block, with_residents
from ._given_tensors import GivenTensors, UseInputs
from ._heads import Place
from ._modules import heed_no_set_to_itself, heed_set_to_itself
from ._on_disk import give_back
from ._pieces import Pieces
from ._random import RandomState
from ._tensor_memory import StepTensors, with_kwargs_hook
from ._tree import tensors_of

# What a forward does to a weight would be in memory alone, be lost with it, and part from what the drive has.
CHANGED = (
    "{} is changed in place by its module's forward (as an embedding's max_norm does it): weights change by the optimizer alone. Use what "
    "forward computes of it, and leave it as it is, or change it between steps, within engine.gathered(write_back=True)"
)

# Of a tensor that is given, these look at shape and type alone.
_WITHOUT_VALUES = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like")

_CPU = torch.device("cpu")


@dataclass
class Use:
    """One call of a module in the model's forward: a stage."""

    module: nn.Module
    name: str
    block: int
    seconds: float = 0.0
    inputs: UseInputs = field(default_factory=UseInputs)


@dataclass
class Traced:
    """What a forward has shown."""

    uses: List[Use]
    #: Ids of parameters that were used outside of the forward of their block's modules.
    outside: Set[int]
    #: Modules whose attributes it changed, which are as before again.
    changing: List[nn.Module]


class _Outside(TorchDispatchMode):
    """Finds the weights that are computed with while their own block does not compute."""

    def __init__(self, blocks: Sequence[Block], device: torch.device) -> None:
        super().__init__()
        self._device = device
        self.in_host: List[Tuple[torch.Tensor, torch.Tensor]] = []  # what is on the device for them, until the forward is over
        self._block_of = {id(parameter): number for number, block in enumerate(blocks) for _, parameter in block.parameters}
        self._returned: Set[int] = set()  # by a block's forward
        self._inside: List[int] = []
        self.found: Set[int] = set()

    def enter_block(self, block: int) -> None:
        self._inside.append(block)

    def leave_block(self, returned: Any) -> None:
        self._returned.update(id(tensor) for tensor in tensors_of(returned))
        self._inside.pop()

    def add(self, parameter: torch.Tensor) -> None:
        if id(parameter) in self._block_of:
            self.found.add(id(parameter))

    def add_modules(self, given: Any) -> None:
        """Modules of blocks that do not compute: their owner may call them when no block is computed."""
        if isinstance(given, (list, tuple)):
            for each in given:
                self.add_modules(each)
        elif isinstance(given, nn.Module):
            for parameter in given.parameters():
                if self._block_of.get(id(parameter)) not in (None, *self._inside):
                    self.found.add(id(parameter))
                    self.bring(parameter)

    def bring(self, parameter: torch.Tensor) -> None:
        if parameter.device != self._device:
            self.in_host.append((parameter, parameter.data))
            parameter.data = parameter.data.to(self._device)

    def place_of(self, head: nn.Linear, tensors: Optional[StepTensors]) -> Place:
        """While the forward is under way, the weights of a head are where it is computed. tensors: as for trace."""
        return Place(lambda: (head.weight, head.bias), lambda: self._computes(head, tensors))

    @contextlib.contextmanager
    def _computes(self, head: nn.Linear, tensors: Optional[StepTensors]) -> Iterator[None]:
        self.enter_block(self._block_of[id(head.weight)])
        with contextlib.nullcontext() if tensors is None else tensors.paused():
            for parameter in head.parameters():
                self.bring(parameter)
        try:
            yield
        finally:
            self.leave_block(())

    def put_back(self) -> None:
        for parameter, value in reversed(self.in_host):
            parameter.data = value

    def __torch_dispatch__(self, func: Any, types: Any, args: Tuple[Any, ...] = (), kwargs: Optional[Dict[str, Any]] = None) -> Any:
        kwargs = kwargs or {}
        name = str(func).split(".")[1] if "." in str(func) else str(func)
        if name not in _WITHOUT_VALUES and not name.startswith("new_"):
            for tensor in tensors_of((args, kwargs)):
                block = self._block_of.get(id(tensor))
                if block is not None and block not in self._inside and id(tensor) not in self._returned:
                    self.found.add(id(tensor))
                    self.bring(tensor)
        return func(*args, **kwargs)


@contextlib.contextmanager
def _functions_told(outside: _Outside) -> Iterator[None]:
    """Within, an autograd.Function that is given modules (as reversible layers are) tells of them: its backward may call them again."""
    function = torch.autograd.Function
    own = function.__dict__.get("apply")

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not cls.__module__.startswith("torch."):
            outside.add_modules(args)
        bound = super(function, cls).apply if own is None else own.__get__(None, cls)
        return bound(*args, **kwargs)

    function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        if own is not None:
            function.apply = own  # type: ignore[method-assign]
        else:
            del function.apply


@contextlib.contextmanager
def _model_told(model: nn.Module, given: GivenTensors) -> Iterator[None]:
    """Within, what the model itself is given is known: its caller keeps that."""
    if hasattr(model, "_forward_pre_hooks_with_kwargs"):  # since torch 2.0
        handle = model.register_forward_pre_hook(lambda _, args, kwargs: given.outside((args, kwargs)), with_kwargs=True)
    else:
        handle = model.register_forward_pre_hook(lambda _, args: given.outside(args))
    try:
        yield
    finally:
        handle.remove()


# The forward that is traced just now.
_traced: List[_Outside] = []
# By the parameter's id.
_kept: "weakref.WeakValueDictionary[int, torch.Tensor]" = weakref.WeakValueDictionary()


def keep_resident(parameters: Sequence[torch.Tensor], lasts: bool = False) -> None:
    """Within the first forward: these parameters are to be in memory for whole passes. lasts: also when that is still to come."""
    if lasts:
        _kept.update((id(parameter), parameter) for parameter in parameters)
    for outside in _traced:
        for parameter in parameters:
            outside.add(parameter)


def with_other_modes(model: nn.Module, blocks: Sequence[Block], traced: Traced, again: Callable[[], Traced]) -> Traced:
    """Where a block was not called: what a forward in the other mode (training, or evaluation) shows, if it calls more in the same order.

    Layers that training drops at random are called in evaluation, and what belongs to training alone in training. again: traces once more.
    """
    if len({use.block for use in traced.uses}) == sum(not block.resident for block in blocks):
        return traced
    modules = list(model.modules())
    modes = [module.training for module in modules]
    model.train(not model.training)
    try:
        other = again()
    except Exception:  # noqa: B902 - a forward of that mode may want other inputs
        return traced
    finally:
        for module, training in zip(modules, modes):
            module.training = training
    calls = iter(other.uses)
    if not all(any(use.module is call.module for call in calls) for use in traced.uses):
        return traced
    return Traced(other.uses, traced.outside | other.outside, merged(traced.changing, other.changing))


def settled(model: nn.Module, blocks: Sequence[Block], traced: Traced) -> Tuple[List[Block], List[Use]]:
    """Blocks and their uses, with resident what the forward has shown to be needed outside of its block, or not at all."""
    made = with_residents(model, blocks, traced.outside, {use.block for use in traced.uses})
    if made[0].modules and made[0].modules[0][1] is model:
        return made, [Use(model, "", 0, sum(use.seconds for use in traced.uses))]
    return made, uses_of(made, traced.uses)


def uses_of(blocks: Sequence[Block], uses: Sequence[Use]) -> List[Use]:
    """These uses of modules, of the blocks that they are in now; before them that of the residents."""
    block_of = {id(module): number for number, block in enumerate(blocks) for _, module in block.modules}
    made = [Use(use.module, use.name, block_of[id(use.module)], use.seconds, use.inputs) for use in uses if id(use.module) in block_of]
    return [Use(nn.Module(), RESIDENT, 0), *made] if blocks[0].resident else made


def trace(
    model: nn.Module,
    blocks: Sequence[Block],
    forward: Callable[[], Any],
    device: torch.device = _CPU,
    tensors: Optional[StepTensors] = None,
    pieces: Optional[Pieces] = None,
) -> Traced:
    """Runs `forward` and records every call of a block's module. On a device, a block's parameters are there while it computes.

    tensors: finds out what a step's tensors take; None: nobody asks. pieces: installed; None: there are none.

    The random state is as before; buffers and attributes that a forward changes (running means, counters) are put back. Raises
    TypeError naming a weight that is changed.
    """
    outside = _Outside(blocks, device)
    versions = [(name, parameter, parameter._version) for block in blocks for name, parameter in block.parameters]
    for _, parameter, _ in versions:
        heed_no_set_to_itself(parameter)
    uses: List[Use] = []
    given = GivenTensors()
    begun: Dict[int, float] = {}
    in_host: Dict[int, List[Tuple[nn.Parameter, torch.Tensor]]] = {}  # by block, while it is on the device
    handles = []
    hooks = Hooks(model.modules())

    def put_back(block: int) -> None:
        for parameter, value in in_host.pop(block, []):
            parameter.data = value

    for number, block in enumerate(blocks):
        for name, module in block.modules:

            def before(called: nn.Module, _: Any, name: str = name, number: int = number) -> None:
                outside.enter_block(number)
                uses.append(Use(called, name, number))
                if device.type not in ("cpu", "meta"):
                    for _, parameter in blocks[number].parameters:
                        if parameter.device != device:
                            in_host.setdefault(number, []).append((parameter, parameter.data))
                            parameter.data = parameter.data.to(device)
                    torch.cuda.synchronize(device)
                if tensors is not None:
                    tensors.inside(True)
                begun[id(called)] = time.perf_counter()

            def after(called: nn.Module, args: Any, kwargs: Dict[str, Any], returned: Any) -> None:
                number = next(number for number in reversed(range(len(uses))) if uses[number].module is called)
                last = uses[number]
                given.use(number, (args, kwargs))
                if device.type not in ("cpu", "meta"):
                    torch.cuda.synchronize(device)
                last.seconds = time.perf_counter() - begun[id(called)]
                if tensors is not None:
                    tensors.inside(False)
                    tensors.block(last.name, called, args, kwargs)
                put_back(last.block)
                for _, parameter in blocks[last.block].parameters:
                    give_back(parameter)
                outside.leave_block(returned)

            handles.append(module.register_forward_pre_hook(before))
            handles.append(with_kwargs_hook(module, after))
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    attributes = Attributes(model.modules())
    changing: List[nn.Module] = []
    random = RandomState.now()
    caches = torch.is_autocast_cache_enabled()
    _traced.append(outside)
    for parameter in list(_kept.values()):
        outside.add(parameter)
    try:
        torch.set_autocast_cache_enabled(False)  # what it kept would have no graph, and be taken for the weight later on
        for parameter in (each for block in blocks if block.resident for _, each in block.parameters):
            outside.bring(parameter)
        if pieces is not None:
            pieces.heads.place = functools.partial(outside.place_of, tensors=tensors)
        with torch.no_grad(), _functions_told(outside), outside, contextlib.nullcontext() if tensors is None else tensors.forward():
            with _model_told(model, given):
                forward()
        changing = attributes.changed()
        for each, use in enumerate(uses):
            use.inputs = given.of(each)
    finally:
        _traced.remove(outside)
        for _, parameter, _ in versions:
            heed_set_to_itself(parameter)
        torch.set_autocast_cache_enabled(caches)
        for handle in handles:
            handle.remove()
        for number in list(in_host):  # of a forward that failed
            put_back(number)
        outside.put_back()
        random.restore()
        attributes.restore()
        hooks.restore()
        with torch.no_grad():
            for module, name, buffer, was in buffers:
                module._buffers[name] = buffer  # also one that forward puts another in the place of
                if buffer.shape == was.shape:
                    buffer.copy_(was)
    for name, parameter, version in versions:
        if parameter._version != version:
            raise TypeError(CHANGED.format(name))
    return Traced(uses, outside.found, changing)
