"""The fp32 weights of a checkpoint, without its model: DeepSpeed's zero_to_fp32, of Penstock's checkpoints and state directories and of
DeepSpeed's."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
import warnings
from collections import OrderedDict
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import torch
from torch import nn

from . import _core
from ._buffers import byte_size, truth
from ._engine import _checkpoint_names as checkpoint_names
from ._engine import _parameters
from ._engine._deepspeed_checkpoint import is_deepspeeds
from ._engine._json import decode
from ._engine._settings import PathLike
from ._files import NewFile, commit_together, open_new, save_into, whole_file
from ._small_files import exists, is_directory, make_directory, read_json

# What checkpoints, DeepSpeed's and ours, are made of.
_MOST_INDEX, _MOST_INDEXED = 64 << 20, 900_000  # bytes, and values with names, of an index: of 400,000 tensors
_IS_READ = re.compile(r"(_states\.pt|/zero/.*\.pt|/penstock\.store|/parameters\.json|/client_state-[^/]+\.pt)$")
_SAFE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class _Weights:
    """Names, with shape and type, and their values one by one."""

    def __init__(self) -> None:
        self.kinds: Dict[str, Tuple[List[int], torch.dtype]] = {}
        self.tied: Dict[str, str] = {}  # names -> the one of kinds that has their values
        self.frozen: List[str] = []

    def read(self, name: str) -> torch.Tensor:
        raise NotImplementedError

    def check(self) -> None:
        """After the last read: raises OSError where what was read is damaged, and only the whole of it could tell."""

    def names(self, exclude_frozen: bool) -> List[str]:
        left_out = set(self.frozen) if exclude_frozen else set()
        return [name for name in (*self.kinds, *self.tied) if self.tied.get(name, name) not in left_out]

    def kind_of(self, name: str) -> Tuple[List[int], torch.dtype]:
        return self.kinds[self.tied.get(name, name)]


class _OfDeepSpeed(_Weights):
    def __init__(self, directory: str) -> None:
        super().__init__()
        self._core = _core.DeepSpeedMasters(directory)
        said = json.loads(self._core.said)
        self._numbers = {name: number for number, name, _, _ in said["weights"]}
        self.kinds = {name: (shape, getattr(torch, dtype)) for _, name, shape, dtype in said["weights"]}
        self.frozen, self.tied = said["frozen"], said["tied"]
        if said["unread"]:
            warnings.warn(f"{said['directory']}: left out: {', '.join(said['unread'])}", stacklevel=5)

    def read(self, name: str) -> torch.Tensor:
        shape, dtype = self.kinds[name]
        value = torch.empty(shape, dtype=dtype)
        self._core.read(self._numbers[name], value.data_ptr())
        return value

    def check(self) -> None:
        self._core.check()


class _OfPenstock(_Weights):
    def __init__(self, directories: List[str]) -> None:
        super().__init__()
        self._core = _core.StateMasters(directories)
        path, identity = self._core.path, json.loads(self._core.identity)
        model = identity.get("model")
        if not isinstance(model, dict) or model.get("architecture") != "driven":
            raise ValueError(f"{path} is a run of `penstock train`: `penstock export`, of a penstock that is built from source, writes its weights")
        described = next((found for found in (_parameters.read(directory, identity) for directory in (path, *directories)) if found), None)
        if described is None:
            raise ValueError(
                f"{path} has no {_parameters.FILE} that names its parameters, as an older Penstock wrote it: load it "
                "(resume=True, or engine.load_checkpoint) and take model.state_dict()"
            )
        self._places = {name: (block, offset) for name, _, block, offset, _ in described["parameters"]}
        self.kinds = {name: (shape, torch.float32) for name, shape, _, _, _ in described["parameters"]}
        self.frozen = [name for name, _, _, _, trains in described["parameters"] if not trains]
        self.tied = described["tied"]
        step, changed = self._step(path, self._places)
        if step.get("partly_written"):
            raise RuntimeError(f"{path} holds values of two states: its process ended within load_state_dict. Take a checkpoint of before")
        self._buffers = {**described["buffers"], **changed}
        self._buffers = {name: value.float() if value.is_floating_point() else value for name, value in self._buffers.items()}
        self.kinds.update({name: (list(value.shape), value.dtype) for name, value in self._buffers.items()})
        told = [f"{name} is too large" for name in described["large_buffers"]]
        if step.get("large_buffers"):
            told.append("buffers that training changed are as they were when the file was written")
        if told:
            warnings.warn(f"{path}: of its buffers {', '.join(told)}: model.state_dict() has all of them", stacklevel=5)

    # What the last commit says of its step, and the buffers that training had changed.
    def _step(self, path: str, parameters: Mapping[str, Any]) -> Tuple[Dict[str, Any], Dict[str, torch.Tensor]]:
        payload = json.loads(self._core.payload)
        try:
            step = decode(payload.get("step") if isinstance(payload, dict) else None) or {}
            if not isinstance(step, dict):
                raise ValueError("its step is no mapping")
            return step, _parameters.buffers_of(step.get("buffers", {}), parameters)
        except ValueError as error:
            raise ValueError(f"{path}: the record of its last commit is none of Penstock's: {error}: take another checkpoint, with tag=") from None

    def read(self, name: str) -> torch.Tensor:
        if name in self._buffers:
            return self._buffers[name]
        value = torch.empty(self.kinds[name][0], dtype=torch.float32)
        block, offset = self._places[name]
        self._core.read(block, offset, value.numel(), value.data_ptr())
        return value


def _open(checkpoint_dir: Union[PathLike, Sequence[PathLike]], tag: Optional[str]) -> _Weights:
    given = [checkpoint_dir] if isinstance(checkpoint_dir, (str, os.PathLike)) else list(checkpoint_dir)
    directories = [os.fspath(directory) for directory in given]
    if len(directories) == 1:
        directory = directories[0]
        checkpoint_names.settle(directory)
        if tag is not None and not is_directory(os.path.join(directory, str(tag))):
            raise FileNotFoundError(f"no checkpoint {os.path.join(directory, str(tag))}")
        if is_deepspeeds(directory, tag):
            return _OfDeepSpeed(directory if tag is None else os.path.join(directory, tag))
        with contextlib.suppress(NotADirectoryError):
            tag = tag or checkpoint_names.newest(directory)
        if tag:
            try:
                path = checkpoint_names.place_of(directory, str(tag))
            except FileNotFoundError as error:
                latest = os.path.join(directory, checkpoint_names.LATEST)
                raise FileNotFoundError(f"{error}, which {latest} names: give tag=") from None
            directories = [path]
    elif tag is not None:
        raise ValueError(f"tag is {tag!r}: several directories are those of one state, which has no tags")
    return _OfPenstock(directories)


def open_weights(path: PathLike) -> _Weights:
    """Of a checkpoint, value by value."""
    return _open(path, None)


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: Union[PathLike, Sequence[PathLike]], tag: Optional[str] = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> "OrderedDict[str, torch.Tensor]":
    """DeepSpeed's: the fp32 masters of a checkpoint, by the module's names, with its persistent buffers. No model and no engine is needed.

    checkpoint_dir: what ``save_checkpoint`` was given, Penstock's or DeepSpeed's; one checkpoint; or a state directory that no training
    has just now (all of them, where there are several). tag: which checkpoint; by default what ``latest`` names. Of buffers those of
    floating point become fp32. All of it is in memory, also with lazy_mode: ``convert_zero_checkpoint_to_fp32_state_dict`` passes it on
    piece by piece. OSError: no checkpoint. ValueError: one that does not name its parameters.
    """
    weights = _open(checkpoint_dir, tag)
    state: "OrderedDict[str, torch.Tensor]" = OrderedDict()
    for name in weights.names(truth(exclude_frozen_parameters, "exclude_frozen_parameters")):
        held = weights.tied.get(name, name)
        state[name] = state[held] if held in state else weights.read(held)
    weights.check()
    return state


def load_state_dict_from_zero_checkpoint(model: nn.Module, checkpoint_dir: PathLike, tag: Optional[str] = None) -> nn.Module:
    """DeepSpeed's: the model, on the processor, with the values of a checkpoint. For one that no engine has."""
    model = model.cpu()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


def _size_of(most: Union[int, str, None]) -> Optional[int]:
    if most is None:
        return None
    return byte_size(most, "max_shard_size", 1)


def _bytes_of(weights: _Weights, name: str) -> int:
    shape, dtype = weights.kind_of(name)
    elements = 1
    for size in shape:
        elements *= size
    return elements * torch.empty(0, dtype=dtype).element_size()


def _shards(weights: _Weights, names: Sequence[str], most: Optional[int]) -> List[List[str]]:
    shards: List[List[str]] = [[]]
    size = 0
    for name in names:
        own = _bytes_of(weights, name)
        if shards[-1] and most is not None and size + own > most:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += own
    return shards


# One value at a time is in memory.
def _write_safetensors(new: NewFile, weights: _Weights, names: Sequence[str]) -> None:
    header: Dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in names:
        shape, dtype = weights.kind_of(name)
        end = at + _bytes_of(weights, name)
        header[name] = {"dtype": _SAFE_NAMES[dtype], "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open_new(new) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            value = weights.read(weights.tied.get(name, name)).contiguous()
            if value.numel():
                file.write(memoryview(value.reshape(-1).view(torch.uint8).numpy()))
        weights.check()


def _write_torch(new: NewFile, weights: _Weights, names: Sequence[str]) -> None:
    state: "OrderedDict[str, torch.Tensor]" = OrderedDict()
    for name in names:
        held = weights.tied.get(name, name)
        state[name] = state[held] if held in state else weights.read(held)
    weights.check()
    save_into(new, state)


# That the index of an older one names, as they are named here; none where it cannot be read.
def _shards_of(index: str, base: str, ending: str) -> List[str]:
    try:
        places = set(read_json(index, _MOST_INDEX, _MOST_INDEXED)["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []
    ours = re.compile(rf"{base}-\d+-of-\d+{re.escape(ending)}")
    return [os.path.join(os.path.dirname(index), name) for name in places if isinstance(name, str) and ours.fullmatch(name)]


def write_weights(
    checkpoint_dir: Union[PathLike, Sequence[PathLike]],
    output: PathLike,
    max_shard_size: Union[int, str, None] = "5GB",
    safe_serialization: bool = False,
    tag: Optional[str] = None,
    exclude_frozen_parameters: bool = False,
    overwrite: bool = True,
) -> List[str]:
    """As convert_zero_checkpoint_to_fp32_state_dict. Returns the paths that were written. FileExistsError: without overwrite.

    Existing files stay until all new ones are durable beside them: the drive needs room for both. Then the names change hands: a kill at
    any moment leaves the old weights, the new ones, or neither an index nor the one file; an error leaves the old ones. Of several at once
    into one directory the names change hands one after the other, and the last one's weights stand.
    """
    most = _size_of(max_shard_size)
    weights = _open(checkpoint_dir, tag)
    names = weights.names(truth(exclude_frozen_parameters, "exclude_frozen_parameters"))
    out, ending = os.fspath(output), ".safetensors" if safe_serialization else ".bin"
    # Older ones of DeepSpeed's, and Lightning's, give a file.
    one_file = os.path.splitext(out)[1] in (".safetensors", ".bin", ".pt", ".pth", ".ckpt") and not is_directory(out)
    _core.check_outside_stores((os.path.dirname(out) or ".") if one_file else out)
    shards = _shards(weights, names, None if one_file else most)
    base = "model" if safe_serialization else "pytorch_model"
    if one_file:
        safe_serialization = out.endswith(".safetensors")
        files = [out]
    else:
        several = len(shards) > 1
        files = [f"{base}-{number:05d}-of-{len(shards):05d}{ending}" if several else base + ending for number in range(1, len(shards) + 1)]
        files = [os.path.join(out, name) for name in files]
        make_directory(out, "output_dir")
    index = os.path.join(out, f"{base}{ending}.index.json")
    # Whichever of the two an earlier one left, the model would be loaded from.
    other = os.path.join(out, base + ending) if len(files) > 1 else index
    for path in files if one_file else [*files, index, other]:
        if exists(path) and _IS_READ.search(os.path.realpath(path)):
            raise ValueError(f"{path} is a checkpoint's own file: give another name")
        if not overwrite and exists(path, follow=False):
            raise FileExistsError(f"{path} is there already: --overwrite replaces it")
    for _, dtype in weights.kinds.values() if safe_serialization else ():
        if dtype not in _SAFE_NAMES:
            raise ValueError(f"a buffer of {dtype} has no type in safetensors: write .bin")
    new: List[NewFile] = []
    try:
        for path, shard in zip(files, shards):
            new.append(NewFile(path))
            (_write_safetensors if safe_serialization else _write_torch)(new[-1], weights, shard)
        if len(files) > 1:
            places = {name: os.path.basename(path) for path, shard in zip(files, shards) for name in shard}
            total = sum(_bytes_of(weights, name) for name in names)
            new.append(NewFile(index))
            with open_new(new[-1]) as file:
                file.write(json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2).encode())
            files.append(index)
        keys = files if one_file else [index, os.path.join(out, base + ending)]
        commit_together(new, keys, lambda: [] if one_file else _shards_of(index, base, ending), overwrite)
    finally:
        for each in new:
            each.discard()
    return files


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: Union[PathLike, Sequence[PathLike]],
    output_dir: PathLike,
    max_shard_size: Union[int, str, None] = "5GB",
    safe_serialization: bool = False,
    tag: Optional[str] = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """DeepSpeed's: writes the fp32 weights of a checkpoint as ``pytorch_model.bin``, or with safe_serialization ``model.safetensors``.

    checkpoint_dir, tag: as for ``get_fp32_state_dict_from_zero_checkpoint``. output_dir: a directory, made where it is missing; or a file
    (``.bin``, ``.pt``, ``.safetensors``); not within a state or checkpoint of Penstock's. max_shard_size: larger ones become several files and an index; None: one file. All of
    them appear together or not at all. Memory: a shard; with safe_serialization the largest parameter. A tied parameter is there under all of its names.
    """
    write_weights(checkpoint_dir, output_dir, max_shard_size, truth(safe_serialization, "safe_serialization"), tag, exclude_frozen_parameters)


def checkpoint_files(checkpoint_dir: PathLike, pattern: str) -> List[str]:
    """Of DeepSpeed's own checkpoint, for who opens its files. FileNotFoundError: it is Penstock's, which has no such files."""
    directory = os.fspath(checkpoint_dir)
    found = sorted(os.path.join(directory, name) for name in os.listdir(directory) if re.search(pattern, name))
    if not found:
        raise FileNotFoundError(
            f"{directory} has no such file of DeepSpeed's: a checkpoint of Penstock's is read by get_fp32_state_dict_from_zero_checkpoint, and its "
            "client_state given back by engine.load_checkpoint"
        )
    return found


#: What lies beside checkpoints under DeepSpeed's name, as its own does.
SCRIPT = "zero_to_fp32.py"
_SCRIPT = b'''#!/usr/bin/env python3
"""The fp32 weights of a checkpoint here: python zero_to_fp32.py . OUTPUT, as with DeepSpeed. It needs the packages penstock and torch."""

from penstock._fp32 import main

if __name__ == "__main__":
    main()
'''


def place_script(directory: PathLike) -> None:
    """Puts ``zero_to_fp32.py`` into the directory, where nothing has its name. OSError: it cannot be written."""
    path = os.path.join(os.fspath(directory), SCRIPT)
    if exists(path, follow=False):
        return
    with whole_file(path) as file:
        os.fchmod(file.fileno(), 0o755)
        file.write(_SCRIPT)


def main(arguments: Optional[Sequence[str]] = None) -> None:
    """DeepSpeed's program: ``zero_to_fp32.py CHECKPOINT_DIR OUTPUT_DIR``. Raises SystemExit with one line where that fails."""
    parser = argparse.ArgumentParser(SCRIPT, description="Writes the fp32 weights of a checkpoint, Penstock's or DeepSpeed's.")
    parser.add_argument("checkpoint_dir", help="what save_checkpoint was given, or a checkpoint")
    parser.add_argument("output_dir", help="a directory, made where it is missing, or a file .bin, .pt or .safetensors")
    parser.add_argument("--max_shard_size", default="5GB", help="of a file; more becomes several and an index [5GB]")
    parser.add_argument("--safe_serialization", action="store_true", help="model.safetensors in the place of pytorch_model.bin")
    parser.add_argument("-t", "--tag", help="which checkpoint [what `latest` names]")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="leave out what did not train")
    parser.add_argument("-d", "--debug", action="store_true", help="of no effect")
    given = parser.parse_args(arguments)
    try:
        written = write_weights(
            given.checkpoint_dir, given.output_dir, given.max_shard_size, given.safe_serialization, given.tag, given.exclude_frozen_parameters
        )
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        sys.exit(f"{SCRIPT}: {error}")
    print("\n".join(written))
