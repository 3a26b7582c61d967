#!/usr/bin/env python3
"""Makes tests/golden/torch_file.json: files of torch.save of every kind that DeepSpeed and transformers write (in base64), and
what is in them.

    tests/golden/make_torch_file.py        needs torch, any version
"""

import argparse
import base64
import collections
import enum
import io
import json
import os
import sys

import torch

OUT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "torch_file.json")


class Stage(enum.IntEnum):
    """As deepspeed.runtime.zero.config.ZeroStageEnum."""

    WEIGHTS = 3


class Scaler:
    """As deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler: an object with attributes."""

    def __init__(self):
        self.cur_scale = 65536.0
        self.cur_iter = 7
        self.last_overflow = None


def described(value):
    """What TorchFile must find: tensors by their first numbers, all else as JSON."""
    if isinstance(value, torch.nn.Parameter):
        value = value.data
    if isinstance(value, bytes):
        return {"bytes": value.decode("latin-1")}
    if isinstance(value, torch.Tensor) and value.is_neg():
        return {"refused": "negative"}
    if isinstance(value, torch.Tensor):
        flat = value.reshape(-1).to(torch.float64).tolist()
        return {"tensor": str(value.dtype).replace("torch.", ""), "sizes": list(value.shape), "values": flat}
    if isinstance(value, dict):
        return {"dict": [[described(k), described(v)] for k, v in value.items()]}
    if isinstance(value, enum.Enum):
        return {"object": "Stage", "items": [described(int(value))]}
    if isinstance(value, (list, tuple, set)):
        return {"list": [described(v) for v in value]}
    if isinstance(value, (Scaler, argparse.Namespace)):
        return {"object": type(value).__name__, "attributes": {k: described(v) for k, v in vars(value).items()}}
    return value


def cases():
    """name -> object"""
    linear = torch.nn.Linear(3, 2)
    with torch.no_grad():
        for i, p in enumerate(linear.parameters()):
            p.copy_(torch.arange(p.numel(), dtype=torch.float32).reshape(p.shape) / 8 + i)
    optimizer = torch.optim.AdamW(linear.parameters(), lr=0.25)
    linear(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    flat = torch.arange(12, dtype=torch.float32) / 4
    yield "state_dict", collections.OrderedDict(linear.state_dict())
    yield "parameters", {"weight": linear.weight, "tied": linear.weight}
    yield "optimizer", optimizer.state_dict()
    yield "views", {"flat": flat, "part": flat[3:9], "shaped": flat.view(3, 4)[1], "scalar": flat[5], "empty": flat[:0]}
    types = [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
    yield "types", {str(t): torch.arange(5).to(t) for t in types + [torch.bool]}
    yield "signs", {"negative": torch._neg_view(torch.arange(3.0) + 1), "bytes": b"a\xff", "no_bytes": b""}
    yield "values", {
        "none": None, "yes": True, "no": False, "small": 7, "negative": -70000, "large": 1 << 40, "float": 0.1, "text": "Größe",
        "list": [1, [2, 3]], "tuple": (1, 2, 3, 4, 5), "long": list(range(300)), "size": torch.Size([2, 3]), "set": {1}, 3: "key",
    }
    yield "deepspeed", {
        "optimizer_state_dict": {
            "loss_scaler": Scaler(), "dynamic_loss_scale": True, "overflow": False, "zero_stage": Stage.WEIGHTS,
            "partition_count": 2, "fp32_flat_groups": [flat], "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999)}],
        },
        "param_shapes": [collections.OrderedDict([("weight", torch.Size([2, 3])), ("bias", torch.Size([2]))])],
        "args": argparse.Namespace(local_rank=0), "ds_version": "0.19.8",
    }


def main():
    golden = {"torch": torch.__version__, "cases": {}}
    for name, value in cases():
        files = []
        for protocol in (2, 5):
            file = io.BytesIO()
            torch.save(value, file, pickle_protocol=protocol)
            files.append(base64.b64encode(file.getvalue()).decode())
        golden["cases"][name] = {"value": described(value), "files": files}
    with open(OUT, "w") as file:
        json.dump(golden, file, indent=0)
        file.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
