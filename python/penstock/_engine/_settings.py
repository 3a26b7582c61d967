"""What a training is made with: arguments, a DeepSpeed configuration, and what neither says."""

from __future__ import annotations

import importlib.util
import os
from typing import Any, Dict, Mapping, Optional, Union

import torch

from .. import _core
from .._small_files import check_directory, check_output

PathLike = Union[str, "os.PathLike[str]"]

# Types of weights and gradients, by the engine's names; and the other way.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

# What ``initialize`` and ``plan`` take by these names, and Settings resolves.
_KEYWORDS = (
    "state_dir",
    "host_memory",
    "device_memory",
    "dtype",
    "offload",
    "gradient_accumulation_steps",
    "forwards_per_step",
    "gradient_clipping",
    "blocks",
    "logits_chunk_size",
    "chunked_modules",
    "chunk_size",
    "missing_gradients",
    "saved_activations",
    "base_weights",
    "zero_quantized_weights",
    "zero_quantized_gradients",
)


def keywords_of(arguments: Mapping[str, Any]) -> Dict[str, Any]:
    """Of a function's arguments (its ``locals()``), those that Settings takes."""
    return {name: arguments[name] for name in _KEYWORDS}


class Settings(_core.Settings):
    """Resolved (run/resolve.h), and what only Python knows.

    config: what DeepSpeed takes for one: a dictionary, the path of a file, or its text in base64; None: there is none.
    keywords: of ``initialize``, which win over it (``keywords_of``); None is not given.
    needs_place: False: where nothing says where state is, it is on a drive without a directory.
    ValueError: what is wrong, contradictory or missing, by the name that its caller gave it. FileNotFoundError, TypeError: config is none.
    """

    def __init__(self, config: Any, keywords: Dict[str, Any], world: int = 1, needs_place: bool = True) -> None:
        super().__init__(config, _with_names(keywords), world, needs_place)
        self.world = world  # processes that train together
        self.device = torch.device("cpu")  # that computes forward and backward
        self.engine_device = ""  # where the engine has blocks for it, as python/src/engine_options.cc names it; "": in host memory
        self.step_tensor_bytes = 0  # of torch's tensors there in a step, at the most; found out in the first forward
        self.asks_for_host = False  # what blocks keep for backward, as transformers' checkpointing with offload=True does
        self.nothing_trains = False  # no parameter required a gradient when initialize was called
        self.has_no_optimizer = False  # nor is to have one: the engine evaluates, whatever requires a gradient
        self.progress: Optional[bool] = None  # whether a line is drawn; None: where somebody sees it
        self.rank_timeout = 30.0  # seconds without a sign of life of another rank
        if self.wandb is not None and importlib.util.find_spec("wandb") is None:
            raise ValueError(
                "wandb.enabled: wandb is not installed (pip install wandb), or switch on csv_monitor or tensorboard, which need nothing"
            )
        _check_paths(self)

    @property
    def counts_tensors(self) -> bool:
        """Whether the first forward finds out what torch's tensors take in a step, of the engine's memory on a device or beside a budget."""
        return bool(self.engine_device) or (self.device.type == "cpu" and self.host_memory > 0 and self.offload == "nvme" and not self.nothing_trains)


# A class is named by its name, as a configuration does it.
def _with_names(keywords: Dict[str, Any]) -> Dict[str, Any]:
    given = keywords.get("chunked_modules")
    if not isinstance(given, (list, tuple)):
        return keywords
    return {**keywords, "chunked_modules": [each.__name__ if isinstance(each, type) else each for each in given]}


# What is read and written with the first forward, and after it, is looked at here.
def _check_paths(settings: Settings) -> None:
    for directory in settings.state_dirs:
        check_directory(directory, "state_dir")
    for name, directory in settings.monitor_directories.items():
        check_directory(directory, f"{name}.output_path")
    if settings.flops_profiler["enabled"] and settings.flops_profiler.get("output_file"):
        check_output(settings.flops_profiler["output_file"], "flops_profiler.output_file")
