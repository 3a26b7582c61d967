"""What a training is made with: arguments, a DeepSpeed configuration, and what neither says."""

from __future__ import annotations

import base64
import errno
import importlib.util
import json
import math
import os
from dataclasses import dataclass, field
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import torch

from .. import _core
from .._buffers import byte_size, truth, whole_number
from .._small_files import check_directory, check_output
from .._tensors import number

PathLike = Union[str, "os.PathLike[str]"]

# Types of weights and gradients, by the engine's names; and the other way.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass
class Settings:
    """Resolved. Sizes in bytes; ``optimizer`` as the engine describes one, None where a torch optimizer will tell."""

    config: str = ""
    dtype: str = "fp32"
    offload: str = "nvme"
    state_dirs: List[str] = field(default_factory=list)
    state_dir_weights: List[float] = field(default_factory=list)  # shares of the bytes; none: by the speed of the drives
    host_memory: int = 0
    micro_batches: int = 1
    blocks: Optional[List[str]] = None  # modules that are fetched as one; None: they are found
    forwards: int = 1  # that a step's losses may come from; micro_batches at least
    managed: bool = True  # gradient accumulation; False: each step() of the caller updates
    clip: float = 0.0
    optimizer: Optional[Dict[str, Any]] = None
    optimizer_states: str = "fp32"
    nothing_trains: bool = False  # no parameter required a gradient when initialize was called
    has_no_optimizer: bool = False  # nor is to have one: the engine evaluates, whatever requires a gradient
    schedule: Optional[str] = None
    train_batch_size: int = 0  # samples of a step, where the configuration says it
    micro_batch_size: int = 0  # samples of a micro-batch, likewise
    wear_budget: float = 0.0  # bytes that the run may write to drives in all; 0: any
    monitors: bool = False  # csv_monitor or tensorboard
    monitor_directories: Dict[str, str] = field(default_factory=dict)  # their output_path, by name
    wandb: Optional[Dict[str, Any]] = None
    flops_profiler: Dict[str, Any] = field(default_factory=lambda: {"enabled": False})
    progress: Optional[bool] = None  # whether a line is drawn; None: where somebody sees it
    device: torch.device = torch.device("cpu")  # that computes forward and backward
    world: int = 1  # processes that train together
    rank_timeout: float = 30.0  # seconds without a sign of life of one of them
    notes: List[str] = field(default_factory=list)


def config_text(config: Any) -> str:
    """A configuration as plain JSON; "" where there is none. config: a dictionary, or what DeepSpeed takes for one: the path of a file,
    with comments and whatever else its reader allows, or such a text in base64. ValueError: it is none of them.
    """
    if config is None:
        return ""
    if isinstance(config, (str, os.PathLike)):
        path = os.fspath(config)
        if not os.path.exists(path):
            try:
                text = base64.urlsafe_b64decode(path).decode("utf-8")
            except ValueError:
                raise FileNotFoundError(errno.ENOENT, "config is no file that is there, nor a configuration in base64", path) from None
            return str(_core.plain_config(text))
        return str(_core.read_config(path))
    if isinstance(config, Mapping):
        # accelerate gives steps_per_print as inf, which JSON has no word for.
        kept = {key: value for key, value in config.items() if key != "steps_per_print" or value != math.inf}
        _check_finite("", kept)
        return json.dumps(kept)
    raise TypeError(f"config is a dictionary, the path of a JSON file or such a text in base64, not {type(config).__name__}")


def _check_finite(place: str, value: Any) -> None:
    if isinstance(value, dict):
        for key, each in value.items():
            _check_finite(f"{place}.{key}" if place else str(key), each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            _check_finite(place, each)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{place} is {value}: a configuration has finite numbers (0 for no gradient_clipping)")


def _dtype_name(dtype: Any) -> str:
    name = DTYPE_NAMES.get(dtype, dtype)
    if name in DTYPES:
        return str(name)
    raise ValueError(f"dtype is {dtype!r}: fp32, bf16 and fp16 are served")


_WANDB_KEYS = ("enabled", "group", "team", "project")


@dataclass
class _Served:
    """What Python serves itself of a configuration."""

    wandb: Optional[Dict[str, Any]] = None  # where it is switched on
    managed: bool = True  # gradient accumulation
    blocks: Optional[List[str]] = None  # of the section "penstock", as is the next
    forwards: Optional[int] = None


def _without_served(text: str) -> Tuple[str, _Served]:
    """The configuration without that, and it."""
    config = json.loads(text or "{}")
    served = _Served()
    managed = config.pop("managed_gradient_accumulation", None)
    if managed not in (None, "auto"):
        served.managed = truth(managed, "managed_gradient_accumulation")
    wandb = config.get("wandb")
    if isinstance(wandb, dict) and truth(wandb.get("enabled", False), "wandb.enabled"):
        unknown = [key for key in wandb if key not in _WANDB_KEYS]
        if unknown:
            raise ValueError(f"wandb.{unknown[0]}: there is no such key; there are {', '.join(_WANDB_KEYS)}")
        if importlib.util.find_spec("wandb") is None:
            raise ValueError(
                "wandb.enabled: wandb is not installed (pip install wandb), or switch on csv_monitor or tensorboard, which need nothing"
            )
        served.wandb = config.pop("wandb")
    own = config.get("penstock")
    if isinstance(own, dict):
        blocks, forwards = own.pop("blocks", None), own.pop("forwards_per_step", None)
        if blocks not in (None, "auto"):
            served.blocks = names_of_blocks(blocks, "penstock.blocks")
        if forwards not in (None, "auto"):
            served.forwards = whole_number(forwards, "penstock.forwards_per_step", 1, 2**20)
    return json.dumps(config) if text else "", served


def names_of_blocks(given: Any, what: str) -> List[str]:
    """TypeError: it is no list of names."""
    if isinstance(given, (str, bytes)) or not all(isinstance(name, str) for name in given):
        raise TypeError(f'{what} is {given!r}: a list of names of modules, ["layers.0", ...] or [""] for the whole model')
    return list(given)


def resolve(
    config: Any,
    state_dir: Union[None, PathLike, Sequence[PathLike]],
    host_memory: Union[None, int, str],
    dtype: Any,
    offload: Optional[str],
    micro_batches: Optional[int],
    forwards: Optional[int],
    clip: Optional[float],
    world: int = 1,
    needs_place: bool = True,
) -> Settings:
    """Arguments win over the configuration. Raises ValueError naming what is missing or contradictory.

    needs_place: False: where nothing says where state is, it is on a drive without a directory.
    """
    text, served = _without_served(config_text(config))
    settings = Settings(
        config=text, wandb=served.wandb, managed=served.managed, world=world, blocks=served.blocks, forwards=served.forwards or 1
    )
    if text:
        parsed = json.loads(_core.parse_config(text, 0, world))
        settings.notes = parsed["notes"] + parsed["filled"]
        settings.dtype = parsed["dtype"]
        settings.micro_batches = parsed["gradient_accumulation_steps"]
        settings.clip = parsed["clip"] or 0.0
        settings.optimizer = parsed["optimizer"]
        settings.optimizer_states = parsed["optimizer_states"] or "fp32"
        settings.host_memory = parsed["host_memory"] or 0
        settings.state_dirs, settings.state_dir_weights = parsed["state_dirs"], parsed["state_dir_weights"]
        settings.offload = parsed["offload"] or ("nvme" if parsed["state_dirs"] or state_dir else "none")
        settings.train_batch_size = parsed["train_batch_size"] or 0
        settings.micro_batch_size = parsed["micro_batch_size"] or 0
        if parsed["elastic"] and micro_batches is not None:
            raise ValueError("gradient_accumulation_steps: elasticity chooses it; leave it out, or set elasticity.enabled to false")
        settings.wear_budget = parsed["wear_budget_bytes"]
        settings.monitors = parsed["monitors"]
        settings.monitor_directories = parsed["monitor_directories"]
        settings.flops_profiler = parsed["flops_profiler"]
        settings.schedule = None if parsed["schedule"] is None else json.dumps(parsed["schedule"])
    if dtype is not None:
        settings.dtype = _dtype_name(dtype)
    if offload is not None:
        if offload not in ("nvme", "cpu", "none"):
            raise ValueError(f"offload is {offload!r}: nvme, cpu or none")
        settings.offload = offload
    if state_dir is not None:
        given = [state_dir] if isinstance(state_dir, (str, os.PathLike)) else list(state_dir)
        settings.state_dirs, settings.state_dir_weights = _core.state_directories([os.fspath(directory) for directory in given])
        if offload is None:
            settings.offload = "nvme"
    if host_memory is not None:
        settings.host_memory = byte_size(host_memory, "host_memory", 1)
    if micro_batches is not None:
        settings.micro_batches = whole_number(micro_batches, "gradient_accumulation_steps", 1, 2**20)
    if forwards is not None:
        settings.forwards = whole_number(forwards, "forwards_per_step", 1, 2**20)
    settings.forwards = max(settings.forwards, settings.micro_batches)
    if clip is not None:
        settings.clip = number(clip, "gradient_clipping")
        if math.isinf(settings.clip) and settings.clip > 0:
            settings.clip = 0.0  # as torch's clip_grad_norm_, which only measures then; the engine does so always
    if not settings.clip >= 0.0:
        raise ValueError(f"gradient_clipping is {settings.clip}: a bound of the norm, or 0 for none")
    if settings.offload == "nvme" and not settings.state_dirs and needs_place:
        raise ValueError(
            "no directory for the states: give state_dir=, or offload_optimizer.nvme_path in the configuration (or offload='none' "
            "to keep all of it in memory)"
        )
    if settings.offload != "nvme":
        settings.state_dirs = []
    _check_paths(settings)
    return settings


# What is read and written with the first forward, and after it, is looked at here.
def _check_paths(settings: Settings) -> None:
    for directory in settings.state_dirs:
        check_directory(directory, "state_dir")
    for name, directory in settings.monitor_directories.items():
        check_directory(directory, f"{name}.output_path")
    if settings.flops_profiler["enabled"] and settings.flops_profiler.get("output_file"):
        check_output(settings.flops_profiler["output_file"], "flops_profiler.output_file")
