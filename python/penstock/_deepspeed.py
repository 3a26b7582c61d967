"""DeepSpeed's calls as Hugging Face's libraries make them: the engine in the shape that they expect.

Here and not in the shim, so that it has one place whatever name it is imported by.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import functools
import itertools
import json
import logging
import os
import shutil
import socket
import stat
import sys
import time
import warnings
import weakref
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Union, cast

import torch
from torch import nn

from . import _client_state, _core
from ._buffers import truth
from ._data_loader import DeepSpeedDataLoader, sampler_of
from ._deepspeed_answers import ATTRIBUTES, answer_of, answers, found_in, instead_of
from ._engine._engine import Engine
from ._engine._hidden import ZeroParamStatus
from ._engine._initialize import NO_OPTIMIZER
from ._engine._initialize import initialize as _initialize
from ._engine._in_memory import InMemory
from ._engine._on_disk import init_on_disk
from ._engine._optimizer import ConfigScheduler
from ._engine._ranks import make_group
from ._engine._settings import PathLike, Settings
from ._engine._trace import keep_resident
from ._files import torch_save, whole_file
from ._fp32 import place_script
from ._small_files import make_directory
from ._throughput import ThroughputTimer

logger = logging.getLogger("penstock")

_SCRATCH = "penstock-swap-"
_numbers = itertools.count()  # of this process's directories: an engine makes its own with its first forward
# By the parameter's id: a tensor is no key, since == compares its elements. Engines go with their models.
_owners: "weakref.WeakValueDictionary[int, Engine]" = weakref.WeakValueDictionary()
_engines: "weakref.WeakSet[DeepSpeedEngine]" = weakref.WeakSet()


def init_distributed(
    dist_backend: Optional[str] = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: Any = None,
    init_method: Optional[str] = None,
    dist_init_required: Optional[bool] = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """torch.distributed's process group, as RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say, where there is none yet.

    timeout: of its operations, a datetime.timedelta. dist_init_required: False makes none. dist_backend changes nothing, the group is
    Gloo's; nor do auto_mpi_discovery and distributed_port, which are for processes that mpirun starts, config and verbose. init_method,
    rank and world_size are refused.
    """
    if init_method is not None or rank != -1 or world_size != -1:
        raise NotImplementedError(
            "init_method, rank and world_size are not served: torchrun sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or call "
            "torch.distributed.init_process_group yourself before"
        )
    if dist_init_required is None or truth(dist_init_required, "dist_init_required"):
        make_group(timeout)


def world_group() -> Any:
    """torch.distributed's process group of all ranks. None: there is none."""
    dist = torch.distributed
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


# Of the engine's: what to do instead.
_REFUSED = {
    "set_train_batch_size": "give initialize gradient_accumulation_steps in the configuration, and make another engine for another",
    "set_train_micro_batch_size": "a batch has as many rows as it is called with",
    "set_gradient_accumulation_steps": "give initialize gradient_accumulation_steps in the configuration, and make another engine for another",
    "scale": "engine.backward(loss) scales losses by itself, as the configuration's fp16 says",
    "allreduce_gradients": "engine.backward(loss) and engine.step() exchange gradients by themselves",
    "eval_batch": "there are no pipelines: engine.eval(), and a call of the engine under torch.no_grad()",
    "load_module_state_dict": "module.load_state_dict before the first forward, or engine.load_checkpoint(load_module_only=True)",
}


def _refuse(why: str, *_: Any, **__: Any) -> Any:
    raise NotImplementedError(why)


class _Unhooked(nn.Module):
    def ds_external_parameters(self) -> Iterator[Any]:
        return iter(())


class _Offload:
    """What TRL takes hooks off before it generates, and puts them on after it: blocks are fetched by the engine, without any."""

    def __init__(self) -> None:
        self.module = _Unhooked()
        self.forward_hooks: List[Any] = []
        self.backward_hooks: List[Any] = []

    def _register_deepspeed_module(self, module: nn.Module) -> None:
        """Nothing to do; DeepSpeed's name for it since 0.16.4."""

    def _register_hooks_recursively(self, module: nn.Module) -> None:
        """Nothing to do; DeepSpeed's name for it before."""


class DeepSpeedEngine(nn.Module):
    """DeepSpeed's engine over Penstock's: ``engine`` is the latter, ``module`` the model."""

    def __init__(self, engine: Engine, config: Dict[str, Any], scratch: Sequence[str], has_optimizer: bool = True) -> None:
        super().__init__()
        self.module = engine.module
        object.__setattr__(self, "engine", engine)
        self._config = config
        #: None where there is none, which is an engine that evaluates only.
        self.optimizer: Any = engine.optimizer if has_optimizer else None
        if self.optimizer is not None:
            self.optimizer.overflow = False
            self.optimizer.parameter_offload = _Offload()
            self.optimizer.cur_scale = self._first_scale()
        self.collate_fn: Any = None
        self.training_dataloader: Optional[DeepSpeedDataLoader] = None
        self._applied = False  # the last step
        self._had_backward = False  # since the last step, of this engine
        self._told_of_frozen = False
        engine.zero_grad_of_module = False  # DeepSpeed's gradients are apart from the module's
        #: Samples a second, from the first training forward to the end of its ``step()``.
        self.tput_timer = ThroughputTimer(batch_size=self._batch_size())
        self._remove_scratch = weakref.finalize(self, _remove, list(scratch), os.getpid())
        for number, parameter in enumerate(self.module.parameters()):
            _owners[id(parameter)] = engine
            _describe_parameter(parameter, number)
        _engines.add(self)

    @property
    def device(self) -> torch.device:
        return self.engine.device

    @property
    def config(self) -> Dict[str, Any]:
        return self._config

    @property
    def lr_scheduler(self) -> Any:
        """``step()`` makes its steps, and commits keep its state. None: there is none, or the caller makes them, as Lightning does."""
        return self.engine.lr_scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, scheduler: Any) -> None:
        self.engine.lr_scheduler = scheduler

    def _batch_size(self) -> Optional[int]:
        size = self.engine.micro_batch_size
        return None if size is None else size * self.engine.gradient_accumulation_steps() * self.engine.world_size

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.training and torch.is_grad_enabled():
            self.tput_timer.start()
        return self.engine(*args, **kwargs)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        self._check_optimizer("backward")
        self._had_backward = True
        return self.engine.backward(loss, retain_graph, scale_wrt_gas)

    def step(self, lr_kwargs: Optional[Mapping[str, Any]] = None) -> None:
        self._check_optimizer("step")
        if lr_kwargs:
            raise NotImplementedError("lr_kwargs are not served: give initialize no lr_scheduler, and make its steps yourself after step()")
        before = self.global_steps
        self.engine.step()
        self._had_backward = self.engine.micro_steps > 0
        self.optimizer.overflow = bool(self.engine.last_step.get("skipped"))
        self.optimizer.cur_scale = self.engine.last_step.get("loss_scale", self.optimizer.cur_scale)
        self._applied = self.global_steps != before and not self.optimizer.overflow
        self.tput_timer.stop(global_step=self.global_steps != before)

    def _check_optimizer(self, call: str) -> None:
        if self.optimizer is None:
            raise RuntimeError(
                f"must provide optimizer during init in order to use {call}: deepspeed.initialize was given none, nor does the configuration name one"
            )

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        self.engine.set_gradient_accumulation_boundary(is_boundary)

    def is_gradient_accumulation_boundary(self) -> bool:
        return self.engine.is_gradient_accumulation_boundary()

    def gradient_accumulation_steps(self) -> int:
        return self.engine.gradient_accumulation_steps()

    def train_micro_batch_size_per_gpu(self) -> int:
        """As the configuration says it, or its elasticity has chosen."""
        size = self.engine.micro_batch_size
        if size is None:
            raise ValueError("the configuration has no train_micro_batch_size_per_gpu")
        return size

    def train_batch_size(self) -> int:
        """Of all ranks, in a step."""
        return self.train_micro_batch_size_per_gpu() * self.gradient_accumulation_steps() * self.engine.world_size

    def _load(self, training_data: Any, collate_fn: Any) -> Optional[DeepSpeedDataLoader]:
        self.collate_fn = collate_fn
        self.training_dataloader = None if training_data is None else self.deepspeed_io(training_data)
        return self.training_dataloader

    def dataloader_drop_last(self) -> bool:
        return truth(self._config.get("dataloader_drop_last", False), "dataloader_drop_last")

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: Optional[int] = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Any = None,
        num_local_io_workers: Optional[int] = None,
    ) -> DeepSpeedDataLoader:
        """A loader of micro-batches of the dataset, of which each rank has its part: shuffled, but for the routes "eval" and "predict"."""
        if data_sampler is None and route in ("eval", "predict"):
            data_sampler = sampler_of(dataset, shuffle=False)
        return DeepSpeedDataLoader(
            dataset, batch_size or self.train_micro_batch_size_per_gpu(), pin_memory, self.local_rank, None, collate_fn or self.collate_fn,
            num_local_io_workers, data_sampler, dataloader_drop_last=self.dataloader_drop_last(),
        )  # fmt: skip

    @property
    def micro_steps(self) -> int:
        return self.engine.micro_steps

    def no_sync(self) -> Any:
        return contextlib.nullcontext()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As DeepSpeed's, it leaves what ``backward`` of this engine has accumulated since the last step; set_to_none: nothing to do.

        What another engine's backward alone has left here (a discriminator's gradients of the generator's step) counts for nothing.
        """
        if self.optimizer is not None and not self._had_backward:
            self.engine.zero_grad()

    def get_global_grad_norm(self) -> Optional[float]:
        return self.engine.get_global_grad_norm()

    def get_lr(self) -> List[float]:
        return self.engine.get_lr()

    @property
    def global_steps(self) -> int:
        return self.engine.global_steps

    @property
    def skipped_steps(self) -> int:
        return self.engine.skipped_steps

    @property
    def world_size(self) -> int:
        return self.engine.world_size

    @property
    def dp_world_size(self) -> int:
        return self.engine.world_size

    @property
    def global_rank(self) -> int:
        return self.engine.global_rank

    @property
    def local_rank(self) -> int:
        return int(os.environ.get("LOCAL_RANK", "0"))

    def zero_optimization_stage(self) -> int:
        return 3

    def zero_optimization(self) -> bool:
        return True

    def fp16_enabled(self) -> bool:
        return self.engine._settings.dtype == "fp16"

    def bfloat16_enabled(self) -> bool:
        return self.engine._settings.dtype == "bf16"

    def loss_scale(self) -> float:
        """As the configuration says it; 0 is one that changes, which is the optimizer's cur_scale."""
        return float((self._config.get("fp16") or {}).get("loss_scale", 0))

    def _first_scale(self) -> float:
        if not self.fp16_enabled():
            return 1.0
        return self.loss_scale() or 2.0 ** float(self._config["fp16"].get("initial_scale_power", 16))

    def was_step_applied(self) -> bool:
        """Whether the last step() updated: False for one that only accumulated, or whose gradients were not finite."""
        return self._applied

    def get_batch_info(self) -> Tuple[int, int, int]:
        """(of all ranks in a step, of one micro-batch, micro-batches)."""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    def get_type(self) -> List[Any]:
        return [group.get("type") for group in self.optimizer.param_groups]

    def get_data_parallel_rank(self) -> int:
        return self.global_rank

    def optimizer_name(self) -> Optional[str]:
        """As the configuration says it, or the class of the optimizer that was given."""
        given = found_in(self._config, "optimizer.type", None)
        if given is not None or self.optimizer is None:
            return given
        return type(self.engine._given.torch_optimizer).__name__

    def zero_nvme_offload_optimizer(self) -> bool:
        return self.engine._settings.offload == "nvme"

    def dynamic_loss_scale(self) -> bool:
        return self.loss_scale() == 0

    def initial_dynamic_scale(self) -> float:
        return 2.0 ** float(found_in(self._config, "fp16.initial_scale_power", 16))

    def dynamic_loss_scale_args(self) -> Optional[Dict[str, Any]]:
        """None: the configuration leaves all of them to their defaults."""
        defaults = {"initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1}
        if not any(name in (self._config.get("fp16") or {}) for name in defaults):
            return None
        given = {name: found_in(self._config, f"fp16.{name}", default) for name, default in defaults.items()}
        return {
            "init_scale": self.initial_dynamic_scale(),
            "scale_window": given["loss_scale_window"],
            "delayed_shift": given["hysteresis"],
            "consecutive_hysteresis": found_in(self._config, "fp16.consecutive_hysteresis", False),
            "min_scale": given["min_loss_scale"],
        }

    def get_mom(self) -> List[Any]:
        return [group.get("betas", group.get("momentum", 0.0)) for group in self.optimizer.param_groups]

    def set_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    @property
    def global_samples(self) -> int:
        return self.global_steps * self.train_batch_size()

    def empty_partition_cache(self) -> None:
        """Nothing to do: between steps no block is in memory but those that the plan keeps."""

    def offload_states(self, include: Any = None, device: Any = None, pin_memory: bool = True, non_blocking: bool = False) -> None:
        """Nothing to do: states are on the drive, or in the host memory of the plan, whatever include, device, pin_memory and non_blocking say."""

    def reload_states(self, non_blocking: bool = False) -> None:
        """Nothing to do, non_blocking or not, as for offload_states."""

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> Mapping[str, torch.Tensor]:
        return self._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)

    @property
    def data_parallel_group(self) -> Any:
        """Of all ranks, which share the batch. None: torch.distributed has no process group here."""
        return world_group()

    def coalesce_grad_reduction(self) -> Any:
        return contextlib.nullcontext()

    def save_16bit_model(self, save_dir: PathLike, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False) -> bool:
        """The model's weights as torch.save writes them, by the first rank. All ranks call it. OSError: it cannot be written."""
        state = self._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)
        if self.global_rank == 0:
            _core.check_outside_stores(os.fspath(save_dir))
            make_directory(save_dir, "save_dir")
            path = os.path.join(save_dir, save_filename)
            with whole_file(path) as file:
                torch_save(dict(state), file, path)
        return True

    save_fp16_model = save_16bit_model

    # Of the model, as generate; or refused in words.
    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in _REFUSED:
                return functools.partial(_refuse, f"{name} is not served: {_REFUSED[name]}")
            if answers(name):
                return functools.partial(answer_of, self._config, name)
            if name in ATTRIBUTES:
                return ATTRIBUTES[name]
            module = self.__dict__.get("_modules", {}).get("module")
            instead = None if hasattr(module, name) else instead_of(name)
            if instead is not None:
                raise AttributeError(f"{name} of DeepSpeed's engine is not served by Penstock: {instead}") from None
            if module is None or name.startswith("__") or not hasattr(module, name):
                raise AttributeError(
                    f"neither the engine nor its model, a {type(module).__name__}, has {name!r}: Penstock answers to DeepSpeed's name here"
                ) from None
            return getattr(module, name)

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        return True

    def compile(self, backend: Any = None, compile_kwargs: Any = None, schedule: Any = None, compiled_autograd_enabled: bool = False) -> None:
        raise NotImplementedError("torch.compile over the engine is not served: compile modules of the model by themselves")

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> Mapping[str, torch.Tensor]:
        state = self.module.state_dict()
        if truth(exclude_frozen_parameters, "exclude_frozen_parameters"):
            frozen = {name for name, parameter in self.module.named_parameters() if not parameter.requires_grad}
            state = {name: value for name, value in state.items() if name not in frozen}
        return state  # type: ignore[no-any-return]

    # exclude_frozen_parameters is no name of the signature: Trainer asks that, and would say True for every adapter.
    def save_checkpoint(
        self,
        save_dir: PathLike,
        tag: Optional[str] = None,
        client_state: Optional[Mapping[str, Any]] = None,
        save_latest: bool = True,
        **options: Any,
    ) -> bool:
        """DeepSpeed's, of Penstock's format. exclude_frozen_parameters=True gives one warning: a checkpoint is the whole state.

        client_state: anything that can be pickled. What JSON cannot hold, or too much for a commit, is in a file of torch.save within the
        checkpoint. Callers look at the directory right after, or remove older ones: it is whole when this returns, as with DeepSpeed. With
        ``"checkpoint": {"writer": {"decoupled": true}}`` it is copied beside the steps that follow; ``wait_for_checkpoint`` waits. One of the
        same run, step and tag is replaced; another run's, one with another tag, or what is no checkpoint keeps its place ``step-N``, and this
        one is ``step-N.2`` under its tag.
        """
        if truth(options.pop("exclude_frozen_parameters", False), "exclude_frozen_parameters") and not self._told_of_frozen:
            self._told_of_frozen = True
            warnings.warn(
                "exclude_frozen_parameters: a checkpoint is the whole state, which is gone on with, frozen weights too; without them weights are written "
                "by zero_to_fp32 (exclude_frozen_parameters=True) and by the model's save_pretrained",
                stacklevel=2,
            )
        if options:
            raise TypeError(f"save_checkpoint() got an unexpected keyword argument {next(iter(options))!r}")
        save = self.engine.save_checkpoint
        given, apart = _client_state.split(client_state or {}, self.engine._record.room() if self.engine.started else sys.maxsize)
        _client_state.tidy(os.fspath(save_dir))
        try:
            if apart:
                file = _client_state.write(os.fspath(save_dir), self.global_steps, self.global_rank, apart)
                given[_client_state.KEY] = [os.path.basename(file.path), list(apart)]
                self.engine._copy.take_in(file)
            # One of this run, step and tag that another process has left is replaced, as DeepSpeed does it: Trainer goes over steps again.
            waits = not _is_decoupled(self._config)
            save(
                save_dir, tag or f"global_step{self.global_steps}", given, save_latest=save_latest, replaces_others=True, wait=waits,
            )  # fmt: skip
        finally:
            self.engine._copy.take_in(None)  # one that was begun has it
            self.engine._record.forget_file()
        if self.global_rank == 0:
            place_script(save_dir)
        return True

    def wait_for_checkpoint(self) -> None:
        self.engine.wait_for_checkpoint()

    @functools.wraps(Engine.load_checkpoint)
    def load_checkpoint(self, load_dir: PathLike, *args: Any, **options: Any) -> Tuple[Optional[str], Dict[str, Any]]:
        return self.engine.load_checkpoint(load_dir, *args, **options)

    def export_checkpoint(self, save_dir: PathLike, tag: Optional[str] = None, **options: Any) -> str:
        return self.engine.export_checkpoint(save_dir, tag, **options)

    def destroy(self) -> None:
        """The engine ends. The parameters have values again, in files of its drive or in memory: a model outlives its engines."""
        self.engine.close(keep_values=True)
        self._remove_scratch()
        _let_trainer_wrap_again()


# Trainer takes the engine of an evaluate(), or of a train() before, for the wrapper of its model, also once accelerate has destroyed it.
def _let_trainer_wrap_again() -> None:
    trainer = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    own = getattr(trainer, "_wrap_model", None)
    if own is None or own.__module__ == __name__:
        return

    def _wrap_model(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(model, DeepSpeedEngine) and model.engine.closed:
            model = self.model_wrapped = model.module
        return own(self, model, *args, **kwargs)

    trainer._wrap_model = _wrap_model  # type: ignore[union-attr]


class _FlatValue:
    """ds_tensor of a parameter that has its values, and an engine, or had one: they may be others each time that it is looked at."""

    def __get__(self, parameter: Optional[nn.Parameter], _: Any) -> torch.Tensor:
        if parameter is None or "ds_id" not in parameter.__dict__:
            raise AttributeError("ds_tensor: deepspeed.initialize has made no engine with this parameter")
        return parameter.detach().reshape(-1)


class _PartOfRank:
    """partition_numel() of such a parameter: elements of which a rank keeps the states, as Lightning's summary tells them."""

    def __get__(self, parameter: Optional[nn.Parameter], _: Any) -> Callable[[], int]:
        if parameter is None or "ds_id" not in parameter.__dict__:
            raise AttributeError("partition_numel: deepspeed.initialize has made no engine with this parameter")
        return functools.partial(_part_of_rank, parameter)


def _part_of_rank(parameter: nn.Parameter) -> int:
    return -(-parameter.numel() // int(os.environ.get("WORLD_SIZE", "1")))


# DeepSpeed's names of a parameter that is not whole in memory; Hidden (_engine/_weights.py) has what changes with that.
def _describe_parameter(parameter: nn.Parameter, number: int) -> None:
    nn.Parameter.ds_tensor = _FlatValue()  # type: ignore[attr-defined]
    nn.Parameter.partition_numel = _PartOfRank()  # type: ignore[attr-defined]
    parameter.ds_id = number  # type: ignore[attr-defined]
    parameter.ds_shape = parameter.shape  # type: ignore[attr-defined]
    parameter.ds_numel = parameter.numel()  # type: ignore[attr-defined]
    parameter.__dict__["ds_status"] = ZeroParamStatus.AVAILABLE  # Hidden's own comes first


def _remove(directories: Sequence[str], process: int) -> None:
    if os.getpid() == process:
        for directory in directories:
            shutil.rmtree(directory, ignore_errors=True)


# DeepSpeed's nvme_path is a place for many runs: each has a directory of its own there, which goes with its process. What a killed
# one has left is removed by the next one of its host.
def _scratch_in(parent: str) -> str:
    make_directory(parent, "nvme_path")
    host = socket.gethostname()
    for name in os.listdir(parent):
        process = name[len(_SCRATCH) :].split("-")[0]
        if name.startswith(_SCRATCH) and name.endswith(f"@{host}") and process.isdigit() and not os.path.exists(f"/proc/{process}"):
            if not _in_use(os.path.join(parent, name)):
                shutil.rmtree(os.path.join(parent, name), ignore_errors=True)
    return os.path.join(parent, f"{_SCRATCH}{os.getpid()}-{next(_numbers)}@{host}")


_YOUNG = 3600.0  # seconds in which a directory without a store may be one that is being made


# By a process that is not seen from here: of another container. What cannot be looked at counts as in use.
def _in_use(directory: str) -> bool:
    try:
        parts = [directory, *(os.path.join(directory, name) for name in os.listdir(directory) if name.startswith("rank-"))]
        locks = [_lock_of(os.path.join(part, "penstock.store")) for part in parts]
        if True in locks:
            return True
        return all(lock is None for lock in locks) and time.time() - os.stat(directory).st_mtime < _YOUNG
    except OSError:
        return True


# Whether a process holds a store's lock; None: there is no such file. OSError: it cannot be looked at.
def _lock_of(store: str) -> Optional[bool]:
    try:
        descriptor = os.open(store, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return True  # nobody's store: not ours to remove
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


# As DeepSpeed reads it: what is no such section is refused by what reads the whole configuration.
def _is_decoupled(config: Mapping[str, Any]) -> bool:
    for key in ("checkpoint", "writer"):
        config = config.get(key) or {}
        if not isinstance(config, Mapping):
            return False
    return config.get("decoupled") is True


def _nvme_path(part: Any, key: str) -> Optional[str]:
    """Of zero_optimization's `key`, where it is on a drive. ValueError: accelerate got no path, and says "none"."""
    if not isinstance(part, dict) or part.get("device") != "nvme" or not part.get("nvme_path"):
        return None
    path = str(part["nvme_path"])
    if path == "none":
        raise ValueError(
            f"zero_optimization.{key}.nvme_path is missing: give DeepSpeedPlugin({key}_nvme_path=...), or set "
            f"ACCELERATE_DEEPSPEED_{key.upper()}_NVME_PATH"
        )
    return path


def _with_scratch(config: Dict[str, Any], scratch: List[str]) -> Dict[str, Any]:
    """The configuration with nvme_path in directories of this process."""
    changed = copy.deepcopy(config)
    changed.pop("dataloader_drop_last", None)  # deepspeed_io's
    made: Dict[str, str] = {}
    for key in ("offload_param", "offload_optimizer"):
        part = (changed.get("zero_optimization") or {}).get(key)
        place = _nvme_path(part, key)
        if place is not None and part is not None:
            path = os.path.abspath(place)
            if path not in made:
                made[path] = _scratch_in(path)
                scratch.append(made[path])
            part["nvme_path"] = made[path]
    return changed


# Where Trainer and accelerate put their batches; None: they are not here, or have not decided.
def _accelerates_device() -> Optional[torch.device]:
    state = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    device = getattr(state, "_shared_state", {}).get("device")
    return device if isinstance(device, torch.device) else None


def initialize(
    args: Any = None,
    model: Optional[nn.Module] = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    distributed_port: int = 29500,
    lr_scheduler: Any = None,
    mpu: Any = None,
    dist_init_required: Optional[bool] = None,
    collate_fn: Any = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> Tuple[DeepSpeedEngine, Any, Optional[DeepSpeedDataLoader], Any]:
    """deepspeed.initialize. nvme_path is scratch, as in DeepSpeed: what lasts is what save_checkpoint writes.

    Without an optimizer, here and in the configuration, the engine evaluates only, as DeepSpeed's: there are no states. A model that has
    an engine gets another one: the first one ends, and its values go on. training_data: a dataset; the third that is returned is its loader.
    A parameter without a gradient is updated as by zeros, as with DeepSpeed; Trainer and accelerate, whose losses are those without DeepSpeed,
    leave it as it is, and "penstock": {"missing_gradients": ...} decides for all.
    args: its deepspeed_config is the configuration where none is given. distributed_port and dist_init_required change nothing: ranks are
    the processes of torch.distributed's group. mpu and mesh_param are refused.
    """
    given = config if config is not None else config_params
    if given is None and args is not None:
        given = getattr(args, "deepspeed_config", None)
    described = _core.config_of(given)
    if mpu is not None or mesh_param is not None:
        raise NotImplementedError("mpu and mesh_param are not served: there is no parallelism but that of batches")
    if model is None:
        raise TypeError("initialize needs model=")
    for earlier in list(_engines):
        if not earlier.engine.closed and any(earlier.engine.has(parameter) for parameter in model.parameters()):
            earlier.destroy()
    has_optimizer = optimizer is not None or bool(described.get("optimizer"))
    if lr_scheduler is not None and not has_optimizer:
        warnings.warn("lr_scheduler: accepted and ignored: there is no optimizer, here or in the configuration, and the engine evaluates only", stacklevel=2)
    own = described.get("penstock")
    own = own if isinstance(own, dict) else {}  # the settings say what is wrong with another
    accelerates = _accelerates_device()
    device = own.get("device") or accelerates
    scratch: List[str] = []
    config_of_engine = _with_scratch(described, scratch)
    if not has_optimizer and not scratch:
        in_memory = cast(Engine, InMemory(model, described, device))
        evaluates = DeepSpeedEngine(in_memory, described, scratch, has_optimizer=False)
        return evaluates, None, evaluates._load(training_data, collate_fn), None
    engine, _, _, scheduler = _initialize(
        model=model,
        config=config_of_engine,
        optimizer=optimizer if has_optimizer else NO_OPTIMIZER,
        model_parameters=model_parameters,
        lr_scheduler=lr_scheduler if has_optimizer else None,
        overwrite=True,
        device=device,
        progress=None if "progress" in own else False,  # these scripts, and Trainer, say themselves how it goes
        ranks=None if has_optimizer else False,  # each has a copy of its own, on its drive
        missing_gradients=None if accelerates is not None or own.get("missing_gradients") is not None else "zeros",
    )
    made = DeepSpeedEngine(engine, described, scratch, has_optimizer)
    return made, made.optimizer, made._load(training_data, collate_fn), scheduler


class Init(contextlib.AbstractContextManager):  # type: ignore[type-arg]
    """deepspeed.zero.Init: with ``offload_param.nvme_path`` in the configuration the model is built there (penstock.init_on_disk), else
    in memory. penstock.initialize then moves it out. dtype: torch's default one within. mem_efficient_linear, remote_device and pin_memory
    change nothing: the configuration says where the model is."""

    def __init__(
        self,
        module: Optional[nn.Module] = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: Optional[str] = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: Optional[torch.dtype] = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
    ) -> None:
        for name, value in {
            "module": module,
            "data_parallel_group": data_parallel_group,
            "mpu": mpu,
            "zero_param_parallel_group": zero_param_parallel_group,
            "zero_quantized_weights": zero_quantized_weights or None,
            "zero_quantized_nontrainable_weights": zero_quantized_nontrainable_weights or None,
            "sequence_data_parallel_group": sequence_data_parallel_group,
            "param_swapper": param_swapper,
        }.items():
            if value is not None:
                raise NotImplementedError(f"zero.Init({name}=) is not served: the model is built within, and initialize takes it over")
        self._dtype = dtype if enabled else None
        self._dtype_before = torch.get_default_dtype()
        described = _core.config_of(config_dict_or_path if config_dict_or_path is not None else config) if enabled else {}
        place = _nvme_path((described.get("zero_optimization") or {}).get("offload_param"), "offload_param")
        self._context = init_on_disk(place) if place else contextlib.nullcontext()

    def __enter__(self) -> "Init":
        self._context.__enter__()
        if self._dtype is not None:
            self._dtype_before = torch.get_default_dtype()
            torch.set_default_dtype(self._dtype)
        return self

    def __exit__(self, *error: Any) -> None:
        torch.set_default_dtype(self._dtype_before)
        self._context.__exit__(*error)


def _available_memory() -> int:
    with open("/proc/meminfo", encoding="ascii") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable:"))


@contextlib.contextmanager
def GatheredParameters(  # noqa: N802
    params: Union[nn.Parameter, Sequence[nn.Parameter]], modifier_rank: Optional[int] = None, fwd_module: Any = None, enabled: bool = True
) -> Iterator[Any]:
    """deepspeed.zero.GatheredParameters: the values are there within; with a modifier_rank its changes are written back.

    Without one, values that would take more than half of the memory that is available stay on the drive: each is read when it is looked at.
    A forward within fetches its own, so fwd_module changes nothing.
    """
    wanted = [params] if isinstance(params, nn.Parameter) else list(params)
    by_engine: Dict[int, Tuple[Engine, List[nn.Parameter]]] = {}
    for each in wanted if enabled else ():
        engine = _owners.get(id(each))
        if engine is not None and engine.started and engine.has(each):
            if not engine.are_here([each]):
                by_engine.setdefault(id(engine), (engine, []))[1].append(each)
    keep_resident(wanted if enabled else [])  # within the first forward: it will use them
    with contextlib.ExitStack() as gathered:
        for engine, owned in by_engine.values():
            bytes_of_all = sum(each.numel() * each.element_size() for each in owned)
            if modifier_rank is None and bytes_of_all > _available_memory() // 2 and not engine.is_inside:
                continue
            gathered.enter_context(engine.gathered(owned, write_back=modifier_rank is not None, source=modifier_rank or 0))
        yield params


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """The parameter is in memory for whole passes, whatever module uses it. Before the first forward, or within it."""
    keep_resident([parameter], lasts=True)


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """The parameter stays in memory for whole passes, which is right for any use of it."""


def _owner_of(parameter: nn.Parameter) -> Engine:
    engine = _owners.get(id(parameter))
    if engine is None or not engine.has(parameter):
        raise ValueError("this parameter belongs to no engine")
    return engine


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor:
    return _owner_of(param).read_state(param)


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor:
    return _owner_of(param).read_state(param, "gradient")


_KINDS = {"exp_avg": "first moment", "exp_avg_sq": "second moment", "sum": "second moment", "momentum_buffer": "first moment"}


def _kind_of(optim_state_key: str) -> str:
    if optim_state_key not in _KINDS:
        raise ValueError(f"no optimizer state {optim_state_key!r}: {', '.join(_KINDS)}")
    return _KINDS[optim_state_key]


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor:
    return _owner_of(param).read_state(param, _kind_of(optim_state_key))


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    _owner_of(param).write_state(param, value)


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    _owner_of(param).write_state(param, value, _kind_of(optim_state_key))


# --- what scripts import besides


class _Absent(type):
    def __getattr__(cls, name: str) -> Any:
        raise AttributeError(f"{cls.__name__}.{name}: {cls.__doc__}")


def absent(name: str, instead: str) -> Any:
    """A class, or function, of DeepSpeed's that is not served: NotImplementedError when it is called."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{name} is not served by Penstock: {instead}")

    return _Absent(name.rsplit(".", 1)[-1], (), {"__new__": refuse, "__doc__": f"Not served: {instead}."})


class _Scheduler(ConfigScheduler):
    """One of DeepSpeed's, which counts updates."""

    _names: Tuple[str, ...] = ()  # of its parameters, in DeepSpeed's order

    def __init__(self, optimizer: torch.optim.Optimizer, *args: Any, last_batch_iteration: int = -1, **parameters: Any) -> None:
        names = (*self._names, "last_batch_iteration")
        if len(args) > len(names):
            raise TypeError(f"{type(self).__name__} takes {', '.join(names)}")
        for name, value in zip(names, args):
            if name in parameters:
                raise TypeError(f"{type(self).__name__} got {name} twice")
            parameters[name] = value
        last_batch_iteration = parameters.pop("last_batch_iteration", last_batch_iteration)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": float(optimizer.param_groups[0]["lr"])}},
            "scheduler": {"type": type(self).__name__, "params": parameters},
        }
        super().__init__(_core, json.dumps(Settings(config, {}, needs_place=False).schedule), optimizer)
        if last_batch_iteration >= 0:
            self.step(last_batch_iteration)

    @property
    def last_batch_iteration(self) -> int:
        return self.last_update - 1

    def step(self, last_batch_iteration: Optional[int] = None) -> None:
        self.last_update = self.last_update + 1 if last_batch_iteration is None else last_batch_iteration + 1
        self._apply()

    def state_dict(self) -> Dict[str, Any]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        self.step(int(state["last_batch_iteration"]))


class WarmupLR(_Scheduler):
    _names = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type")


class WarmupDecayLR(_Scheduler):
    _names = ("total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type")


class WarmupCosineLR(_Scheduler):
    _names = ("total_num_steps", "warmup_min_ratio", "warmup_num_steps", "cos_min_ratio", "warmup_type")


class OneCycle(_Scheduler):
    _names: Tuple[str, ...] = ("cycle_min_lr", "cycle_max_lr", "decay_lr_rate", "cycle_first_step_size", "cycle_second_step_size", "cycle_first_stair_count")
    _names += ("cycle_second_stair_count", "decay_step_size", "cycle_momentum", "cycle_min_mom", "cycle_max_mom", "decay_mom_rate")


class LRRangeTest(_Scheduler):
    _names = ("lr_range_test_min_lr", "lr_range_test_step_size", "lr_range_test_step_rate", "lr_range_test_staircase")


class FusedAdam(torch.optim.Optimizer):
    """DeepSpeed's groups and values of AdamW, or Adam (adam_w_mode False), for an engine: its updates are the engine's.

    set_grad_none changes nothing: the engine's gradients are apart from the parameters'. The engine refuses amsgrad, and bias_correction False.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: Tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        self.adam_w_mode = adam_w_mode
        super().__init__(params, dict(lr=lr, bias_correction=bias_correction, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad))

    def step(self, closure: Any = None) -> Any:
        raise NotImplementedError("FusedAdam makes its steps within deepspeed.initialize's engine: torch.optim.AdamW(fused=True) makes them by itself")


class ElasticityError(Exception):
    """elasticity: what it says cannot be."""


class ElasticityConfigError(ElasticityError):
    """A key of it is missing or wrong."""


class ElasticityIncompatibleWorldSize(ElasticityError):
    """So many ranks cannot share the batch."""


def elasticity_enabled(ds_config: Any) -> bool:
    return bool((_core.config_of(ds_config).get("elasticity") or {}).get("enabled", False))


def compute_elastic_config(ds_config: Any, target_deepspeed_version: str = "", world_size: int = 0, return_microbatch: bool = False) -> Tuple[Any, ...]:
    """DeepSpeed's: (the batch, the numbers of ranks that can share it), and with a world_size or return_microbatch the micro-batch.

    target_deepspeed_version changes nothing: there is one way to choose.
    """
    described = _core.config_of(ds_config)
    if not isinstance(described.get("elasticity"), dict):
        raise ElasticityConfigError("'elasticity' is missing from the configuration")
    if not elasticity_enabled(described):
        raise ElasticityConfigError("elasticity is disabled: set elasticity.enabled to true")
    elasticity = {"elasticity": described["elasticity"]}
    try:
        chosen = _core.elastic_batch(elasticity)
    except ValueError as error:
        raise ElasticityConfigError(str(error)) from error
    world = world_size or (int(os.environ.get("WORLD_SIZE", "1")) if return_microbatch else 0)
    if not world:
        return chosen["train_batch"], chosen["ranks"]
    try:
        micro = _core.elastic_batch(elasticity, world)["micro_batch"]
    except ValueError as error:
        raise ElasticityIncompatibleWorldSize(str(error)) from error
    return chosen["train_batch"], chosen["ranks"], micro


# DeepSpeed's, which print: of a model as it is, or by its numbers.
def _estimate(stage: str, parameters: int, largest: int, gpus: int, nodes: int, factor: float) -> None:
    given = ["--params", str(parameters), "--gpus-per-node", str(gpus), "--nodes", str(nodes), "--buffer-factor", str(factor)]
    if stage == "3":
        given += ["--largest-layer", str(largest)]
    sys.stdout.flush()
    if _core.run_penstock(["estimate", "--stage", stage, *given]) != 0:
        raise ValueError("the estimate's numbers are not of a model: the line on stderr says which")


def _numbers_of(model: nn.Module) -> Tuple[int, int]:
    """Parameters in all, and of the largest layer."""
    in_all = {id(parameter): parameter.numel() for parameter in model.parameters()}
    largest = max(sum(parameter.numel() for parameter in module.parameters(recurse=False)) for module in model.modules())
    return sum(in_all.values()), largest


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    _estimate("2", *_numbers_of(model), num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    _estimate("2", total_params, 0, num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    _estimate("3", *_numbers_of(model), num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int, largest_layer_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    _estimate("3", total_params, largest_layer_params, num_gpus_per_node, num_nodes, additional_buffer_factor)
