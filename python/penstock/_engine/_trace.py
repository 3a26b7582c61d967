"""The order in which a model uses its blocks, from one forward in which nothing is changed."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Sequence

import torch
from torch import nn

from ._blocks import Block
from ._random import RandomState


@dataclass
class Use:
    """One call of a module in the model's forward: a stage."""

    module: nn.Module
    name: str
    block: int
    seconds: float = 0.0


def trace(model: nn.Module, blocks: Sequence[Block], forward: Callable[[], Any]) -> List[Use]:
    """Runs `forward` and records every call of a block's module.

    The random state and the modules' training flags are as before; buffers that a forward changes (running means) are put
    back. Raises TypeError naming blocks that were never called.
    """
    uses: List[Use] = []
    begun: Dict[int, float] = {}
    handles = []
    for number, block in enumerate(blocks):
        for name, module in block.modules:

            def before(called: nn.Module, _: Any, name: str = name, number: int = number) -> None:
                uses.append(Use(called, name, number))
                begun[id(called)] = time.perf_counter()

            def after(called: nn.Module, *_: Any) -> None:
                last = next(use for use in reversed(uses) if use.module is called)
                last.seconds = time.perf_counter() - begun[id(called)]

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
            forward()
    finally:
        torch.set_autocast_cache_enabled(caches)
        for handle in handles:
            handle.remove()
        random.restore()
        with torch.no_grad():
            for module, name, buffer, was in buffers:
                module._buffers[name] = buffer  # also one that forward puts another in the place of
                if buffer.shape == was.shape:
                    buffer.copy_(was)
    called = {use.block for use in uses}
    idle = [block.name for number, block in enumerate(blocks) if number not in called]
    if idle:
        raise TypeError(
            f"blocks that the model's forward never calls: {', '.join(idle[:5])}{', ...' if len(idle) > 5 else ''}. A module whose "
            "weights are used without calling it cannot be a block: give blocks=[...] with a module around it that is called"
        )
    return uses
