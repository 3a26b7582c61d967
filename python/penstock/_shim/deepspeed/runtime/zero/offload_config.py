import enum

from penstock._deepspeed import absent

_INSTEAD = "offload_param and offload_optimizer of the configuration are dictionaries"
DeepSpeedZeroOffloadParamConfig = absent("deepspeed.runtime.zero.offload_config.DeepSpeedZeroOffloadParamConfig", _INSTEAD)
DeepSpeedZeroOffloadOptimizerConfig = absent("deepspeed.runtime.zero.offload_config.DeepSpeedZeroOffloadOptimizerConfig", _INSTEAD)


class OffloadDeviceEnum(str, enum.Enum):
    """Where states may be, by DeepSpeed's names."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, enum.Enum):
    """What DeepSpeed's offload_states takes."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"
