"""When a loss is read: on the processor at once, and of a GPU's nobody waits before its number is wanted."""

from __future__ import annotations

import types
from typing import Any, List

import pytest
import torch

from penstock._engine import _late_loss


def test_a_loss_in_host_memory_is_the_one_that_it_was() -> None:
    loss = torch.tensor(3.0)
    late = _late_loss.LateLoss(loss, 0.5)
    loss.add_(1)
    assert float(late) == 1.5


class _Pinned:
    """Pinned memory whose content comes when its event has."""

    def __init__(self, told: List[str]) -> None:
        self._told = told

    def copy_(self, value: Any, non_blocking: bool) -> _Pinned:
        self._told.append(f"copied, {'enqueued' if non_blocking else 'waited for'}")
        return self

    def __float__(self) -> float:
        self._told.append("read")
        return 7.0


def test_nobody_waits_for_a_loss_on_a_gpu_before_its_number_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    told: List[str] = []
    event = types.SimpleNamespace(synchronize=lambda: told.append("waited"))

    def record_event() -> Any:
        told.append("event")
        return event

    def empty(shape: Any, dtype: torch.dtype, pin_memory: bool) -> _Pinned:
        assert (tuple(shape), dtype, pin_memory) == ((), torch.float32, True)
        return _Pinned(told)

    class OnCuda:
        is_cuda = True
        shape, dtype, device = torch.Size(()), torch.float32, torch.device("cuda", 0)

        def detach(self) -> OnCuda:
            return self

        def __float__(self) -> float:
            raise AssertionError("waits for the device")

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: types.SimpleNamespace(record_event=record_event))
    late = _late_loss.LateLoss(OnCuda(), 2.0)  # type: ignore[arg-type]
    assert told == ["copied, enqueued", "event"]
    assert float(late) == 14.0
    assert told == ["copied, enqueued", "event", "waited", "read"]
