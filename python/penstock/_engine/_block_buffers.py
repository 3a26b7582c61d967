"""Buffers that a forward changes (running means), as they were before it: for when it is computed again, or given up."""

from __future__ import annotations

import contextlib
from typing import Iterable, Iterator, List, Optional, Sequence, Tuple

import torch
from torch import nn

#: Of this module, by this name: the buffer, and what it held.
Held = Tuple[nn.Module, str, torch.Tensor, torch.Tensor]


class BlockBuffers:
    """The buffers of a block that its forward changes (running means): as they were, when it is computed again.

    known: which ones, from the use's forward before; None: not seen yet, so all are kept this once.
    """

    def __init__(self, module: nn.Module, known: Optional[List[Tuple[nn.Module, str]]]) -> None:
        self._places = known if known is not None else [
            (part, name) for part in module.modules() for name, buffer in part._buffers.items() if buffer is not None
        ]
        self._before = [(part._buffers[name], part._buffers[name].detach().clone()) for part, name in self._places]

    def keep_changed(self) -> List[Tuple[nn.Module, str]]:
        """Those that are not as they were; the others are let go."""
        found = []
        for place, (buffer, value) in zip(self._places, self._before):
            now = place[0]._buffers[place[1]]
            if now is not buffer or now.shape != value.shape or not torch.equal(now, value):
                found.append((place, (buffer, value)))
        self._places = [place for place, _ in found]
        self._before = [before for _, before in found]
        return self._places

    @contextlib.contextmanager
    def as_in_forward(self) -> Iterator[None]:
        now = [part._buffers[name] for part, name in self._places]
        for (part, name), (_, value) in zip(self._places, self._before):
            part._buffers[name] = value.clone()
        try:
            yield
        finally:
            for (part, name), buffer in zip(self._places, now):
                part._buffers[name] = buffer


def held_by(modules: Iterable[nn.Module]) -> List[Held]:
    """What all buffers of these modules hold."""
    buffers = [(module, name, buffer) for module in modules for name, buffer in module._buffers.items() if buffer is not None]
    return [(module, name, buffer, buffer.detach().clone()) for module, name, buffer in buffers]


@torch.no_grad()
def put_back(buffers: Sequence[Held]) -> None:
    """They are there again, and hold it."""
    for module, name, buffer, value in buffers:
        module._buffers[name] = buffer
        buffer.copy_(value)
