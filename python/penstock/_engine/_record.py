"""What every commit of a run keeps beside weights and states."""

from __future__ import annotations

import json
import warnings
from typing import Any, Dict, List, Mapping, Optional, Sequence

import torch

from .. import _core
from .._client_state import KEY
from ._accumulation import Accumulation
from ._given import Given
from ._identity import changes, groups_go_on, identity_of, same_scheduler, scheduler_of, values_of
from ._json import decode, encode
from ._modules import counts_no_versions
from ._random import RandomState, restore_text
from ._run import Run

MOST_BUFFERS = 24 << 10  # bytes, in every commit
MOST_KEPT = 56 << 10  # with all else; the store takes 64 KiB (swap/format.h)
_GROWTH = 1 << 10  # of what later commits say in more digits


def is_kept(value: Any) -> bool:
    """Whether commits keep this value of a scheduler's state. Functions belong to the program."""
    try:
        encode(value)
    except TypeError:
        return False
    return True


def kept_in(directories: Sequence[str]) -> Dict[str, Any]:
    """What the last commit there keeps for Python. OSError, ValueError: there is none, or none that can be read."""
    return dict(decode(json.loads(_core.record_of(list(directories), "step"))) or {})


class Record:
    """Steps, samples, bytes written, random numbers, groups, the scheduler, changed buffers, and the caller's ``client_state``.

    Owns all of these but groups and scheduler. ``describe`` hands them to the core, whose next commit has them.
    """

    def __init__(self, given: Given, run: Run, accumulation: Accumulation) -> None:
        self._given = given
        self._run = run
        self._accumulation = accumulation
        self.identity = identity_of(given.described, given.torch_optimizer.param_groups, given.settings, given.scheduler)
        #: Kept with every commit, and there again after a resume: anything that is JSON.
        self.client_state: Dict[str, Any] = {}
        #: Names of values that the last checkpoint's client_state has in a file beside it, and no commit has.
        self.kept_apart: List[str] = []
        #: The directory of the run's last checkpoint; empty: it has none.
        self.checkpoints = ""
        self.steps = 0  # of the run, as far as this process knows
        self.skipped_steps = 0
        self.watched: Optional[Dict[str, Any]] = None  # what monitors get of the last step
        self._samples_before = 0  # this process
        self._written_before = 0  # likewise: bytes, by all ranks
        self._written_here = 0
        self._random = ""
        self._told_of_buffers = False
        self._kept_buffers: Optional[Dict[str, torch.Tensor]] = None  # as the last step left them
        self._partly_written = False  # values of a program, of which the drive has some

    @property
    def samples(self) -> int:
        """Samples that the run has trained on."""
        return self._samples_before if self._run.watch is None else self._run.watch.samples

    def written_bytes(self) -> int:
        """Bytes that all ranks have written to drives since the run began."""
        return self._written_before + self._written_here

    def note_scheduler(self) -> None:
        """Commits keep the state of the scheduler that is the engine's now, and say which it is."""
        self.identity["scheduler"] = scheduler_of(self._given.scheduler)

    def stepped(self, result: Mapping[str, Any]) -> None:
        """Takes over the result of a step that the core has made."""
        self.steps = result["step"]
        self.skipped_steps += bool(result["skipped"])
        self._written_here = int(result.get("written_bytes", 0))
        self._random = RandomState.now().text()

    def start_over(self) -> None:
        """Another run takes the place of this one."""
        self._written_here, self._kept_buffers = 0, None

    def has_written(self, least: int) -> None:
        """At least these bytes were written before the run began."""
        self._written_before = max(self._written_before, least)

    def wrote(self, here: int) -> None:
        """At least these bytes were written by this engine."""
        self._written_here = max(self._written_here, here)

    def describe(self) -> None:
        """The next commit says: torch's random state as the step left it, the rest as it is when the next pass begins, since schedulers of
        others make their steps in between.
        """
        self._run.core.describe(self.steps, self.text())

    def commit(self) -> None:
        """The last step is applied and committed when this returns."""
        self.describe()
        self._run.core.flush()

    def mark_partly_written(self, whether: bool) -> None:
        """Commits that the state is of two, or of one again."""
        if self._run.begun:
            self._partly_written = whether
            self._run.ready()
            self.commit()

    def room(self) -> int:
        """Bytes of JSON that client_state may take, beside what commits keep just now."""
        own, self.client_state = self.client_state, {}
        try:
            return max(0, MOST_KEPT - _GROWTH - len(self.text()))
        finally:
            self.client_state = own

    def forget_file(self) -> None:
        """client_state names no file beside a checkpoint any more: it is that checkpoint's, and commits have a life of their own."""
        said = self.client_state.pop(KEY, None)
        if said is not None:
            self.kept_apart = [str(key) for key in said[1]]

    def text(self) -> str:
        """The record as JSON. ValueError, TypeError: a part of it cannot be kept."""
        if self._run.gathered:
            raise RuntimeError("a forward within engine.gathered(write_back=True): what was changed is the engine's when that is over")
        kept: Dict[str, Any] = {
            "client": self.client_state,
            "skipped": self.skipped_steps,
            "lr": [float(group["lr"]) for group in self._given.optimizer.param_groups],
            "groups": [values_of(group) for group in self._given.optimizer.param_groups],
            "given": self.identity,
            "torch_rng": self._random,
            "ranks": [self._run.ranks.rank, self._run.ranks.world],
            "watched": self.watched,
            "samples": self.samples,
            "written": self.written_bytes(),
        }
        if self.checkpoints:
            kept["checkpoints"] = self.checkpoints
        if self._partly_written:
            kept["partly_written"] = True
        if self._given.scheduler is not None:
            state = self._given.scheduler.state_dict()
            kept["scheduler"] = {name: value for name, value in state.items() if is_kept(value)}
        # A step is what is gone on from: what forwards of the next one have changed by now comes with them again.
        if not self._accumulation.under_way or self._kept_buffers is None:
            self._kept_buffers = {name: buffer.detach().clone() for name, buffer in self.changed_buffers().items()}
        kept["buffers"] = self._kept_buffers
        if self._told_of_buffers:
            kept["large_buffers"] = True
        text = json.dumps(encode(kept), allow_nan=False)
        if len(text) > MOST_KEPT:
            raise ValueError(
                f"client_state, the scheduler's state and buffers that change take {len(text)} bytes, and a commit has room for {MOST_KEPT}: "
                "keep what is large in a file of your own"
            )
        return text

    def _all_changed(self) -> Dict[str, torch.Tensor]:
        changed = {}
        for name, (module, short, first, version) in self._run.buffers.items():
            buffer = module._buffers[short]
            if buffer is not None and (buffer is not first or buffer._version != version or counts_no_versions(module)):
                changed[name] = buffer
        return changed

    def changed_buffers(self) -> Dict[str, torch.Tensor]:
        """Persistent buffers that training changes (running means): a state_dict has them, and so has a commit, where they are small."""
        changed = self._all_changed()
        size = sum(buffer.numel() * buffer.element_size() for buffer in changed.values())
        if size > MOST_BUFFERS:
            if not self._told_of_buffers:
                self._told_of_buffers = True
                warnings.warn(f"{size} bytes of buffers change: too much for every commit; save model.state_dict() yourself", stacklevel=2)
            return {}
        return changed

    def share_buffers(self) -> None:
        """Rank 0's persistent buffers that training changes become those of all ranks, as DistributedDataParallel's with the next forward.

        A batch is normalized by its own rank's statistics, as there and in DeepSpeed. RuntimeError on all ranks: buffers of other shapes or types.
        """
        ranks, buffers = self._run.ranks, self._run.buffers
        if ranks.world == 1 or not buffers:
            return
        mine = {name: [list(each.shape), str(each.dtype)] for name, each in self._all_changed().items()} if ranks.rank == 0 else {}
        shared = json.loads(ranks.texts("which buffers change", json.dumps(mine))[0])
        failure = ""
        for name, (shape, dtype) in shared.items():
            buffer = buffers[name][0]._buffers[buffers[name][1]]
            found = "none" if buffer is None else f"{list(buffer.shape)} {buffer.dtype}"
            if found != f"{shape} {dtype}":
                failure = f"{name} is {found} on rank {ranks.rank} and {shape} {dtype} on rank 0: buffers that training changes are alike on all ranks"
        told = next((text for text in ranks.texts("whether buffers are alike", failure) if text), "")
        if told:
            raise RuntimeError(told)
        for name in shared:
            buffer = buffers[name][0]._buffers[buffers[name][1]]
            with torch.no_grad():
                value = buffer.detach().cpu().contiguous()  # type: ignore[union-attr]
                ranks.share(value)
                if ranks.rank > 0:
                    buffer.copy_(value)  # type: ignore[union-attr]

    def _restore_scheduler(self, kept: Mapping[str, Any]) -> bool:
        scheduler = self._given.scheduler
        if scheduler is None or kept.get("scheduler") is None or not same_scheduler(kept.get("given"), self.identity):
            return False
        scheduler.load_state_dict(kept["scheduler"])
        return True

    def take_scheduler(self, kept: Mapping[str, Any]) -> None:
        """The scheduler, where it is the same, goes on from a checkpoint's, with its learning rates. kept: the checkpoint's record."""
        if self._restore_scheduler(kept):
            for group, rate in zip(self._given.optimizer.param_groups, kept.get("lr", [])):
                group["lr"] = rate

    def restore(self, where: str, takes_scheduler: bool) -> None:
        """Takes over the record of the commit that the run begins with. where: its place, for errors. RuntimeError: the commit mixes two states."""
        info = self._run.info()
        self.steps = info["step"]
        kept = decode(json.loads(self._run.core.description())) or {}
        if kept.get("partly_written"):
            raise RuntimeError(
                f"{where} holds values of two states: its process ended within load_state_dict (or "
                "engine.gathered(write_back=True)). Go on from a checkpoint of before, or begin anew with overwrite=True"
            )
        for name, value in kept.get("buffers", {}).items():
            module, short, _, _ = self._run.buffers[name]
            with torch.no_grad():
                module._buffers[short].copy_(value)  # type: ignore[union-attr]
        self.client_state, self.kept_apart = kept.get("client", {}), []
        self.forget_file()
        self.checkpoints = kept.get("checkpoints", "")
        self.skipped_steps = kept.get("skipped", 0)
        self.watched = kept.get("watched")
        self._samples_before = kept.get("samples", 0)
        self._written_before = kept.get("written", 0)
        given = kept.get("given")
        if takes_scheduler:
            self._restore_scheduler(kept)
        groups_go_on(self._given.optimizer.param_groups, kept.get("lr", []), kept.get("groups", []), given, self.identity)
        told = changes(given, self.identity)
        if told:
            warnings.warn(f"resume: {'; '.join(told)}", stacklevel=2)
        self._random = kept.get("torch_rng", "")
        if self._random:
            restore_text(self._random)
            if kept.get("ranks", [0, 1]) != [self._run.ranks.rank, self._run.ranks.world] and self._run.ranks.rank > 0:
                # Of another number of ranks there is one state, and each wants numbers of its own.
                torch.manual_seed(int(torch.randint(2**62, ()).item()) + self._run.ranks.rank)
