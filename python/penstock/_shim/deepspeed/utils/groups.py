"""Groups of ranks: there is that of all, which share the batch."""

from typing import Any

from penstock._engine._ranks import world_size


def _get_sequence_parallel_world_size() -> int:
    return 1


def _get_data_parallel_world_size() -> int:
    return world_size(None)


def _get_data_parallel_rank() -> int:
    from ..comm import get_rank

    return get_rank()


def _get_data_parallel_group() -> Any:
    """None: that of all, as torch.distributed takes it."""
    return None


def _get_model_parallel_world_size() -> int:
    return 1


def _get_expert_parallel_world_size(group_name: str = "") -> int:
    return 1


def initialize(ep_size: int = 1, mpu: Any = None) -> None:
    """Nothing to do for one group of all."""
    if ep_size != 1 or mpu is not None:
        raise NotImplementedError("groups.initialize: there is no parallelism but that of batches; leave out ep_size and mpu")
