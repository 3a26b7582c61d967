"""The engine as Python sees it: DeepSpeed's calls over an unmodified torch module."""

from __future__ import annotations

import atexit
import contextlib
import copy
import difflib
import errno
import functools
import inspect
import json
import logging
import os
import re
import secrets
import shutil
import sys
import tempfile
import types
import warnings
import weakref
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Set, Tuple, Union

import torch
from torch import nn

from .. import _core
from .._buffers import truth, whole_number
from .._data_loader import DeepSpeedDataLoader
from .._small_files import exists
from . import _checkpoint_names as checkpoint_names
from . import _deepspeed_checkpoint as deepspeeds
from . import _parameters
from ._accumulation import Accumulation, Forward
from ._attributes import merged
from ._blocks import Block, check_memory, find_blocks
from ._device import choose_device, has_own_memory
from ._handed_over import check_types, described_blocks, described_stages, options_of, resident_bytes
from ._identity import changes, groups_go_on, identity_of, same_scheduler, values_of
from ._interrupts import deferred
from ._json import decode, encode
from ._modules import counts_no_versions, move_buffers, persistent_buffers, replace_forward, restore_forward, switch_off_checkpointing, without_cache
from ._on_disk import give_back, tensors_on_disk
from ._optimizer import ConfigScheduler, EngineOptimizer, describe, zeros_change
from ._random import RandomState, restore_text
from ._ranks import Alone, Meeting, end_group, world_size
from ._report import Report
from ._runtime import ForwardsChange, Runtime
from ._settings import DTYPES, PathLike, Settings
from ._trace import settled, trace, with_other_modes
from ._tree import counted, map_tensors, tensors_of
from ._watch import Watch
from ._weights import OUTSIDE, Weights, hide_copies, show_copies
from ._whole import Whole

_STEP = "step-%08d"  # a checkpoint's name (swap/checkpoint_files.cc)
_MARK = "_penstock_engine"
_MOST_BUFFERS = 24 << 10  # bytes, in every commit
_MOST_KEPT = 56 << 10  # with all else; the store takes 64 KiB (swap/format.h)

_engines: "weakref.WeakSet[Engine]" = weakref.WeakSet()
# Until they are closed: the last step of an engine that nobody refers to any more is committed when Python exits.
_started: "Set[Engine]" = set()


@atexit.register
def _close_all(process: int = os.getpid()) -> None:
    """The last step of an engine that nobody closed is committed, and its threads end before the interpreter does."""
    if os.getpid() != process:
        return
    error = getattr(sys, "last_value", None)  # that the program ends with
    failed = False
    for engine in list(_engines):
        told = error is not None and engine.world_size > 1
        if told:
            engine.abort(f"its program ended with {type(error).__name__}: {error}")
        try:
            engine.close()
        except Exception as raised:  # noqa: B902
            failed = failed or engine.world_size == 1  # of several, the one that failed says so
            if not told:
                print(f"penstock: an engine could not be closed: {type(raised).__name__}: {raised}", file=sys.stderr)
    end_group()
    if failed and error is None:
        # A step or a checkpoint is lost: the program has not succeeded, which nothing else tells its caller any more.
        logging.shutdown()
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(1)


class Engine:
    """Trains a torch module whose weights, gradients and optimizer states are larger than memory.

    Made by ``penstock.initialize``. The module keeps its class, its names and its code; its parameters keep shape and dtype and
    have values only while they are used. ``module(...)`` and ``engine(...)`` are the same call.

    The first forward shows the order of the blocks; with it the state is written to ``state_dir`` and the parameters leave memory.

    Where no parameter requires a gradient, it evaluates and generates only: the drive gets the weights and nothing else, and host
    memory keeps as many of them as there is room for, whatever else a step would need.

    On a GPU (``device``) each block's weights are copied there while it is computed, and gradients back; what comes into the model is
    taken there as well, and its outputs are there. Masters, states and updates stay the engine's, in host memory and on the drive.

    Threads: one at a time. A forked child makes an engine of its own. Errors: an exception in a forward or backward gives up that
    step and no more; the next one may begin. Over several ranks it ends the run on all of them: the last commit stands.

    Ranks: each process has an engine of its own, trains on batches of its own and keeps its part of the state. Loss, norm, clipping
    and commits are of all. All ranks make the same calls in the same order, of ``state_dict()``, ``read_state``, ``gathered``,
    ``save_checkpoint``, evaluations and ``close`` too; where one does not, all have an error that names both calls.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: Settings,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        blocks: Optional[Sequence[str]],
        resume: Union[bool, str],
        overwrite: bool,
        seed: int,
    ) -> None:
        self.module = model
        self._settings = settings
        self._given = optimizer
        self._described = describe(optimizer)
        state = getattr(model, _MARK, "")
        if state == "open":
            raise ValueError("this model has an engine already: close that one first")
        self._values_are_gone = state == "closed"
        #: Where the model is computed, and its outputs are.
        self.device = settings.device
        if model.__dict__.get("forward") is _closed_forward:
            model.__dict__.pop("forward")
        self._names_of_blocks = blocks
        self._look_at_parameters()
        self._resume = resume
        self._overwrite = overwrite
        self._seed = seed
        self._required_grad = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
        self._changing: List[nn.Module] = []  # whose attributes a forward changes
        self._input_gradients = False  # wanted of what went into the first forward
        self._core: Any = None
        self._made = False  # a run, which came to nothing after that
        self._ranks: Alone = Alone()  # until they have met
        self._watch: Optional[Watch] = None
        self._watched: Optional[Dict[str, Any]] = None  # what monitors get of the last step
        self._last_report: Optional[Report] = None  # of a closed engine
        self._runtime: Optional[Runtime] = None
        self._restore_from: Optional[str] = None
        self._takes_scheduler = True  # of that, where it is Penstock's
        self._is_verified = False  # all of it has been read and checked
        self._uses: Sequence[Any] = ()  # of blocks, as the first forward has shown them
        self._found: Optional[deepspeeds.Found] = None  # where that is DeepSpeed's
        self._optimizer_was_given = False  # by the caller, and not made of the configuration
        self.optimizer = EngineOptimizer(optimizer, self._step, self.zero_grad)  # with its very groups, which schedulers may know
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
        if scheduler is plateau or isinstance(scheduler, plateau):
            raise ValueError("ReduceLROnPlateau wants a metric for its steps: make them yourself, between engine.step() and the next forward")
        made = callable(scheduler) and (isinstance(scheduler, type) or not hasattr(scheduler, "step"))
        self.lr_scheduler = scheduler(self.optimizer) if made else scheduler
        if self.lr_scheduler is not None and not (hasattr(self.lr_scheduler, "step") and hasattr(self.lr_scheduler, "state_dict")):
            raise TypeError(f"lr_scheduler is a {type(scheduler).__name__}: a scheduler has step() and state_dict(), or is made by a function")
        if self.lr_scheduler is None and settings.schedule is not None:
            self.lr_scheduler = ConfigScheduler(_core, json.dumps(settings.schedule), self.optimizer)
        self._identity = identity_of(self._described, optimizer.param_groups, settings, self.lr_scheduler)
        #: Kept with every commit, and there again after a resume: anything that is JSON.
        self.client_state: Dict[str, Any] = {}
        self._steps = 0  # of the run, as far as this process knows
        self.skipped_steps = 0
        self._samples = 0  # before this process
        self._written_before = 0  # likewise: bytes, by all ranks
        self._result: Dict[str, Any] = {}
        self._begun_rates: List[Any] = []
        self._rng = ""
        self._told_of_buffers = False
        self._kept_buffers: Optional[Dict[str, torch.Tensor]] = None  # as the last step left them
        self._written: Set[str] = set()  # checkpoints of this engine
        self._run_id = ""
        self._copied: Optional[str] = None  # the path of one that is being copied, or whose end nobody has heard of
        self._gathered = False
        self._looked_at: List[nn.Parameter] = []  # those that are gathered, and not to be written back
        self._partly_written = False  # values of a program, of which the drive has some
        self._closed = False
        self._accumulation = Accumulation(model)  # of forwards that are computed again when the step is due
        self._accumulates = settings.forwards > 1
        #: Whether the module's zero_grad is this one's; set before the first forward.
        self.zero_grad_of_module = True
        self._made_early = False  # the step, since its gradients were read; engine.step() is to come
        self._several = False  # a step was of several forwards, though nothing said so
        self._boundary: Optional[bool] = None  # as the caller has said it
        self.micro_steps = 0
        known = {id(parameter) for parameter in model.parameters()}
        for number, group in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                if id(parameter) not in known:
                    raise ValueError(f"parameter {index} of group {number} is none of the model's: give it an optimizer of its own")
        self._take_step_of(optimizer)  # all was looked at
        self._wait_for_a_batch()
        setattr(model, _MARK, "open")
        _engines.add(self)

    # Once more with the first forward: until then a script may tie, replace or cast them.
    def _look_at_parameters(self) -> None:
        if not self._values_are_gone:
            check_memory([each for each in self.module.named_parameters() if each[1].device.type == "cuda"])
            for parameter in self.module.parameters():
                if parameter.device.type == "cuda":
                    parameter.data = parameter.data.cpu()  # the engine takes them from there
        self._blocks: List[Block] = find_blocks(self.module, self._names_of_blocks, has_values=not self._values_are_gone)
        self._dtypes = {id(parameter): parameter.dtype for parameter in self.module.parameters()}
        check_types(self.module)

    # Its own would change what lies in the engine's memory: the weights of the block that backward began with.
    def _take_step_of(self, optimizer: torch.optim.Optimizer) -> None:
        def step(_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            raise RuntimeError("this optimizer was handed to penstock.initialize: engine.step() makes its steps, or step() of engine.optimizer")

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # schedulers warn of others
        self._given_own = {name: optimizer.__dict__.get(name) for name in ("step", "zero_grad", "load_state_dict")}
        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
        optimizer.zero_grad = self.zero_grad  # type: ignore[method-assign]
        optimizer.load_state_dict = self.optimizer.load_state_dict  # type: ignore[method-assign]

    def _give_step_back(self) -> None:
        for name, own in self._given_own.items():
            self._given.__dict__.pop(name, None)
            if own is not None:
                setattr(self._given, name, own)

    # --- the first forward

    def _wait_for_a_batch(self) -> None:
        def first_forward(*args: Any, **kwargs: Any) -> Any:
            self._materialize(args, kwargs)
            return self.module(*args, **kwargs)

        self._previous_forward = replace_forward(self.module, first_forward)
        every = {id(parameter) for parameter in self.module.parameters()}
        self._all_of_it = [
            (part, replace_forward(part, self._first_forward_of(part)))
            for part in self.module.modules()
            if part is not self.module and {id(parameter) for parameter in part.parameters()} == every and type(part).forward is not nn.Module.forward
        ]

    # Of a module that has all parameters, and generates without the model's forward, as peft's does.
    def _first_forward_of(self, part: nn.Module) -> Callable[..., Any]:
        def first_forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                self._materialize(args, kwargs, lambda: _apart_for(part, args, kwargs))
                return part(*args, **kwargs)
            return previous(*args, **kwargs)

        previous = part.forward
        return first_forward

    def _stop_waiting(self) -> None:
        restore_forward(self.module, self._previous_forward)
        for part, previous in self._all_of_it:
            restore_forward(part, previous)
        self._all_of_it = []

    def _group_of(self) -> Dict[int, int]:
        return {
            id(parameter): number
            for number, group in enumerate(self.optimizer.param_groups)
            for parameter in group["params"]
        }

    def _materialize(self, args: Tuple[Any, ...], kwargs: Dict[str, Any], call: Optional[Callable[[], Any]] = None) -> None:
        """Finds the order of the blocks, and hands the parameters over to the engine. call: instead of module(*args, **kwargs)."""
        self._stop_waiting()
        for parameter in self.module.parameters():
            show_copies(parameter)  # of a closed engine, whose NaN pass through the forward that is traced
        try:
            self._look_at_parameters()
            switch_off_checkpointing(self.module.modules())
            if self.module.training:
                kwargs = without_cache(self.module.forward, kwargs)
            move_buffers(self.module, self.device)
            with self._inputs_of_the_models_type():
                forward = call or (lambda: _apart_for(self.module, args, kwargs))
                once_more = functools.partial(trace, self.module, self._blocks, forward, self.device)
                traced = with_other_modes(self.module, self._blocks, once_more(), once_more)
                flops = self._flops_of(forward) if self._settings.flops_profiler["enabled"] else None
            self._changing = traced.changing
            self._blocks, uses = settled(self.module, self._blocks, traced)
            with self._met(), self._adapters_on():
                self._make_core(uses)
            if flops is not None and self._watch is not None:
                self._watch.counts_flops(*flops)
        except BaseException:
            if self._runtime is None:
                for name, parameter in self.module.named_parameters() if self._values_are_gone else ():
                    hide_copies(parameter, name, _closed_value)
                move_buffers(self.module, torch.device("cpu"))
                self._wait_for_a_batch()
            raise

    # peft's adapters do not require gradients as long as they are switched off, as for a reference model of which they train: what they did when
    # the engine was made holds.
    @contextmanager
    def _adapters_on(self) -> Iterator[None]:
        off = any(getattr(module, "disable_adapters", False) is True for module in self.module.modules())
        trained = [each for each in self.module.parameters() if not each.requires_grad and id(each) in self._required_grad] if off else []
        for parameter in trained:
            parameter.requires_grad_(True)
        try:
            yield
        finally:
            for parameter in trained:
                parameter.requires_grad_(False)

    # Of the first forward: (matrix products' FLOPs, tokens or samples); None where torch does not count.
    def _flops_of(self, forward: Callable[[], Any]) -> Optional[Tuple[float, int]]:
        try:
            from torch.utils.flop_counter import FlopCounterMode
        except ImportError:
            warnings.warn("flops_profiler: this torch counts no FLOPs (2.1 and newer do)", stacklevel=2)
            return None
        units = []
        own = self.module.forward

        def counting(*args: Any, **kwargs: Any) -> Any:
            tokens, samples = counted(args, kwargs)
            units.append(tokens or samples)
            return own(*args, **kwargs)

        previous = replace_forward(self.module, counting)
        try:
            with FlopCounterMode(display=False) as counter:
                trace(self.module, self._blocks, forward, self.device)
        finally:
            restore_forward(self.module, previous)
        return float(counter.get_total_flops()), sum(units)

    # As later forwards take them in (Runtime._taken_in). A model of several types does what it does with them.
    @contextmanager
    def _inputs_of_the_models_type(self) -> Iterator[None]:
        types = set(self._dtypes.values())
        cast_to = types.pop() if len(types) == 1 and self._settings.dtype != "fp32" else None
        own = self.module.forward

        def taken_in(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(self.device, tensor.dtype if cast_to is None or not tensor.is_floating_point() else cast_to)

        def forward(*args: Any, **kwargs: Any) -> Any:
            self._input_gradients |= any(tensor.requires_grad for tensor in tensors_of((args, kwargs)))
            args, kwargs = map_tensors((args, kwargs), taken_in)
            return own(*args, **kwargs)

        previous = replace_forward(self.module, forward)
        try:
            yield
        finally:
            restore_forward(self.module, previous)

    # Over several ranks all of them are connected within, and after it.
    @contextmanager
    def _met(self) -> Iterator[None]:
        if self._settings.world == 1:
            self._refuse_other_ranks()
            yield
            return
        meeting = Meeting(self._settings.rank_timeout)
        try:
            meeting.check_model(self.module)
            self._ranks = meeting.connect()
            try:
                self._refuse_other_ranks()
                if not self._values_are_gone and not self._may_resume() and not self._restore_from:
                    meeting.share_values(self.module)
                yield
            except BaseException as error:
                self._ranks.abort(f"{type(error).__name__}: {error}")
                self._ranks.close()
                self._ranks = Alone()
                raise
        finally:
            meeting.close()

    def _make_core(self, uses: Sequence[Any]) -> None:
        self._uses = uses
        settings = self._settings
        described, marks, held = described_blocks(self.module, self._blocks, self._group_of(), settings, self._values_of)
        stages = described_stages(uses)
        trains = any(each for mark in marks for each, _ in mark)
        if not trains:
            self._check_evaluates()
        elif settings.nothing_trains:
            raise ValueError(
                "no parameter required a gradient when initialize was called, so that it made no optimizer, and some do now: call requires_grad_() "
                "before it"
            )
        resume = self._may_resume()
        if self._values_are_gone and not resume and not self._restore_from:
            raise ValueError("this model's values went with its engine that was closed: go on with resume=True, or build the model anew")
        if self._restore_from and not (self._overwrite or self._made) and "a run" in self._runs_there():
            raise FileExistsError(
                errno.EEXIST,
                "a run is there already, which the checkpoint would replace: that takes overwrite=True; resume=True without load_checkpoint "
                "goes on with it",
                settings.state_dirs[0],
            )
        where = [self._restore_from] if self._restore_from else self._own_dirs()
        goes_on = resume or bool(self._restore_from)
        known = ""
        if where:
            with contextlib.suppress(OSError, ValueError):  # none is there, or the engine refuses it, on all ranks
                known = (json.loads(_core.record_of(where)) or {}).get("run_id", "")
        known = self._ranks.texts("the run's name", known)[0]
        run_id = self._ranks.texts("the run's name", known if goes_on and known else f"python-{secrets.token_hex(6)}")[0]
        options = {
            **options_of(settings, self._described, trains=trains, resident_bytes=resident_bytes(self._blocks, settings, trains)),
            "run": {"run_id": run_id},
            "run_changes": {} if not goes_on or known else {"run_id": run_id},
            "state_dirs": self._own_dirs(),
            "new_weights": not trains and not resume,
            "resume": resume,
            "overwrite": (self._overwrite or self._made) and not resume,
            "restore_from": self._restore_from if self._found is None else None,
            "restore_is_verified": self._is_verified,
            "import": self._what_is_imported(),
            "seed": self._seed,
            "input_gradients": self._input_gradients,
        }
        self._ranks.agree(self._alike(options, described))
        other = next((each for each in _started if not set(each._places()).isdisjoint(self._places())), None)
        if other is not None:
            raise RuntimeError(f"an engine of this process has {self._settings.state_dirs[0]}: close() that one first")
        with deferred():
            self._hand_over(described, stages, uses, options, marks, known)
        del held

    # Where they are gone they are read nowhere.
    def _values_of(self, parameter: nn.Parameter) -> torch.Tensor:
        return parameter if self._values_are_gone else parameter.detach().contiguous()

    # A checkpoint of DeepSpeed's becomes a run of one commit, which says what Python finds again in any run that is gone on with.
    def _what_is_imported(self) -> Optional[Dict[str, Any]]:
        if self._found is None:
            return None
        if self._ranks.world > 1 and not self._settings.state_dirs:
            raise ValueError("several ranks load a checkpoint of DeepSpeed's where their state is on a drive: give state_dir=")
        deepspeeds.check_served(self._parameters(), self._group_of(), self._described)
        said = self._found.said
        rates, values = deepspeeds.groups_of(self._found, self.optimizer.param_groups)
        state = deepspeeds.scheduler_of(self._found, self.lr_scheduler)
        kept = {
            "client": decode(said["client"]),
            "skipped": said["step"] - said["updates"],
            "lr": rates,
            "groups": values,
            "given": self._identity,
            "torch_rng": "",
            "samples": said["samples"] or said["step"] * self._settings.train_batch_size,
            "scheduler": None if state is None else {name: value for name, value in state.items() if _is_kept(value)},
            "buffers": deepspeeds.buffers_of(self._found, {name: each[2] for name, each in persistent_buffers(self.module).items()}),
        }
        if len(json.dumps(encode(kept))) > _MOST_KEPT:
            warnings.warn("load_checkpoint: the client_state is too large for commits, which do not keep it", stacklevel=2)
            kept["client"] = {}
        names = [[name for name, _ in block.parameters] for block in self._blocks]
        return {
            "path": self._found.path,
            "names": self._found.names,
            "parameters": names,
            "step": said["step"],
            "updates": said["updates"],
            "is_read_once": not self._settings.state_dirs,
            "description": encode(kept),
        }

    def _parameters(self) -> List[Tuple[str, nn.Parameter]]:
        return [each for block in self._blocks for each in block.parameters]

    # Of an engine that has nothing to train: its weights are all that the drive gets.
    def _check_evaluates(self) -> None:
        why = "no parameter of the model requires a gradient (and is the optimizer's), so that the engine only evaluates"
        if self._settings.offload != "nvme":
            raise ValueError(f"{why}, with weights on a drive: give state_dir=")
        if self._ranks.world > 1:
            raise ValueError(f"{why}, and several ranks only train: make it with ranks=False in each process, with a state_dir of its own")
        if self._restore_from:
            raise ValueError(f"{why}, and there is no training to load from a checkpoint: give the model its values first")

    def _places(self) -> List[str]:
        return [os.path.realpath(directory) for directory in self._own_dirs()]

    # All of it or nothing: what goes wrong before the parameters are the engine's leaves them to the model, for another attempt.
    def _hand_over(
        self,
        described: List[Any],
        stages: List[Any],
        uses: Sequence[Any],
        options: Dict[str, Any],
        marks: List[Any],
        known: str,
    ) -> None:
        settings = self._settings
        goes_on, run_id = options["resume"] or bool(self._restore_from), options["run"]["run_id"]
        self._run_id = run_id
        try:
            with self._import_directory(options):
                core = _core.TrainingEngine(described, stages, settings, json.dumps(options), self._ranks.core)
        except FileExistsError as error:
            raise FileExistsError(
                error.errno,
                "a run is there already: go on with it (resume=True, or resume='auto'), replace it (overwrite=True), or use another "
                "directory",
                self._own_dirs()[0],
            ) from error
        places = [core.offsets(number) for number in range(len(self._blocks))]
        self._names = {
            id(parameter): f"{block_name}.{short}"
            for (block_name, parameters), block in zip(described, self._blocks)
            for (short, *_), (_, parameter) in zip(parameters, block.parameters)
        }
        self._core = core
        self._buffers = persistent_buffers(self.module)
        weights: Optional[Weights] = None
        try:
            if goes_on:
                self._restored()
            if self._found is not None:
                note = self._info()["run"]["imported"].get("note")
                if note:
                    warnings.warn(f"load_checkpoint: {note}", stacklevel=2)
            watch = Watch(core, settings, run_id, goes_on, [known] if known and not goes_on else [], self._samples, self._ranks)
            weights = Weights(
                self._blocks, DTYPES[settings.dtype], places, self.device, self._copy_of, core.arena(), has_own_memory(self.device)
            )
            trains = [[trains for trains, _ in mark] for mark in marks]
            self._layout = _parameters.describe(self.module, self._blocks, places, trains, self._info()["model"])
            if settings.state_dirs and self._ranks.rank == 0:
                _parameters.write(self._own_dirs()[0], _parameters.with_buffers(self._layout, self._buffers))
            self._runtime = Runtime(core, self.module, self._blocks, uses, weights, trains, self._input_gradients, self._changing)
        except BaseException:
            try:
                if weights is not None:
                    weights.release()  # first: CUDA must not know memory that is unmapped
            finally:
                core.close()  # or the state stays locked, by ourselves
                self._core = None
                self._made = not options["resume"]
            raise
        _started.add(self)
        self._weights = weights
        weights.hide_all()
        self._runtime.on_training_forward = self._training_forward
        self._runtime.on_interrupted = self._interrupted
        self._runtime.dtype = DTYPES[settings.dtype]
        self._runtime.device = self.device
        self._runtime.world = self._ranks.world
        self._runtime.zeros_change = zeros_change(self._described, self.optimizer.param_groups)
        self._runtime.loss_factor = settings.forwards / settings.micro_batches
        self._runtime.before_pass = self._before_pass
        self._patch_state_dict()
        self._whole = Whole(self.module, self._blocks, self._runtime.replaced, self._value_of)
        self._watch = watch
        self._watch.again(self._watched)
        self._tell_of_wear()
        self._runtime.flops_of = self._watch.flops
        seconds = [use.seconds for use in uses]
        if sum(seconds) > 0:
            self._watch.backward_share = sum(seconds[self._runtime.first_trained :]) / sum(seconds)

    # State in memory is read from a drive too, once: what is made of DeepSpeed's checkpoint goes as soon as it was.
    @contextmanager
    def _import_directory(self, options: Dict[str, Any]) -> Iterator[None]:
        if self._found is None or options["state_dirs"]:
            yield
            return
        with tempfile.TemporaryDirectory(prefix="penstock-import-") as directory:
            options["state_dirs"] = [directory]
            try:
                yield
            except OSError as error:
                if directory not in str(error):
                    raise
                why = f"{error.strerror}: state in memory passes through TMPDIR ({tempfile.gettempdir()}), which must have room for it"
                raise OSError(error.errno, why, directory) from error

    # Where this process keeps its part of the state.
    def _own_dirs(self) -> List[str]:
        dirs = self._settings.state_dirs
        return list(_core.rank_directories(dirs, self._ranks.rank)) if self._ranks.world > 1 else dirs

    def _may_resume(self) -> bool:
        if self._resume != "auto":
            return bool(self._resume)
        every = self._runs_there()
        for rank, theirs in enumerate(every):
            if theirs != every[0]:
                raise ValueError(
                    f"resume='auto': rank {rank} has {theirs} in its part of {self._settings.state_dirs[0]}, rank 0 has {every[0]}: bring "
                    "what is missing back, go on from a checkpoint in another state_dir, or start over (overwrite=True, without resume)"
                )
        return every[0] == "a run"

    # By rank.
    def _runs_there(self) -> List[str]:
        mine = bool(self._settings.state_dirs) and _core.holds_run(self._own_dirs())
        return self._ranks.texts("whether a run is there", "a run" if mine else "no run")

    # A run goes on in its place with as many ranks as it had, and is not replaced by one of another number.
    def _refuse_other_ranks(self) -> None:
        dirs, world = self._settings.state_dirs, self._ranks.world
        there = _core.ranks_of(dirs) if dirs else 0
        known = self._ranks.texts("the number of ranks", str(there))
        for theirs in map(int, known):
            if theirs in (0, world):
                continue
            of = "one rank" if theirs == 1 else f"{theirs} ranks"
            raise ValueError(
                f"{dirs[0]} holds a run of {of}, and there {'is one' if world == 1 else f'are {world}'}: go on with as many, or in another "
                "state_dir with engine.load_checkpoint, which takes this directory, or a checkpoint, of any number of ranks"
            )

    # What is the same on all ranks: everything but places.
    def _alike(self, options: Dict[str, Any], described: Sequence[Any]) -> Dict[str, Any]:
        if self._ranks.world == 1:
            return {}
        places = ("state_dirs", "run", "run_changes", "device_computes")
        settings = self._settings
        return {
            **{name: value for name, value in options.items() if name not in places},
            "config": settings.shared_config(),
            "dtype": settings.dtype,
            "offload": settings.offload,
            "clip": settings.clip,
            "micro_batches": settings.forwards,
            "optimizer_states": settings.optimizer_states,
            "schedule": settings.schedule,
            "gradient_accumulation_steps": settings.micro_batches,
            "monitors": settings.monitors,
            "groups": {
                f"{block} {name}": group if trains else "frozen" for block, parameters in described for name, _, trains, group, *_ in parameters
            },
            "version": _core.__version__,
        }

    def _restored(self) -> None:
        info = self._info()
        self.global_steps = info["step"]
        kept = decode(json.loads(self._core.description())) or {}
        if kept.get("partly_written"):
            raise RuntimeError(
                f"{self._restore_from or self._settings.state_dirs[0]} holds values of two states: its process ended within load_state_dict (or "
                "engine.gathered(write_back=True)). Go on from a checkpoint of before, or begin anew with overwrite=True"
            )
        for name, value in kept.get("buffers", {}).items():
            module, short, _, _ = self._buffers[name]
            with torch.no_grad():
                module._buffers[short].copy_(value)  # type: ignore[union-attr]
        self.client_state = kept.get("client", {})
        self.skipped_steps = kept.get("skipped", 0)
        self._watched = kept.get("watched")
        self._samples = kept.get("samples", 0)
        self._written_before = kept.get("written", 0)
        given = kept.get("given")
        if self._takes_scheduler and self.lr_scheduler is not None and kept.get("scheduler") is not None and same_scheduler(given, self._identity):
            self.lr_scheduler.load_state_dict(kept["scheduler"])
        groups_go_on(self.optimizer.param_groups, kept.get("lr", []), kept.get("groups", []), given, self._identity)
        told = changes(given, self._identity)
        if told:
            warnings.warn(f"resume: {'; '.join(told)}", stacklevel=2)
        self._rng = kept.get("torch_rng", "")
        if self._rng:
            restore_text(self._rng)
            if kept.get("ranks", [0, 1]) != [self._ranks.rank, self._ranks.world] and self._ranks.rank > 0:
                # Of another number of ranks there is one state, and each wants numbers of its own.
                torch.manual_seed(int(torch.randint(2**62, ()).item()) + self._ranks.rank)

    @property
    def global_steps(self) -> int:
        """Steps that the run has made, those before this process with it. Before the first forward of a run that is resumed, or of a
        checkpoint that was loaded: its last commit's. OSError: that cannot be read.
        """
        if self._runtime is not None or self._closed or self._found is not None:
            return self._steps
        if self._restore_from:
            return _core.committed_step_of([self._restore_from])
        dirs = self._settings.state_dirs
        goes_on = bool(self._resume) and bool(dirs) and not self._made and _core.ranks_of(dirs) > 0
        return _core.committed_step_of(dirs) if goes_on else self._steps

    @global_steps.setter
    def global_steps(self, steps: int) -> None:
        self._steps = steps

    # --- training

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward. In training mode, with gradients, it belongs to a step: backward and step follow.

        With ``gradient_accumulation_steps`` above 1 (or ``forwards_per_step``) it is computed without a graph, and once more at the
        step, in one pass over all forwards of the step: each block is fetched once for all of them.
        """
        return self.module(*args, **kwargs)

    forward = __call__

    def _training_forward(self, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
        runtime = self._ready()
        self._refuse_early()
        if runtime.is_open:
            self._interrupted_by_training()
        goes_on = self._several and any(tensor.requires_grad for tensor in tensors_of((args, kwargs)))  # backward, to what made its inputs
        if self.module.training and (goes_on or not (self._accumulates or self._several)):
            self._begin()
            return runtime.train_forward(args, kwargs)
        forward, outputs, gradient = runtime.forward_of_accumulation(args, kwargs)
        self._add(forward, gradient)
        return outputs

    def _add(self, forward: Forward, gradient: float) -> None:
        scale = gradient * self._settings.micro_batches
        self._accumulation.add(forward, round(scale) if abs(scale - round(scale)) < 1e-9 * scale else scale)

    # A pass is open, and another forward comes: it is computed again when its step is due, where that can be.
    def _interrupted(self, with_gradients: bool = True) -> bool:
        taken = self._ready().take_forward(with_gradients)
        if taken is not None:
            self._add(*taken)
            self._several = True
        return taken is not None

    # Gradients that wait for their step are part of it where the script is known to add them up. Later on they may be what an exception
    # has left.
    def _interrupted_by_training(self) -> None:
        runtime = self._ready()
        came = runtime.gradient_came
        if self._interrupted(with_gradients=self._several or not self._result) or not came:
            return
        runtime.give_up("no step")
        lost = "the backward before this forward had no engine.step(), and its gradients"
        if not self._result:
            raise RuntimeError(
                f"{lost} would be lost: give initialize gradient_accumulation_steps= for several backwards a step; engine.zero_grad() "
                "says that they are not wanted"
            )
        warnings.warn(f"{lost} count for nothing (engine.zero_grad() says so, without this line)", stacklevel=5)

    def _begin(self, reads_ahead: bool = True, forwards: int = 1) -> None:
        runtime = self._ready()
        if runtime.is_open:
            self._interrupted_by_training()
        else:
            self._refuse_wear()
        self._begun_rates = self.optimizer.rates()
        self._runtime.begin(True, self._begun_rates, self._settings.forwards, reads_ahead, forwards)  # type: ignore[union-attr]

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Backward from a loss of the forwards before: a tensor of one element. Scales it where fp16 asks for that.

        scale_wrt_gas: it is divided by ``gradient_accumulation_steps``. False: the caller has done so.
        """
        runtime = self._ready()
        runtime.check_trains()
        if runtime.is_open or not (self._accumulates or self._accumulation.under_way):
            runtime.backward(loss, retain_graph)
        else:
            share = 1 / self._settings.micro_batches if scale_wrt_gas else 1.0
            self._accumulation.backward(loss, share, retain_graph)
        return loss

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next ``step()`` updates: the last micro-batch of a step is under way, or was."""
        if self._boundary is not None or not self._accumulates or not self._settings.managed:
            return self._boundary is not False
        all_came = len(self._accumulation.forwards()) >= self._settings.forwards
        return all_came or self.micro_steps + 1 >= self._settings.micro_batches

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Whether the next ``step()`` updates, in the place of counting micro-batches."""
        if not self._settings.managed:
            raise RuntimeError("managed_gradient_accumulation is false: each step() updates, and there is no boundary to set")
        if not is_boundary and not self._accumulates:
            raise RuntimeError("each step is of one forward: give gradient_accumulation_steps (or forwards_per_step) to initialize")
        self._boundary = is_boundary

    def step(self) -> None:
        """Clips and updates by the gradients of the backwards before; the scheduler makes its step too.

        Where ``gradient_accumulation_steps`` is above 1 it does so for the last of as many micro-batches, counted by calls of
        ``step()`` or by forwards that a backward has come to, or when ``set_gradient_accumulation_boundary`` says so; else it only counts.
        With ``"managed_gradient_accumulation": false`` in the configuration each call updates.
        The update is applied while the next step runs, and committed then: ``flush()`` commits it now.
        """
        if self._runtime is not None:
            self._runtime.check_trains()
        self._tell_of_checkpoint()
        if not self._made_early and not self.is_gradient_accumulation_boundary():
            self.micro_steps += 1
            return
        self._update()

    # One that was copied beside steps could not be written: before anything else is done.
    def _tell_of_checkpoint(self) -> None:
        if self._copied is None:
            return
        try:
            self._core.take_checkpoint_error()
        except BaseException:
            self._copied = None
            raise

    def _update(self) -> None:
        self.optimizer.step()
        if self.lr_scheduler is not None and not self._result["skipped"]:
            self.lr_scheduler.step()
        self._describe()
        if self._watch is not None:
            self._watch.complain()
        self._refuse_wear()

    def _written_bytes(self) -> int:
        return self._written_before + int(self._result.get("written_bytes", 0))

    # penstock.wear_budget_tb: over it, what was made is committed, and nothing more is trained. Of all ranks, which know the same.
    def _refuse_wear(self) -> None:
        most, written = self._settings.wear_budget, self._written_bytes()
        if not most or written <= most:
            return
        self._core.flush()
        raise RuntimeError(
            f"after step {self.global_steps}, which is committed: penstock.wear_budget_tb: the run has written {written * 1e-12:.4g} TB to its "
            f"drives, of {most * 1e-12:.4g} TB that it may: raise the budget and go on with resume=True, or from engine.save_checkpoint"
        )

    # Before the first step: how far the budget goes.
    def _tell_of_wear(self) -> None:
        most = self._settings.wear_budget
        if not most or self._runtime is None or not self._runtime.trains:
            return
        step = self._ranks.world * self._info()["nvme_write_bytes_per_step"]
        if not step:
            return
        left = max(0, int((most - self._written_bytes()) / step))
        schedule = (self._settings.schedule or {}).get("params", {})
        if schedule.get("total_num_steps") is not None and schedule["total_num_steps"] <= self.global_steps + left:
            return
        warnings.warn(
            f"penstock.wear_budget_tb: a step writes {step * 1e-12:.4g} TB, so that {most * 1e-12:.4g} TB are used up {left} steps from here: the "
            'run stops then. optimizer_states "8bit", durability "checkpoint", more host_memory and larger steps write less',
            stacklevel=2,
        )

    def _step(self) -> None:
        runtime = self._ready()
        runtime.check_trains()
        if self._made_early:
            self._made_early = False
            return
        if runtime.is_open and self._accumulation.forwards():
            if not self._interrupted():
                raise RuntimeError("forwards of this step had their backward in two ways: engine.backward(loss) for all of them is served")
        if not runtime.is_open and (self._accumulates or self._accumulation.under_way):
            self._repeat(self._accumulation)
        if not runtime.is_open:
            raise RuntimeError("no step is open: forward and backward come first")
        if not runtime.backward_came:
            runtime.give_up("no backward")
            raise RuntimeError("step() without a backward: engine.backward(loss) comes first; the forward is given up")
        if self.optimizer.rates() != self._begun_rates:
            runtime.give_up("rates changed")
            raise RuntimeError(
                "a learning rate (or betas, or weight decay) was changed between the forward and step(): part of the update may "
                "have been made in backward. Change it after step()"
            )
        self._kept()  # or it would fail once the step was made
        with deferred():
            try:
                self._result = runtime.finish()
            except BaseException:
                runtime.give_up("the step failed")
                self._accumulation.end()
                raise
            self.global_steps = self._result["step"]
            self.skipped_steps += bool(self._result["skipped"])
            self.micro_steps = 0
            self._several = len(self._accumulation.forwards()) > 1
            self._accumulation.end()
            self._rng = RandomState.now().text()
            # What a scheduler of the optimizer that was given looks at, and warns without.
            self._given._opt_called = True  # type: ignore[attr-defined]
            if hasattr(self._given, "_step_count"):
                self._given._step_count += 1
            if self._watch is not None:
                self._watched = self._watch.stepped(self._result, *runtime.counts)
            self._describe()

    # The gradients of backwards whose step is still to come are those of the step that is made here.
    def _make_early(self) -> None:
        runtime = self._ready()
        if self._made_early or not (runtime.gradient_came if runtime.is_open else self._accumulation.forwards()):
            return
        if not self.is_gradient_accumulation_boundary():
            raise RuntimeError("gradients are read after backward of the last micro-batch of a step, when they are whole, or after step()")
        self._step()
        self._made_early = True

    def _refuse_early(self) -> None:
        if self._made_early:
            raise RuntimeError("gradients of this step were read, which has made it: engine.step() comes next")

    # The pass over all forwards of the step. Whatever goes wrong in it, they are given up with it.
    def _repeat(self, accumulation: Accumulation) -> None:
        runtime = self._ready()
        forwards = accumulation.forwards()
        if not forwards:
            accumulation.end()
            raise RuntimeError("step() without a backward: engine.backward(loss) comes first; the forwards are given up")
        try:
            with accumulation.modes_of(forwards):
                self._begin(reads_ahead=False, forwards=len(forwards))
                accumulation.repeats()
                runtime.repeat(forwards, accumulation.loss)
        except BaseException:
            runtime.give_up("the step failed")
            accumulation.end()
            self.micro_steps = 0
            raise

    # What the commit of the last step says: torch's random state as the step left it, the rest as it is when the next pass
    # begins, since schedulers of others make their steps in between.
    def _describe(self) -> None:
        self._core.describe(self.global_steps, self._kept())

    # What is gathered for looking at has its values no more once a forward begins, which fetches its own.
    def _before_pass(self) -> None:
        if self._looked_at:
            self._end_of_looking()
        self._describe()

    def _end_of_looking(self) -> None:
        looked_at, self._looked_at = self._looked_at, []
        self._gathered = False
        self._weights.take_back(looked_at)
        self._ready().values_were_here()

    # ValueError, TypeError: it cannot be kept.
    def _kept(self) -> str:
        if self._gathered:
            raise RuntimeError("a forward within engine.gathered(write_back=True): what was changed is the engine's when that is over")
        kept: Dict[str, Any] = {
            "client": self.client_state,
            "skipped": self.skipped_steps,
            "lr": [float(group["lr"]) for group in self.optimizer.param_groups],
            "groups": [values_of(group) for group in self.optimizer.param_groups],
            "given": self._identity,
            "torch_rng": self._rng,
            "ranks": [self._ranks.rank, self._ranks.world],
            "watched": self._watched,
            "samples": self._samples if self._watch is None else self._watch.samples,
            "written": self._written_bytes(),
        }
        if self._partly_written:
            kept["partly_written"] = True
        if self.lr_scheduler is not None:
            state = self.lr_scheduler.state_dict()
            kept["scheduler"] = {name: value for name, value in state.items() if _is_kept(value)}
        # A step is what is gone on from: what forwards of the next one have changed by now comes with them again.
        if not self._accumulation.under_way or self._kept_buffers is None:
            self._kept_buffers = {name: buffer.detach().clone() for name, buffer in self._changed_buffers().items()}
        kept["buffers"] = self._kept_buffers
        if self._told_of_buffers:
            kept["large_buffers"] = True
        text = json.dumps(encode(kept), allow_nan=False)
        if len(text) > _MOST_KEPT:
            raise ValueError(
                f"client_state, the scheduler's state and buffers that change take {len(text)} bytes, and a commit has room for {_MOST_KEPT}: "
                "keep what is large in a file of your own"
            )
        return text

    # Persistent buffers that training changes (running means): a state_dict has them, and so has a commit.
    def _changed_buffers(self) -> Dict[str, torch.Tensor]:
        changed = {}
        for name, (module, short, first, version) in self._buffers.items():
            buffer = module._buffers[short]
            if buffer is not None and (buffer is not first or buffer._version != version or counts_no_versions(module)):
                changed[name] = buffer
        size = sum(buffer.numel() * buffer.element_size() for buffer in changed.values())
        if size > _MOST_BUFFERS:
            if not self._told_of_buffers:
                self._told_of_buffers = True
                warnings.warn(f"{size} bytes of buffers change: too much for every commit; save model.state_dict() yourself", stacklevel=2)
            return {}
        if changed and self._ranks.world > 1:
            raise RuntimeError(
                f"{next(iter(changed))} is changed by training, as BatchNorm's statistics are: ranks would change it each in its own way. "
                "Train with one process, or use a layer without (LayerNorm, GroupNorm, BatchNorm with track_running_stats=False)"
            )
        return changed

    def train_batch(
        self,
        batches: Union[Sequence[Any], Iterator[Any], None] = None,
        loss: Optional[Callable[[nn.Module, Any], torch.Tensor]] = None,
        data_iter: Optional[Iterator[Any]] = None,
    ) -> torch.Tensor:
        """A whole step over ``gradient_accumulation_steps`` micro-batches. Returns the mean of their losses, over all ranks.

        batches: a list of them, or an iterator. A mapping is passed to the model by name, a tuple or list in order, anything else
        as it is. loss: from the module and a micro-batch to its loss; by default the model's own (``.loss``, ``["loss"]``, the
        first of a tuple, or what it returns).
        """
        source = data_iter if batches is None else batches
        if source is None:
            raise TypeError("train_batch needs its micro-batches")
        self._tell_of_checkpoint()
        count = self._settings.micro_batches
        if isinstance(source, (list, tuple)):
            given = list(source)
        else:
            given = [next(source) for _ in range(count)]  # type: ignore[call-overload,arg-type]
        if len(given) != count:
            raise ValueError(f"{len(given)} micro-batches given, gradient_accumulation_steps is {count}")
        of = loss or _loss_of
        if self._runtime is None and self._settings.nothing_trains:
            raise RuntimeError("no parameter of the model requires a gradient: there is nothing to train")
        if self._runtime is None:
            self._materialize((), {}, lambda: of(self.module, given[0]))
        runtime = self._ready()
        runtime.check_trains()
        if not self.module.training:
            raise RuntimeError("the module is in evaluation mode: call engine.train() first")
        if self._accumulation.backwards:
            raise RuntimeError("a step of forwards one by one is under way: step() ends it, zero_grad() gives it up")
        losses = None if count > 1 and runtime.changing else self._all_at_once(runtime, of, given)
        if losses is None:
            losses = self._one_by_one(runtime, of, given)
        self._update()
        return torch.tensor(sum(losses) / len(losses) if self._ranks.world == 1 else self._result["loss"])

    # The losses of the micro-batches, block by block. None: their forwards change attributes, and nothing has come of it.
    def _all_at_once(self, runtime: Runtime, of: Callable[[nn.Module, Any], torch.Tensor], given: Sequence[Any]) -> Optional[List[float]]:
        self._begin()
        try:
            return runtime.train_batch([functools.partial(of, self.module, batch) for batch in given])
        except ForwardsChange:
            return None
        except BaseException:
            runtime.give_up("the step failed")
            raise

    # The same, each forward after the other: they are computed again in the step.
    def _one_by_one(self, runtime: Runtime, of: Callable[[nn.Module, Any], torch.Tensor], given: Sequence[Any]) -> List[float]:
        losses, after = [], RandomState.now()
        changed: List[nn.Module] = []
        try:
            for number, (batch, state) in enumerate(zip(given, runtime.random_states(len(given)))):
                state.restore()
                loss = of(self.module, batch)
                changed = merged(changed, runtime.changed_last)
                self.backward(loss)
                losses.append(float(loss.detach()))
                after = RandomState.now() if number == 0 else after
        except BaseException:
            self.zero_grad()
            raise
        after.restore()
        runtime.settle_changing(changed)
        return losses

    def train(self, mode: bool = True) -> "Engine":
        self.module.train(mode)
        return self

    def eval(self) -> "Engine":
        self.module.eval()
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Backwards since the last step count for nothing. After a step there is nothing to do: its gradients end with it."""
        self._refuse_early()
        self._accumulation.drop_gradients()
        self.micro_steps = 0
        if self._runtime is not None and self._runtime.is_open and self._runtime.gradient_came:
            self._runtime.give_up("zero_grad")

    def gradient_accumulation_steps(self) -> int:
        return self._settings.micro_batches

    @property
    def micro_batch_size(self) -> Optional[int]:
        """Samples of a micro-batch, as the configuration says it; None: it does not."""
        return self._settings.micro_batch_size or None

    @property
    def world_size(self) -> int:
        """Processes that train together."""
        return self._settings.world

    @property
    def global_rank(self) -> int:
        """Which of them this is; 0 before the first forward."""
        return self._ranks.rank

    def abort(self, why: str) -> None:
        """Over several ranks: ends the run on all of them, with `why` as the reason. The last commit stands."""
        self._ranks.abort(why)

    def get_global_grad_norm(self) -> Optional[float]:
        """Of the last step, before clipping; None before the first."""
        return self._result.get("grad_norm")

    def get_lr(self) -> List[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    @property
    def last_step(self) -> Dict[str, Any]:
        """What the engine says of the last step: loss, grad_norm, seconds, stall_io_seconds, bytes moved."""
        return dict(self._result)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The model's ``generate``: each pass fetches its blocks."""
        return self.module.generate(*args, **kwargs)  # type: ignore[operator]

    # --- state

    def flush(self) -> None:
        """The last step is applied and committed when this returns."""
        self._ready()
        self._describe()
        self._core.flush()

    def parameter_names(self) -> List[str]:
        return [name for block in self._blocks for name, _ in block.parameters]

    def read_state(self, parameter: nn.Parameter, kind: str = "parameter") -> torch.Tensor:
        """One parameter's fp32 master, "first moment", "second moment" or "gradient" (of the last step, before clipping).

        Between backward and ``step()`` the gradient is that of the step to come, whose update is made by reading it; ``step()`` must
        follow. Over several ranks all of them call it, and each gets the whole of it.
        """
        self._ready()
        if kind == "gradient":
            self._make_early()
        if not self._gathered:
            self._describe()
        value = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
        self._core.read(self._names[id(parameter)], kind, value.data_ptr(), value.numel() * 4)
        return value

    def write_state(self, parameter: nn.Parameter, value: torch.Tensor, kind: str = "parameter") -> None:
        """Writes it, and commits that. Over several ranks all of them call it, with the same value."""
        self._ready().check_trains()
        if tuple(value.shape) != tuple(parameter.shape):
            raise ValueError(f"a value of shape {tuple(value.shape)} for a parameter of {tuple(parameter.shape)}")
        value = value.detach().to("cpu", torch.float32).contiguous()
        self._core.write(self._names[id(parameter)], kind, value.data_ptr(), list(value.shape))

    @contextmanager
    def gathered(self, parameters: Optional[Sequence[nn.Parameter]] = None, write_back: bool = False, source: int = 0) -> Iterator[None]:
        """All of these parameters (default: all) have their values, in the dtype that they came in, up to the next forward at the latest.

        write_back: what was changed within is written to the engine at the end. They must fit into memory. Over several ranks all of
        them come here; what rank ``source`` has changed is written.
        """
        runtime = self._ready()
        if runtime.is_inside and not write_back:
            with runtime.fetched(list(parameters or [p for b in self._blocks for _, p in b.parameters])):
                yield
            return
        if runtime.is_open:
            raise RuntimeError("a step is open: its weights are gathered between step() and the next forward")
        if write_back:
            runtime.check_trains()
        wanted = list(parameters) if parameters is not None else [p for b in self._blocks for _, p in b.parameters]
        read = []
        if self._gathered:
            raise RuntimeError("engine.gathered() within itself")
        for parameter in wanted:
            value = self.read_state(parameter).to(self._dtypes[id(parameter)])
            read.append(value.clone() if write_back else value)
            self._weights.lend(parameter, value)
        self._gathered = True
        if not write_back:
            self._looked_at = wanted
        try:
            yield
            if write_back:
                self._gathered = False
                changed = [not torch.equal(parameter.data, before) for parameter, before in zip(wanted, read)]
                changed = json.loads(self._ranks.texts("which values were changed", json.dumps(changed))[source])
                self._write_back([parameter for parameter, whether in zip(wanted, changed) if whether], source)
        finally:
            if write_back:
                self._gathered = False
                self._weights.take_back(wanted)
                runtime.values_were_here()
            elif self._looked_at is wanted:
                self._end_of_looking()

    # Each is a commit: between the first and the last of them commits say that the state is neither the old nor the new one.
    def _write_back(self, parameters: Sequence[nn.Parameter], source: int) -> None:
        if len(parameters) > 1:
            self._mark_partly_written(True)
        for parameter in parameters:
            value = parameter.data.contiguous()
            self._ranks.share(value, source)
            self.write_state(parameter, value)
        if len(parameters) > 1:
            self._mark_partly_written(False)

    # As it came in; None where the parameter has it just now.
    def _value_of(self, parameter: nn.Parameter) -> Optional[torch.Tensor]:
        return self._copy_of(parameter) if self._weights.is_hidden(parameter) else None

    def _copy_of(self, parameter: nn.Parameter, wants_graph: bool = False) -> torch.Tensor:
        runtime = self._ready()
        if runtime.is_open:
            name = next(name for name, each in self._parameters() if each is parameter)
            if wants_graph or runtime.is_inside:
                raise RuntimeError(OUTSIDE.format(name))
            raise RuntimeError(f"a step is open: {name} is read between step() and the next forward")
        return self.read_state(parameter).to(self._dtypes[id(parameter)])

    def _patch_state_dict(self) -> None:
        own, load = self.module.state_dict, self.module.load_state_dict
        engine = self

        @functools.wraps(own)
        def state_dict(*args: Any, **kwargs: Any) -> Any:
            with engine.gathered():
                return own(*args, **kwargs)

        @functools.wraps(load)
        def load_state_dict(*args: Any, **kwargs: Any) -> Any:
            if kwargs.pop("assign", False):
                raise ValueError("load_state_dict(assign=True) would put other parameters in the place of the engine's")
            with engine.gathered(write_back=True):
                return load(*args, **kwargs)

        self.module.state_dict = state_dict  # type: ignore[method-assign]
        self.module.load_state_dict = load_state_dict  # type: ignore[method-assign]
        if self.zero_grad_of_module:
            self.module.zero_grad = self.zero_grad  # type: ignore[method-assign]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's, whole: every parameter with its values, in the dtype that it came in."""
        return self.module.state_dict(*args, **kwargs)

    def save_checkpoint(
        self,
        save_dir: PathLike,
        tag: Optional[str] = None,
        client_state: Optional[Mapping[str, Any]] = None,
        *,
        save_latest: bool = True,
        replaces_others: bool = False,
        wait: bool = False,
    ) -> str:
        """A whole copy of the run in ``save_dir``, which stays as it is while training goes on. Returns its path.

        It returns when the commit is retained; a thread copies it beside the steps that follow, and the path, the tag and ``latest`` are
        there once the copy is whole and durable. What it has, client_state, random numbers, scheduler and loss scale too, is of the moment
        of the call. The next ``save_checkpoint``, ``load_checkpoint``, ``export_checkpoint``, ``wait_for_checkpoint`` and ``close`` wait
        for it. An error of the copy is raised once, by the first of these and ``step`` and ``train_batch``: ``step`` raises it before
        it does anything, and may be called again. With state in memory the update of the next step waits for the copy; on a drive with
        two versions, that of the step after.

        tag: a name for it beside its own, ``step-N``. client_state: JSON, given back by ``load_checkpoint``. save_latest: False leaves
        ``latest`` as it is, which names the checkpoint that is loaded without a tag. A second one of the same step takes the place of the
        first, and is waited for; replaces_others: also where another engine has written that. wait: it is whole when this returns. Over
        several ranks all of them call it, for one directory that all of them see; each writes its part, and each gets its own client_state
        back.
        """
        self._ready()
        self.wait_for_checkpoint()
        save_latest, wait = truth(save_latest, "save_latest"), truth(wait, "wait")
        replaces_others = truth(replaces_others, "replaces_others")
        self._check_tag(os.fspath(save_dir), tag)
        if client_state is not None:
            before, self.client_state = self.client_state, dict(client_state)
            try:
                self._kept()
            except (TypeError, ValueError):
                self.client_state = before
                raise
        self._describe()
        return self._checkpoint(os.fspath(save_dir), tag or "", save_latest, replaces_others, wait)

    def wait_for_checkpoint(self) -> None:
        """Blocks until the checkpoint of the last ``save_checkpoint`` is whole and durable under its name, and raises its error.

        Returns at once where none is being copied. Between steps. Over several ranks all of them call it.
        """
        if self._core is None or self._core.closed or self._copied is None:
            return
        self._copied = None
        self._core.finish_checkpoint()

    # For others who read it. Its error is raised as ever. A pass that is open is not waited for.
    def _settle_checkpoint(self) -> None:
        if self._copied is not None and self._runtime is not None and not self._closed and not self._runtime.is_open:
            self._core.settle_checkpoint()

    # ValueError: a name that is none, or a checkpoint's own. Before the checkpoint is written, which takes its time.
    def _check_tag(self, save_dir: str, tag: Any) -> None:
        if tag is None:
            return
        own = _is_own(tag) and tag != _STEP % self.global_steps
        if own or not _is_tag(tag):
            raise ValueError(f"tag is {tag!r}: a name within the directory, not beginning with a dot, that no other checkpoint has or will have")
        link = os.path.join(save_dir, tag)
        if exists(link, follow=False) and not os.path.islink(link) and tag != _STEP % self.global_steps:
            raise FileExistsError(errno.EEXIST, "something else than a checkpoint's tag has this name", link)

    # What a kill has left of a replacement is whole, and this engine may put its own in its place if the run is the same.
    def _check_is_of_this_run(self, path: str) -> None:
        if (json.loads(_core.record_of([path])) or {}).get("run_id") != self._run_id:
            why = "a checkpoint of this step is there, of another run, whose replacement was interrupted: rename it to step-N or remove it"
            raise FileExistsError(errno.EEXIST, why, path)

    # One of the same step that is there already stands until the new one does, which is waited for then.
    def _checkpoint(self, parent: str, tag: str, latest: bool, replaces_others: bool, wait: bool) -> str:
        with contextlib.ExitStack() as lock:
            self._ranks.on_first("the directory of checkpoints", lambda: lock.enter_context(checkpoint_names.locked(parent)))
            path = self._begin_checkpoint(parent, tag, latest, replaces_others)
        if wait:
            self.wait_for_checkpoint()
        return path

    def _begin_checkpoint(self, parent: str, tag: str, latest: bool, replaces_others: bool) -> str:
        name = _STEP % self.global_steps
        old, aside = os.path.join(parent, name), os.path.join(parent, checkpoint_names.REPLACED % name)
        description = json.dumps(_parameters.with_buffers(self._layout, self._buffers), allow_nan=False)

        def begin() -> None:
            self._copied = self._core.begin_checkpoint(parent, tag, latest, description)
            # From here on what has its name is this engine's, however the copy ends.
            self._written.add(os.path.realpath(self._copied))
            checkpoint_names.begun(self, parent)

        found: List[str] = []
        self._ranks.on_first("which directories of this step exist", lambda: found.extend("yn"[not exists(each, follow=False)] for each in (old, aside)))
        there = self._ranks.texts("which directories of this step exist", "".join(found))[0]
        if there == "ny" and not (replaces_others or os.path.realpath(old) in self._written):
            self._ranks.on_first("the checkpoint that stands in", lambda: self._check_is_of_this_run(aside))
        if there == "nn":
            begin()
            return old
        if there[0] == "y":
            if os.path.realpath(old) not in self._written and not replaces_others:
                raise FileExistsError(
                    errno.EEXIST, "a checkpoint of this step is there that this engine has not written: remove it, or use another directory", old
                )

            def move_aside() -> None:
                shutil.rmtree(aside, ignore_errors=True)
                os.rename(old, aside)

            self._ranks.on_first("the old checkpoint", move_aside)
        try:
            begin()
            self.wait_for_checkpoint()
        except BaseException:
            if self._ranks.rank == 0 and there[0] == "y" and not exists(old, follow=False):
                os.rename(aside, old)
            raise
        if self._ranks.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)  # also where a kill came before this line the last time
        return old

    def load_checkpoint(
        self,
        load_dir: PathLike,
        tag: Optional[str] = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
        *,
        names: deepspeeds.Names = None,
    ) -> Tuple[Optional[str], Dict[str, Any]]:
        """Goes on from a checkpoint. Returns its path and its ``client_state``. Waits for what ``save_checkpoint`` copies into load_dir.

        Before the first forward that one reads it; later the run ends, and another one begins in its place. The state directory must hold
        no run, or ``overwrite=True`` was given. The checkpoint may be of any number of ranks.

        load_lr_scheduler_states: False leaves the scheduler as it is; learning rates go on from the checkpoint until its next step.
        load_module_only: the model gets the values of a checkpoint of Penstock's, in its own types, and nothing else goes on: in an engine
        that has begun, moments stay. load_module_strict: False leaves those that the checkpoint has not as they are, and what it has
        besides alone; for load_module_only, since a run goes on with the very parameters that it had. load_optimizer_states=False is
        refused: a run goes on whole, or gives its weights; so is custom_load_fn.

        It may be DeepSpeed's: ZeRO-1, 2, 3 of any number of ranks, or universal. Masters, moments, steps, loss scale, learning rates and
        the scheduler's count go on, and nothing in its files is executed. names: where parameters are called otherwise there, a mapping
        from the module's names to the checkpoint's, or the path of a JSON file with one. Raises ValueError naming a parameter that is
        missing there, of another shape, or left over.
        """
        if custom_load_fn is not None:
            raise NotImplementedError("custom_load_fn is not served: load_module_only=True takes the weights, by their names")
        directory = os.fspath(load_dir)
        only = truth(load_module_only, "load_module_only")
        strict = truth(load_module_strict, "load_module_strict")
        if not truth(load_optimizer_states, "load_optimizer_states") and not only:
            raise ValueError(
                f"load_optimizer_states=False: {directory} is gone on with as a whole, or gives its weights alone: load_module_only=True"
            )
        takes_scheduler = truth(load_lr_scheduler_states, "load_lr_scheduler_states")
        if tag is not None and "\0" in str(tag):
            raise ValueError(f"tag is {tag!r}: no checkpoint has a zero byte in its name")
        self._check_may_load(only)
        self.wait_for_checkpoint()
        checkpoint_names.settle(directory)
        if deepspeeds.is_deepspeeds(directory, tag):
            path = directory if tag is None else os.path.join(directory, tag)
            if only:
                raise ValueError(
                    f"{path}: load_module_only: all of a checkpoint of DeepSpeed's is loaded; its weights alone are taken by the model's "
                    "load_state_dict (deepspeed.utils.zero_to_fp32)"
                )
            found, client = self._load_deepspeeds(path, deepspeeds.names_of(names), takes_scheduler)
            self._start_over()
            return found, client
        if tag is None:
            tag = checkpoint_names.newest(directory)
            if tag is None:
                if names is not None:
                    raise ValueError(f"{directory} holds no checkpoint of DeepSpeed's: only those may have other names=")
                warnings.warn(f"{directory} holds no checkpoint (no file `{checkpoint_names.LATEST}`): the run begins anew", stacklevel=2)
                return None, {}
            if not tag:
                raise ValueError(f"{os.path.join(directory, checkpoint_names.LATEST)} is empty: name the checkpoint, with tag=")
        path = checkpoint_names.place_of(directory, tag)
        if names is not None:
            raise ValueError(f"{directory} holds no checkpoint of DeepSpeed's: only those may have other names=")
        try:
            kept = decode(json.loads(_core.record_of([path], "step"))) or {}
        except FileNotFoundError as error:  # "never committed": it has its name since it was whole
            raise OSError(errno.EIO, f"the checkpoint is damaged ({error.strerror}): load another one, with tag=", path) from None
        if only:
            self._take_weights(path, strict)
        else:
            self._verify_before_giving_up(lambda rank, world: _core.verify_checkpoint(path, rank, world))
            self._restore_from, self._found, self._takes_scheduler = path, None, takes_scheduler
            self._start_over()
        return path, kept.get("client", {})

    # The engine goes on with what it has where what is to take its place is damaged: known on all ranks before any gives it up. One that has
    # not begun has nothing yet; the run that its first forward replaces is looked after there.
    def _verify_before_giving_up(self, verify: Callable[[int, int], None], always: bool = False) -> None:
        if self._runtime is None:
            if always:
                verify(0, 1)
            return
        failure: Optional[Exception] = None
        try:
            verify(self._ranks.rank, self._ranks.world)
        except Exception as error:  # noqa: B902
            failure = error
        told = self._ranks.texts("whether the checkpoint is whole", "" if failure is None else str(failure))
        if failure is not None:
            raise failure
        for rank, text in enumerate(told):
            if text:
                raise OSError(errno.EIO, f"rank {rank}: {text}")

    def _check_may_load(self, only_weights: bool) -> None:
        if self._closed:
            raise RuntimeError("this engine was closed")
        if self._runtime is None:
            return
        if self._ready().is_open or self._accumulation.backwards:
            raise RuntimeError("a step is open: a checkpoint is loaded between step() and the next forward")
        if only_weights or not self._settings.state_dirs or self._overwrite:
            return
        raise RuntimeError(
            f"the engine has begun a run in {self._settings.state_dirs[0]}, which the checkpoint would replace: that takes overwrite=True of "
            "initialize; or load it before the first forward"
        )

    # Values of another run, in the types of the parameters, and its buffers.
    def _take_weights(self, path: str, strict: bool) -> None:
        from .._fp32 import open_weights

        weights = open_weights(path)
        begun = self._runtime is not None
        if self._values_are_gone and not begun:
            raise ValueError("this model's values went with its engine that was closed: build the model anew, or load the checkpoint whole")
        buffers = {name: module._buffers[short] for name, (module, short, _, _) in persistent_buffers(self.module).items()}
        own = {
            **buffers,
            **{
                f"{prefix}.{name}" if prefix else name: parameter
                for prefix, module in self.module.named_modules(remove_duplicate=False)
                for name, parameter in module._parameters.items()
                if parameter is not None
            },
        }
        there = weights.names(exclude_frozen=False)
        if strict:
            for names, holder, other in ((own, path, "the model"), (there, "the model", path)):
                lacking = next((name for name in names if name not in (there if names is own else own)), None)
                if lacking is not None:
                    raise ValueError(f"{holder} has no {lacking}, which {other} has: load_module_strict=False leaves it out")
        taken = {id(own[name]): (name, own[name]) for name in there if name in own}
        for name, tensor in taken.values():
            shape = weights.kind_of(name)[0]
            if list(tensor.shape) != shape:
                raise ValueError(f"{path}: {name} is {shape} there and {list(tensor.shape)} in this model")
        # A half of its values would be worse than none.
        self._verify_before_giving_up(lambda rank, world: _core.verify_checkpoint(path, rank, world), always=True)
        self._mark_partly_written(begun)
        for name, tensor in taken.values():
            value = weights.read(weights.tied.get(name, name))
            if begun and name not in buffers:
                self.write_state(tensor, value.to(self._dtypes[id(tensor)]))  # type: ignore[arg-type]
                continue
            with torch.no_grad():
                tensor.data.copy_(value)
            give_back(tensor)
        self._mark_partly_written(False)

    def _mark_partly_written(self, whether: bool) -> None:
        if self._runtime is not None:
            self._partly_written = whether
            self.flush()

    # The run that has begun ends without a commit, and another one takes its place, which begins where a checkpoint stands.
    def _start_over(self) -> None:
        if self._runtime is None:
            return
        written = self._written_bytes()
        try:
            self._runtime.close()
            if self._watch is not None:
                self._watch.close()
            self._detach()
            _started.discard(self)
            self._runtime, self._watch, self._values_are_gone, self._resume = None, None, True, False
            self._result, self._kept_buffers, self.micro_steps, self._made_early = {}, None, 0, False
            self._accumulation.end()
            move_buffers(self.module, self.device)
            self._is_verified = True
            with self._met():
                self._make_core(self._uses)
        except BaseException:
            self.close()
            self.module.forward = _closed_forward  # type: ignore[method-assign]
            raise
        self._written_before = max(self._written_before, written)

    def _load_deepspeeds(self, path: str, names: Dict[str, str], takes_scheduler: bool) -> Tuple[str, Dict[str, Any]]:
        if self._runtime is None:
            self._look_at_parameters()
        deepspeeds.check_served(self._parameters(), self._group_of(), self._described)
        found = deepspeeds.open_checkpoint(
            path,
            names,
            self._parameters(),
            list(persistent_buffers(self.module)),
            _MOST_BUFFERS,
            takes_scheduler,
        )
        client = deepspeeds.client_state_of(found)
        self._verify_before_giving_up(lambda rank, world: deepspeeds.verify(found, self._parameters(), rank, world))
        self._restore_from, self._found = found.path, found
        self.global_steps, self.skipped_steps = found.said["step"], found.said["step"] - found.said["updates"]
        return found.path, client

    def export_checkpoint(
        self,
        save_dir: PathLike,
        tag: Optional[str] = None,
        *,
        names: deepspeeds.Names = None,
        torch_optimizer: Optional[bool] = None,
        overwrite: bool = False,
    ) -> str:
        """Writes the state as DeepSpeed's universal checkpoint, which it loads with ``"checkpoint": {"load_universal": true}`` under any stage
        and number of ranks. Returns its path.

        tag: ``global_stepN_universal``. names: where parameters are called otherwise there, as for ``load_checkpoint``. torch_optimizer:
        it will be one of torch's own (an optimizer handed to deepspeed.initialize, or ``"torch_adam": true``), which counts steps in a
        tensor; default: as in the checkpoint that was loaded, else whether the configuration says so or an optimizer was handed over.
        overwrite: a universal checkpoint of that tag may be replaced: the old one stands until the new one is whole. Memory: a tile, and
        48 MiB. Of one rank, between steps.
        """
        if self._ready().is_open:
            raise RuntimeError("a step is open: the state is written between step() and the next forward")
        self.wait_for_checkpoint()
        if self._ranks.world > 1:
            raise ValueError("several ranks do not export: save_checkpoint, load that with one process, and export there")
        deepspeeds.check_served(self._parameters(), self._group_of(), self._described)
        if self.global_steps == self.skipped_steps:
            raise ValueError("no step has changed the weights yet: there are no moments to export")
        if tag is None:
            tag = f"global_step{self.global_steps}_universal"
        if not _is_tag(tag) or _is_own(tag):
            raise ValueError(f"tag is {tag!r}: a name within the directory, not beginning with a dot, that no checkpoint of save_checkpoint has")
        path = os.path.join(os.fspath(save_dir), tag)
        if exists(path, follow=False) and not overwrite:
            raise FileExistsError(errno.EEXIST, "a checkpoint is there already: overwrite=True replaces it", path)
        mapped = {name: theirs for name, theirs in deepspeeds.names_of(names).items() if name not in persistent_buffers(self.module)}
        known = self.parameter_names()
        unknown = [name for name in mapped if name not in known]
        if unknown:
            raise ValueError(f"names= has {unknown[0]}, which is no parameter of this model")
        client, left_out = deepspeeds.plain_client(self.client_state)
        if left_out:
            warnings.warn(
                f"client_state: {', '.join(left_out)} is more than numbers of 64 bits, texts, lists and dicts, or has a name of DeepSpeed's own, and "
                "left out",
                stacklevel=2,
            )
        if len({group["lr"] for group in self.optimizer.param_groups}) > 1:
            taken = "leaves them as its own optimizer has them"
            if self.lr_scheduler is not None:
                taken = "gives all the first one's for a step, unless its script sets them after load_checkpoint (docs/deepspeed.md)"
            warnings.warn(f"groups have different learning rates: DeepSpeed's stage 3 {taken}", stacklevel=2)
        if self._changed_buffers():
            warnings.warn(
                f"DeepSpeed loads no buffers from a universal checkpoint: {', '.join(self._changed_buffers())} will be as the model has them there",
                stacklevel=2,
            )
        if torch_optimizer is None:
            torch_optimizer = self._torch_optimizer()
        self._describe()
        what = {
            "directory": os.fspath(save_dir),
            "tag": tag,
            "overwrite": truth(overwrite, "overwrite"),
            "names": mapped,
            "groups": deepspeeds.group_options(self.optimizer.param_groups),
            "lr_scheduler": deepspeeds.scheduler_state(self.lr_scheduler, self.global_steps - self.skipped_steps),
            "client": client,
            "samples": self._samples if self._watch is None else self._watch.samples,
            "torch_optimizer": truth(torch_optimizer, "torch_optimizer"),
            "has_scheduler": self.lr_scheduler is not None,
        }
        self._core.export_checkpoint(json.dumps(what, allow_nan=False), [[name for name, _ in block.parameters] for block in self._blocks])
        return path

    # Whether DeepSpeed's script has one of torch's own, as far as is known.
    def _torch_optimizer(self) -> bool:
        imported = self._info()["run"].get("imported")
        if imported is not None:
            return bool(imported["torch_optimizer"])
        if self._optimizer_was_given:
            return type(self._given).__module__.startswith("torch.")
        described = self._settings.config.get("optimizer") or {}
        return bool((described.get("params") or {}).get("torch_adam"))

    # --- looking at it

    def _info(self) -> Dict[str, Any]:
        return dict(json.loads(self._core.info()))

    def plan(self) -> Dict[str, Any]:
        """What was planned and used so far: bytes of state, of the drive, of the budget, and the least that would do."""
        self._ready()
        return self._info()

    def report(self) -> Report:
        """What this process has trained: losses, bytes, seconds, peaks, what bounds a step, a list of steps; of a closed engine the last.

        A dictionary; ``report().html(path)`` is a page, and a notebook shows it as one. Between steps only.
        """
        if self._last_report is not None:
            return Report(self._last_report)
        if self._ready().is_open:
            raise RuntimeError("a step is open: the report is given between step() and the next forward")
        return self._report_of(self._ready())

    def _report_of(self, runtime: Runtime) -> Report:
        return Report.of(self._core.report(), runtime.device_report(), self._watch.product_flops_per_second if self._watch is not None else 0.0)

    def log(self) -> List[str]:
        """What the engine had to say since the last call."""
        return list(self._core.take_log()) if self._core is not None else []

    def are_here(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether these have their values just now, within a forward that is under way."""
        return self._runtime is not None and self._runtime.are_here(parameters)

    @property
    def is_inside(self) -> bool:
        """Whether this thread is in the model's forward."""
        return self._runtime is not None and self._runtime.is_inside

    def has(self, parameter: nn.Parameter) -> bool:
        """Whether this very parameter is of the engine's model."""
        return any(parameter is each for block in self._blocks for _, each in block.parameters)

    @property
    def started(self) -> bool:
        """Whether the parameters are the engine's: from the first forward on, until it is closed."""
        return self._runtime is not None and not self._closed

    @property
    def closed(self) -> bool:
        return self._closed

    def _ready(self) -> Runtime:
        if self._closed:
            raise RuntimeError("this engine was closed")
        if self._runtime is None:
            raise RuntimeError("the engine has not seen the model yet: call it on a batch first")
        if self._runtime.spoiled:
            raise RuntimeError(f"{self._runtime.spoiled}. This engine ends here: close() it, and go on from its last commit with resume=True")
        return self._runtime

    def close(self, keep_values: bool = False) -> None:
        """Ends it: the last step is committed, and the parameters stay without values (``state_dict()`` before).

        keep_values: they get their values, each in the type that it came in: in files of the drive that has the state, which go with the
        last of them, else in memory. Over several ranks all of them give it then. Not committed is what was made after a weight was
        changed in place in the engine's memory."""
        if self._closed:
            return
        values = self._values_to_keep() if truth(keep_values, "keep_values") and self._runtime is not None else None
        self._closed = True
        _engines.discard(self)
        _started.discard(self)
        self._give_step_back()
        has_values = values is not None or (self._runtime is None and not self._values_are_gone)
        setattr(self.module, _MARK, "" if has_values else "closed")
        if self._runtime is None:
            self._stop_waiting()
            return
        try:
            self._runtime.close()
            try:
                self._end_run()
            finally:
                self.wait_for_checkpoint()
            if not self._runtime.spoiled:
                self._last_report = self._report_of(self._runtime)
        finally:
            if values is None:
                self.module.forward = _closed_forward  # type: ignore[method-assign]
            self._detach()
            if values is not None:
                self._whole.remove()
                for (_, parameter), value in zip(self._parameters(), values):
                    self._weights.lend(parameter, value)
        if self._watch is not None:
            self._watch.complain()

    def _end_run(self) -> None:
        if self._runtime.spoiled:  # type: ignore[union-attr]
            return
        try:
            self._describe()
        finally:
            self._core.flush()
        if self._watch is not None:
            self._watch.close()

    def _values_to_keep(self) -> List[torch.Tensor]:
        self._ready().give_up("the engine was closed")
        dirs = self._settings.state_dirs
        with tensors_on_disk(os.path.dirname(os.path.abspath(dirs[0]))) if dirs else contextlib.nullcontext(lambda value: value) as place:
            return [place(self.read_state(parameter).to(self._dtypes[id(parameter)])) for _, parameter in self._parameters()]

    # The module has its own functions again, and the engine's memory and files are given up. The parameters have no values.
    def _detach(self) -> None:
        for name in ("state_dict", "load_state_dict", "zero_grad"):
            self.module.__dict__.pop(name, None)
        with contextlib.ExitStack() as all_of_it:  # from the last to the first, whatever a broken device says to one of them
            all_of_it.callback(self._ranks.close)
            all_of_it.callback(self._core.close)
            all_of_it.callback(move_buffers, self.module, torch.device("cpu"))
            all_of_it.callback(self._runtime.let_go)  # type: ignore[union-attr]

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


# What a model's forward may change, as generate()'s cache of keys and values: tracing changes a copy, since the forward itself follows.
def _apart(given: Any) -> Any:
    if given is None or isinstance(given, (torch.Tensor, nn.Module, str, bytes, int, float, list, tuple, dict)):
        return given
    try:
        return copy.deepcopy(given)
    except Exception:  # noqa: B902 - it is as its owner made it
        return given


def _apart_for(module: nn.Module, args: Tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return module(*(_apart(each) for each in args), **{name: _apart(each) for name, each in kwargs.items()})


def _closed_value(_: nn.Parameter, __: bool) -> torch.Tensor:
    raise RuntimeError("this model's engine was closed, and its values went with it")


def _closed_forward(*_: Any, **__: Any) -> Any:
    raise RuntimeError("this model's engine was closed: its weights are in the state directory; make an engine with resume=True")


# Of a checkpoint, within its directory.
def _is_tag(tag: Any) -> bool:
    if not isinstance(tag, str) or not tag or tag.startswith("."):
        return False
    if len(os.fsencode(tag)) > 200:  # names of 255 bytes are all that file systems take, and temporary ones are longer
        return False
    return "/" not in tag and "\0" not in tag and tag not in (checkpoint_names.LATEST, "latest_universal")


# Whether save_checkpoint gives such names itself.
def _is_own(tag: Any) -> bool:
    return isinstance(tag, str) and re.fullmatch(r"step-\d{8}", tag) is not None


# Functions of a scheduler are its program's, and not kept.
def _is_kept(value: Any) -> bool:
    try:
        encode(value)
    except TypeError:
        return False
    return True


def _arguments_of(batch: Any) -> Tuple[Tuple[Any, ...], Dict[str, Any]]:
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, (tuple, list)):
        return tuple(batch), {}
    return (batch,), {}


def _loss_of(module: nn.Module, batch: Any) -> torch.Tensor:
    args, kwargs = _arguments_of(batch)
    out = module(*args, **kwargs)
    if isinstance(out, torch.Tensor):
        return out
    if isinstance(out, Mapping) and "loss" in out:
        return out["loss"]  # type: ignore[no-any-return]
    if getattr(out, "loss", None) is not None:
        return out.loss  # type: ignore[no-any-return]
    if isinstance(out, (tuple, list)) and out:
        return out[0]  # type: ignore[no-any-return]
    raise TypeError("the model returned no loss: give it labels, or train_batch a loss= that computes one")


#: For initialize: the engine evaluates and generates only, whatever requires a gradient.
NO_OPTIMIZER: Any = object()


def initialize(
    model: Optional[nn.Module] = None,
    config: Any = None,
    optimizer: Union[torch.optim.Optimizer, Callable[[Any], torch.optim.Optimizer], None] = None,
    model_parameters: Any = None,
    lr_scheduler: Any = None,
    *,
    config_params: Any = None,
    state_dir: Union[None, PathLike, Sequence[PathLike]] = None,
    host_memory: Union[None, int, str] = None,
    dtype: Any = None,
    offload: Optional[str] = None,
    gradient_accumulation_steps: Optional[int] = None,
    forwards_per_step: Optional[int] = None,
    gradient_clipping: Optional[float] = None,
    blocks: Optional[Sequence[str]] = None,
    resume: Union[bool, str] = False,
    overwrite: bool = False,
    seed: int = 1,
    device: Union[None, str, int, torch.device] = None,
    progress: Optional[bool] = None,
    ranks: Optional[bool] = None,
    rank_timeout: float = 30.0,
    training_data: Any = None,
    collate_fn: Any = None,
    **unknown: Any,
) -> Tuple[Engine, EngineOptimizer, Optional[DeepSpeedDataLoader], Any]:
    """An engine for an unmodified torch module, after ``deepspeed.initialize``.

    model: with its values, in host memory; what is on a GPU is taken from there.
    config: a DeepSpeed configuration, as a dictionary or the path of a JSON file. What it gives and the engine does otherwise is a
        warning; what it cannot do is a ValueError. Arguments win over it.
    optimizer: a new torch.optim.AdamW, Adam, SGD or Adagrad (or a function from parameters to one): its groups and values are taken.
        Without it, the configuration's; without that, AdamW with torch's defaults. None is needed where no parameter requires a
        gradient: the engine evaluates and generates only.
    model_parameters: parameters, or groups of them, for the configuration's optimizer; the default is all that require gradients.
    lr_scheduler: of ``engine.optimizer``, or a function that makes one of it; ``engine.step()`` makes its steps.
    state_dir: a directory, or one for each drive, for weights and states; made where it is missing. Several share the bytes of a new
        run: in proportion to the measured speed of their drives, or to the weights of ["DIR=WEIGHT", ...]. Also
        ``"penstock": {"state_dirs": [...]}`` in the configuration, in place of nvme_path.
    host_memory: bytes, or "4GiB", that the engine may take for weights, gradients, states and transfers. What torch takes for
        activations comes on top. Default: as much as it likes; of a model of which nothing trains, half of what is free.
    dtype: torch.float32, bfloat16 or float16 (masters and states are fp32).
    offload: "nvme", "cpu" or "none": where weights and states live. Default: what the configuration's offload blocks say; "nvme" where
        there is a directory for them.
    gradient_accumulation_steps: micro-batches of a step, given all to ``engine.train_batch``, or one by one.
    forwards_per_step: of the model, where a loss is made of several (a pair of answers, two views of an image). Default: one for
        each micro-batch; more are noticed as they come, and computed twice.
    gradient_clipping: the largest global norm of a step's gradients; 0 for no bound. Default: the configuration's, else 0.
    blocks: names of modules that are fetched as one; parameters of none of them stay in memory for a whole pass. By default blocks are
        found. Also ``"penstock": {"blocks": [...]}`` in the configuration, and ``forwards_per_step`` likewise.
    resume: go on from what ``state_dir`` holds; "auto": if it holds anything.
    overwrite: what ``state_dir`` holds may be replaced.
    seed: of what the engine itself draws: the rounding of 8-bit states.
    device: that computes forward and backward: "cuda", "cuda:1", "cpu". Default: the GPU where torch has one, as with DeepSpeed; with
        torchrun each process has its own.
    progress: a line on stderr, or in a notebook's cell, with step, loss, tokens and bytes a second. Default: where a terminal or a
        notebook shows it, and no bar of tqdm is open.
    ranks: False: this process trains by itself, whatever others there are. Default: the processes of torch.distributed's process
        group train together, which is made of torchrun's environment where there is none and WORLD_SIZE is above 1.
    rank_timeout: seconds that one of them may give no sign of life; ten times as long may pass until all have come to their first
        forward.

    Returns (engine, engine.optimizer, None, the scheduler), as DeepSpeed does.
    """
    if model is None:
        raise TypeError("initialize needs model=")
    for name in ("args", "mpu"):
        if unknown.pop(name, None) is not None:
            raise ValueError(f"{name} is not served: config= says the configuration, and there is no parallelism but that of batches")
    if unknown:
        misspelt = min(unknown)
        near = difflib.get_close_matches(misspelt, inspect.signature(initialize).parameters, 1)
        raise TypeError(f"initialize has no argument {misspelt!r}" + (f" (did you mean {near[0]!r}?)" if near else ""))
    if not rank_timeout >= 1:
        raise ValueError(f"rank_timeout is {rank_timeout}: a second, or more")
    world = world_size(ranks)
    keywords = {
        "state_dir": state_dir,
        "host_memory": host_memory,
        "dtype": dtype,
        "offload": offload,
        "gradient_accumulation_steps": gradient_accumulation_steps,
        "forwards_per_step": forwards_per_step,
        "gradient_clipping": gradient_clipping,
        "blocks": blocks,
    }
    settings = Settings(config if config is not None else config_params, keywords, world)
    settings.device = choose_device(device)
    settings.progress = None if progress is None else truth(progress, "progress")
    overwrite = truth(overwrite, "overwrite")
    if resume != "auto":
        resume = truth(resume, "resume (or 'auto')")
    seed = whole_number(seed, "seed", 0, 2**63 - 1)
    settings.rank_timeout = rank_timeout
    for note in settings.notes:
        warnings.warn(note, stacklevel=2)
    parameters = model_parameters
    if parameters is None:
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    parameters = list(parameters)
    was_given = optimizer is not None
    if not isinstance(optimizer, torch.optim.Optimizer):
        settings.has_no_optimizer = optimizer is NO_OPTIMIZER
        if settings.has_no_optimizer or not any(parameter.requires_grad for parameter in model.parameters()):
            settings.nothing_trains = True
            optimizer = torch.optim.SGD(list(model.parameters()), lr=0.0)  # groups alone: it makes no step
        elif optimizer is not None:
            optimizer = optimizer(parameters)
        else:
            optimizer = _optimizer_of(settings.optimizer, parameters)
    loader = None
    if training_data is not None:
        if not settings.micro_batch_size:
            raise ValueError("training_data= is loaded in batches of the configuration's train_micro_batch_size_per_gpu, and there is none")
        loader = DeepSpeedDataLoader(training_data, settings.micro_batch_size, pin_memory=True, collate_fn=collate_fn, data_parallel_world_size=world)
    engine = Engine(model, settings, optimizer, lr_scheduler, settings.blocks, resume, overwrite, seed)
    engine._optimizer_was_given = was_given
    return engine, engine.optimizer, loader, engine.lr_scheduler


def _optimizer_of(described: Optional[Dict[str, Any]], parameters: List[Any]) -> torch.optim.Optimizer:
    if described is None:
        return torch.optim.AdamW(parameters)
    options = {name: value for name, value in described.items() if name != "type"}
    if "beta1" in options:
        options["betas"] = (options.pop("beta1"), options.pop("beta2"))
    if described["type"] == "Lion":
        return _Groups("Lion", parameters, {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0, **options})
    return getattr(torch.optim, described["type"])(parameters, **options)  # type: ignore[no-any-return]


class _Groups(torch.optim.Optimizer):
    """Groups and values of an optimizer that torch has not."""

    def __init__(self, kind: str, parameters: List[Any], defaults: Dict[str, Any]) -> None:
        super().__init__(parameters, defaults)
        self.__class__ = type(kind, (_Groups,), {})
