"""A micro-batch's loss as a number, for which nobody waits before it is asked for."""

from __future__ import annotations

from typing import Optional, Union

import torch


class LateLoss:
    """The value that `loss` has now, times `factor`, as ``float()`` of this.

    Of a loss on a GPU the value is copied to pinned memory behind what computes it. So backward is enqueued while forward is
    still computed; ``float()`` waits for that copy alone, not for what was enqueued since.
    """

    def __init__(self, loss: torch.Tensor, factor: float) -> None:
        self._factor = factor
        self._copied: Optional[torch.cuda.Event] = None
        self._value: Union[float, torch.Tensor]
        value = loss.detach()
        if not value.is_cuda:
            self._value = float(value)
            return
        self._value = torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)
        self._copied = torch.cuda.current_stream(value.device).record_event()

    def __float__(self) -> float:
        if self._copied is not None:
            self._copied.synchronize()
        return float(self._value) * self._factor
