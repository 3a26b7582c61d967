"""A model and its training as the engine, and its planner, are given them."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import nn

from ._blocks import Block
from ._on_disk import is_on_disk
from ._settings import DTYPE_NAMES, Settings
from ._trace import Use


def check_types(model: nn.Module) -> None:
    """TypeError: a parameter of a type that is not served."""
    for name, parameter in model.named_parameters():
        if parameter.dtype not in DTYPE_NAMES:
            raise TypeError(f"{name} is {parameter.dtype}: parameters of float32, bfloat16 and float16 are served: model.to(torch.bfloat16)")


def described_blocks(
    model: nn.Module,
    blocks: Sequence[Block],
    groups: Mapping[int, int],
    settings: Settings,
    values_of: Callable[[nn.Parameter], Optional[torch.Tensor]],
    frozen_have_values: bool = True,
) -> Tuple[List[Any], List[List[Tuple[bool, int]]], List[torch.Tensor]]:
    """The blocks; of each parameter of each whether it trains, and its group; and what must live until they are handed over.

    groups: by the parameter's id. values_of: contiguous, in host memory; None: nobody reads them. frozen_have_values: False: those
    of what is frozen are read elsewhere.
    """
    described, marks, held = [], [], []
    for block in blocks:
        parameters = []
        for name, parameter in block.parameters:
            trains = parameter.requires_grad and id(parameter) in groups and not settings.has_no_optimizer
            values = values_of(parameter) if trains or frozen_have_values else None
            if values is not None:
                held.append(values)
            address, on_disk = (0, False) if values is None else (values.data_ptr(), is_on_disk(parameter))
            kind = DTYPE_NAMES[parameter.dtype]
            parameters.append((block.short_name(name), list(parameter.shape), trains, groups.get(id(parameter), 0), address, kind, on_disk))
        described.append((block.name or type(model).__name__, parameters))
        marks.append([(trains, group) for _, _, trains, group, _, _, _ in parameters])
    return described, marks, held


def described_stages(uses: Sequence[Use]) -> List[Tuple[str, int, float, float, List[int]]]:
    """Backward computes each once more, and takes twice as long for its gradients."""
    return [(use.name or "model", use.block, use.seconds, 3 * use.seconds, list(use.inputs.bytes.values())) for use in uses]


def options_of(settings: Settings, optimizer: Dict[str, Any], trains: bool, resident_bytes: int) -> Dict[str, Any]:
    """What the engine gets beside its settings (python/src/engine_options.cc)."""
    return {
        "state_dirs": settings.state_dirs,
        "optimizer": optimizer,
        "device_computes": settings.device.type != "cpu",
        "computes_elsewhere": settings.device.type != "cpu" and not settings.engine_device,
        "device": settings.engine_device,
        "step_tensor_bytes": settings.step_tensor_bytes,
        "asks_for_host": settings.asks_for_host,
        "trains": trains,
        "resident_bytes": resident_bytes,
    }


def resident_bytes(blocks: Sequence[Block], settings: Settings, trains: bool) -> int:
    """What is in this process's memory beside the engine's as long as a pass is open: values, and gradients."""
    if settings.device.type != "cpu" and not settings.engine_device:
        return 0
    width = 4 if settings.dtype == "fp32" else 2
    of = [parameter for block in blocks if block.resident for _, parameter in block.parameters]
    return width * sum(parameter.numel() * (2 if trains and parameter.requires_grad else 1) for parameter in of)
