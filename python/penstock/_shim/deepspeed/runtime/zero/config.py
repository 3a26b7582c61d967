import enum
from typing import Any

from penstock._deepspeed import absent

from .offload_config import DeepSpeedZeroOffloadOptimizerConfig as DeepSpeedZeroOffloadOptimizerConfig
from .offload_config import DeepSpeedZeroOffloadParamConfig as DeepSpeedZeroOffloadParamConfig
from .offload_config import OffloadDeviceEnum as OffloadDeviceEnum

ZERO_OPTIMIZATION = "zero_optimization"
_INSTEAD = "zero_optimization of the configuration is a dictionary: `penstock train --config FILE --check` says what becomes of each key"
_ABSENT = ("DeepSpeedZeroConfig", "DeepSpeedZeroLeafModuleConfig", "ZenFlowConfig", "ZERO_FORMAT", "get_zero_config", "read_zero_config_deprecated")


class ZeroStageEnum(int, enum.Enum):
    """Stages of ZeRO, by DeepSpeed's names."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


def __getattr__(name: str) -> Any:
    if name in _ABSENT:
        return absent(f"deepspeed.runtime.zero.config.{name}", _INSTEAD)
    raise AttributeError(f"deepspeed.runtime.zero.config.{name} is not served by Penstock: {_INSTEAD}")
