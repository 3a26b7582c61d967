"""A model that only evaluates and is in memory as a whole: what deepspeed.initialize gives without an optimizer and without a drive."""

from __future__ import annotations

import os
import warnings
from typing import Any, List, Optional

import torch
from torch import nn

from ._device import choose_device
from ._ranks import world_size
from ._settings import DTYPES, Settings


class InMemory:
    """Moved to its device, in the configuration's type where that has 16 bits; its forward is its own, and there is nothing besides.

    Has what an Engine has, as far as that needs no optimizer and no state; else AttributeError.
    """

    started = False  # the parameters are the model's
    lr_scheduler = None
    global_steps = skipped_steps = micro_steps = 0

    def __init__(self, model: nn.Module, config: Any, device: Optional[torch.device]) -> None:
        self.world_size = world_size(None)
        self._settings = Settings(config, {}, self.world_size)
        for note in self._settings.notes:
            warnings.warn(note, stacklevel=3)
        self.module = model
        self.device = choose_device(device)
        model.to(self.device)
        if self._settings.dtype != "fp32":
            model.to(DTYPES[self._settings.dtype])
        self.closed = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @property
    def global_rank(self) -> int:
        return int(os.environ.get("RANK", "0"))

    @property
    def micro_batch_size(self) -> Optional[int]:
        return self._settings.micro_batch_size or None

    def gradient_accumulation_steps(self) -> int:
        return self._settings.micro_batches

    def is_gradient_accumulation_boundary(self) -> bool:
        return True

    def get_global_grad_norm(self) -> Optional[float]:
        return None

    def get_lr(self) -> List[float]:
        return []

    def has(self, parameter: nn.Parameter) -> bool:
        return any(parameter is each for each in self.module.parameters())

    def close(self, keep_values: bool = False) -> None:
        self.closed = True

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{name}: deepspeed.initialize was given no optimizer, and the configuration no drive: the model is in memory as it is, and has no "
            "state beside its own state_dict()"
        )
