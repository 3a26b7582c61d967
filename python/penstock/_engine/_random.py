"""The random state that a forward draws from: torch's, Python's and numpy's."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, replace
from typing import Any

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
