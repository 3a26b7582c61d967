from __future__ import annotations

import atexit
import ctypes
import errno
import logging
import os
import stat
import threading
import warnings
import weakref
from typing import Any, Dict, List, Optional, Tuple, Union

from ... import _core
from ..._buffers import MAX_OFFSET, Memory, PathLike, is_tensor, memory_of, truth, whole_number

_log = logging.getLogger("penstock")

# How long a wait stays in the extension before Python may look at signals, in ms. The end of a transfer ends it at once.
_SLICE_MS = 100

_MIB = 1 << 20
_SECTOR = 4096
_MOST_BLOCK = 64 * _MIB
_MOST_IN_FLIGHT = 64 * _MIB  # beyond it only latency grows
_MOST_BLOCKS = 4096

# Locked memory that was handed out, by address; of the whole process, so that every handle knows every tensor.
_locked: "Dict[int, weakref.ref[_core.LockedMemory]]" = {}
_locked_mutex = threading.Lock()

_handles: "weakref.WeakSet[aio_handle]" = weakref.WeakSet()

_MISSING: Any = object()


class _Operation:
    """A transfer and what is to be looked at when it has ended."""

    __slots__ = ("transfer", "memory", "path", "offset", "validate")

    def __init__(self, transfer: Optional[_core.Transfer], memory: Memory, path: str, offset: int, validate: bool):
        self.transfer = transfer  # None: there was nothing to move
        self.memory = memory
        self.path = path
        self.offset = offset
        self.validate = validate

    def wait(self) -> None:
        while self.transfer is not None and not self.transfer.wait(_SLICE_MS):
            pass  # a signal's handler runs here

    def check(self) -> None:
        if self.transfer is not None:
            self.transfer.check()
        if self.validate:
            _compare(self.memory, self.path, self.offset)


def _compare(memory: Memory, path: str, offset: int) -> None:
    """OSError (EIO) at the first byte in which the file, read through the page cache, is not the memory."""
    view = memory.view()
    with open(path, "rb", buffering=0) as file:
        at = 0
        while at < memory.nbytes:
            piece = os.pread(file.fileno(), min(_MIB, memory.nbytes - at), offset + at)
            if not piece or view[at : at + len(piece)] != piece:
                same = next((i for i, (a, b) in enumerate(zip(view[at:], piece)) if a != b), 0)
                error = OSError(errno.EIO, f"validate {path}: bytes from {offset + at + same} on are not the buffer's")
                error.filename = path
                raise error
            at += len(piece)


def _path_of(file: Union[PathLike, int]) -> Tuple[str, int]:
    """(path, descriptor): one of them names the file, the other is "" or -1."""
    if isinstance(file, (str, bytes, os.PathLike)):
        path = os.fsdecode(file)
        if not path:
            raise ValueError("the filename is empty")
        if "\0" in path:
            raise ValueError(f"the filename has a zero byte in it: {path!r}")
        return os.path.realpath(path), -1  # the engine follows no links
    descriptor = whole_number(file, "the file descriptor", 0, 2**31 - 1)
    return f"descriptor {descriptor}", descriptor


class aio_handle:
    """Reads files into tensors and writes tensors to files, directly (O_DIRECT) where the file system can.

    block_size: bytes of one transfer at the device; rounded to whole 4096, at most 64 MiB.
    queue_depth: transfers in flight, for each of intra_op_parallelism; together at most 4096 and 64 MiB, or one block.
    single_submit, overlap_events: kept for their getters; the engine always submits in batches and overlaps.
    intra_op_parallelism: multiplies queue_depth; threads where the kernel has neither io_uring nor libaio.

    Buffers are torch tensors of any dtype or numpy arrays, contiguous and in host memory (else ValueError), of any length
    and at any address. Offsets are in bytes; none needs to be aligned, though multiples of 4096 are fastest. A write never
    truncates: what lies behind it stays, and it makes a file longer where it must. Files are named by a path or by an open
    descriptor, which remains the caller's.

    Every failure is an exception: OSError (with errno, filename, offset and length of what failed), ShortFileError where
    a file ends before its buffer is full, ValueError and TypeError for arguments. A failed operation leaves its file and
    its buffer undefined, and the handle usable. A buffer stays referenced until wait() has seen its operation end.

    Threads may share a handle; wait() waits for the operations of all of them. A forked child must make its own handle:
    every method of this one raises RuntimeError there. Raises ValueError, TypeError; OSError where no engine can be had.
    """

    def __init__(
        self,
        block_size: int = _MIB,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
    ) -> None:
        self._block_size = whole_number(block_size, "block_size", 1)
        self._queue_depth = whole_number(queue_depth, "queue_depth", 1)
        self._single_submit = truth(single_submit, "single_submit")
        self._overlap_events = truth(overlap_events, "overlap_events")
        self._intra_op_parallelism = whole_number(intra_op_parallelism, "intra_op_parallelism", 1)
        block = min(-(-self._block_size // _SECTOR) * _SECTOR, _MOST_BLOCK)
        depth = min(self._queue_depth * self._intra_op_parallelism, _MOST_BLOCKS)
        self._engine = _core.Engine(
            block_bytes=block,
            bytes_in_flight=max(block, min(block * depth, _MOST_IN_FLIGHT)),
            blocks_in_flight=depth,
            threads=min(self._intra_op_parallelism, 64) if self._intra_op_parallelism > 1 else 4,
        )
        self._mutex = threading.Lock()
        self._pending: List[_Operation] = []
        # Files in use, so that writes to one sector of one file are kept in order.
        self._files: "weakref.WeakValueDictionary[Tuple[int, int, bool], _core.File]" = weakref.WeakValueDictionary()
        _handles.add(self)
        self._say()

    # What it was made with.

    def get_block_size(self) -> int:
        """Bytes of one transfer, as given."""
        return self._block_size

    def get_queue_depth(self) -> int:
        """Transfers in flight, as given."""
        return self._queue_depth

    def get_single_submit(self) -> bool:
        """As given."""
        return self._single_submit

    def get_overlap_events(self) -> bool:
        """As given."""
        return self._overlap_events

    def get_intra_op_parallelism(self) -> int:
        """As given."""
        return self._intra_op_parallelism

    def get_alignment(self) -> int:
        """DeepSpeed's figure, 512 x intra_op_parallelism. Nothing needs to be aligned here."""
        return 512 * self._intra_op_parallelism

    # Transfers.

    def read(self, buffer: Any, filename: Union[PathLike, int], validate: bool = False, file_offset: int = 0) -> int:
        """Fills the buffer from the file, from byte file_offset on; returns 0 when it is done."""
        self._sync(False, buffer, filename, file_offset, validate)
        return 0

    def write(self, buffer: Any, filename: Union[PathLike, int], validate: bool = False, file_offset: int = 0) -> int:
        """Writes the buffer into the file at byte file_offset; returns 0 when it is done."""
        self._sync(True, buffer, filename, file_offset, validate)
        return 0

    def pread(
        self,
        buffer: Any,
        filename: Union[PathLike, int],
        validate: bool = False,
        async_: Any = _MISSING,
        file_offset: int = 0,
        **keywords: Any,
    ) -> int:
        """Reads; ``async`` (the fourth argument) starts only and returns 0, else returns how many operations ended.

        The synchronous form waits for all operations that are pending, as DeepSpeed's does. validate reads the file
        once more through the page cache when the operation has ended; a difference is an OSError.
        """
        return self._either(False, buffer, filename, validate, async_, file_offset, keywords)

    def pwrite(
        self,
        buffer: Any,
        filename: Union[PathLike, int],
        validate: bool = False,
        async_: Any = _MISSING,
        file_offset: int = 0,
        **keywords: Any,
    ) -> int:
        """Writes; otherwise as pread()."""
        return self._either(True, buffer, filename, validate, async_, file_offset, keywords)

    def sync_pread(self, buffer: Any, filename: Union[PathLike, int], file_offset: int = 0) -> int:
        """Reads, and waits for all that is pending; returns how many operations ended."""
        return self._sync(False, buffer, filename, file_offset)

    def sync_pwrite(self, buffer: Any, filename: Union[PathLike, int], file_offset: int = 0) -> int:
        """Writes, and waits for all that is pending; returns how many operations ended."""
        return self._sync(True, buffer, filename, file_offset)

    def async_pread(
        self, buffer: Any, filename: Union[PathLike, int, None] = None, file_offset: int = 0, *, fd: Optional[int] = None
    ) -> int:
        """Starts a read and returns 0. The buffer holds the bytes once wait() has returned."""
        self._start(False, buffer, _one_file(filename, fd), file_offset, False)
        return 0

    def async_pwrite(
        self, buffer: Any, filename: Union[PathLike, int, None] = None, file_offset: int = 0, *, fd: Optional[int] = None
    ) -> int:
        """Starts a write and returns 0. The buffer must not change, and nothing is written, before wait() says so."""
        self._start(True, buffer, _one_file(filename, fd), file_offset, False)
        return 0

    def wait(self) -> int:
        """Waits for everything that is pending and returns how many operations that were; 0 where there were none.

        Raises the first failure, in the order of the calls, after all of them have ended. Ctrl-C ends the waiting: the
        operations go on, and another wait() collects them.
        """
        self._check_here()
        with self._mutex:
            operations, self._pending = self._pending, []
        try:
            for operation in operations:
                operation.wait()
        except BaseException:
            with self._mutex:
                self._pending = operations + self._pending
            raise
        self._say()
        failure: Optional[BaseException] = None
        for operation in operations:
            try:
                operation.check()
            except OSError as error:
                if failure is None:
                    failure = error
                elif hasattr(failure, "add_note"):
                    failure.add_note(f"also: {error}")
        if failure is not None:
            raise failure
        return len(operations)

    def close(self) -> None:
        """Waits for what is pending; what then failed is a warning. Called at the end of handle and process."""
        if not self._engine.here:
            return
        try:
            self.wait()
        except OSError as error:
            warnings.warn(f"penstock: an operation that nobody waited for failed: {error}", RuntimeWarning, stacklevel=2)

    def __enter__(self) -> "aio_handle":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_pending", None):
            self.close()

    # Locked memory.

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: Any = None, **keywords: Any) -> Any:
        """A one-dimensional tensor of num_elem elements of the example's dtype, in page-aligned, locked memory.

        An example that is a numpy array gives an array. The content is undefined. The memory goes when nothing refers to
        it any more. Raises ValueError, TypeError, MemoryError.
        """
        self._check_here()
        example = _either_name("new_cpu_locked_tensor", "example_tensor", example_tensor, "example_tenosr", keywords)  # DeepSpeed's spelling
        return _new_locked_tensor(num_elem, example)

    def free_cpu_locked_tensor(self, locked_tensor: Any = None, **keywords: Any) -> bool:
        """Gives a tensor of new_cpu_locked_tensor() up: True, or False for any other.

        The memory itself stays for as long as a tensor refers to it: none is ever left dangling.
        """
        self._check_here()
        tensor = _either_name("free_cpu_locked_tensor", "locked_tensor", locked_tensor, "tensor", keywords)
        return _give_up_locked(memory_of(tensor, "locked_tensor").address)

    def is_pinned(self, tensor: Any) -> bool:
        """Whether the tensor lies in locked memory: of any handle here, or pinned by torch."""
        return _is_locked(tensor)

    # Within.

    def _check_here(self) -> None:
        if not self._engine.here:
            raise RuntimeError(
                "this aio_handle was made in the parent process: a forked child must make its own (in the worker, or use "
                "the start method 'spawn')"
            )

    def _say(self) -> None:
        for line in self._engine.take_log():
            _log.warning("aio: %s", line)

    def _open(self, write: bool, file: Union[PathLike, int]) -> Tuple[_core.File, str]:
        path, descriptor = _path_of(file)
        try:
            if descriptor < 0 and stat.S_ISDIR(os.stat(path).st_mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        except FileNotFoundError:
            pass  # a write makes it
        opened = _core.File(path, write=write, create=write and descriptor < 0, descriptor=descriptor)
        key = (*opened.identity, write)
        with self._mutex:
            return self._files.setdefault(key, opened), path if descriptor < 0 else f"/proc/self/fd/{descriptor}"

    def _start(self, write: bool, buffer: Any, file: Union[PathLike, int], file_offset: int, validate: bool) -> _Operation:
        self._check_here()
        memory = memory_of(buffer, writable=not write)
        offset = whole_number(file_offset, "file_offset", 0)
        if offset + memory.nbytes > MAX_OFFSET:
            raise ValueError(f"file_offset {offset} and the buffer's {memory.nbytes} bytes end beyond 2^63")
        validate = truth(validate, "validate")
        opened, path = self._open(write, file)
        transfer = None
        if memory.nbytes != 0:
            start = self._engine.write if write else self._engine.read
            transfer = start(opened, offset, memory.address, memory.nbytes, (memory.owner, opened))
        operation = _Operation(transfer, memory, path, offset, validate)
        with self._mutex:
            self._pending.append(operation)
        return operation

    def _sync(self, write: bool, buffer: Any, file: Union[PathLike, int], file_offset: int, validate: bool = False) -> int:
        operation = self._start(write, buffer, file, file_offset, validate)
        try:
            return self.wait()
        except KeyboardInterrupt:
            # The caller has its buffer back: nothing may still move into it or out of it.
            with self._mutex:
                if operation in self._pending:
                    self._pending.remove(operation)
            if operation.transfer is not None:
                operation.transfer.cancel()
                operation.transfer.wait()
            raise

    def _either(
        self, write: bool, buffer: Any, file: Union[PathLike, int], validate: bool, async_: Any, file_offset: int, keywords: Dict[str, Any]
    ) -> int:
        if "async" in keywords and async_ is _MISSING:
            async_ = keywords.pop("async")
        if keywords:
            raise TypeError(f"{'pwrite' if write else 'pread'}() got an unexpected keyword argument {next(iter(keywords))!r}")
        if async_ is not _MISSING and truth(async_, "async"):
            self._start(write, buffer, file, file_offset, validate)
            return 0
        return self._sync(write, buffer, file, file_offset, validate)


def _either_name(call: str, name: str, value: Any, other: str, keywords: Dict[str, Any]) -> Any:
    """The value, by its name or another one in keywords. TypeError: by both, or keywords has what the call does not."""
    if other in keywords and value is not None:
        raise TypeError(f"{call}() got {name} and {other}, which are the same: give one of them")
    found = keywords.pop(other, value)
    if keywords:
        raise TypeError(f"{call}() got an unexpected keyword argument {next(iter(keywords))!r}")
    return found


def _one_file(filename: Union[PathLike, int, None], fd: Optional[int]) -> Union[PathLike, int]:
    if (filename is None) == (fd is None):
        raise TypeError("give either a filename or fd, an open file descriptor")
    return filename if filename is not None else fd  # type: ignore[return-value]


def _new_locked(nbytes: int) -> Any:
    """An object with the buffer protocol over locked memory, which it owns."""
    memory = _core.LockedMemory(nbytes)
    address = memory.address
    array = (ctypes.c_char * nbytes).from_address(address)
    array._penstock_memory = memory  # type: ignore[attr-defined]
    with _locked_mutex:
        _locked[address] = weakref.ref(memory)
    weakref.finalize(memory, _forget_locked, address)
    return array


def _new_locked_tensor(num_elem: int, example: Any) -> Any:
    count = whole_number(num_elem, "num_elem", 0)
    if is_tensor(example):
        import torch

        if count == 0:
            return torch.empty(0, dtype=example.dtype)
        return torch.frombuffer(_new_locked(count * example.element_size()), dtype=example.dtype)
    if hasattr(example, "__array_interface__"):
        import numpy

        if example.dtype.hasobject:
            raise TypeError(f"example_tensor is an array of Python objects (dtype {example.dtype}), which are no bytes")
        if count == 0:
            return numpy.empty(0, dtype=example.dtype)
        return numpy.frombuffer(_new_locked(count * example.dtype.itemsize), dtype=example.dtype)
    raise TypeError(f"example_tensor must be a torch tensor or a numpy array, not {type(example).__name__}")


def _give_up_locked(address: int) -> bool:
    with _locked_mutex:
        return _locked.pop(address, None) is not None


def _is_locked(tensor: Any) -> bool:
    memory = memory_of(tensor, "tensor")
    if is_tensor(tensor) and tensor.is_pinned():
        return True
    with _locked_mutex:
        for reference in list(_locked.values()):
            held = reference()
            if held is not None and held.address <= memory.address and memory.address + memory.nbytes <= held.address + held.nbytes:
                return True
    return False


def _forget_locked(address: int) -> None:
    with _locked_mutex:
        reference = _locked.get(address)
        if reference is not None and reference() is None:
            del _locked[address]


@atexit.register
def _close_all() -> None:
    for handle in list(_handles):
        handle.close()


def aio_read(
    buffer: Any,
    filename: PathLike,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
) -> int:
    """Fills the buffer from the beginning of the file and returns 0; arguments and errors as aio_handle's."""
    return aio_handle(block_size, queue_depth, single_submit, overlap_events, 1).read(buffer, filename, validate)


def aio_write(
    buffer: Any,
    filename: PathLike,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
) -> int:
    """Writes the buffer to the beginning of the file and returns 0; arguments and errors as aio_handle's."""
    return aio_handle(block_size, queue_depth, single_submit, overlap_events, 1).write(buffer, filename, validate)


def deepspeed_memcpy(dest: Any, src: Any) -> int:
    """Copies the bytes of src to dest, both contiguous, in host memory and equally long (else ValueError); returns 0."""
    to, origin = memory_of(dest, "dest", writable=True), memory_of(src, "src")
    if to.nbytes != origin.nbytes:
        raise ValueError(f"dest has {to.nbytes} bytes, src {origin.nbytes}")
    ctypes.memmove(to.address, origin.address, to.nbytes)
    return 0


class pin_handle:
    """DeepSpeed's: locked memory by itself, which every aio_handle knows too."""

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: Any) -> Any:
        """As aio_handle's."""
        return _new_locked_tensor(num_elem, example_tensor)

    def free_cpu_locked_tensor(self, locked_tensor: Any) -> bool:
        """As aio_handle's: the memory stays for as long as a tensor refers to it."""
        return _give_up_locked(memory_of(locked_tensor, "locked_tensor").address)

    def free_cpu_locked_tensor_by_ptr(self, address: int) -> bool:
        """The same, by the address of its first element."""
        return _give_up_locked(whole_number(address, "address", 0, 2**64 - 1))

    def is_pinned(self, buffer: Any) -> bool:
        """As aio_handle's."""
        return _is_locked(buffer)


class PinMemoryBuilder:
    """DeepSpeed's builder of this operator: there is nothing to build, ``load()`` gives the module."""

    NAME = "pin_memory"

    def is_compatible(self, verbose: bool = False) -> bool:
        """True, verbose or not: that changes nothing."""
        return True

    def load(self, verbose: bool = False) -> Any:
        """The module with pin_handle. verbose changes nothing."""
        import penstock.ops.aio as module

        return module


class AsyncIOBuilder:
    """DeepSpeed's builder of this operator: there is nothing to build, ``load()`` gives the module."""

    NAME = "async_io"

    def is_compatible(self, verbose: bool = False) -> bool:
        """True: the engine falls back to what the kernel has. verbose changes nothing."""
        return True

    def load(self, verbose: bool = False) -> Any:
        """The module with aio_handle, aio_read and aio_write. verbose changes nothing."""
        import penstock.ops.aio as module

        return module
