"""How a block was when it was computed, for when backward computes it again."""

from __future__ import annotations

import contextlib
from typing import Any, Iterator, List, Optional, Sequence, Tuple

import torch
from torch import nn

from ._accumulation import alike, sample_of, set_modes
from ._attributes import Attributes
from ._random import drawn_again, others_now
from ._tree import tensors_of


class Before:
    """How a block was when it was computed, for when it is computed again: its modes, attributes, and random numbers that are not torch's."""

    def __init__(self, module: nn.Module, copies: Optional[Sequence[nn.Module]], given: Sequence[Any]) -> None:
        """copies: as for Attributes. given: what it is called with and may change, as a cache."""
        self._modules = list(module.modules())
        self._modes = [each.training for each in self._modules]
        self._random = others_now()
        self._samples: List[Tuple[torch.Size, torch.Tensor]] = []
        self._changes = True
        self._attributes = Attributes(self._modules, given=given, copies=copies)

    def changed(self) -> List[nn.Module]:
        """The modules whose attributes its forward, which is over, has changed."""
        self._changes = self._attributes.any_changed()
        return self._attributes.changed() if self._changes else []

    def gave(self, out: Any) -> None:
        self._samples = [(tensor.shape, sample_of(tensor)) for tensor in tensors_of(out)]

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        now = [each.training for each in self._modules]
        if now != self._modes:
            set_modes(self._modules, self._modes)
        # Where nothing was changed, nothing is when it is computed again.
        as_before = self._attributes.again() if self._changes or self._attributes.any_changed() else contextlib.nullcontext()
        try:
            with drawn_again(self._random), as_before:
                yield
        finally:
            if now != self._modes:
                set_modes(self._modules, now)

    def same(self, out: Any) -> bool:
        found = tensors_of(out)
        return len(found) == len(self._samples) and all(
            tensor.shape == shape and alike(sample_of(tensor), sample) for tensor, (shape, sample) in zip(found, self._samples)
        )
