"""Groups of ranks: there is that of all, which share the batch. Of every other parallelism a rank is alone."""

from typing import Any, Dict, List

from penstock._deepspeed import absent, world_group
from penstock._engine._ranks import world_size

from ..comm import get_all_ranks_from_group, get_rank

mpu: Any = None
_PARTS = ("get_", "set_", "create_", "init_", "clone_", "ensure_", "zero_param_")


def get_data_parallel_world_size() -> int:
    return world_size(None)


def get_data_parallel_rank() -> int:
    return get_rank()


def get_data_parallel_group() -> Any:
    """Of all ranks. None: torch.distributed has no process group here."""
    return world_group()


def _get_data_parallel_group_ranks() -> List[int]:
    return get_all_ranks_from_group()


def get_model_parallel_world_size() -> int:
    return 1


def get_model_parallel_rank() -> int:
    return 0


def get_tensor_model_parallel_src_rank() -> int:
    """The rank itself."""
    return get_rank()


def _get_broadcast_src_rank() -> int:
    return 0


def _get_expert_parallel_world_size(group_name: str = "") -> int:
    return 1


def _get_expert_parallel_rank(group_name: str = "") -> int:
    return 0


def _get_expert_data_parallel_world_size(group_name: str = "") -> int:
    return world_size(None)


def _get_expert_data_parallel_rank(group_name: str = "") -> int:
    return get_rank()


def _get_expert_parallel_group_dict() -> Dict[str, Any]:
    """None is made."""
    return {}


def _zero_param_parallel_is_initialized() -> bool:
    return False


_get_data_parallel_world_size = _get_sequence_data_parallel_world_size = get_data_parallel_world_size
_get_data_parallel_rank = _get_sequence_data_parallel_rank = get_data_parallel_rank
_get_data_parallel_group = _get_sequence_data_parallel_group = get_data_parallel_group
get_tensor_model_parallel_world_size = _get_model_parallel_world_size = _get_sequence_parallel_world_size = get_model_parallel_world_size
_get_expert_model_parallel_world_size = _get_max_expert_size = get_model_parallel_world_size
get_tensor_model_parallel_rank = _get_sequence_parallel_rank = get_model_parallel_rank
_get_expert_data_parallel_group_dict = _get_expert_parallel_group_dict


def initialize(ep_size: int = 1, mpu: Any = None) -> None:
    """Nothing to do for one group of all."""
    if ep_size != 1 or mpu is not None:
        raise NotImplementedError("groups.initialize: there is no parallelism but that of batches; leave out ep_size and mpu")


# Groups of parallelisms that there are not, and what makes them.
def __getattr__(name: str) -> Any:
    if name.startswith("__") or not name.lstrip("_").startswith(_PARTS):
        raise AttributeError(f"deepspeed.utils.groups.{name} is not served by Penstock: get_data_parallel_group() is that of all ranks, and there is no other")
    return absent(f"deepspeed.utils.groups.{name}", "there is no parallelism but that of batches, whose group is get_data_parallel_group()")
