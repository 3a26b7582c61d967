"""Where a model is computed: in the engine's own memory, or on a device that has another.

    drive --> engine's memory --copy--> a buffer on the device --> forward, backward --> gradient --copy--> host memory --> engine

The weights of the block that is computed lie in one of two buffers, those of the one before in the other: they are copied while the
device still computes that one. A use is left when its weights have been copied, since their place in the engine's memory is the engine's
again then; what the device computes goes on. Gradients are waited for.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple, Union

import torch


def choose_device(wanted: Union[None, str, int, torch.device]) -> torch.device:
    """The device of this process; None: the GPU where torch has one, as DeepSpeed does it, each rank of a machine another.

    Raises ValueError for a device that is not there, or of a kind that is not served.
    """
    there = torch.cuda.is_available()
    served = hasattr(torch.autograd, "set_multithreading_enabled")  # since torch 2.0
    if wanted is None:
        wanted = "cuda" if there and served else "cpu"
    try:
        device = torch.device(wanted)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device is {wanted!r}: 'cpu', 'cuda' or 'cuda:N'") from error
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise ValueError(f"device is {wanted!r}: 'cpu', 'cuda' or 'cuda:N'")
    if not there:
        raise ValueError(f"device is {wanted!r}, and this torch ({torch.__version__}) finds no GPU: use device='cpu'")
    if not served:
        raise ValueError(f"device is {wanted!r}: with torch {torch.__version__} the processor computes; a GPU takes torch 2.0 or newer")
    count = torch.cuda.device_count()
    if device.index is None:
        rank = os.environ.get("LOCAL_RANK", "")
        device = torch.device("cuda", int(rank) % count if rank.isdigit() else torch.cuda.current_device())
    if device.index >= count:
        raise ValueError(f"device is {wanted!r}, and there are {count}")
    torch.cuda.set_device(device)
    return device


def has_own_memory(device: torch.device) -> bool:
    """Whether blocks are copied to it."""
    return device.type != "cpu"


class _Buffer:
    """On the device, for the weights of one block."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.memory = torch.empty(size, dtype=torch.uint8, device=device)
        self.holds: Tuple[int, int] = (-1, 0)  # the block, and where its weights lay in the engine's memory
        on_gpu = device.type == "cuda"
        self.copied = torch.cuda.Event(blocking=True) if on_gpu else None
        self.used: Optional[torch.cuda.Event] = torch.cuda.Event() if on_gpu else None  # by all that was computed with it


class DeviceMemory:
    """Weights on the device, and gradients on their way back. Threads: one at a time.

    On torch.device("cpu") it does the same with memory of the processor, without streams: for tests.
    """

    def __init__(self, device: torch.device, block_bytes: int, arena: Tuple[int, int]) -> None:
        """block_bytes: of the largest block. arena: address and bytes of the engine's memory, which is pinned until ``close``."""
        self.device = device
        self._on_gpu = device.type == "cuda"
        with torch.inference_mode(False):
            self._buffers = [_Buffer(block_bytes, device) for _ in range(2)]
            self._gradients = torch.empty(block_bytes, dtype=torch.uint8, device="cpu")
        self._inside: Optional[_Buffer] = None  # of the block that is entered
        self._last = self._buffers[0]
        self._stream = torch.cuda.Stream(device) if self._on_gpu else None
        self._pinned: List[int] = []  # addresses
        if self._on_gpu:
            self._pin(*arena)
            self._pin(self._gradients.data_ptr(), block_bytes)
        self.h2d_bytes = 0
        self.d2h_bytes = 0

    # Copies of memory that is not pinned are right as well, and slower.
    def _pin(self, address: int, size: int) -> None:
        if size and int(torch.cuda.cudart().cudaHostRegister(address, size, 0)) == 0:
            self._pinned.append(address)
            return
        try:  # CUDA has kept the error, for whoever asks next
            torch.zeros(1, device=self.device)
        except RuntimeError:
            pass

    def begin_pass(self) -> None:
        """The values of weights are others from here on."""
        for buffer in self._buffers:
            buffer.holds = (-1, 0)

    def bring(self, block: int, address: int, size: int) -> torch.Tensor:
        """The block's weights, which lie at `address`, as bytes on the device: there for what is enqueued from here on, until ``leave``."""
        held = next((buffer for buffer in self._buffers if buffer.holds == (block, address)), None)
        if held is None:
            held = next(buffer for buffer in self._buffers if buffer is not self._last)
            held.holds = (block, address)
            there = torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.uint8)
            self._copy(held, there)
            self.h2d_bytes += size
        self._inside = self._last = held
        return held.memory[:size]

    def _copy(self, buffer: _Buffer, weights: torch.Tensor) -> None:
        to = buffer.memory[: weights.numel()]
        if self._stream is None:
            to.copy_(weights)
            return
        self._stream.wait_event(buffer.used)
        with torch.cuda.stream(self._stream):
            to.copy_(weights, non_blocking=True)
            buffer.copied.record(self._stream)  # type: ignore[union-attr]
        torch.cuda.current_stream(self.device).wait_event(buffer.copied)

    def leave(self) -> None:
        """The engine's memory of the block that was brought is read no more when this returns."""
        buffer, self._inside = self._inside, None
        if buffer is None or not self._on_gpu:
            return
        buffer.used.record(torch.cuda.current_stream(self.device))  # type: ignore[union-attr]
        buffer.copied.synchronize()  # type: ignore[union-attr]

    def take(self, gradients: Sequence[torch.Tensor]) -> List[torch.Tensor]:
        """These gradients of one block in host memory, until the next call."""
        found, at = [], 0
        for gradient in gradients:
            size = gradient.numel() * gradient.element_size()
            if at + size <= self._gradients.numel():
                place = self._gradients[at : at + size].view(gradient.dtype).view(gradient.shape)
            else:  # of a wider type than the weights
                place = torch.empty(gradient.shape, dtype=gradient.dtype, device="cpu")
            place.copy_(gradient, non_blocking=self._on_gpu)
            found.append(place)
            at += (size + 7) // 8 * 8
            self.d2h_bytes += size
        if self._on_gpu:
            torch.cuda.current_stream(self.device).synchronize()
        return found

    def report(self) -> Dict[str, Any]:
        """What a report says of it: the device, bytes copied in both directions, and the most that torch held there."""
        peak = torch.cuda.max_memory_allocated(self.device) if self._on_gpu else 0
        return {"device": self.device.type, "peak_device_bytes": peak, "h2d_bytes": self.h2d_bytes, "d2h_bytes": self.d2h_bytes}

    def close(self) -> None:
        """The engine's memory goes: nothing is copied from it any more."""
        try:
            if self._on_gpu:
                torch.cuda.synchronize(self.device)
        finally:
            for address in self._pinned:
                torch.cuda.cudart().cudaHostUnregister(address)
            self._pinned = []
            self._buffers, self._inside = [], None
            del self._last, self._gradients


@contextlib.contextmanager
def in_this_thread(device: torch.device) -> Iterator[None]:
    """Backward within runs in the thread that begins it, also on a GPU, which all threads' backwards would else share one thread for.

    Micro-batches wait for each other within their backwards: in one thread they would wait for ever.
    """
    if device.type == "cpu":
        yield
        return
    with torch.autograd.set_multithreading_enabled(False):
        yield
