"""deepspeed.accelerator: the processor."""

from typing import Optional


class _Processor:
    def device_name(self, index: Optional[int] = None) -> str:
        return "cpu"

    current_device_name = device_name

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def is_available(self) -> bool:
        return True

    def communication_backend_name(self) -> str:
        return "gloo"


def get_accelerator() -> _Processor:
    return _Processor()
