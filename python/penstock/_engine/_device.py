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
import warnings
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple, Union

import torch

from .. import _core


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
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        hidden = f", and CUDA_VISIBLE_DEVICES={seen!r} hides those that are there" if seen is not None else ""
        raise ValueError(f"device is {wanted!r}, and this torch ({torch.__version__}) finds no GPU{hidden}: use device='cpu'")
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


# For tests, as of the programs: the engine computes in the memory of such a device (zero/compute/test_device.h), and torch on the processor.
_TEST_DEVICE = "PENSTOCK_TEST_DEVICE"


def choose_devices(wanted: Union[None, str, int, torch.device], budget: int) -> Tuple[torch.device, str]:
    """Where torch computes (``choose_device``), and where the engine has blocks for it, as the engine names it; "": in host memory.

    budget: bytes of the device's memory for the engine and torch; 0: none was given, and the engine has no blocks on a GPU.

    With PENSTOCK_TEST_DEVICE in the environment, which is for tests, that device stands in for a GPU.
    """
    test = os.environ.get(_TEST_DEVICE)
    if test is not None and str(wanted) != "cpu":
        return torch.device("cpu"), f"test:{test}"
    device = choose_device(wanted)
    if device.type != "cuda" or not budget:
        return device, ""
    name = f"cuda:{device.index}"
    why = _core.why_no_device(name)
    if why:
        warnings.warn(f"torch copies weights to {name} block by block, and no state is there, which is slower: {why}", stacklevel=3)
    return device, "" if why else name


def tell_of_unused_settings(settings: Any) -> List[str]:
    """A line for each setting of a device's memory that has no effect, since the engine uses none."""
    if settings.engine_device:
        return []
    where = "with device='cpu'" if settings.device.type == "cpu" else "where torch copies weights"
    return list(settings.unused_device_keys(f"from Python {where}"))


def tell_of_offload(settings: Any) -> None:
    """Warns of what transformers' checkpointing with offload=True comes to, where it is not as its user means."""
    if settings.engine_device or settings.saved_activations != "auto":
        return
    where = (
        "the processor computes, and saved activations are in host memory, or on the drive where they do not fit host_memory; "
        if settings.device.type == "cpu"
        else "saved activations stay on the device where torch copies weights to it block by block; device_memory= makes room for the engine there, and "
    )
    warnings.warn(f'gradient checkpointing with offload=True: {where}saved_activations= says where they wait', stacklevel=4)


def has_own_memory(device: torch.device) -> bool:
    """Whether torch copies blocks to it."""
    return device.type != "cpu"


def cuda_of(device: torch.device) -> Any:
    """torch.cuda, or what stands in for it in a test; None: the device has no streams."""
    return torch.cuda if device.type == "cuda" else None


def give_back_cache(device: torch.device) -> None:
    """What torch's allocator keeps of the device for later tensors is free for the engine's blocks."""
    cuda = cuda_of(device)
    if cuda is not None:
        cuda.empty_cache()


class _Memory:
    """Bytes on a CUDA device that are somebody else's, as torch takes them."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 2}


def view_of(address: int, size: int, device: torch.device) -> torch.Tensor:
    """These bytes of the device's memory, which is the engine's, as a tensor."""
    if device.type == "cuda":
        return torch.as_tensor(_Memory(address, size), device=device)
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.uint8)


class Streams:
    """Of an engine that has its blocks in a device's memory: on which streams a use is computed. Threads: one at a time.

    The engine enqueues what it does with a use behind them, and they wait for what it has enqueued before (zero/compute/driven_compute.h).
    A device of tests has none: torch computes at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = cuda_of(device)
        self._use: Any = None  # that is entered
        self._seen: Dict[Any, None] = {}  # its streams, in order

    def here(self) -> Optional[int]:
        """The current stream of the calling thread, which may be any, on which a use will be computed."""
        return None if self._cuda is None else int(self._cuda.current_stream(self._device).cuda_stream)

    def entered(self, use: Any) -> None:
        """This use has been entered, by one micro-batch or by several together, and is computed on the current stream."""
        if self._cuda is None:
            return
        if self._use != use:
            self._use, self._seen = use, {}
        self._current()

    def computed(self) -> None:
        """What was enqueued on the current stream, or what that one waits for, took part in the use that is entered."""
        if self._cuda is not None:
            self._current()

    def left(self, gradients: Sequence[torch.Tensor]) -> List[int]:
        """The use is about to be left with these gradients: its streams, the current one first."""
        if self._cuda is None:
            return []
        here = self._current()
        others = [stream for stream in self._seen if stream != here]
        self._use = None
        for gradient in gradients if others else ():
            gradient.record_stream(here)  # its memory may be another stream's
        return [int(stream.cuda_stream) for stream in (here, *others)]

    def _current(self) -> Any:
        stream = self._cuda.current_stream(self._device)
        self._seen[stream] = None
        return stream


class _Buffer:
    """On the device, for the weights of one block."""

    def __init__(self, size: int, device: torch.device, cuda: Any) -> None:
        self.memory = torch.empty(size, dtype=torch.uint8, device=device)
        self.holds: Tuple[int, int] = (-1, 0)  # the block, and where its weights lay in the engine's memory
        self.copied = cuda.Event(blocking=True) if cuda is not None else None
        self.used: Dict[Any, Any] = {}  # by stream: an event behind all that was computed with it there


class DeviceMemory:
    """Weights on the device, and gradients on their way back. Threads: one at a time.

    Order on a GPU: weights are copied on a stream of their own, behind all work with the buffer's former content on whatever streams;
    each stream that enters a use waits for the copy. Gradients are copied behind every stream that took part in the use.

    On torch.device("cpu") it does the same with memory of the processor, without streams: for tests.
    """

    def __init__(self, device: torch.device, block_bytes: int, arena: Tuple[int, int]) -> None:
        """block_bytes: of the largest block. arena: address and bytes of the engine's memory, which is pinned until ``close``.

        Where the driver refuses to pin, it warns: copies are right then, and slower.
        """
        self.device = device
        self._cuda = cuda = cuda_of(device)
        self._pinned: Dict[int, int] = {}  # bytes, by address
        self._arena_address = arena[0]
        self._inside: Optional[_Buffer] = None  # of the block that is entered
        self._streams: Dict[Any, None] = {}  # that took part in the use, in order
        self.h2d_bytes = 0
        self.d2h_bytes = 0
        with torch.inference_mode(False):
            self._buffers = [_Buffer(block_bytes, device, cuda) for _ in range(2)]
            self._gradients = torch.empty(block_bytes, dtype=torch.uint8, device="cpu")
        self._last = self._buffers[0]
        if cuda is None:
            return
        self._stream = cuda.Stream(device)
        # torch gives memory back in the order of the stream that asks: its former owner may still be at work there.
        self._stream.wait_stream(cuda.current_stream(device))
        try:
            self._pin(*arena)
            self._pin(self._gradients.data_ptr(), block_bytes)
        except BaseException:
            self.close()
            raise

    def pin_arena(self, arena: Tuple[int, int]) -> None:
        """arena: address and bytes of the engine's memory, which is another than before."""
        self._arena_address = arena[0]
        if self._cuda is not None:
            self._pin(*arena)

    def unpin_arena(self) -> None:
        """The engine's memory is about to go. Nothing is copied from it any more."""
        self.begin_pass()
        if self._cuda is None:
            return
        self._cuda.synchronize(self.device)
        if self._pinned.pop(self._arena_address, 0):
            self._unpin(self._arena_address)

    def _unpin(self, address: int) -> None:
        if int(self._cuda.cudart().cudaHostUnregister(address)) != 0:
            self._forget_error()

    def _pin(self, address: int, size: int) -> None:
        if not size:
            return
        error = int(self._cuda.cudart().cudaHostRegister(address, size, 0))
        if error == 0:
            self._pinned[address] = size
            return
        self._forget_error()
        warnings.warn(
            f"CUDA does not pin {size} bytes of host memory (cudaHostRegister: error {error}): copies to and from {self.device} are of pageable "
            "memory, which is slower. A smaller host_memory=, or a higher limit of locked memory (ulimit -l), may help",
            stacklevel=2,
        )

    # CUDA keeps an error for the next call that asks.
    def _forget_error(self) -> None:
        try:
            torch.zeros(1, device=self.device)
        except RuntimeError:
            pass

    def begin_pass(self) -> None:
        """The values of weights are others from here on."""
        for buffer in self._buffers:
            buffer.holds = (-1, 0)

    def bring(self, block: int, address: int, size: int) -> torch.Tensor:
        """The block's weights, which lie at `address`, as bytes on the device: there for what is enqueued from here on, until ``leave``.

        What is enqueued on another stream than the current one has to wait for the current one first.
        """
        held = next((buffer for buffer in self._buffers if buffer.holds == (block, address)), None)
        if held is None:
            held = next(buffer for buffer in self._buffers if buffer is not self._last)
            held.holds = (-1, 0)
            there = torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.uint8)
            self._copy(held, there)
            held.holds = (block, address)
            self.h2d_bytes += size
        self._inside = self._last = held
        self._streams = {}
        if self._cuda is not None:
            self._current_stream().wait_event(held.copied)
        return held.memory[:size]

    def _copy(self, buffer: _Buffer, weights: torch.Tensor) -> None:
        to = buffer.memory[: weights.numel()]
        if self._cuda is None:
            to.copy_(weights)
            return
        for event in buffer.used.values():
            self._stream.wait_event(event)
        with self._cuda.stream(self._stream):
            try:
                to.copy_(weights, non_blocking=True)
                buffer.copied.record(self._stream)  # type: ignore[union-attr]
            except BaseException:
                self._stream.synchronize()  # it may be under way, and nothing else will tell when it is over
                raise

    def computed(self) -> None:
        """What was enqueued on the current stream, or what that one waits for, took part in the use that is entered."""
        if self._cuda is not None and self._inside is not None:
            self._current_stream()

    def _current_stream(self) -> Any:
        stream = self._cuda.current_stream(self.device)
        self._streams[stream] = None
        return stream

    def leave(self) -> None:
        """The engine's memory of the block that was brought is read no more when this returns."""
        buffer, self._inside = self._inside, None
        if buffer is None or self._cuda is None:
            return
        self._current_stream()
        try:
            for stream in self._streams:
                if stream not in buffer.used:
                    buffer.used[stream] = self._cuda.Event()
                buffer.used[stream].record(stream)
            buffer.copied.synchronize()  # type: ignore[union-attr]
        except BaseException:
            self._cuda.synchronize(self.device)  # whatever happened: the work is over
            raise

    def take(self, gradients: Sequence[torch.Tensor]) -> List[torch.Tensor]:
        """These gradients of the block that is entered in host memory, until the next call."""
        found, at = [], 0
        if self._cuda is not None:
            here = self._current_stream()
            for stream in self._streams:
                if stream != here:
                    here.wait_stream(stream)
        try:
            for gradient in gradients:
                size = gradient.numel() * gradient.element_size()
                if at + size <= self._gradients.numel():
                    place = self._gradients[at : at + size].view(gradient.dtype).view(gradient.shape)
                else:  # of a wider type than the weights
                    place = torch.empty(gradient.shape, dtype=gradient.dtype, device="cpu")
                place.copy_(gradient, non_blocking=self._cuda is not None)
                found.append(place)
                at += (size + 7) // 8 * 8
                self.d2h_bytes += size
        finally:  # also after an error: what was begun writes here
            if self._cuda is not None:
                here.synchronize()
        return found

    def report(self) -> Dict[str, Any]:
        """What a report says of it: the device, bytes copied in both directions, the most that torch held there, and what is pinned for it.

        ``peak_pinned_bytes`` is of the arena alone.
        """
        peak = self._cuda.max_memory_allocated(self.device) if self._cuda is not None else 0
        return {
            "device": self.device.type,
            "peak_device_bytes": peak,
            "h2d_bytes": self.h2d_bytes,
            "d2h_bytes": self.d2h_bytes,
            "pinned_for_device_bytes": sum(self._pinned.values()),
            "peak_pinned_bytes": self._pinned.get(self._arena_address, 0),
        }

    def close(self) -> None:
        """The engine's memory goes: nothing is copied from it any more, and CUDA knows it no longer. A second call does nothing."""
        try:
            if self._cuda is not None:
                self._cuda.synchronize(self.device)
        finally:
            while self._pinned:
                self._unpin(self._pinned.popitem()[0])
            self._buffers, self._inside, self._streams = [], None, {}
            self._last = self._gradients = None  # type: ignore[assignment]


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
