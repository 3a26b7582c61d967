"""Values of Python as JSON, such that the same values come back: tuples, keys that are no text, numbers that are not finite."""

from __future__ import annotations

import base64
import math
from collections import Counter
from typing import Any

import torch

_TAG = "__penstock__"


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
    """What encode was given."""
    if isinstance(value, list):
        return [decode(each) for each in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_TAG)
    if kind is None:
        return {key: decode(each) for key, each in value.items()}
    if kind == "float":
        return float(value["value"])
    if kind == "tuple":
        return tuple(decode(each) for each in value["value"])
    if kind == "tensor":
        data = bytearray(base64.b64decode(value["value"]))
        dtype = getattr(torch, value["dtype"])
        flat = torch.frombuffer(data, dtype=torch.uint8).clone().view(dtype) if data else torch.empty(0, dtype=dtype)
        return flat.view(value["shape"])
    pairs = [(decode(key), decode(each)) for key, each in value["value"]]
    return Counter(dict(pairs)) if kind == "counter" else dict(pairs)
