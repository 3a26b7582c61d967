"""The random state that a forward draws from: torch's on the processor and on a GPU, Python's and numpy's."""

from __future__ import annotations

import base64
import contextlib
import random
import sys
from dataclasses import dataclass, replace
from typing import Any, Iterator, Optional, Tuple

import torch


@dataclass(frozen=True)
class RandomState:
    """The generators of a program as they were at one moment.

    numpy's only where the program has imported numpy; a GPU's, of the current device, where torch has used one.
    """

    torch: torch.Tensor
    python: Any
    numpy: Any
    gpu: Optional[torch.Tensor]

    @staticmethod
    def now() -> "RandomState":
        return RandomState(torch.get_rng_state(), *others_now())

    def text(self) -> str:
        """torch's generators, for restore_text."""
        kept = [self.torch] if self.gpu is None else [self.torch, self.gpu]
        return ",".join(base64.b64encode(bytes(each.numpy())).decode() for each in kept)

    def restore(self) -> None:
        torch.set_rng_state(self.torch)
        _set((self.python, self.numpy, self.gpu))

    def seeded(self, seed: int) -> "RandomState":
        """The same, with torch's generators seeded."""
        gpu = None if self.gpu is None else torch.Generator("cuda").manual_seed(seed).get_state()
        return replace(self, torch=torch.Generator().manual_seed(seed).get_state(), gpu=gpu)


def restore_text(text: str) -> None:
    """torch's generators as they were. A GPU's stays as it is where the text has none, or there is none."""
    first, _, second = text.partition(",")
    torch.set_rng_state(_state(first))
    if second and torch.cuda.is_available():
        torch.cuda.set_rng_state(_state(second))


def _state(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8).clone()


#: Python's generator, numpy's, a GPU's.
Others = Tuple[Any, Any, Optional[torch.Tensor]]


@contextlib.contextmanager
def drawn_again(before: Others) -> Iterator[None]:
    """These generators are as they were at `before` (of others_now), and afterwards as they are now."""
    now = others_now()
    _set(before)
    try:
        yield
    finally:
        _set(now)


def others_now() -> Others:
    """The generators that torch.utils.checkpoint knows nothing of, or (a GPU's) only for some of a block's inputs."""
    numpy = sys.modules.get("numpy.random")
    gpu = torch.cuda.get_rng_state() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    return random.getstate(), None if numpy is None else numpy.get_state(), gpu


def _set(states: Others) -> None:
    random.setstate(states[0])
    if states[1] is not None:
        sys.modules["numpy.random"].set_state(states[1])
    if states[2] is not None:
        torch.cuda.set_rng_state(states[2])
