"""torch.save with the bytes going through the I/O engine, past the page cache, and no crash that leaves half a file."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
from typing import Any, BinaryIO, Iterator, List, Optional, Tuple

import torch

from . import _core
from ._buffers import PathLike

_MIB = 1 << 20
_PIECE = 4 * _MIB  # what is written at once
_PIECES = 16  # buffers, 64 MiB: what is written while torch computes the checksum of a tensor
_FIRST_SPACE = 64 * _MIB
_MOST_SPACE = 1024 * _MIB  # reserved ahead of the end, so that writes do not make the file longer
_SLICE_MS = 100


def _path_of(path: Any, instead: str) -> str:
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise TypeError(f"path must name a file, not {type(path).__name__}: {instead} takes file objects")
    name = os.fsdecode(path)
    if not name or "\0" in name:
        raise ValueError(f"path is empty or has a zero byte in it: {name!r}")
    return os.path.realpath(name)


def _wait(transfer: _core.Transfer) -> None:
    while not transfer.wait(_SLICE_MS):
        pass  # a signal's handler runs here
    transfer.check()


class _Writer:
    """What torch.save writes to: bytes are copied into locked buffers, and full ones written while others fill."""

    def __init__(self, file: _core.File) -> None:
        self._file = file
        self._engine = _core.Engine(block_bytes=2 * _MIB, bytes_in_flight=_PIECE * _PIECES)
        self._memories: List[_core.LockedMemory] = []
        self._views: List[memoryview] = []
        self._under_way: List[Optional[_core.Transfer]] = []
        self._add_piece()
        self._now = 0
        self._filled = 0
        self._at = 0  # where the buffer being filled goes
        self._space = 0
        self.failure: Optional[BaseException] = None

    def _add_piece(self) -> None:
        memory = _core.LockedMemory(_PIECE)
        self._memories.append(memory)
        self._views.append(memoryview((ctypes.c_char * _PIECE).from_address(memory.address)).cast("B"))
        self._under_way.append(None)

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        try:
            done = 0
            while done < len(view):
                count = min(_PIECE - self._filled, len(view) - done)
                self._views[self._now][self._filled : self._filled + count] = view[done : done + count]
                self._filled += count
                done += count
                if self._filled == _PIECE:
                    self._send()
        except BaseException as failure:
            self.failure = self.failure or failure
            raise
        return len(view)

    def flush(self) -> None:
        """torch calls it; the bytes are on their way."""

    def _send(self) -> None:
        end = self._at + self._filled
        if end > self._space:
            wanted = max(end, self._space + min(max(self._space, _FIRST_SPACE), _MOST_SPACE))
            try:
                self._file.preallocate(wanted)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    raise
                wanted = end  # there may be room for what there is
                self._file.preallocate(wanted)
            self._space = wanted
        memory = self._memories[self._now]
        self._under_way[self._now] = self._engine.write(self._file, self._at, memory.address, self._filled, memory)
        self._at = end
        self._filled = 0
        self._now = (self._now + 1) % _PIECES
        if self._now == len(self._memories):
            self._add_piece()
        before = self._under_way[self._now]
        if before is not None:
            self._under_way[self._now] = None
            _wait(before)

    def finish(self) -> None:
        """Everything is in the file and durable."""
        if self._filled:
            self._send()
        self.settle(check=True)
        self._file.resize(self._at)
        self._file.sync()

    def settle(self, check: bool) -> None:
        """Nothing is on its way any more."""
        for index, transfer in enumerate(self._under_way):
            if transfer is None:
                continue
            self._under_way[index] = None
            if check:
                _wait(transfer)
            else:
                transfer.cancel()
                transfer.wait()


def _new_file(path: str) -> Tuple[int, Optional[str]]:
    """A descriptor of an empty file beside path, without a name where the file system can do that; else its name."""
    directory = os.path.dirname(path)
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o666), None
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            error.filename = path
            raise
    name = _beside(path)
    return os.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666), name


def _beside(path: str) -> str:
    directory, name = os.path.split(path)
    return os.path.join(directory, f".{name[:200]}.{secrets.token_hex(6)}")


@contextlib.contextmanager
def whole_file(path: str) -> Iterator[BinaryIO]:
    """A file that takes path's place when all of it is written and on the drive (fsync); until then, and where that fails, path is as it was.

    For small ones: they go through the page cache, and the directory is not synced.
    """
    directory, name = os.path.split(path)
    temporary = os.path.join(directory, f".{name}.{os.getpid()}.partial")  # of a killed process that had our number it is written over
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


@contextlib.contextmanager
def _checksums(wanted: Optional[bool]) -> Iterator[None]:
    """torch's option for the archive's CRC-32s, for the time of a save."""
    option = torch.serialization
    if wanted is None or not hasattr(option, "set_crc32_options"):
        yield
        return
    before = option.get_crc32_options()
    option.set_crc32_options(wanted)
    try:
        yield
    finally:
        option.set_crc32_options(before)


def save(obj: Any, path: PathLike, *, crc32: Optional[bool] = None, **arguments: Any) -> None:
    """torch.save(obj, path), through the I/O engine and safe from crashes.

    path: where the file will be; a link is followed. The bytes are torch.save's, and torch.load reads them. They go to a
    new file, which takes path's place when all of it is durable (fsync of file and directory): after a crash at any
    moment there is the old file or the new one, whole. Its mode is the old one's, if there was one.
    crc32: False leaves out the archive's checksums, which take most of the processor's time and which torch.load does not
    look at; None is as torch.serialization.set_crc32_options() says. Without effect where torch has no such option.
    arguments: pickle_module and pickle_protocol, as torch.save's.

    Takes up to 64 MiB of locked memory meanwhile, less for less. Raises OSError (errno, filename), with path as it was; what pickling raises.
    """
    target = _path_of(path, "torch.save")
    if os.path.isdir(target):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), target)
    if os.path.exists(target) and not os.path.isfile(target):
        raise OSError(errno.EINVAL, "it is no regular file, and a new one would take its place: torch.save writes into it", target)
    descriptor, name = _new_file(target)
    writer = None
    try:
        try:
            os.fchmod(descriptor, os.stat(target).st_mode & 0o7777)
        except FileNotFoundError:
            pass
        writer = _Writer(_core.File(target, write=True, descriptor=descriptor))
        try:
            with _checksums(crc32):
                torch.save(obj, writer, **arguments)  # type: ignore[arg-type]
        except BaseException:
            failure, writer.failure = writer.failure, None
            if failure is None:
                raise
            try:  # torch tells of a failed write in words of its own
                raise failure from None
            finally:
                del failure
        writer.finish()
        if name is None:
            beside = _beside(target)
            # With a directory's descriptor, which the absolute path makes moot, Python calls linkat(), which can follow.
            os.link(f"/proc/self/fd/{descriptor}", beside, src_dir_fd=descriptor, follow_symlinks=True)
            name = beside
        os.replace(name, target)
        name = None
        directory = os.open(os.path.dirname(target), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    finally:
        if writer is not None:
            writer.settle(check=False)
        os.close(descriptor)
        if name is not None:
            os.unlink(name)


def load(path: PathLike, **arguments: Any) -> Any:
    """torch.load(path, **arguments), for symmetry: torch reads a file as fast as its drive gives it."""
    return torch.load(_path_of(path, "torch.load"), **arguments)
