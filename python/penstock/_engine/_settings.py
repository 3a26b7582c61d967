"""What a training is made with: arguments, a DeepSpeed configuration, and what neither says."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import os
from typing import Any, Callable, Dict, Mapping, Optional, TypeVar, Union, get_type_hints

import torch

from .. import _core
from .._small_files import check_directory, check_output

PathLike = Union[str, os.PathLike[str]]

# Types of weights and gradients, by the engine's names; and the other way.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_Function = TypeVar("_Function", bound=Callable[..., Any])


def takes(*keywords: type) -> Callable[[_Function], _Function]:
    """A decorator of a function that takes what classes of _keywords.py name, as ``**keywords``: its signature and its docstring have each of them."""

    def with_names(function: _Function) -> _Function:
        signature = inspect.signature(function)
        named = {name: each for name, each in signature.parameters.items() if each.kind is not inspect.Parameter.VAR_KEYWORD}
        for each in keywords:
            for name, kind in get_type_hints(each, localns={"torch": torch, "PathLike": PathLike}).items():
                named[name] = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        function.__signature__ = signature.replace(parameters=list(named.values()))  # type: ignore[attr-defined]
        function.__annotations__ = {**{name: each.annotation for name, each in named.items()}, "return": signature.return_annotation}
        meanings = [str(each.__doc__).split("\n\n", 1)[1].rstrip() for each in keywords]
        function.__doc__ = "\n".join([str(function.__doc__).rstrip(), "", "    Settings:", "", *meanings, ""])
        return function

    return with_names


def check_names(function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """TypeError: the function has no argument of a name that is given; the nearest one is in the message."""
    names = inspect.signature(function).parameters
    for name in sorted(set(given) - set(names)):
        near = difflib.get_close_matches(name, names, 1)
        raise TypeError(f"{function.__name__} has no argument {name!r}" + (f" (did you mean {near[0]!r}?)" if near else ""))


class Settings(_core.Settings):
    """Resolved (run/resolve.h), and what only Python knows.

    config: what DeepSpeed takes for one: a dictionary, the path of a file, or its text in base64; None: there is none.
    keywords: of _keywords.py, which win over it; None is not given.
    needs_place: False: where nothing says where state is, it is on a drive without a directory.
    ValueError: what is wrong, contradictory or missing, by the name that its caller gave it. FileNotFoundError, TypeError: config is none.
    """

    def __init__(self, config: Any, keywords: Mapping[str, Any], world: int = 1, needs_place: bool = True) -> None:
        super().__init__(config, _with_names(keywords), world, needs_place)
        self.world = world  # processes that train together
        self.device = torch.device("cpu")  # that computes forward and backward
        self.engine_device = ""  # where the engine has blocks for it, as python/src/engine_options.cc names it; "": in host memory
        self.step_tensor_bytes = 0  # of torch's tensors there in a step, at the most; found out in the first forward
        self.asks_for_host = False  # what blocks keep for backward, as transformers' checkpointing with offload=True does
        self.nothing_trains = False  # no parameter required a gradient when initialize was called
        self.has_no_optimizer = False  # nor is to have one: the engine evaluates, whatever requires a gradient
        self.progress: Optional[bool] = self.draws_progress  # whether a line is drawn; None: where somebody sees it
        self.rank_timeout: float = 30.0 if self.chosen_rank_timeout is None else self.chosen_rank_timeout  # seconds without a sign of life of another rank
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
def _with_names(keywords: Mapping[str, Any]) -> Dict[str, Any]:
    given = keywords.get("chunked_modules")
    if not isinstance(given, (list, tuple)):
        return dict(keywords)
    return {**keywords, "chunked_modules": [each.__name__ if isinstance(each, type) else each for each in given]}


# What is read and written with the first forward, and after it, is looked at here.
def _check_paths(settings: Settings) -> None:
    for directory in settings.state_dirs:
        check_directory(directory, "state_dir")
    for name, directory in settings.monitor_directories.items():
        check_directory(directory, f"{name}.output_path")
    if settings.flops_profiler["enabled"] and settings.flops_profiler.get("output_file"):
        check_output(settings.flops_profiler["output_file"], "flops_profiler.output_file")
