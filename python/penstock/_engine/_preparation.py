"""From a model that has been seen to a run: on this rank and on all of them, on new weights, an old run or a checkpoint."""

from __future__ import annotations

import errno
import json
import secrets
import tempfile
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import torch
from torch import nn

from .. import _core
from . import _deepspeed_checkpoint as deepspeeds
from . import _base_weights, _parameters
from ._blocks import Block, adapters, with_adapters_resident
from ._device import Streams, has_own_memory
from ._first_forward import Shown
from ._given import Given
from ._handed_over import described_blocks, described_stages, options_of, resident_bytes
from ._interrupts import deferred
from ._json import decode, encode
from ._modules import move_buffers, persistent_buffers
from ._optimizer import zeros_change
from ._places import Places
from ._ranks import Alone, Meeting
from ._record import MOST_KEPT, Record, is_kept
from ._run import Run
from ._runtime import Runtime
from ._settings import DTYPES
from ._state import State
from ._trace import uses_of
from ._training import Training
from ._watch import Watch
from ._wear import WearBudget
from ._weights import Weights
from ._whole import Whole


@dataclass(frozen=True)
class Source:
    """A checkpoint that the run begins with."""

    path: str
    takes_scheduler: bool = True  # of a checkpoint of Penstock's
    found: Optional[deepspeeds.Found] = None  # of one of DeepSpeed's


class Preparation:
    """Makes the ``Run`` of what was given. Owns the checkpoint that it begins with, and what the first forward has shown.

    started: called when the parameters are the engine's, which must be closed from then on.
    """

    def __init__(
        self,
        given: Given,
        run: Run,
        places: Places,
        record: Record,
        wear: WearBudget,
        training: Training,
        state: State,
        seed: int,
        started: Callable[[], None],
    ) -> None:
        self._given = given
        self._run = run
        self._places = places
        self._record = record
        self._wear = wear
        self._training = training
        self._state = state
        self._seed = seed
        self._started = started
        self._source: Optional[Source] = None
        self._shown: Optional[Shown] = None
        self._found: List[Block] = []  # by the first forward, whatever trains in them

    def begin_with(self, source: Source) -> None:
        """The first forward, or ``again``, makes a run that goes on from this checkpoint."""
        self._source = source

    def begin(self, shown: Shown) -> None:
        """Makes the run: the parameters are the engine's then. Where it raises, they are the model's."""
        self._shown = shown
        self._found = self._given.blocks
        with self._met(), self._adapters_on():
            self._make(shown, is_verified=False)

    def again(self) -> None:
        """The run that has begun ends without a commit, and one that begins with the checkpoint, which has been verified, takes its place."""
        run, module = self._run, self._given.module
        written = self._record.written_bytes()
        run.runtime.close()  # type: ignore[union-attr]
        if run.watch is not None:
            run.watch.close()
        run.let_go(module)
        self._places.let_go()
        run.runtime, run.watch, self._given.values_are_gone = None, None, True
        self._places.start_over()
        self._record.start_over()
        self._record.has_written(written)
        self._training.start_over()
        move_buffers(module, self._given.settings.device)
        with self._met(), self._adapters_on():
            self._make(self._shown, is_verified=True)  # type: ignore[arg-type]
        self._record.has_written(written)

    def steps(self) -> int:
        """Of the run that there is, or will be with the first forward. OSError: its last commit cannot be read."""
        if self._run.begun or self._run.closed or (self._source is not None and self._source.found is not None):
            return self._record.steps
        if self._source is not None:
            return _core.committed_step_of([self._source.path])
        return self._places.steps() if self._places.goes_on() else self._record.steps

    # peft's adapters do not require gradients as long as they are switched off, as for a reference model of which they train: what they did when
    # the engine was made holds.
    @contextmanager
    def _adapters_on(self) -> Iterator[None]:
        off = any(getattr(module, "disable_adapters", False) is True for module in self._given.module.modules())
        parameters = self._given.module.parameters() if off else ()
        trained = [each for each in parameters if not each.requires_grad and id(each) in self._given.required_grad]
        for parameter in trained:
            parameter.requires_grad_(True)
        try:
            yield
        finally:
            for parameter in trained:
                parameter.requires_grad_(False)

    # Over several ranks all of them are connected within, and after it.
    @contextmanager
    def _met(self) -> Iterator[None]:
        if self._given.settings.world == 1:
            self._places.check_ranks(resumes=self._source is None)
            yield
            return
        meeting = Meeting(self._given.settings.rank_timeout)
        try:
            meeting.check_model(self._given.module)
            self._run.ranks = meeting.connect()
            try:
                self._places.check_ranks(resumes=self._source is None)
                restores = self._source is not None or self._places.may_resume()
                if not self._given.values_are_gone and not restores:
                    meeting.share_values(self._given.module)
                yield
                if restores:  # too large ones are in no commit
                    meeting.share_buffers(self._given.module)
            except BaseException as error:
                self._run.ranks.abort(f"{type(error).__name__}: {error}")
                self._run.ranks.close()
                self._run.ranks = Alone()
                raise
        finally:
            meeting.close()

    def _make(self, shown: Shown, is_verified: bool) -> None:
        given, settings, source = self._given, self._given.settings, self._source
        resume = source is None and self._places.may_resume()
        shown = self._with_blocks(shown, resume)
        goes_on = resume or source is not None
        there = self._run_there(goes_on)
        base = there.get("lora_base") if goes_on else None
        if goes_on and there and settings.base_weights and base is None:
            raise ValueError("base_weights: the run that is gone on with has the weights of its frozen parameters itself: leave it out")
        has_base = bool(settings.base_weights) or base is not None
        described, marks, held = described_blocks(given.module, given.blocks, given.groups(), settings, self._values_of, frozen_have_values=not has_base)
        trains = any(each for mark in marks for each, _ in mark)
        if not trains and has_base:
            raise ValueError(
                "base_weights: no parameter of the model requires a gradient, so that nothing trains beside these weights: penstock.LLM generates with "
                "them as they are"
            )
        if not trains:
            self._check_evaluates()
        elif settings.nothing_trains:
            raise ValueError(
                "no parameter required a gradient when initialize was called, so that it made no optimizer, and some do now: call requires_grad_() "
                "before it"
            )
        if given.values_are_gone and not resume and source is None:
            raise ValueError("this model's values went with its engine that was closed: go on with resume=True, or build the model anew")
        if source is not None and not self._places.may_replace and "a run" in self._places.runs():
            raise FileExistsError(
                errno.EEXIST,
                "a run is there already, which the checkpoint would replace: that takes overwrite=True; resume=True without load_checkpoint "
                "goes on with it",
                settings.state_dirs[0],
            )
        known, run_id = self._names_of_runs(goes_on, there)
        options = {
            **options_of(settings, given.described, trains=trains, resident_bytes=resident_bytes(given.blocks, settings, trains)),
            "computes_elsewhere": has_own_memory(settings.device) and not settings.engine_device,
            "run": {"run_id": run_id},
            "run_changes": {} if not goes_on or known else {"run_id": run_id},
            "state_dirs": self._places.own(),
            "new_weights": not trains and not resume,
            "resume": resume,
            "overwrite": self._places.replaces and not resume,
            "overwrites_until": self._places.replaces_until_ns,
            "restore_from": None if source is None or source.found is not None else source.path,
            "restore_is_verified": is_verified,
            "import": self._what_is_imported(),
            "seed": self._seed,
            "input_gradients": shown.input_gradients,
        }
        trained = [[each for each, _ in mark] for mark in marks]
        if has_base:
            options["base"] = _base_weights.describe(given.module, given.blocks, trained, settings.base_weights, base, is_planned=False)
        if not goes_on:
            _base_weights.check_values(given.blocks, trained, has_base)
        self._run.ranks.agree(self._alike(options, described))
        self._places.check_free()
        if trains:
            self._look_at_wear(resume, known, is_again=is_verified)
        with deferred():
            self._hand_over(described, shown, options, marks, known)
        del held

    # A rank has a part of every block, cut evenly, with a state for all of it, unless it is frozen whole: so over several ranks adapters are resident,
    # and the exchange of gradients is theirs. A run that is gone on with has the blocks that it began with.
    def _with_blocks(self, shown: Shown, resume: bool) -> Shown:
        given, groups, self._given.blocks = self._given, self._given.groups(), self._found
        found = adapters(
            given.module,
            given.blocks,
            lambda parameter: parameter.requires_grad and id(parameter) in groups and not given.settings.has_no_optimizer,
        )
        apart = bool(found) and self._run.ranks.world > 1
        source = self._source
        if found and (resume or (source is not None and source.found is None)):
            where = self._places.own() if source is None else [source.path, *_core.rank_directories([source.path], 0)]
            there = next(filter(None, map(_parameters.blocks_in, where)), {})
            apart = len({there.get(name) for name, _ in found[0][0].parameters}) > 1
        apart = self._run.ranks.texts("whether adapters are resident", "yes" if apart else "no")[0] == "yes"
        if not apart:
            return shown
        given.blocks = with_adapters_resident(given.module, self._found, found)
        return replace(shown, uses=uses_of(given.blocks, shown.uses))

    # What the run that is there, or that the run begins with, says of itself; empty: there is none.
    def _run_there(self, goes_on: bool) -> Dict[str, Any]:
        source = self._source
        where = self._places.own() if source is None else [] if source.found is not None else [source.path]
        if where and (goes_on or self._places.may_replace):
            try:
                return json.loads(_core.record_of(where)) or {}
            except FileNotFoundError:
                pass  # none is there: what goes on is refused by the engine
            except (OSError, ValueError) as error:
                # Of what is replaced the name is of no use where it is damaged, or no run's.
                if goes_on or getattr(error, "errno", errno.EINVAL) not in (errno.EIO, errno.EINVAL):
                    raise
        return {}

    # Its name, empty where there is none; and of the run that is made. On all ranks.
    def _names_of_runs(self, goes_on: bool, there: Dict[str, Any]) -> Tuple[str, str]:
        known = self._run.ranks.texts("the run's name", there.get("run_id", ""))[0]
        return known, self._run.ranks.texts("the run's name", known if goes_on and known else f"python-{secrets.token_hex(6)}")[0]

    # Before anything is written. is_again: a run of this engine is over, and cannot be gone on with any more.
    def _look_at_wear(self, resume: bool, known: str, is_again: bool) -> None:
        source, recorded, stands = self._source, None, "before its first step"
        where = self._places.own() if source is None else [source.path]
        place = self._places.own()[0] if self._wear.counts else ""
        if self._wear.counts and (resume or (source is not None and source.found is None)):
            kept = decode(json.loads(_core.record_of(where, "step"))) or {}
            recorded = {"written_bytes": kept.get("written", 0), **({"run_id": known} if known else {})}
            stands = f"after step {_core.committed_step_of(where)}, which is committed"
        begun = source is None and self._places.may_have_begun
        training = self._given.module.training and torch.is_grad_enabled()
        self._wear.look(place, recorded, recorded is not None or begun, not is_again and (training or not resume), stands)

    # Where they are gone they are read nowhere.
    def _values_of(self, parameter: nn.Parameter) -> torch.Tensor:
        return parameter if self._given.values_are_gone else parameter.detach().contiguous()

    # A checkpoint of DeepSpeed's becomes a run of one commit, which says what Python finds again in any run that is gone on with.
    def _what_is_imported(self) -> Optional[Dict[str, Any]]:
        found = None if self._source is None else self._source.found
        if found is None:
            return None
        if self._run.ranks.world > 1 and not self._given.settings.state_dirs:
            raise ValueError("several ranks load a checkpoint of DeepSpeed's where their state is on a drive: give state_dir=")
        deepspeeds.check_served(self._given.parameters(), self._given.groups(), self._given.described)
        said = found.said
        rates, values = deepspeeds.groups_of(found, self._given.optimizer.param_groups)
        state = deepspeeds.scheduler_of(found, self._given.scheduler)
        kept = {
            "client": decode(said["client"]),
            "skipped": said["step"] - said["updates"],
            "lr": rates,
            "groups": values,
            "given": self._record.identity,
            "torch_rng": "",
            "samples": said["samples"] or said["step"] * self._given.settings.train_batch_size,
            "scheduler": None if state is None else {name: value for name, value in state.items() if is_kept(value)},
            "buffers": deepspeeds.buffers_of(found, {name: each[2] for name, each in persistent_buffers(self._given.module).items()}),
        }
        if len(json.dumps(encode(kept))) > MOST_KEPT:
            warnings.warn("load_checkpoint: the client_state is too large for commits, which do not keep it", stacklevel=2)
            kept["client"] = {}
        names = [[name for name, _ in block.parameters] for block in self._given.blocks]
        return {
            "path": found.path,
            "names": found.names,
            "parameters": names,
            "step": said["step"],
            "updates": said["updates"],
            "is_read_once": not self._given.settings.state_dirs,
            "description": encode(kept),
        }

    # Of an engine that has nothing to train: its weights are all that the drive gets.
    def _check_evaluates(self) -> None:
        why = "no parameter of the model requires a gradient (and is the optimizer's), so that the engine only evaluates"
        if self._given.settings.offload != "nvme":
            raise ValueError(f"{why}, with weights on a drive: give state_dir=")
        if self._source is not None:
            raise ValueError(f"{why}, and there is no training to load from a checkpoint: give the model its values first")

    # All of it or nothing: what goes wrong before the parameters are the engine's leaves them to the model, for another attempt.
    def _hand_over(self, described: List[Any], shown: Shown, options: Dict[str, Any], marks: List[Any], known: str) -> None:
        given, run, settings = self._given, self._run, self._given.settings
        goes_on = options["resume"] or self._source is not None
        run.id = options["run"]["run_id"]
        core = run.core = self._new_core(described, described_stages(shown.uses), options)
        places = [core.offsets(number) for number in range(len(given.blocks))]
        run.names = {
            id(parameter): f"{block_name}.{short}"
            for (block_name, parameters), block in zip(described, given.blocks)
            for (short, *_), (_, parameter) in zip(parameters, block.parameters)
        }
        run.buffers = persistent_buffers(given.module)
        weights: Optional[Weights] = None
        try:
            if goes_on:
                self._restore()
            if options["trains"]:
                self._wear.made(run.id, run.info()["state_bytes"] if self._source is not None and settings.offload == "nvme" else 0)
            watch = Watch(core, settings, run.id, goes_on, [known] if known and not goes_on else [], self._record.samples, run.ranks)
            weights = Weights(
                given.blocks, DTYPES[settings.dtype], places, settings.device, self._state.read_of, core.arena(),
                apart=has_own_memory(settings.device) and not settings.engine_device,
                streams=Streams(settings.device) if settings.engine_device else None,
            )  # fmt: skip
            trains = [[trains for trains, _ in mark] for mark in marks]
            run.layout = _parameters.describe(given.module, given.blocks, places, trains, run.info()["model"])
            if settings.state_dirs and run.ranks.rank == 0:
                _parameters.write(self._places.own()[0], _parameters.with_buffers(run.layout, run.buffers))
            run.runtime = Runtime(
                core,
                given.module,
                given.blocks,
                shown.uses,
                weights,
                trains,
                shown.input_gradients,
                shown.changing,
                settings,
                run.ranks.world,
                given.pieces,
            )
        except BaseException:
            try:
                if weights is not None:
                    weights.release()  # first: CUDA must not know memory that is unmapped
            finally:
                core.close()  # or the state stays locked, by ourselves
                run.core = None
                self._places.made(not options["resume"])
            raise
        self._places.hold()
        self._started()
        run.weights, run.watch = weights, watch
        weights.hide_all()
        self._connect(run.runtime, watch, [use.seconds for use in shown.uses])
        if options["trains"]:
            self._tell_of_length(shown)

    # What torch takes in a step beside host_memory, and which length would still fit.
    def _tell_of_length(self, shown: Shown) -> None:
        settings = self._given.settings
        if settings.engine_device or not settings.step_tensor_bytes:
            return
        inputs = sorted((sum(use.inputs.bytes.values()) for use in shown.uses[1:]), reverse=True)
        beside = sum(inputs if settings.saved_activations == "memory" else inputs[:3])  # kInputRing of tiering/plan/working_set.h
        self._run.torch_bytes = taken = settings.step_tensor_bytes + settings.forwards * beside
        free = _core.free_host_memory()
        at = f" at {shown.tokens} tokens in a micro-batch" if shown.tokens else ""
        fits = int(shown.tokens * free / taken) if taken else 0
        line = f"torch's tensors take {taken >> 20} MiB beside host_memory in a step{at}, as the first forward has shown, and {free >> 20} MiB are free"
        if shown.tokens:
            line += f": about {fits} tokens would still fit, if they take memory in proportion"
        if taken <= free:
            self._run.lines.append(line)
            return
        warnings.warn(
            f"{line}. Shorter or fewer sequences in a micro-batch and more gradient_accumulation_steps take less"
            + (", and so do saved_activations=\"auto\" or \"drive\"" if settings.saved_activations == "memory" else "")
            + "; a smaller host_memory leaves more to torch",
            stacklevel=2,
        )

    def _new_core(self, described: List[Any], stages: List[Any], options: Dict[str, Any]) -> Any:
        try:
            with self._import_directory(options):
                core = self._run.ranks.core if options["trains"] else None
                count = self._wear.count if options["trains"] and (options["resume"] or not self._places.are_taken()) else None
                return _core.TrainingEngine(described, stages, self._given.settings, json.dumps(options), core, count)
        except FileExistsError as error:
            self._wear.failed(not options["resume"])
            raise FileExistsError(
                error.errno,
                "a run is there already: go on with it (resume=True, or resume='auto'), replace it (overwrite=True), or use another "
                "directory",
                self._places.own()[0],
            ) from error
        except BaseException:
            self._wear.failed(not options["resume"])
            raise

    def _restore(self) -> None:
        source = self._source
        self._record.restore(
            self._given.settings.state_dirs[0] if source is None else source.path, takes_scheduler=source is None or source.takes_scheduler
        )
        note = self._run.info()["run"]["imported"].get("note") if source is not None and source.found is not None else None
        if note:
            warnings.warn(f"load_checkpoint: {note}", stacklevel=2)

    # The runtime asks the other parts from here on, and they it. seconds: of each use of a block in the first forward.
    def _connect(self, runtime: Runtime, watch: Watch, seconds: Sequence[float]) -> None:
        given = self._given
        runtime.connect(
            before_pass=self._state.before_pass,
            on_interrupted=self._training.interrupted,
            on_training_forward=self._training.forward,
            flops_of=watch.flops,
            zeros_change=given.settings.missing_gradients == "zeros" and zeros_change(given.described, given.optimizer.param_groups),
        )
        self._state.patch_module()
        self._run.whole = Whole(given.module, given.blocks, [*given.pieces.replaced, *runtime.replaced], self._state.value_of)
        watch.again(self._record.watched)
        self._wear.warn()
        if sum(seconds) > 0:
            watch.backward_share = sum(seconds[runtime.first_trained :]) / sum(seconds)

    # State in memory is read from a drive too, once: what is made of DeepSpeed's checkpoint goes as soon as it was.
    @contextmanager
    def _import_directory(self, options: Dict[str, Any]) -> Iterator[None]:
        if options["import"] is None or options["state_dirs"]:
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

    # What is the same on all ranks: everything but places.
    def _alike(self, options: Dict[str, Any], described: Sequence[Any]) -> Dict[str, Any]:
        if self._run.ranks.world == 1:
            return {}
        places = ("state_dirs", "overwrites_until", "run", "run_changes", "device_computes", "computes_elsewhere", "device", "step_tensor_bytes")
        settings = self._given.settings
        return {
            **{name: value for name, value in options.items() if name not in places},
            "config": settings.shared_config(),
            "dtype": settings.dtype,
            "offload": settings.offload,
            **settings.kept,
            "micro_batches": settings.forwards,
            "optimizer_states": settings.optimizer_states,
            "missing_gradients": settings.missing_gradients,
            "schedule": settings.schedule,
            "monitors": settings.monitors,
            "groups": {
                f"{block} {name}": group if trains else "frozen" for block, parameters in described for name, _, trains, group, *_ in parameters
            },
            "version": _core.__version__,
        }
