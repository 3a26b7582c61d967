"""Where an engine's checkpoints lie in their directory: which is the newest, and what stands in for one that is being replaced."""

from __future__ import annotations

import os
import weakref
from typing import Any, Optional

from .._small_files import is_directory, read_text

LATEST = "latest"
#: A checkpoint of this name that another is about to replace.
REPLACED = ".%s.replaced"


# By engine: the directory of the checkpoint that it copied last.
_directories: "weakref.WeakKeyDictionary[Any, str]" = weakref.WeakKeyDictionary()


def begun(engine: Any, directory: str) -> None:
    """The engine copies a checkpoint into this directory from now on."""
    _directories[engine] = os.path.realpath(directory)


def settle(path: str) -> None:
    """Blocks until no engine of this process, of one rank, copies a checkpoint into the directory, or one in it. Each engine raises its error itself."""
    real = os.path.realpath(path)
    for engine, directory in list(_directories.items()):
        if engine.world_size == 1 and (real == directory or os.path.dirname(real) == directory):
            engine._settle_checkpoint()


def newest(directory: str) -> Optional[str]:
    """What `latest` says, which may be nothing; None: there is no such file. OSError, ValueError: it cannot be read."""
    try:
        return read_text(os.path.join(directory, LATEST), 4096).strip()
    except FileNotFoundError:
        return None


def place_of(directory: str, tag: str) -> str:
    """The directory of a checkpoint. FileNotFoundError: there is none."""
    path = os.path.realpath(os.path.join(directory, tag))
    aside = os.path.join(os.path.dirname(path), REPLACED % os.path.basename(path))
    if not is_directory(path) and is_directory(aside):
        path = aside  # it was about to be replaced when its process was killed
    if not is_directory(path):
        raise FileNotFoundError(f"no checkpoint {path}")
    return path
