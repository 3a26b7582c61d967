"""Nothing to do: every block is computed again in backward, whatever its forward calls."""

import warnings
from typing import Any, Callable, Optional

from penstock._deepspeed import absent

_INSTEAD = "there is no model parallelism, so random numbers need no tracker: torch.manual_seed"
get_cuda_rng_tracker = absent("deepspeed.checkpointing.get_cuda_rng_tracker", _INSTEAD)
model_parallel_cuda_manual_seed = absent("deepspeed.checkpointing.model_parallel_cuda_manual_seed", _INSTEAD)


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: Optional[bool] = None,
    contiguous_checkpointing: Optional[bool] = None,
    num_checkpoints: Optional[int] = None,
    checkpoint_in_cpu: Optional[bool] = None,
    synchronize: Optional[bool] = None,
    profile: Optional[bool] = None,
) -> None:
    """Taken, and of no effect: warns of what would change where inputs are kept."""
    if checkpoint_in_cpu:
        warnings.warn(
            "checkpoint_in_cpu: accepted and ignored: the inputs that are saved, one for each block, stay in the memory of the device that computes",
            stacklevel=2,
        )


def is_configured() -> bool:
    return True


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def reset() -> None:
    """Nothing is kept that a reset would drop."""
