"""Which parameters a state has, and where: a file beside its store, which knows numbers alone. Who has no model reads them by it."""

from __future__ import annotations

import json
import os
from typing import Any, Dict, Mapping, Optional, Sequence, Tuple

import torch
from torch import nn

from .._files import whole_file
from .._small_files import read_json
from ._blocks import Block
from ._json import encode

FILE = "parameters.json"
_MOST_BUFFERS = 16 << 20  # bytes, of all together
_MOST_BYTES = 64 << 20  # of the file: the buffers in base64, and the names of 100,000 parameters
_MOST_VALUES = 1_200_000  # of these, with their shapes and places


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


def write(directory: str, described: Mapping[str, Any]) -> None:
    """OSError: it cannot be written."""
    with whole_file(os.path.join(directory, FILE)) as file:
        file.write(json.dumps(described, allow_nan=False).encode())


def read(directory: str, identity: Mapping[str, Any]) -> Optional[Dict[str, Any]]:
    """What was written for that very model; None: nothing was. ValueError: the file is damaged."""
    path = os.path.join(directory, FILE)
    try:
        described = read_json(path, _MOST_BYTES, _MOST_VALUES)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(described, dict) or described.get("model") != dict(identity):
        return None  # of a run that was there before
    return described
