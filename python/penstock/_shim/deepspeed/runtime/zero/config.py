import enum

from penstock._deepspeed import absent

DeepSpeedZeroConfig = absent("deepspeed.runtime.zero.config.DeepSpeedZeroConfig", "zero_optimization of the configuration is a dictionary")


class ZeroStageEnum(int, enum.Enum):
    """Stages of ZeRO, by DeepSpeed's names."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3
