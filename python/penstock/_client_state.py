"""What a checkpoint under DeepSpeed's name keeps of a client_state beside its record: what JSON cannot hold, or too much for a commit.

It is a file of torch.save within the checkpoint, durable before the checkpoint has its name. The record names it. (Beside the checkpoint: of an
older Penstock.)
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import secrets
import struct
import types
import warnings
import zipfile
from typing import Any, BinaryIO, Dict, List, Mapping, Optional, Sequence, Tuple

import torch

from ._engine._json import encode
from ._engine._tree import tensors_of
from ._files import NewFile, open_new, remove_leftovers, torch_save
from ._small_files import make_directory, open_regular

#: In the client_state that a record has: the name of the file, and which values are in it.
KEY = "__penstock_client_state__"
_NAMING = 128  # bytes of JSON, of KEY, the file's name and what is around them
_NAME = re.compile(r"client_state-step-\d{8,}-rank-\d+-[0-9a-f]{8}\.pt")


def split(client_state: Mapping[str, Any], room: int) -> Tuple[Dict[str, Any], Dict[str, Any]]:
    """(What the record takes, what goes into a file.) room: bytes of JSON that the record takes."""
    lengths = {key: _length(key, value, room) for key, value in client_state.items()}
    apart = {key for key, length in lengths.items() if length is None}
    by_length = sorted((key for key in lengths if key not in apart), key=lambda key: lengths[key] or 0)
    size = sum(length for length in lengths.values() if length is not None)
    named = _NAMING + sum(len(json.dumps(encode(key))) + 2 for key in apart)
    while by_length and size + (named if apart else 0) > room:
        longest = by_length.pop()
        apart.add(longest)
        size -= lengths[longest] or 0
        named += len(json.dumps(encode(longest))) + 2
    kept = {key: value for key, value in client_state.items() if key not in apart}
    return kept, {key: value for key, value in client_state.items() if key in apart}


# Of its JSON, in bytes. None: it has none, or tensors that are longer than there is room for, which are not encoded to learn that.
def _length(key: Any, value: Any, room: int) -> Optional[int]:
    try:
        if sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(value)) > room:
            return None
        return len(json.dumps(encode([key, value]), allow_nan=False)) + 2
    except (TypeError, ValueError, RuntimeError):  # RecursionError is a RuntimeError
        return None


def write(directory: str, step: int, rank: int, apart: Mapping[str, Any]) -> NewFile:
    """A file with these values, settled, for the checkpoint that is begun next. TypeError: a value cannot be pickled. OSError: it cannot be written."""
    make_directory(directory, "save_dir")
    path = os.path.join(directory, f"client_state-step-{step:08d}-rank-{rank}-{secrets.token_hex(4)}.pt")
    new = NewFile(path)
    try:
        with open_new(new) as file:
            try:
                torch_save(dict(apart), file, path)
            except OSError as error:
                if error.filename == path:
                    raise
                raise TypeError(_unpickled(apart, error)) from error  # of a value's own
            except Exception as error:  # noqa: B902 - of a value's own class
                raise TypeError(_unpickled(apart, error)) from error
        new.settle()
    except OSError as error:
        new.discard()
        raise OSError(error.errno, f"client_state cannot be written ({error.strerror})", path) from None
    except BaseException:
        new.discard()
        raise
    return new


def _unpickled(apart: Mapping[str, Any], error: Exception) -> str:
    return f"client_state: {', '.join(map(str, apart))} cannot be pickled: {error}"


def tidy(directory: str) -> None:
    """Removes what killed processes have left of files that no checkpoint has taken in. One whose process lives is in use."""
    remove_leftovers(directory, _NAME.pattern)


def whole(client_state: Mapping[str, Any], checkpoint: str, trusts: bool, needs_all: bool = True) -> Dict[str, Any]:
    """What save_checkpoint was given, of the checkpoint at this path. trusts: what the file executes is allowed to. needs_all: else a file that cannot be read is a warning.

    FileNotFoundError: the file is missing. OSError: it is no regular file, or cannot be read. RuntimeError: it is not as it was written, holds classes that may execute something when they are read, or other values.
    """
    kept = dict(client_state)
    said = kept.pop(KEY, None)
    if said is None:
        return kept
    name, keys = said
    if _NAME.fullmatch(str(name)) is None:
        raise ValueError(f"the checkpoint's client_state names {name!r}, which is no file of such a checkpoint")
    try:
        return {**kept, **_found(checkpoint, name, keys, trusts)}
    except Exception as error:  # noqa: B902 - what a trusted file executes may raise anything
        if needs_all:
            raise
        warnings.warn(f"client_state without {', '.join(map(str, keys))}: {error}", stacklevel=6)
        return kept


def _found(checkpoint: str, name: str, keys: Sequence[Any], trusts: bool) -> Dict[Any, Any]:
    rank = name.split("-")[4]
    inside = [os.path.join(checkpoint, name), os.path.join(checkpoint, f"rank-{rank}", name)]
    for path in (*inside, os.path.join(os.path.dirname(os.path.realpath(checkpoint)), name)):
        try:
            found = _read(path, trusts)
            break
        except FileNotFoundError:
            continue
    else:
        raise FileNotFoundError(
            f"{inside[0]} is missing, which has {', '.join(map(str, keys))} of client_state: copy it with the checkpoint (load_module_only=True takes the "
            "weights alone)"
        ) from None
    if not isinstance(found, dict) or any(key not in found for key in keys):
        raise RuntimeError(f"{path} is not as it was written: it is to have {', '.join(map(str, keys))} of client_state")
    return {key: found[key] for key in keys}


def _read(path: str, trusts: bool) -> Any:
    with os.fdopen(open_regular(path, os.O_RDONLY), "rb") as file:
        _check_archive(file, path)
        if trusts:
            return torch.load(file, map_location="cpu", weights_only=False)
        try:
            with _plain_classes():
                return torch.load(file, map_location="cpu", weights_only=True)
        except OSError:
            raise
        except Exception as error:  # noqa: B902 - pickle's, or torch's for a class that it does not know
            allowed = "; torch.serialization.add_safe_globals allows one class" if hasattr(torch.serialization, "add_safe_globals") else ""
            found = re.search(r"GLOBAL ([\w.]+)", str(error))
            what = "a class of its own" if found is None else found[1]
            raise RuntimeError(
                f"{path}: client_state holds {what}, and reading that may execute what the file says: load_checkpoint(trust_client_state=True) does, for "
                f"a file that you trust{allowed}"
            ) from error


# torch inflates what is compressed without a bound: torch.save only stores, so that the entries together are shorter than the file.
def _check_archive(file: BinaryIO, path: str) -> None:
    length = os.fstat(file.fileno()).st_size
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            as_written = not archive.comment and all(each.compress_type == zipfile.ZIP_STORED and each.compress_size == each.file_size for each in entries)
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OverflowError, struct.error):
        as_written, entries = False, []
    if not as_written or sum(each.file_size for each in entries) > length:
        raise RuntimeError(f"{path} is not as it was written: an archive of torch.save, of stored entries that are no longer than the file")
    file.seek(0)


# Classes whose objects are their attributes, or numbers: reading them executes nothing else.
def _plain_classes() -> Any:
    allow = getattr(torch.serialization, "safe_globals", None)  # since torch 2.5
    return contextlib.nullcontext() if allow is None else allow(_harmless())


def _harmless() -> List[Any]:
    found: List[Any] = [argparse.Namespace, types.SimpleNamespace]
    try:
        import numpy
    except ImportError:
        return found
    core = getattr(numpy, "_core", None) or numpy.core
    found += [numpy.ndarray, numpy.dtype, core.multiarray.scalar, core.multiarray._reconstruct]
    found += [(core.multiarray.scalar, f"numpy.{other}.multiarray.scalar") for other in ("core", "_core")]
    found += [(core.multiarray._reconstruct, f"numpy.{other}.multiarray._reconstruct") for other in ("core", "_core")]
    kinds = getattr(numpy, "dtypes", None)
    return found + [each for each in vars(kinds).values() if isinstance(each, type)] if kinds is not None else found
