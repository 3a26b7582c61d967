"""torch.distributed under DeepSpeed's name."""

import functools
import importlib
import os
from typing import Any, Dict, List

import torch.distributed as dist

from penstock._deepspeed import absent, init_distributed, world_group

_ALIKE = {"inference_all_reduce": "all_reduce", "allgather_fn": "all_gather_into_tensor", "reduce_scatter_fn": "reduce_scatter_tensor"}
# Their calls are timed in DeepSpeed, and take words for that.
_TIMED = frozenset(
    "all_gather all_gather_into_tensor all_gather_object all_reduce all_to_all_single allgather_fn broadcast gather inference_all_reduce irecv isend "
    "monitored_barrier recv reduce reduce_scatter reduce_scatter_fn reduce_scatter_tensor scatter send".split()
)
_OF_TIMING = ("prof", "log_name", "debug")
# Arguments of DeepSpeed's that have another name in torch.
_RENAMED: Dict[str, Dict[str, str]] = {
    "all_to_all_single": {"tensor": "input"},
    "reduce_scatter_tensor": {"output_tensor": "output", "input_tensor": "input"},
}
_TORCHS = "torch.distributed's process group is the one there is: init_distributed makes it"
_ABSENT = {
    **dict.fromkeys(("set_backend", "init_deepspeed_backend", "initialize_mesh_device", "enable_symm_mem_for_group", "TorchBackend"), _TORCHS),
    **dict.fromkeys(("all_reduce_coalesced", "all_gather_coalesced"), "torch.distributed.all_reduce, or all_gather, of each tensor"),
    **dict.fromkeys(("has_comm_data", "get_comm_operation_count", "get_logged_comm_ops"), "comms_logger in the configuration tells them at the end"),
    **dict.fromkeys(("patch_aml_env_for_torch_nccl_backend", "patch_aws_sm_env_for_torch_nccl_backend"), "torchrun sets what is read"),
}
mpi_discovery = absent("deepspeed.comm.mpi_discovery", "torchrun starts the processes, and sets what torch.distributed reads")

__path__: List[str] = []  # so that imports of what DeepSpeed has below are answered by _refused.py
__all__ = ["barrier", "get_rank", "get_world_size", "init_distributed", "is_initialized"]


def is_initialized() -> bool:
    return bool(dist.is_available() and dist.is_initialized())


def get_rank(group: Any = None) -> int:
    return dist.get_rank(group) if is_initialized() else 0


def get_world_size(group: Any = None) -> int:
    return dist.get_world_size(group) if is_initialized() else 1


def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None, prof: bool = False, log_name: str = "", debug: Any = None) -> Any:
    """torch.distributed's. prof, log_name and debug change nothing: comms_logger in the configuration tells of the engine's own exchanges."""
    return dist.barrier(group, async_op, device_ids) if is_initialized() else None


def get_local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def log_summary(*_: Any, **__: Any) -> None:
    """Nothing to tell: with comms_logger in the configuration the engine writes its own lines."""


def configure(*_: Any, **__: Any) -> None:
    """Nothing to do: comms_logger in the configuration says what is reported."""


def reset_log() -> None:
    """Nothing to do, as for log_summary."""


def get_world_group() -> Any:
    return world_group()


def get_all_ranks_from_group(group: Any = None) -> List[int]:
    return list(range(get_world_size())) if group is None else list(dist.get_process_group_ranks(group))


def has_all_gather_into_tensor() -> bool:
    return hasattr(dist, "all_gather_into_tensor")


def has_reduce_scatter_tensor() -> bool:
    return hasattr(dist, "reduce_scatter_tensor")


def has_all_reduce_coalesced() -> bool:
    return False


def has_coalescing_manager() -> bool:
    return False


def in_aml() -> bool:
    return False


in_aws_sm = in_dlts = in_aml


def _timed(name: str) -> Any:
    @functools.wraps(getattr(dist, name))
    def call(*args: Any, **kwargs: Any) -> Any:
        renamed = _RENAMED.get(name, {})
        return getattr(dist, name)(*args, **{renamed.get(key, key): value for key, value in kwargs.items() if key not in _OF_TIMING})

    return call


# all_reduce, all_gather and the others, which are torch's own.
def __getattr__(name: str) -> Any:
    if name.startswith("__"):  # torch's __path__ would make its modules ours
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "comm":  # DeepSpeed's own module of the same names
        return importlib.import_module(f"{__name__}.comm")
    if name in _ABSENT:
        return absent(f"deepspeed.comm.{name}", _ABSENT[name])
    try:
        found = getattr(dist, _ALIKE.get(name, name))
    except AttributeError:
        raise AttributeError(f"deepspeed.comm.{name}: torch.distributed has none, and its functions are what Penstock gives by this name") from None
    if name in _TIMED:
        found = globals()[name] = _timed(_ALIKE.get(name, name))
    return found
