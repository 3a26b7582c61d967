"""The one reader of small files, the one parser of JSON, and what a path names: none waits for a pipe, fills memory, ends the process by nested
text, or takes a failure for an absence."""

from __future__ import annotations

import errno
import json
import os
import stat
from typing import Any, Optional, Union

SMALL = 16 << 20
#: Values and names of a text of JSON: each takes up to 150 bytes of memory and as little as two of the text. base/json.h has the same bound.
VALUES = 400_000
_PIECE = 1 << 20


def open_regular(path: Union[str, "os.PathLike[str]"], flags: int) -> int:
    """Opens a regular file, by a descriptor that the caller closes. flags: os.open's. OSError: it cannot be opened, or is none.

    Never waits for another process, as it would for a pipe's other end.
    """
    name = os.fspath(path)
    try:
        descriptor = os.open(name, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno != errno.ENXIO:  # a pipe that nobody reads, a socket
            raise
        raise OSError(errno.EINVAL, "not a regular file", name) from None
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "not a regular file", name)
        os.set_blocking(descriptor, True)  # for who inherits it
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_special(path: Union[str, "os.PathLike[str]"]) -> int:
    """Opens what is no regular file (a pipe, a device) for writing, by a descriptor that the caller closes. OSError: it cannot be opened.

    A pipe that nothing reads is an error, and is not waited for. A descriptor of this process that the path names (/dev/stdout, /dev/fd/3) is
    written to as it is, a socket too.
    """
    name = os.fspath(path)
    own = _own_descriptor(name)
    if own is not None:
        return os.dup(own)
    try:
        descriptor = os.open(name, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        raise OSError(errno.ENXIO, "a pipe that nothing reads, a socket, or no device: start its reader first", name) from None
    os.set_blocking(descriptor, True)
    return descriptor


def names_own_descriptor(path: Union[str, "os.PathLike[str]"]) -> bool:
    """Whether the path names a descriptor of this process, itself or by one link (/dev/stdout), whatever it is of."""
    return _own_descriptor(os.fspath(path)) is not None


def _own_descriptor(name: str) -> Optional[int]:
    if os.path.dirname(name) == "/dev" and os.path.islink(name):
        name = os.readlink(name)
    number = os.path.basename(name)
    if not (number.isascii() and number.isdigit()):
        return None
    return int(number) if os.path.realpath(os.path.dirname(name)) == os.path.realpath("/proc/self/fd") else None


def read_bytes(path: Union[str, "os.PathLike[str]"], most: int = SMALL) -> bytes:
    """What a regular file holds. OSError: it cannot be read, or is none. ValueError: longer than most bytes."""
    name = os.fspath(path)
    data = bytearray()
    descriptor = open_regular(name, os.O_RDONLY)
    try:
        left = most + 1 if os.fstat(descriptor).st_size <= most else 0
        while left > 0:
            piece = os.read(descriptor, min(left, _PIECE))
            if not piece:
                break
            data += piece
            left -= len(piece)
    finally:
        os.close(descriptor)
    if left <= 0:
        raise ValueError(f"{name} is longer than the {most} bytes that a file of its kind may have: is it the right file?")
    return bytes(data)


def read_text(path: Union[str, "os.PathLike[str]"], most: int = SMALL) -> str:
    """The text of a regular file in UTF-8: errors of read_bytes. ValueError: no UTF-8."""
    try:
        # As Python's open() has it: every kind of line end is "\n".
        return read_bytes(path, most).decode().replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{os.fspath(path)} is no text in UTF-8: {error}") from error


def exists(path: Union[str, "os.PathLike[str]"], follow: bool = True) -> bool:
    """Whether a path names anything. Unlike os.path.exists, what cannot be looked at (EACCES, EIO) is an OSError, never an absence."""
    return _mode(path, follow) is not None


def is_directory(path: Union[str, "os.PathLike[str]"]) -> bool:
    """Whether a path names a directory, links followed. OSError as for exists."""
    mode = _mode(path)
    return mode is not None and stat.S_ISDIR(mode)


def is_regular_file(path: Union[str, "os.PathLike[str]"]) -> bool:
    """Whether a path names a regular file, links followed. OSError as for exists."""
    mode = _mode(path)
    return mode is not None and stat.S_ISREG(mode)


def is_link(path: Union[str, "os.PathLike[str]"]) -> bool:
    """Whether a path names a symbolic link. OSError as for exists."""
    mode = _mode(path, follow=False)
    return mode is not None and stat.S_ISLNK(mode)


def check_directory(path: Union[str, "os.PathLike[str]"], what: str) -> None:
    """NotADirectoryError: what the path names, or would have to be made in, is no directory. OSError as for exists."""
    at = os.path.abspath(path)
    while not exists(at):
        at = os.path.dirname(at)
    if not is_directory(at):
        raise NotADirectoryError(errno.ENOTDIR, f"{what} is no directory: give another place", at)


def make_directory(path: Union[str, "os.PathLike[str]"], what: str) -> None:
    """Makes a directory, with those it is in, unless it is there. OSError names what is in the way of it, and what it was to be."""
    check_directory(path, what)
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        why = f"{what} cannot be made ({error.strerror}): give another place"
        raise OSError(error.errno, why, error.filename or os.fspath(path)) from None


def check_output(path: Union[str, "os.PathLike[str]"], what: str) -> None:
    """OSError: no file can be written at the path, which is a directory, a device, a pipe or a socket, or whose directory is not there."""
    if is_directory(path):
        raise IsADirectoryError(errno.EISDIR, f"{what} is a directory: give a file", os.fspath(path))
    if exists(path) and not is_regular_file(path):
        raise OSError(errno.EINVAL, f"{what} is no regular file: give another name", os.fspath(path))
    parent = os.path.dirname(os.path.abspath(path))
    check_directory(parent, f"{what}: what it is to be in")
    if not exists(parent):
        raise FileNotFoundError(errno.ENOENT, f"{what}: its directory is not there", parent)


def _mode(path: Union[str, "os.PathLike[str]"], follow: bool = True) -> Optional[int]:
    try:
        return os.stat(path, follow_symlinks=follow).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None


def parse_json(text: str, name: str, most: int = VALUES) -> Any:
    """The value that a text spells. ValueError, which begins with name: malformed, nested too deep, or of more than so many values and names."""
    if _may_have(text, most) and not _has_at_most(text, most):
        raise ValueError(f"{name}: the JSON has more than the {most} values and names that one of its kind may have: is it the right one?")
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(f"{name}: the JSON has values nested too deep") from None
    except ValueError as error:
        raise ValueError(f"{name} is no JSON: {error}") from error


def read_json(path: Union[str, "os.PathLike[str]"], most: int = SMALL, most_values: int = VALUES) -> Any:
    """The value in a file: errors of read_text and parse_json."""
    return parse_json(read_text(path, most), os.fspath(path), most_values)


# Each begins a value or a name, but for the first of a text; within strings they mean nothing.
_BEGIN = "[{,:"


# Whether there may be more than most, where some of them may stand within strings.
def _may_have(text: str, most: int) -> bool:
    return sum(map(text.count, _BEGIN)) > most


# Without memory for each: that is why it is looked at before it is parsed. Where the text is no JSON at all the parser says so.
def _has_at_most(text: str, most: int) -> bool:
    plain = text.replace("\\\\", "").replace('\\"', "")  # every quotation mark that is left begins a string or ends one
    if plain.count('"') > 2 * (most + 1):
        return False
    left, at = most, 0
    while left >= 0:
        begin = plain.find('"', at)
        left -= sum(plain.count(each, at, len(plain) if begin < 0 else begin) for each in _BEGIN)
        at = plain.find('"', begin + 1) + 1
        if begin < 0 or at == 0:
            return left >= 0
    return False
