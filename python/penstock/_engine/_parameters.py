"""Which parameters a state has, and where: a file beside its store, which knows numbers alone. Who has no model reads them by it."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import nn

from .._files import whole_file
from .._small_files import parse_json, read_text
from ._blocks import Block
from ._json import decode, encode, in_brief, is_number, is_shape

FILE = "parameters.json"
_MOST_BUFFERS = 16 << 20  # bytes, of all together
_MOST_BYTES = 64 << 20  # of the file: the buffers in base64, and the names of 100,000 parameters
_MOST_VALUES = 1_200_000  # of these, with their shapes and places
_KEYS = {"model", "parameters", "tied", "buffers", "large_buffers"}
_DIGEST = "sha256"  # the last key: of the text as it would be without
_DIGEST_AT_END = re.compile(r', "sha256": "([0-9a-f]{64})"\}\s*\Z')
# Where a parameter may begin behind another (zero/compute/flat_layout.h): the next one, one of another group, one that trains.
_ALIGNMENTS = (64, 256, 4096)
_MOST_AT_END = 4096 + 2048  # elements of a block that are no parameter's


def describe(
    model: nn.Module, blocks: Sequence[Block], places: Sequence[Sequence[int]], trains: Sequence[Sequence[bool]], identity: Mapping[str, Any]
) -> Dict[str, Any]:
    """As JSON. places, trains: of each parameter of each block. identity: of the model, as the store has it."""
    named, parameters, tied = {}, [], {}
    for number, (block, offsets, marks) in enumerate(zip(blocks, places, trains)):
        for (name, parameter), offset, mark in zip(block.parameters, offsets, marks):
            named[id(parameter)] = name
            parameters.append([name, list(parameter.shape), number, offset, mark])
    for prefix, module in model.named_modules(remove_duplicate=False):
        for short, parameter in module._parameters.items():
            name = f"{prefix}.{short}" if prefix else short
            if parameter is not None and named.get(id(parameter), name) != name:
                tied[name] = named[id(parameter)]
    return {"model": dict(identity), "parameters": parameters, "tied": tied}


def with_buffers(described: Mapping[str, Any], buffers: Mapping[str, Tuple[nn.Module, str, Any, Any]]) -> Dict[str, Any]:
    """The same with what persistent buffers hold just now, and the names of those that take too much."""
    kept: Dict[str, torch.Tensor] = {}
    left, size = [], 0
    for name, (module, short, _, _) in buffers.items():
        buffer = module._buffers[short]
        if buffer is None:
            continue
        size += buffer.numel() * buffer.element_size()
        if size > _MOST_BUFFERS:
            left.append(name)
        else:
            kept[name] = buffer
    return {**described, "buffers": encode(kept), "large_buffers": left}


def text_of(described: Mapping[str, Any]) -> str:
    """Of the file: JSON with its own digest, since nothing else tells a changed digit of a place from another place."""
    text = json.dumps(described, allow_nan=False)
    return f'{text[:-1]}, "{_DIGEST}": "{hashlib.sha256(text.encode()).hexdigest()}"}}'


def write(directory: str, described: Mapping[str, Any]) -> None:
    """OSError: it cannot be written."""
    with whole_file(os.path.join(directory, FILE)) as file:
        file.write(text_of(described).encode())


def read(directory: str, identity: Mapping[str, Any]) -> Optional[Dict[str, Any]]:
    """What was written for that very state, with its buffers as tensors; None: nothing was. identity: the state's, as the store has it.

    ValueError: the file is damaged. One of an older Penstock has no digest; that each parameter has a place of its own is looked at in any.
    """
    path = os.path.join(directory, FILE)
    try:
        text = read_text(path, _MOST_BYTES)
    except FileNotFoundError:
        return None
    try:
        described = _checked(text)
        if described.get("model") != identity["model"]:
            return None  # of a run that was there before
        return _of_blocks(described, identity["block_elements"])
    except ValueError as error:
        raise ValueError(
            f"{path} is damaged: {error}: load the checkpoint itself (engine.load_checkpoint, or resume=True) and take model.state_dict()"
        ) from None


def blocks_in(directory: str) -> Dict[str, int]:
    """The number of each parameter's block, as the file says. Empty: there is none, as of an older Penstock.

    OSError: it cannot be read. ValueError: it is damaged.
    """
    path = os.path.join(directory, FILE)
    try:
        text = read_text(path, _MOST_BYTES)
    except FileNotFoundError:
        return {}
    try:
        return {str(name): int(block) for name, _, block, _, _ in _checked(text).get("parameters", ())}
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error}: which blocks this run has is not known: load a checkpoint of it") from None


def _checked(text: str) -> Dict[str, Any]:
    described = parse_json(text, "its text", _MOST_VALUES)
    if not isinstance(described, dict):
        raise ValueError("its text is no object of JSON")
    if _DIGEST in described:
        end = _DIGEST_AT_END.search(text)
        if end is None or hashlib.sha256(f"{text[: end.start()]}}}".encode()).hexdigest() != end.group(1):
            raise ValueError(f"it was changed after it was written ({_DIGEST})")
        del described[_DIGEST]
    if not described.keys() <= _KEYS:
        raise ValueError(f"it has the key {in_brief(min(described.keys() - _KEYS))}, which none has")
    return described


# ValueError: it is no description of a state whose blocks have these sizes.
def _of_blocks(described: Dict[str, Any], blocks: Sequence[int]) -> Dict[str, Any]:
    missing = _KEYS - described.keys()
    if missing:
        raise ValueError(f"it has no {min(missing)}")
    names = _check_places(described["parameters"], blocks)
    buffers = buffers_of(decode(described["buffers"]), names)
    tied, large = described["tied"], described["large_buffers"]
    if not isinstance(tied, dict) or not all(isinstance(held, str) and held in names and name not in names for name, held in tied.items()):
        raise ValueError("it has tied names of no parameter")
    if not isinstance(large, list) or not all(isinstance(each, str) for each in large):
        raise ValueError("it has large_buffers that are no names")
    return {**described, "buffers": buffers}


def buffers_of(value: Any, parameters: Mapping[str, Any]) -> Dict[str, torch.Tensor]:
    """The value, if it is what a record may have of buffers beside these parameters. ValueError: it is not."""
    if not isinstance(value, dict):
        raise ValueError("its buffers are no mapping")
    for name, each in value.items():
        if not isinstance(name, str) or not isinstance(each, torch.Tensor) or name in parameters:
            raise ValueError(f"it has a buffer {in_brief(name)}, which is none")
    return value


# Each element of a block is one parameter's, or fills up. Returns them by name.
def _check_places(parameters: Any, blocks: Sequence[int]) -> Dict[str, Any]:
    named: Dict[str, Any] = {}
    there: List[List[Tuple[int, int, str]]] = [[] for _ in blocks]
    if not isinstance(parameters, list):
        raise ValueError("its parameters are no list")
    for each in parameters:
        if not isinstance(each, list) or len(each) != 5:
            raise ValueError("it has a parameter that is not a name with shape, block, place and whether it trains")
        name, shape, block, offset, trains = each
        if not isinstance(name, str) or not is_shape(shape) or not is_number(block) or not is_number(offset) or not isinstance(trains, bool):
            raise ValueError(f"its parameter {in_brief(name)} has another shape, block or place than parameters have")
        if name in named or block >= len(blocks):
            raise ValueError(f"its parameter {in_brief(name)} {'is there twice' if name in named else f'is of block {block}, of {len(blocks)}'}")
        named[name] = each
        there[block].append((offset, math.prod(shape), name))
    for block, (elements, inside) in enumerate(zip(blocks, there)):
        end = 0
        for offset, size, name in sorted(inside):
            if offset not in [-(-end // alignment) * alignment for alignment in _ALIGNMENTS]:
                raise ValueError(f"its parameter {in_brief(name)} begins at {offset} of block {block}, where another one ends at {end}")
            end = offset + size
        if not inside or not end <= elements <= end + _MOST_AT_END:
            raise ValueError(f"its parameters of block {block} end at {end}, and the block at {elements}")
    return named
