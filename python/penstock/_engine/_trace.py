"""The order in which a model uses its blocks, from one forward in which nothing is changed."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional, Sequence, Set, Tuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ._blocks import Block
from ._on_disk import give_back
from ._random import RandomState
from ._tree import tensors_of

# What a forward does to a weight would be in memory alone, be lost with it, and part from what the drive has.
CHANGED = (
    "{} is changed in place by its module's forward (as an embedding's max_norm does it): weights change by the optimizer alone. Use what "
    "forward computes of it, and leave it as it is, or change it between steps, within engine.gathered(write_back=True)"
)

# Of a tensor that is given, these look at shape and type alone.
_WITHOUT_VALUES = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like")


@dataclass
class Use:
    """One call of a module in the model's forward: a stage."""

    module: nn.Module
    name: str
    block: int
    seconds: float = 0.0


class _Outside(TorchDispatchMode):
    """Active where no block computes: TypeError for a weight that is computed with there, since later on it has no value there."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        super().__init__()
        self._names = {id(parameter): name for block in blocks for name, parameter in block.parameters}
        self._returned: Set[int] = set()  # by a block's forward
        self._inside = 0
        self._active = False

    def enter_block(self) -> None:
        self._inside += 1
        self._switch(False)

    def leave_block(self, returned: Any) -> None:
        self._returned.update(id(tensor) for tensor in tensors_of(returned))
        self._inside -= 1
        self._switch(self._inside == 0)

    def _switch(self, on: bool) -> None:
        if on and not self._active:
            self.__enter__()
        if not on and self._active:
            self.__exit__(None, None, None)
        self._active = on

    def begin(self) -> None:
        self._switch(True)

    def end(self) -> None:
        self._switch(False)

    def __torch_dispatch__(self, func: Any, types: Any, args: Tuple[Any, ...] = (), kwargs: Optional[Dict[str, Any]] = None) -> Any:
        kwargs = kwargs or {}
        name = str(func).split(".")[1] if "." in str(func) else str(func)
        if name not in _WITHOUT_VALUES and not name.startswith("new_"):
            for tensor in tensors_of((args, kwargs)):
                if id(tensor) in self._names and id(tensor) not in self._returned:
                    raise TypeError(
                        f"{self._names[id(tensor)]} is used ({name}) outside of the forward of its module, where it will have no values: give "
                        "blocks=[...] with a module around all its uses, or use it within its module's forward"
                    )
        return func(*args, **kwargs)


def trace(model: nn.Module, blocks: Sequence[Block], forward: Callable[[], Any], device: torch.device = torch.device("cpu")) -> List[Use]:
    """Runs `forward` and records every call of a block's module. On a device, a block's parameters are there while it computes.

    The random state and the modules' training flags are as before; buffers that a forward changes (running means) are put
    back. Raises TypeError naming blocks that were never called, and a weight that is used outside of them or changed.
    """
    outside = _Outside(blocks)
    versions = [(name, parameter, parameter._version) for block in blocks for name, parameter in block.parameters]
    uses: List[Use] = []
    begun: Dict[int, float] = {}
    in_host: Dict[int, List[Tuple[nn.Parameter, torch.Tensor]]] = {}  # by block, while it is on the device
    handles = []

    def put_back(block: int) -> None:
        for parameter, value in in_host.pop(block, []):
            parameter.data = value

    for number, block in enumerate(blocks):
        for name, module in block.modules:

            def before(called: nn.Module, _: Any, name: str = name, number: int = number) -> None:
                outside.enter_block()
                uses.append(Use(called, name, number))
                if device.type != "cpu":
                    for _, parameter in blocks[number].parameters:
                        if parameter.device != device:
                            in_host.setdefault(number, []).append((parameter, parameter.data))
                            parameter.data = parameter.data.to(device)
                    torch.cuda.synchronize(device)
                begun[id(called)] = time.perf_counter()

            def after(called: nn.Module, _: Any, returned: Any) -> None:
                last = next(use for use in reversed(uses) if use.module is called)
                if device.type != "cpu":
                    torch.cuda.synchronize(device)
                last.seconds = time.perf_counter() - begun[id(called)]
                put_back(last.block)
                for _, parameter in blocks[last.block].parameters:
                    give_back(parameter)
                outside.leave_block(returned)

            handles.append(module.register_forward_pre_hook(before))
            handles.append(module.register_forward_hook(after))
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    random = RandomState.now()
    caches = torch.is_autocast_cache_enabled()
    try:
        torch.set_autocast_cache_enabled(False)  # what it kept would have no graph, and be taken for the weight later on
        with torch.no_grad():
            outside.begin()
            forward()
    finally:
        outside.end()
        torch.set_autocast_cache_enabled(caches)
        for handle in handles:
            handle.remove()
        for number in list(in_host):  # of a forward that failed
            put_back(number)
        random.restore()
        with torch.no_grad():
            for module, name, buffer, was in buffers:
                module._buffers[name] = buffer  # also one that forward puts another in the place of
                if buffer.shape == was.shape:
                    buffer.copy_(was)
    for name, parameter, version in versions:
        if parameter._version != version:
            raise TypeError(CHANGED.format(name))
    called = {use.block for use in uses}
    idle = [block.name for number, block in enumerate(blocks) if number not in called]
    if idle:
        raise TypeError(
            f"blocks that the model's forward never calls: {', '.join(idle[:5])}{', ...' if len(idle) > 5 else ''}. A module whose "
            "weights are used without calling it cannot be a block: give blocks=[...] with a module around it that is called"
        )
    return uses
