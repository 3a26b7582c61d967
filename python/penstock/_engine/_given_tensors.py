"""Which tensors the uses of a forward are given, and which of them one use alone."""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass, field
from typing import Any, Dict, List, Sequence, Set, Tuple

import torch

from ._tree import tensors_of

#: Bytes; smaller tensors are not worth a transfer.
SMALL = 16384


@dataclass(frozen=True)
class UseInputs:
    """Of one use: how many tensors it is given, and of those that no other use is, by their number, the bytes."""

    count: int = 0
    bytes: Dict[int, int] = field(default_factory=dict)


def storage_of(tensor: torch.Tensor) -> Any:
    """The memory that a tensor is a view of."""
    return tensor.untyped_storage() if hasattr(tensor, "untyped_storage") else tensor.storage()


@functools.lru_cache(maxsize=None)
def ends_are_told() -> bool:
    """Whether the end of a storage is seen: since torch 2.1 it is one object of Python's as long as it lives."""
    tensor = torch.empty(1)
    told: List[bool] = []
    weakref.finalize(storage_of(tensor), told.append, True)
    return not told


def bytes_of(tensor: torch.Tensor) -> int:
    """Of its elements."""
    return tensor.numel() * tensor.element_size()


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements lie one beside the other, each once, in any order of its dimensions."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.size()) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


class GivenTensors:
    """Knows the tensors of a forward by their memory, as long as they live."""

    def __init__(self) -> None:
        self._known: Dict[int, Tuple["weakref.ref[torch.Tensor]", int]] = {}  # by their storage: one of them, and its number
        self._made = 0
        self._users: Dict[int, Set[int]] = {}
        self._rows: Dict[int, List[Tuple[int, int]]] = {}  # by use: of each tensor number and bytes; 0: it stays

    def _number_of(self, tensor: torch.Tensor) -> int:
        key = int(storage_of(tensor)._cdata)
        known = self._known.get(key)
        if known is None or known[0]() is None:
            self._made += 1
            known = self._known[key] = (weakref.ref(tensor), self._made)
        return known[1]

    def outside(self, given: Any) -> None:
        """These are known, and not a use's alone."""
        for tensor in tensors_of(given):
            self._users.setdefault(self._number_of(tensor), set()).update((-1, -2))

    def is_known(self, tensor: torch.Tensor) -> bool:
        """Whether it, or a view of its memory, was given before."""
        known = self._known.get(int(storage_of(tensor)._cdata))
        return known is not None and known[0]() is not None

    def use(self, number: int, given: Any) -> None:
        """A use of this number was given these."""
        row = self._rows[number] = []
        for tensor in tensors_of(given):
            at = self._number_of(tensor)
            self._users.setdefault(at, set()).add(number)
            size = bytes_of(tensor)
            moves = type(tensor) is torch.Tensor and tensor.layout == torch.strided and size >= SMALL and is_dense(tensor)
            row.append((at, size if moves else 0))

    def of(self, number: int) -> UseInputs:
        """What this use alone was given, once the forward is over."""
        row, seen = self._rows.get(number, []), set()
        alone: Dict[int, int] = {}
        for index, (at, size) in enumerate(row):
            if size and at not in seen and len(self._users[at]) == 1:
                alone[index] = size
            seen.add(at)
        return UseInputs(len(row), alone)


def bytes_alone(uses: Sequence[Any]) -> int:
    """Of what single uses are given, the first one's apart."""
    return sum(sum(use.inputs.bytes.values()) for use in uses[1:])
