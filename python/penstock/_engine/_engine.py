"""The engine as Python sees it: DeepSpeed's calls over an unmodified torch module.

``Engine`` puts its parts together, and names what of them is public. Each part knows those above it only, but for ``Preparation``, which
connects ``Training`` and ``State`` with the run:

- ``Given``: the caller's module, optimizer and scheduler, and the settings
- ``Run``: the core, the patched modules, the weights, the watch, the other ranks; ``Places``: the directories of its state
- ``Record``: what every commit keeps beside weights and states
- ``Training``: forward, backward and step; ``WearBudget``: how long it may write
- ``State``: weights, moments and gradients as the caller reads and writes them
- ``Preparation``: makes the run with the ``FirstForward``, which shows the order of the blocks
- ``Saving``, ``Loading``, ``Exporting``: checkpoints; ``CheckpointCopy``: the one that is being copied
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import sys
import weakref
from typing import Any, Callable, Concatenate, Dict, Generic, List, Optional, ParamSpec, Sequence, Set, Type, TypeVar, Union

import torch
from torch import nn

from .._buffers import truth
from ._accumulation import Accumulation, Part
from ._checkpoint_copy import CheckpointCopy
from ._exporting import Exporting
from ._first_forward import FirstForward
from ._given import MARK, Given, closed_forward
from ._loading import Loading
from ._modules import forward_of_another
from ._places import Places
from ._preparation import Preparation
from ._ranks import end_group
from ._record import Record
from ._run import Run
from ._saving import Saving
from ._settings import Settings
from ._state import State
from ._training import Training
from ._wear import WearBudget

_Arguments = ParamSpec("_Arguments")
_Value = TypeVar("_Value")

_engines: "weakref.WeakSet[Engine]" = weakref.WeakSet()
# Until they are closed: the last step of an engine that nobody refers to any more is committed when Python exits.
_started: "Set[Engine]" = set()


def an_engine_is_open() -> bool:
    """Whether this process has an engine that was not closed."""
    return bool(_engines)


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


def _method(part: str, method: Callable[Concatenate[Any, _Arguments], _Value]) -> Callable[Concatenate[Any, _Arguments], _Value]:
    """The method of a part as the engine's own, with its signature and docstring."""

    @functools.wraps(method)
    def call(self: "Engine", *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Value:
        return method(getattr(self, part), *args, **kwargs)

    return call


class _Attribute(Generic[_Value]):
    """An attribute of a part as the engine's own."""

    def __init__(self, part: str, name: str, doc: str) -> None:
        self._part, self._name, self.__doc__ = part, name, doc

    def __get__(self, engine: "Optional[Engine]", _: "Type[Engine]") -> _Value:
        return self if engine is None else getattr(getattr(engine, self._part), self._name)  # type: ignore[no-any-return,return-value]

    def __set__(self, engine: "Engine", value: _Value) -> None:
        setattr(getattr(engine, self._part), self._name, value)


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
        optimizer_was_given: bool,
    ) -> None:
        self.module = model
        #: Where the model is computed, and its outputs are.
        self.device = settings.device
        self._settings = settings
        self._given = Given(model, settings, optimizer, scheduler, blocks, optimizer_was_given, lambda: self._training.make_step(), self.zero_grad)
        self._run = Run()
        self._places = Places(settings, self._run, resume, overwrite)
        self._copy = CheckpointCopy(self._run, settings.world)
        accumulation = Accumulation(model)
        self._record = Record(self._given, self._run, accumulation)
        self._wear = WearBudget(settings, self._run, self._record)
        self._training = Training(
            self._given, self._run, self._record, self._wear, self._copy, accumulation, lambda *forward: self._first_forward.look(*forward)
        )
        self._state = State(self._given, self._run, self._record, self._training)
        self._preparation = Preparation(
            self._given, self._run, self._places, self._record, self._wear, self._training, self._state, seed, lambda: _started.add(self)
        )
        self._first_forward = FirstForward(self._given, self._run, self._preparation.begin)
        self._saving = Saving(self._run, self._record, self._copy)
        self._loading = Loading(
            self._given, self._run, self._places, self._record, self._copy, self._training, self._state, self._preparation, self.close
        )
        self._exporting = Exporting(self._given, self._run, self._record, self._copy)
        self._given.take_steps()  # all was looked at
        self._first_forward.wait()
        setattr(model, MARK, "open")
        _engines.add(self)

    optimizer = _Attribute[Any]("_given", "optimizer", "The groups of the caller's optimizer; its steps are the engine's.")
    zero_grad_of_module = _Attribute[bool]("_given", "zero_grad_of_module", "Whether the module's becomes this one; set before the first forward.")

    @property
    def lr_scheduler(self) -> Any:
        """``step()`` makes its steps, and commits keep its state; None: there is none. Another one takes its place between steps."""
        return self._given.scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, scheduler: Any) -> None:
        self._given.take_scheduler(scheduler)
        self._record.note_scheduler()

    # --- training

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward. In training mode, with gradients, it belongs to a step: backward and step follow.

        With ``gradient_accumulation_steps`` above 1 (or ``forwards_per_step``) it is computed without a graph, and once more at the
        step, in one pass over all forwards of the step: each block is fetched once for all of them.

        Where the module's forward is another one for this call, as Lightning makes it its training_step, that one is the model's: what is
        called within is one pass. Without automatic optimization, when it makes whole steps, its calls of the model are passes of their own.
        """
        other = forward_of_another(self.module)
        if other is None or self._run.closed:
            return self.module(*args, **kwargs)
        call = functools.partial(self._call_as, other)
        try:
            if getattr(self.module, "automatic_optimization", True):
                self.module.forward = call  # type: ignore[method-assign]
            return self.module(*args, **kwargs)
        finally:
            if self.module.__dict__.get("forward") is call:
                self.module.forward = other  # type: ignore[method-assign]  # it is there for good
            elif forward_of_another(self.module) is None and not self._run.closed:
                self.module.forward = (self._run.runtime or self._first_forward).forward_of_model  # type: ignore[method-assign]

    def _call_as(self, other: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._run.runtime is None:
            called = self.module.forward
            self._first_forward.look(args, kwargs, other)
            self.module.forward = called  # type: ignore[method-assign]
        return self._run.ready().called(args, kwargs, Part(self.module, other))

    forward = __call__
    backward = _method("_training", Training.backward)
    step = _method("_training", Training.step)
    train_batch = _method("_training", Training.train_batch)
    zero_grad = _method("_training", Training.zero_grad)
    is_gradient_accumulation_boundary = _method("_training", Training.is_gradient_accumulation_boundary)
    set_gradient_accumulation_boundary = _method("_training", Training.set_gradient_accumulation_boundary)
    micro_steps = _Attribute[int]("_training", "micro_steps", "Calls of ``step()`` since the last update.")

    def train(self, mode: bool = True) -> "Engine":
        self.module.train(mode)
        return self

    def eval(self) -> "Engine":
        self.module.eval()
        return self

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The model's ``generate``: each pass fetches its blocks."""
        return self.module.generate(*args, **kwargs)  # type: ignore[operator]

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
        return self._run.ranks.rank

    def abort(self, why: str) -> None:
        """Over several ranks: ends the run on all of them, with `why` as the reason. The last commit stands."""
        self._run.ranks.abort(why)

    # --- the last step

    @property
    def last_step(self) -> Dict[str, Any]:
        """What the engine says of the last step: loss, grad_norm, seconds, stall_io_seconds, bytes moved."""
        return self._training.last_step

    def get_global_grad_norm(self) -> Optional[float]:
        """Of the last step, before clipping; None before the first."""
        return self._training.last_step.get("grad_norm")

    def get_lr(self) -> List[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    @property
    def global_steps(self) -> int:
        """Steps that the run has made, those before this process with it. Before the first forward of a run that is resumed, or of a
        checkpoint that was loaded: its last commit's. OSError: that cannot be read.
        """
        return self._preparation.steps()

    skipped_steps = _Attribute[int]("_record", "skipped_steps", "Those of the run whose gradients were not finite.")
    client_state = _Attribute[Dict[str, Any]]("_record", "client_state", "Kept with every commit, and back after a resume: anything that is JSON.")

    # --- state

    read_state = _method("_state", State.read_state)
    write_state = _method("_state", State.write_state)
    gathered = _method("_state", State.gathered)

    def flush(self) -> None:
        """The last step is applied and committed when this returns."""
        self._run.ready()
        self._record.commit()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's, whole: every parameter with its values, in the dtype that it came in."""
        return self.module.state_dict(*args, **kwargs)

    def has(self, parameter: nn.Parameter) -> bool:
        """Whether this very parameter is of the engine's model."""
        return any(parameter is each for _, each in self._given.parameters())

    def are_here(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether these have their values just now, within a forward that is under way."""
        return self._run.runtime is not None and self._run.runtime.are_here(parameters)

    @property
    def is_inside(self) -> bool:
        """Whether this thread is in the model's forward."""
        return self._run.runtime is not None and self._run.runtime.is_inside

    # --- checkpoints

    save_checkpoint = _method("_saving", Saving.save_checkpoint)
    wait_for_checkpoint = _method("_copy", CheckpointCopy.wait_for_checkpoint)
    load_checkpoint = _method("_loading", Loading.load_checkpoint)
    export_checkpoint = _method("_exporting", Exporting.export_checkpoint)

    # --- looking at it

    plan = _method("_run", Run.plan)
    report = _method("_run", Run.report)
    log = _method("_run", Run.log)

    # --- its end

    @property
    def started(self) -> bool:
        """Whether the parameters are the engine's: from the first forward on, until it is closed."""
        return self._run.begun and not self._run.closed

    @property
    def closed(self) -> bool:
        return self._run.closed

    def close(self, keep_values: bool = False) -> None:
        """Ends it: the last step is committed, and the parameters stay without values (``state_dict()`` before).

        keep_values: they get their values, each in the type that it came in: in files of the drive that has the state, which go with the
        last of them, else in memory. Over several ranks all of them give it then. Not committed is what was made after a weight was
        changed in place in the engine's memory."""
        run, module = self._run, self.module
        if run.closed:
            return
        values = self._state.values_to_keep() if truth(keep_values, "keep_values") and run.begun else None
        run.closed = True
        _engines.discard(self)
        _started.discard(self)
        self._places.let_go()
        self._given.give_steps_back()
        has_values = values is not None or not (run.begun or self._given.values_are_gone)
        setattr(module, MARK, "" if has_values else "closed")
        if run.runtime is None:
            self._first_forward.stop()
            return
        try:
            run.runtime.close()
            self._given.pieces.remove()
            try:
                self._commit_and_end(run.runtime.spoiled)
            finally:
                self._copy.wait_for_checkpoint()
            if not run.runtime.spoiled:
                run.keep_report()
        finally:
            if values is None:
                module.forward = closed_forward  # type: ignore[method-assign]
            if run.watch is not None:
                run.watch.release()
            run.let_go(module)
            if values is not None:
                run.whole.remove()
                for (_, parameter), value in zip(self._given.parameters(), values):
                    run.weights.lend(parameter, value)
        if run.watch is not None:
            run.watch.complain()

    def _commit_and_end(self, spoiled: str) -> None:
        if spoiled:
            return
        try:
            self._record.describe()
        finally:
            self._run.core.flush()
        try:
            self._wear.end()
        finally:
            if self._run.watch is not None:
                self._run.watch.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
