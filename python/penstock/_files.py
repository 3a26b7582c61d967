"""Files that are replaced whole, the only way in which the package replaces one; and torch.save past the page cache."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import secrets
import stat
import time
from typing import Any, BinaryIO, Callable, Iterator, List, Optional, Sequence, Set, Tuple

import torch

from . import _core
from ._buffers import PathLike
from ._small_files import exists, is_directory, is_regular_file, names_own_descriptor, open_special

_MIB = 1 << 20
_PIECE = 4 * _MIB  # what is written at once
_PIECES = 16  # buffers, 64 MiB: what is written while torch computes the checksum of a tensor
_FIRST_SPACE = 64 * _MIB
_MOST_SPACE = 1024 * _MIB  # reserved ahead of the end, so that writes do not make the file longer
_SLICE_MS = 100
_CANNOT_LOCK = (errno.EBADF, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)  # a file system's words for it
_OTHERS_PATIENCE = 60.0  # seconds that others' changes of names may take (base/atomic_file.h)
_SHORT_NAME = 200


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


def _beside(path: str, ending: str) -> str:
    directory, name = os.path.split(path)
    return os.path.join(directory, f".{name[:_SHORT_NAME]}.{secrets.token_hex(8)}{ending}")


def try_lock(descriptor: int, path: str, patience: float = 0.0) -> bool:
    """Takes the exclusive lock of an open file or directory, until it is closed. False: another has held it for so many seconds. OSError
    names path: the file system has no locks, or the call failed. The C++ library locks the same way (base/file_lock.h).
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.002)
        except OSError as error:
            error.filename = path
            raise


@contextlib.contextmanager
def locked_directory(path: str, patience: float, refusal: str) -> Iterator[None]:
    """Others that lock the directory, those of C++ too, are kept out while the block runs. OSError (EBUSY) with refusal: another has
    held it for so many seconds. Where directories cannot be locked, as on NFS, nobody is kept out.
    """
    descriptor = os.open(path or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            if not try_lock(descriptor, path, patience):
                raise OSError(errno.EBUSY, refusal, path or ".")
        except OSError as error:
            if error.errno not in _CANNOT_LOCK:
                raise
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # copies of the descriptor in forked children have it too
    finally:
        os.close(descriptor)


def sync_directory(path: str) -> None:
    """Makes the creation, renaming and removal of names in a directory durable."""
    descriptor = os.open(path or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that cannot
            error.filename = path
            raise
    finally:
        os.close(descriptor)


class NewFile:
    """A new file in the directory of ``path``, open for writing as ``descriptor``. It has no name until it is committed where the file
    system can do that, so that a kill leaves nothing; elsewhere a random one. Links are not followed: one at ``path`` is itself replaced,
    and the mode of a regular file there is handed on. Without ``commit`` or ``commit_together``, ``discard`` leaves ``path`` as it was.
    OSError: it cannot be made, or what is at ``path`` is a directory, a device, a pipe or a socket, whose place no file takes.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._name: Optional[str] = None
        mode = self._mode_there()
        try:
            self.descriptor = os.open(os.path.dirname(path) or ".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o666)
            self._is_ours()
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                error.filename = path
                raise
            self._create()
        if mode is not None:
            try:
                os.fchmod(self.descriptor, mode)
            except BaseException:
                self.discard()
                raise

    # That the new file gets; None: its own.
    def _mode_there(self) -> Optional[int]:
        try:
            mode = os.lstat(self.path).st_mode
        except FileNotFoundError:
            return None
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), self.path)
        if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
            raise OSError(errno.EINVAL, "it is no regular file, and a new one would take its place: remove it, or give another name", self.path)
        return stat.S_IMODE(mode) if stat.S_ISREG(mode) else None

    # Where there are no files without a name.
    def _create(self) -> None:
        while True:
            name = _beside(self.path, ".new")
            self.descriptor = os.open(name, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_RDWR | os.O_CLOEXEC, 0o666)
            self._name = name
            if self._is_ours():
                return
            self.discard()

    # Locks it: what has a temporary name and is not locked was left by a kill. False: another process has removed it as such before that.
    def _is_ours(self) -> bool:
        try:
            locked = try_lock(self.descriptor, self.path)
        except OSError:
            locked = True  # where nothing can be locked nothing is taken for left
        return locked and (self._name is None or os.fstat(self.descriptor).st_nlink > 0)

    def settle(self) -> None:
        """Durable, and under a temporary name: what is left is to rename it."""
        os.fsync(self.descriptor)
        if self._name is None:
            name = _beside(self.path, ".new")
            # With a directory's descriptor, which the absolute path makes moot, Python calls linkat(), which can follow.
            os.link(f"/proc/self/fd/{self.descriptor}", name, src_dir_fd=self.descriptor, follow_symlinks=True)
            self._name = name

    @property
    def settled(self) -> str:
        """Its temporary name. Who gives it another one leaves nothing for ``discard``."""
        assert self._name is not None
        return self._name

    def move(self) -> None:
        """Under its own name, which is not durable yet."""
        assert self._name is not None
        os.replace(self._name, self.path)
        self._name = None

    def commit(self) -> None:
        self.settle()
        self.move()
        directory, name = os.path.split(self.path)
        _remove_leftovers(directory, {name}, others=False)
        sync_directory(directory)

    def discard(self) -> None:
        """Closes it. One that was not committed is gone."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
        name, self._name = self._name, None
        if name is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)


def commit_together(
    files: Sequence[NewFile], keys: Sequence[str], superseded: Optional[Callable[[], Sequence[str]]] = None, replace: bool = True
) -> None:
    """Commits files of one directory that only mean something together: who begins to read at one of ``keys``, also after a kill, finds all
    the old files, all the new ones, or no key. The last of ``files`` is the one to begin with, its path one of ``keys``; the other keys are
    gone afterwards. OSError before the last one has its name: everything is as it was.

    Of several processes that do this in one directory at once, those of C++ too, one does it after the other: the directory is locked from the
    first change to the last. ``superseded`` returns paths of the old state that the new one does not have; it is called when nobody else can
    change that any more, and they are gone afterwards. OSError (EBUSY): another process has held the lock for a minute. FileExistsError:
    without ``replace``, where a key is there.
    """
    for file in files:
        file.settle()
    directory = os.path.dirname(files[-1].path)
    refusal = "another process has been replacing files here for a minute: let it end, or write to another directory"
    with locked_directory(directory, _OTHERS_PATIENCE, refusal):
        _change_names(files, keys, superseded, replace)


def _change_names(files: Sequence[NewFile], keys: Sequence[str], superseded: Optional[Callable[[], Sequence[str]]], replace: bool) -> None:
    key, alone = files[-1].path, len(files) == 1  # one file takes an old one's place in one step
    directory = os.path.dirname(key)
    gone = [path for path in (superseded() if superseded is not None else ()) if all(path != file.path for file in files)]
    for path in () if replace else keys:
        if exists(path, follow=False):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
    old: List[Tuple[str, str]] = []
    named: List[str] = []

    def set_aside(path: str) -> None:
        name = _beside(path, ".old")
        with contextlib.suppress(FileNotFoundError):
            os.rename(path, name)
            old.append((path, name))

    try:
        if not alone:
            for path in keys:
                set_aside(path)
            if old:
                sync_directory(directory)
            for file in files[:-1]:
                set_aside(file.path)
                file.move()
                named.append(file.path)
            sync_directory(directory)
        files[-1].move()
    except BaseException:
        for path in named:
            os.unlink(path)
        for path, name in reversed(old):  # those that are read first get their names last
            os.rename(name, path)
        raise
    sync_directory(directory)
    for _, name in old:
        os.unlink(name)
    for path in (*keys, *gone):
        if path != key:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
    names = {os.path.basename(path) for path in (*(file.path for file in files), *keys, *gone)}
    _remove_leftovers(directory, names, others=True)
    sync_directory(directory)


# What killed writers of these names left, with others of all names; and then, as the directory is locked, what changes of these names have set
# aside that a kill has ended. The C++ library has the same rule (base/atomic_file.cc).
def _remove_leftovers(directory: str, names: Set[str], others: bool) -> None:
    short = {name[:_SHORT_NAME] for name in names}
    with contextlib.suppress(OSError):
        for entry in os.listdir(directory or "."):
            found = re.fullmatch(r"\.(.+)\.[0-9a-f]{16}\.(old|new)", entry, re.DOTALL)
            if found is None or not (found.group(1) in short or others and found.group(2) == "new"):
                continue
            path = os.path.join(directory, entry)
            with contextlib.suppress(OSError):  # what cannot be removed now is left to the next
                if found.group(2) == "new":
                    _remove_unless_written(path)
                elif others:
                    os.unlink(path)


def remove_leftovers(directory: str, pattern: str) -> None:
    """Removes what killed writers of files whose names match have left. What cannot be listed or removed is left to the next."""
    with contextlib.suppress(OSError):
        found = (re.fullmatch(rf"\.({pattern})\.[0-9a-f]{{16}}\.new", entry) for entry in os.listdir(directory or "."))
        _remove_leftovers(directory, {each[1] for each in found if each is not None}, others=False)


# Who writes a file has it locked from before it gets its temporary name until it has its own, and nothing else ever has the same one.
def _remove_unless_written(path: str) -> None:
    flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, os.O_RDWR | flags)
    except PermissionError:
        descriptor = os.open(path, os.O_RDONLY | flags)
    try:
        if try_lock(descriptor, path):
            os.unlink(path)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def open_new(new: NewFile) -> Iterator[BinaryIO]:
    """The new file, to write through the page cache."""
    with open(new.descriptor, "wb", closefd=False) as file:
        yield file


@contextlib.contextmanager
def whole_file(path: str) -> Iterator[BinaryIO]:
    """A file that takes path's place, durably (fsync of file and directory), when the block ends; where it fails, path is as it was."""
    new = NewFile(path)
    try:
        with open_new(new) as file:
            yield file
        new.commit()
    finally:
        new.discard()


class _Told:
    """A file for torch.save, which tells of a failed write in words of its own."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.failure: Optional[OSError] = None

    def write(self, data: Any) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.failure = self.failure or error
            raise

    def flush(self) -> None:
        self._file.flush()


def torch_save(obj: Any, file: BinaryIO, path: str) -> None:
    """torch.save into an open file. OSError, which names path: it cannot be written. What pickling raises."""
    told = _Told(file)
    try:
        torch.save(obj, told)  # type: ignore[arg-type]
    except Exception:
        if told.failure is None:
            raise
        raise OSError(told.failure.errno, told.failure.strerror, path) from None


def write_text(path: PathLike, text: str) -> None:
    """Puts text in place of what a path holds. What is no regular file (a pipe), and a descriptor of this process (/dev/stdout), is written to as
    it is; a pipe that nothing reads is an OSError, and is not waited for."""
    name = os.fsdecode(path)
    if names_own_descriptor(name) or exists(name) and not is_regular_file(name) and not is_directory(name):
        with os.fdopen(open_special(name), "w", encoding="utf-8") as out:
            out.write(text)
        return
    with whole_file(name) as file:
        file.write(text.encode())


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


def save_into(new: NewFile, obj: Any, crc32: Optional[bool] = None, **arguments: Any) -> None:
    """What ``save`` writes, durable, in a file that is not committed yet."""
    writer = _Writer(_core.File(new.path, write=True, descriptor=new.descriptor))
    try:
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
    finally:
        writer.settle(check=False)


def save(obj: Any, path: PathLike, *, crc32: Optional[bool] = None, **arguments: Any) -> None:
    """torch.save(obj, path), through the I/O engine and safe from crashes.

    path: where the file will be; a link is followed. The bytes are torch.save's, and torch.load reads them. They go to a
    new file. When all of it is durable (fsync) it takes path's place, and the directory is synced: after a crash at any
    moment there is the old file or the new one, whole, and once ``save`` has returned the new one. Its mode is the old
    one's, if there was one.
    crc32: False leaves out the archive's checksums, which take most of the processor's time and which torch.load does not
    look at; None is as torch.serialization.set_crc32_options() says. Without effect where torch has no such option.
    arguments: pickle_module and pickle_protocol, as torch.save's.

    Takes up to 64 MiB of locked memory meanwhile, less for less. Raises OSError (errno, filename) and what pickling raises, with
    path as it was; but where the directory's own fsync fails, the last thing that happens, path is the new file, which a power
    cut may still take back.
    """
    target = _path_of(path, "torch.save")
    if is_directory(target):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), target)
    if exists(target) and not is_regular_file(target):
        raise OSError(errno.EINVAL, "it is no regular file, and a new one would take its place: torch.save writes into it", target)
    new = NewFile(target)
    try:
        save_into(new, obj, crc32, **arguments)
        new.commit()
    finally:
        new.discard()


def load(path: PathLike, **arguments: Any) -> Any:
    """torch.load(path, **arguments), for symmetry: torch reads a file as fast as its drive gives it."""
    return torch.load(_path_of(path, "torch.load"), **arguments)
