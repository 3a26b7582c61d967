"""Parameters in a GPU's memory: how they and their gradients pass through host memory in a step, where their states are.

    gradient, value --copy--> host memory --> update beside the states --> value --copy--> parameter

They pass in pieces of whole parameters. While one piece is updated, the next ones are copied in and the one before is copied out.
"""

from __future__ import annotations

import warnings
from typing import Any, Callable, Dict, List, NamedTuple, Sequence

import torch

from .._tensors import in_layout_of

_PIECE = 64 << 20  # bytes of values and gradients; a larger parameter is a piece by itself
_BUFFERS = 3  # one that is filled, one that is updated, one that is emptied
_ALIGNMENT = 64  # of a tensor in a buffer


class Passing(NamedTuple):
    """A parameter and its gradient, or their copies in host memory, and what the caller knows them by."""

    value: torch.Tensor
    gradient: torch.Tensor
    key: Any
    is_taken: bool = False  # the gradient is in host memory already (Passage.take)


def is_on_device(tensor: torch.Tensor) -> bool:
    """Whether the tensor is in the memory of a device that this module serves."""
    return tensor.device.type == "cuda"


def cuda_of(device: torch.device) -> Any:
    """torch.cuda, or what stands in for it in a test."""
    return torch.cuda


def _bytes(tensor: torch.Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT


def _of(passing: Passing) -> int:
    return _bytes(passing.value) + (0 if passing.is_taken else _bytes(passing.gradient))


def _pieces(passing: Sequence[Passing]) -> List[List[Passing]]:
    pieces: List[List[Passing]] = []
    size = 0
    for each in passing:
        if not pieces or size + _of(each) > _PIECE:
            pieces.append([])
            size = 0
        pieces[-1].append(each)
        size += _of(each)
    return pieces


class _Buffer:
    def __init__(self, size: int, device: torch.device, cuda: Any) -> None:
        self.memory = _pinned(size, device)
        self.filled = cuda.Event(blocking=True)
        self.emptied = cuda.Event()
        self.holds: List[Passing] = []


def _pinned(size: int, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        if is_on_device(torch.empty(0, device=device)):
            try:
                return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
            except RuntimeError as error:
                warnings.warn(
                    f"CUDA does not pin {size} bytes of host memory ({error}): copies to and from {device} are of pageable memory, which is "
                    "slower. A higher limit of locked memory (ulimit -l) may help",
                    stacklevel=2,
                )
        return torch.empty(size, dtype=torch.uint8, device="cpu")


class Passage:
    """Of one device. Threads: one at a time.

    Order: values and gradients are copied behind what is enqueued on the current stream, and what is enqueued there afterwards comes behind the
    values that go back. When ``update`` returns, gradients are read no more.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._cuda = cuda_of(device)
        self._fills, self._empties = self._cuda.Stream(device), self._cuda.Stream(device)
        self._buffers: List[_Buffer] = []
        self._taken: Dict[torch.Tensor, torch.Tensor] = {}  # host memory of a parameter's gradient

    def take(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """A copy of this gradient in host memory, of the parameter's layout: there when ``update`` hands it on, until the next call."""
        gradient = in_layout_of(gradient.detach(), parameter)
        copy = self._taken.get(parameter)
        if copy is None or copy.dtype != gradient.dtype:
            memory = _pinned(gradient.numel() * gradient.element_size(), self.device).view(gradient.dtype)
            copy = self._taken[parameter] = torch.as_strided(memory, gradient.shape, gradient.stride())
        self._fills.wait_stream(self._cuda.current_stream(self.device))
        with self._cuda.stream(self._fills):
            copy.copy_(gradient, non_blocking=True)
        if gradient.device.type == "cuda":
            gradient.record_stream(self._fills)  # its memory is the current stream's, which may give it away
        return copy

    def update(self, passing: Sequence[Passing], update: Callable[[List[Passing]], None]) -> None:
        """Calls `update` with pieces of these in host memory, of the parameters' layout; what it makes of the values goes back.

        After an error of `update` the values of its piece stay as they were, and nothing is under way.
        """
        pieces = _pieces(passing)
        if not pieces:
            return
        self._reserve(max(sum(map(_of, piece)) for piece in pieces), min(_BUFFERS, len(pieces)))
        here = self._cuda.current_stream(self.device)
        self._fills.wait_stream(here)
        self._empties.wait_stream(here)
        try:
            count = len(self._buffers)
            for number in range(len(pieces) + count - 1):  # a piece is filled count - 1 turns before it is updated
                if number < len(pieces):
                    self._fill(self._buffers[number % count], pieces[number])
                at = number - (count - 1)
                if at < 0:
                    continue
                buffer = self._buffers[at % count]
                buffer.filled.synchronize()
                update(buffer.holds)
                self._empty(buffer, pieces[at])
            here.wait_stream(self._empties)
        except BaseException:
            self._fills.synchronize()
            self._empties.synchronize()
            raise

    def value(self, parameter: torch.Tensor) -> torch.Tensor:
        """A copy in host memory, of the parameter's layout."""
        return torch.empty_like(parameter, device="cpu", memory_format=torch.preserve_format).copy_(parameter.detach())

    def _reserve(self, size: int, count: int) -> None:
        if self._buffers and (self._buffers[0].memory.numel() < size or len(self._buffers) < count):
            self._buffers = []  # before the larger ones are made; their copies are over
        if not self._buffers:
            self._buffers = [_Buffer(size, self.device, self._cuda) for _ in range(count)]

    def _fill(self, buffer: _Buffer, piece: List[Passing]) -> None:
        self._fills.wait_event(buffer.emptied)
        buffer.holds = []
        at = 0
        with self._cuda.stream(self._fills):
            for each in piece:
                copies = []
                for tensor in (each.value,) if each.is_taken else (each.value, each.gradient):
                    room = buffer.memory[at : at + tensor.numel() * tensor.element_size()]
                    copy = torch.as_strided(room.view(tensor.dtype), tensor.shape, tensor.stride())
                    copies.append(copy.copy_(tensor.detach(), non_blocking=True))
                    at += _bytes(tensor)
                buffer.holds.append(Passing(copies[0], each.gradient if each.is_taken else copies[1], each.key))
            buffer.filled.record(self._fills)

    def _empty(self, buffer: _Buffer, piece: List[Passing]) -> None:
        with self._cuda.stream(self._empties):
            for passed, each in zip(buffer.holds, piece):
                each.value.detach().copy_(passed.value, non_blocking=True)
            buffer.emptied.record(self._empties)
