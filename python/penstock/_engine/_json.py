"""Values of Python as JSON, such that the same values come back: tuples, keys that are no text, numbers that are not finite."""

from __future__ import annotations

import base64
import math
import reprlib
from collections import Counter
from typing import Any

import torch

_TAG = "__penstock__"
_BRIEF = reprlib.Repr()
_BRIEF.maxstring = 120


def encode(value: Any) -> Any:
    """As JSON's types. Raises TypeError naming a type that would not come back."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_TAG: "float", "value": repr(value)}
    if isinstance(value, list):
        return [encode(each) for each in value]
    if isinstance(value, tuple):
        return {_TAG: "tuple", "value": [encode(each) for each in value]}
    if isinstance(value, torch.Tensor):
        plain = value.detach().cpu().contiguous()
        data = bytes(plain.reshape(-1).view(torch.uint8).numpy()) if plain.numel() else b""
        return {
            _TAG: "tensor",
            "dtype": str(plain.dtype).rsplit(".", 1)[-1],
            "shape": list(plain.shape),
            "value": base64.b64encode(data).decode(),
        }
    if isinstance(value, dict):
        if type(value) is dict and _TAG not in value and all(isinstance(key, str) for key in value):
            return {key: encode(each) for key, each in value.items()}
        kind = "counter" if isinstance(value, Counter) else "dict"
        return {_TAG: kind, "value": [[encode(key), encode(each)] for key, each in value.items()]}
    raise TypeError(f"a {type(value).__name__} cannot be kept with a commit: numbers, text, tensors, lists, tuples and dicts can")


def decode(value: Any) -> Any:
    """What encode was given. ValueError: it is nothing that encode returns."""
    try:
        return _decoded(value)
    except (KeyError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
        raise ValueError(f"a value is not as it was written ({type(error).__name__})") from None


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(each) for each in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_TAG)
    if kind is None:
        return {key: _decoded(each) for key, each in value.items()}
    if kind == "float":
        return float(value["value"])
    if kind == "tuple":
        return tuple(_decoded(each) for each in value["value"])
    if kind == "tensor":
        return _tensor_of(value)
    if kind not in ("dict", "counter"):
        raise ValueError(f"a value has the kind {in_brief(kind)}, which is none")
    pairs = [(_decoded(key), _decoded(each)) for key, each in value["value"]]
    return Counter(dict(pairs)) if kind == "counter" else dict(pairs)


def _tensor_of(value: Any) -> torch.Tensor:
    data = bytearray(base64.b64decode(value["value"], validate=True))
    name, shape = value["dtype"], value["shape"]
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype) or not is_shape(shape):
        raise ValueError(f"a tensor has the type {name} and the shape {shape}")
    if math.prod(shape) * torch.empty(0, dtype=dtype).element_size() != len(data):
        raise ValueError(f"a tensor of the type {name} and the shape {shape} has {len(data)} bytes")
    flat = torch.frombuffer(data, dtype=torch.uint8).clone().view(dtype) if data else torch.empty(0, dtype=dtype)
    return flat.view(shape)


def is_number(value: Any) -> bool:
    """Whether it is a whole number from 0 on, as places and sizes are."""
    return type(value) is int and 0 <= value < 1 << 62


def is_shape(value: Any) -> bool:
    """Whether it is a tensor's, as JSON has it."""
    return isinstance(value, list) and len(value) <= 64 and all(map(is_number, value))


def in_brief(value: Any) -> str:
    """A value of a file for an error's line, whatever a stranger has put there."""
    return _BRIEF.repr(value)
