"""Loss scalers as files of DeepSpeed's hold them: torch.load builds them, and what they have can be read. The engine scales losses itself."""

from typing import Any

import torch

from penstock._deepspeed import absent

_INSTEAD = "the engine scales losses by itself, as the configuration's fp16 says"
CreateLossScaler = absent("deepspeed.runtime.fp16.loss_scaler.CreateLossScaler", _INSTEAD)


def _refused(name: str) -> Any:
    def refuse(self: Any, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__}.{name} is not served by Penstock: {_INSTEAD}")

    return refuse


class LossScalerBase:
    """The scale of a moment. ``cur_scale`` and ``loss_scale`` are one number."""

    def __init__(self, cur_scale: float) -> None:
        self.cur_scale = cur_scale
        self.dynamic = False

    @property
    def loss_scale(self) -> float:
        return self.cur_scale

    scale_loss = _refused("scale_loss")
    scale_gradient = _refused("scale_gradient")
    update_scale = _refused("update_scale")
    backward = _refused("backward")


class LossScaler(LossScalerBase):
    """A scale that never changes."""

    def __init__(self, scale: float = 1) -> None:
        super().__init__(scale)


class DynamicLossScaler(LossScalerBase):
    """A scale that changed in DeepSpeed's training, with what it was changed by."""

    def __init__(
        self,
        init_scale: float,
        scale_window: int,
        min_scale: float,
        delayed_shift: int,
        consecutive_hysteresis: bool,
        raise_error_at_min_scale: bool = True,
        dtype: torch.dtype = torch.half,
    ) -> None:
        super().__init__(init_scale)
        self.dynamic = True
        self.cur_iter, self.last_overflow_iter = 0, -1
        self.scale_factor, self.scale_window, self.min_scale = 2.0, scale_window, min_scale
        self.delayed_shift = self.cur_hysteresis = delayed_shift
        self.consecutive_hysteresis = consecutive_hysteresis
        self.raise_error_at_min_scale = raise_error_at_min_scale
        self.dtype = dtype
