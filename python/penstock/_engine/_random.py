"""The random state that a forward draws from: torch's, Python's and numpy's."""

from __future__ import annotations

import contextlib
import random
import sys
from dataclasses import dataclass, replace
from typing import Any, Iterator, Tuple

import torch


@dataclass(frozen=True)
class RandomState:
    """The generators of a program as they were at one moment. numpy's only where the program has imported numpy."""

    torch: torch.Tensor
    python: Any
    numpy: Any

    @staticmethod
    def now() -> "RandomState":
        numpy = sys.modules.get("numpy.random")
        return RandomState(torch.get_rng_state(), random.getstate(), None if numpy is None else numpy.get_state())

    def restore(self) -> None:
        torch.set_rng_state(self.torch)
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy.random"].set_state(self.numpy)

    def seeded(self, seed: int) -> "RandomState":
        """The same, with torch's generator seeded."""
        return replace(self, torch=torch.Generator().manual_seed(seed).get_state())


@contextlib.contextmanager
def drawn_again(before: Tuple[Any, Any]) -> Iterator[None]:
    """Python's and numpy's generators are as they were at `before` (of others_now), and afterwards as they are now."""
    now = others_now()
    _set(before)
    try:
        yield
    finally:
        _set(now)


def others_now() -> Tuple[Any, Any]:
    """The generators that torch.utils.checkpoint knows nothing of."""
    numpy = sys.modules.get("numpy.random")
    return random.getstate(), None if numpy is None else numpy.get_state()


def _set(states: Tuple[Any, Any]) -> None:
    random.setstate(states[0])
    if states[1] is not None:
        sys.modules["numpy.random"].set_state(states[1])
