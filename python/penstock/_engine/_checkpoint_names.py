"""Where an engine's checkpoints lie in their directory: which is the newest, what stands in for one that is being replaced, and which process may
change it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import weakref
from typing import Any, Iterator, Optional, Sequence, Set

from .. import _core
from .._files import locked_directory, try_lock
from .._small_files import exists, is_directory, is_link, read_text

LATEST = "latest"
#: A checkpoint of this name that another is about to replace.
REPLACED = ".%s.replaced"
#: What a checkpoint's directory has in it; those of several ranks lie in rank-K (swap/checkpoint.h).
_OWN = re.compile(r"penstock\.store|parameters\.json|client_state-[^/]+\.pt")
_LOCK = ".penstock.lock"  # of who copies a checkpoint, or trains from the command line (swap/checkpoint_lock.h)
_PATIENCE = 2.0  # seconds that a killed process may take to end
_IN_USE = "checkpoints go to a directory that is in use by another process, which writes its own there: let that one end, or give another directory"


# By CheckpointCopy, of each engine: the directory of the one that it copied last.
_directories: "weakref.WeakKeyDictionary[Any, str]" = weakref.WeakKeyDictionary()


def begun(copy: Any, directory: str) -> None:
    """A checkpoint is copied into this directory from now on."""
    _directories[copy] = os.path.realpath(directory)


def settle(path: str) -> None:
    """Blocks until no engine of this process, of one rank, copies a checkpoint into the directory, or one in it. Each engine raises its error itself."""
    real = os.path.realpath(path)
    for copy, directory in list(_directories.items()):
        if real == directory or os.path.dirname(real) == directory:
            copy.settle()


def newest(directory: str) -> Optional[str]:
    """What `latest` says, which may be nothing; None: there is no such file. OSError, ValueError: it cannot be read, or names nothing beside it."""
    path = os.path.join(directory, LATEST)
    try:
        tag = read_text(path, 4096).strip()
    except FileNotFoundError:
        return None
    check_tag(tag, f"{path} names")
    return tag


def is_tag(tag: Any) -> bool:
    """Whether a checkpoint may have it for a name within its directory."""
    if not isinstance(tag, str) or not tag or tag.startswith("."):
        return False
    if len(os.fsencode(tag)) > 200:  # names of 255 bytes are all that file systems take, and temporary ones are longer
        return False
    if any(ord(each) < 32 or ord(each) == 127 for each in tag) or tag != tag.strip():  # `latest` names it by its first line, blanks at its ends apart
        return False
    return "/" not in tag and tag not in (LATEST, "latest_universal")


def name_of(step: int, number: int = 1) -> str:
    """A checkpoint's own name: of several of one step, which must not take each other's place, the numbered one (swap/checkpoint_files.cc)."""
    return f"step-{step:08d}" + (f".{number}" if number > 1 else "")


def is_own(tag: Any) -> bool:
    """Whether save_checkpoint gives such names itself."""
    return isinstance(tag, str) and re.fullmatch(r"step-\d{8,}(\.[1-9]\d*)?", tag) is not None


def tags_of(directory: str, name: str) -> Set[str]:
    """The links in the directory that name what has this name there, or had it. OSError: the directory cannot be listed."""
    place = os.path.realpath(os.path.join(directory, name))
    there = (os.path.join(directory, each) for each in os.listdir(directory))
    return {os.path.basename(each) for each in there if is_link(each) and os.path.realpath(each) == place}


def run_of(path: str) -> str:
    """The run that made the checkpoint. Empty: the path names no checkpoint of a run that has a name, or one that holds other files besides, or one
    that cannot be read; nobody may take its place or remove it.
    """
    try:
        if is_link(path) or not is_directory(path) or not all(_is_own_file(path, name) for name in os.listdir(path)):
            return ""
        return run_in([path])
    except (OSError, ValueError, RuntimeError):
        return ""


def run_in(directories: Sequence[str]) -> str:
    """The run in state directories, or that made a checkpoint; empty: it has no name. OSError, ValueError: there is none, or none that can be read."""
    found = json.loads(_core.record_of(list(directories)))
    name = found.get("run_id") if isinstance(found, dict) else None
    return name if isinstance(name, str) else ""


def _is_own_file(directory: str, name: str) -> bool:
    path = os.path.join(directory, name)
    if re.fullmatch(r"rank-\d+", name) and not is_link(path) and is_directory(path):
        return all(_OWN.fullmatch(each) for each in os.listdir(path))
    return _OWN.fullmatch(name) is not None


def remove_superseded(directory: str) -> None:
    """Removes checkpoints that were set aside for one that a kill has left whole since, both of one run. By who has the directory locked."""
    for entry in os.listdir(directory) if is_directory(directory) else ():
        found = re.fullmatch(r"\.(.+)\.replaced", entry)
        if found is None or not is_own(found[1]):
            continue
        aside = os.path.join(directory, entry)
        run = run_of(aside)
        if run and exists(os.path.join(directory, found[1])) and run_of(os.path.join(directory, found[1])) == run:
            shutil.rmtree(aside, ignore_errors=True)


def check_tag(tag: str, what: str) -> None:
    """ValueError, which begins with what: the tag is no name of a checkpoint within the directory."""
    for text, why in (("\0", "a zero byte"), ("\n", "a line end"), ("/", "a slash")):
        if text in tag:
            raise ValueError(f"{what} {tag!r}, which has {why} in it and is no checkpoint of that directory: name one, with tag=")
    if tag in (".", ".."):
        raise ValueError(f"{what} {tag!r}, which is no checkpoint of that directory: name one, with tag=")


def place_of(directory: str, tag: str) -> str:
    """The directory of a checkpoint. FileNotFoundError: there is none."""
    path = os.path.realpath(os.path.join(directory, tag))
    aside = os.path.join(os.path.dirname(path), REPLACED % os.path.basename(path))
    if not is_directory(path) and is_directory(aside):
        path = aside  # it was about to be replaced when its process was killed
    if not is_directory(path):
        raise FileNotFoundError(f"no checkpoint {path}")
    return path


@contextlib.contextmanager
def locked(directory: str) -> Iterator[None]:
    """No other engine looks for checkpoints there that it would replace, renames or removes them while the block runs, and none was being copied
    when it began. A directory that is missing is locked by who makes it. OSError: it is in use (EBUSY), or cannot be locked.
    """
    if not is_directory(directory):
        yield
        return
    with locked_directory(directory, _PATIENCE, _IN_USE):
        _check_nobody_copies(directory)
        yield


def _check_nobody_copies(directory: str) -> None:
    path = os.path.join(directory, _LOCK)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not try_lock(descriptor, path, _PATIENCE):
            raise OSError(errno.EBUSY, _IN_USE, directory)
    finally:
        os.close(descriptor)
