"""deepspeed.accelerator: a GPU where torch has one, else the processor."""

from typing import Optional

import torch


class _Accelerator:
    def __init__(self) -> None:
        self._gpu = torch.cuda.is_available()

    def device_name(self, index: Optional[int] = None) -> str:
        if not self._gpu:
            return "cpu"
        return "cuda" if index is None else f"cuda:{index}"

    def current_device_name(self) -> str:
        return self.device_name(self.current_device())

    def current_device(self) -> int:
        return torch.cuda.current_device() if self._gpu else 0

    def device_count(self) -> int:
        return torch.cuda.device_count() if self._gpu else 1

    def is_available(self) -> bool:
        return True

    # Ranks meet in host memory.
    def communication_backend_name(self) -> str:
        return "gloo"


def get_accelerator() -> _Accelerator:
    return _Accelerator()
