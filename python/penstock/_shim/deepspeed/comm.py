"""torch.distributed under DeepSpeed's name."""

import os
from typing import Any

import torch.distributed as dist

from penstock._deepspeed import absent, init_distributed

mpi_discovery = absent("deepspeed.comm.mpi_discovery", "torchrun starts the processes, and sets what torch.distributed reads")

__all__ = ["barrier", "get_rank", "get_world_size", "init_distributed", "is_initialized"]


def is_initialized() -> bool:
    return bool(dist.is_available() and dist.is_initialized())


def get_rank(group: Any = None) -> int:
    return dist.get_rank(group) if is_initialized() else 0


def get_world_size(group: Any = None) -> int:
    return dist.get_world_size(group) if is_initialized() else 1


def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
    return dist.barrier(group, async_op, device_ids) if is_initialized() else None


def get_local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def log_summary(*_: Any, **__: Any) -> None:
    """Nothing to tell: with comms_logger in the configuration the engine writes its own lines."""


# all_reduce, all_gather and the others, which are torch's own.
def __getattr__(name: str) -> Any:
    if name.startswith("__"):  # torch's __path__ would make its modules ours
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(dist, name)
