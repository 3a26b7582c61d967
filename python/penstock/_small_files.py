"""The one reader of small files and the one parser of JSON: neither waits for a pipe, fills memory, nor ends the process by nested text."""

from __future__ import annotations

import errno
import json
import os
import stat
from typing import Any, List, Union

SMALL = 16 << 20
_PIECE = 1 << 20


def read_text(path: Union[str, "os.PathLike[str]"], most: int = SMALL) -> str:
    """The text of a regular file in UTF-8. OSError: it cannot be read, or is none. ValueError: longer than most bytes, or no UTF-8."""
    name = os.fspath(path)
    descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", name)
        pieces: List[bytes] = []
        left = most + 1 if status.st_size <= most else 0
        while left > 0:
            piece = os.read(descriptor, min(left, _PIECE))
            if not piece:
                break
            pieces.append(piece)
            left -= len(piece)
    finally:
        os.close(descriptor)
    if left <= 0:
        raise ValueError(f"{name} is longer than the {most} bytes that a file of its kind may have: is it the right file?")
    try:
        # As Python's open() has it: every kind of line end is "\n".
        return b"".join(pieces).decode().replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is no text in UTF-8: {error}") from error


def parse_json(text: str, name: str) -> Any:
    """The value that a text spells. ValueError, which begins with name: malformed, or nested too deep."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(f"{name}: the JSON has values nested too deep") from None
    except ValueError as error:
        raise ValueError(f"{name} is no JSON: {error}") from error


def read_json(path: Union[str, "os.PathLike[str]"], most: int = SMALL) -> Any:
    """The value in a file: errors of read_text and parse_json."""
    return parse_json(read_text(path, most), os.fspath(path))
