"""A model that only evaluates and is in memory as a whole: what deepspeed.initialize gives without an optimizer and without a drive."""

from __future__ import annotations

import os
import warnings
from typing import Any, Dict, List, Optional, Tuple

import torch
from torch import nn

from .. import _client_state, _core
from . import _checkpoint_names as checkpoint_names
from . import _deepspeed_checkpoint as deepspeeds
from ._device import choose_device
from ._loading import matched, place_of, record_of
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

    def load_checkpoint(
        self, load_dir: Any, tag: Optional[str] = None, load_module_strict: bool = True, *_: Any, trust_client_state: bool = False, **__: Any
    ) -> Tuple[Optional[str], Dict[str, Any]]:
        """The model gets the weights and buffers of a checkpoint of Penstock's, of all options those; there is nothing else that could go on. Else as
        ``Engine.load_checkpoint``.
        """
        from .._fp32 import open_weights

        directory = os.fspath(load_dir)
        checkpoint_names.settle(directory)
        if deepspeeds.is_deepspeeds(directory, tag):
            raise ValueError(f"{directory}: a checkpoint of DeepSpeed's goes on with an optimizer: module.load_state_dict takes weights (deepspeed.utils.zero_to_fp32)")
        path = place_of(directory, tag)
        if path is None:
            warnings.warn(f"{directory} holds no checkpoint (no file `{checkpoint_names.LATEST}`): the model stays as it is", stacklevel=3)
            return None, {}
        client = _client_state.whole(record_of(path).get("client", {}), path, trust_client_state, needs_all=False)
        weights = open_weights(path)
        taken = matched(self.module, weights, path, load_module_strict)
        _core.verify_checkpoint(path, 0, 1)
        with torch.no_grad():
            for name, tensor in taken:
                tensor.copy_(weights.read(weights.tied.get(name, name)))
        return path, client

    def close(self, keep_values: bool = False) -> None:
        self.closed = True

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{name}: deepspeed.initialize was given no optimizer, and the configuration no drive: the model is in memory as it is, and has no "
            "state beside its own state_dict()"
        )
