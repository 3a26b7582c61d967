"""The state directories of an engine, and the run that they hold."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import List, Set, Tuple, Union

from .. import _core
from . import _checkpoint_names as checkpoint_names
from ._record import kept_in
from ._run import Run
from ._settings import Settings

_held: Set[str] = set()  # real paths of the state directories of this process's engines


def _asked_ns() -> int:
    """The time by which a run must stand to be replaced, in ns since the epoch: the start of the process; at a prompt or in a notebook, now."""
    started = None if hasattr(sys, "ps1") else _core.process_start_ns()
    return time.time_ns() if started is None else started


def _ranks(number: int) -> str:
    return "one rank" if number == 1 else f"{number} ranks"


def _is_of(place: str, run: str) -> bool:
    try:
        return checkpoint_names.run_in([place]) == run
    except (OSError, ValueError, RuntimeError):
        return True  # for all that is known; who reads it says what is wrong with it


# "": there is no checkpoint of the run, or none that can be read.
def _newest_of(run: str, parent: str) -> str:
    if not parent:
        return ""
    try:
        tags = [checkpoint_names.newest(parent), *reversed(_core.checkpoints_in(parent))]
        places = (checkpoint_names.place_of(parent, tag) for tag in tags if tag)
        return next((place for place in places if _is_of(place, run)), "")
    except (OSError, ValueError):
        return ""


class Places:
    """Of one engine. Owns what may be done with the run in its directories: resume it, or replace it."""

    def __init__(self, settings: Settings, run: Run, resume: Union[bool, str], overwrite: bool) -> None:
        """resume: "auto" resumes where the directories hold a run. overwrite: what they hold by now, or held when the process was started."""
        self._settings = settings
        self._run = run
        self._resume = resume
        self._overwrite = overwrite
        self._asked_ns = _asked_ns()
        self._made = False
        self._begun = False
        self._mine: Set[str] = set()

    def made(self, whether: bool) -> None:
        """whether: the run in the directories is of an attempt of this engine that failed, and may be replaced."""
        self._made = whether

    def start_over(self) -> None:
        """The run in the directories is not resumed any more."""
        self._resume = False

    @property
    def may_replace(self) -> bool:
        return self._overwrite or self._made

    @property
    def may_have_begun(self) -> bool:
        """Whether a new run is one that was begun before, and left no commit to resume."""
        return bool(self._resume) or self._made

    def are_taken(self) -> bool:
        """Whether a run is there that may not be replaced. OSError: that cannot be read."""
        dirs = self._settings.state_dirs
        return not self.replaces and bool(dirs) and _core.ranks_of(dirs) > 0

    @property
    def replaces(self) -> bool:
        """Whether a new run may take the place of an old one: also of one that "auto" has found never committed."""
        return self.may_replace or self._resume == "auto"

    @property
    def replaces_until_ns(self) -> int:
        """Of the runs in the directories, those that stood there by then may be replaced, besides what this process has left there; 0: none."""
        return self._asked_ns if self._overwrite else 0

    def check_begun(self) -> None:
        """RuntimeError: the run that this engine has begun may not be replaced."""
        dirs = self._settings.state_dirs
        if dirs and not self._overwrite:
            raise RuntimeError(
                f"the engine has begun a run in {dirs[0]}, which the checkpoint would replace: that takes overwrite=True of "
                "initialize; or load it before the first forward"
            )

    def goes_on(self) -> bool:
        """Whether the first forward will resume a run. OSError: the directories cannot be read."""
        dirs = self._settings.state_dirs
        return bool(self._resume) and bool(dirs) and not self._made and _core.ranks_of(dirs) > 0

    def hold(self) -> None:
        """Reserves the directories within this process, until ``let_go``."""
        self._begun = True
        self._mine = {os.path.realpath(directory) for directory in self.own()}
        _held.update(self._mine)

    def let_go(self) -> None:
        _held.difference_update(self._mine)
        self._mine = set()

    def check_free(self) -> None:
        """RuntimeError: another engine of this process has reserved the directories."""
        if not _held.isdisjoint(map(os.path.realpath, self.own())):
            raise RuntimeError(f"an engine of this process has {self._settings.state_dirs[0]}: close() that one first")

    def own(self) -> List[str]:
        """The directories of this rank's part of the state."""
        dirs = self._settings.state_dirs
        if self._run.ranks.world == 1:
            return dirs
        if self._settings.nothing_trains:  # nothing is exchanged: each has all weights
            return [os.path.join(directory, f"process-{self._run.ranks.rank}") for directory in dirs]
        return list(_core.rank_directories(dirs, self._run.ranks.rank))

    def may_resume(self) -> bool:
        """Whether the run in the directories is resumed. ValueError: some ranks hold one, and others none. OSError: that cannot be seen."""
        if self._resume != "auto":
            return bool(self._resume)
        every = self.runs()
        for rank, theirs in enumerate(every):
            if theirs != every[0]:
                raise ValueError(
                    f"resume='auto': rank {rank} has {theirs} in its part of {self._settings.state_dirs[0]}, rank 0 has {every[0]}: bring "
                    "what is missing back, go on from a checkpoint in another state_dir, or start over (overwrite=True, without resume)"
                )
        return every[0] == "a run"

    def runs(self) -> List[str]:
        """By rank: "a run" or "no run", as its directories hold. OSError: they hold what was a run, or cannot be read."""
        return self._run.ranks.texts("whether a run is there", "a run" if self._holds_run() else "no run")

    def _holds_run(self) -> bool:
        if not self._settings.state_dirs:
            return False
        try:
            return bool(_core.holds_run(self.own()))
        except OSError as error:
            raise OSError(
                error.errno,
                f"{error.strerror}: nothing takes its place unasked: go on from a checkpoint (load_checkpoint), which replaces it with "
                "overwrite=True, or start over with overwrite=True and without resume",
                self.own()[0],
            ) from None

    def _newest_checkpoint(self) -> str:
        """The newest checkpoint of the run in the directories, where it has saved its last one: what `latest` names, if that is this run's. Empty:
        none is known, or it cannot be read. All ranks call it.
        """
        told = self._run.ranks.texts("where checkpoints are", json.dumps(self._checkpoints_of_run()))
        return _newest_of(*next((each for each in map(json.loads, told) if all(each)), ("", "")))

    def steps(self) -> int:
        """Of the run in the directories, as this rank sees it; where parts of it are gone and made up for, those of its newest checkpoint. OSError:
        it cannot be read.
        """
        try:
            return _core.committed_step_of(self._settings.state_dirs)
        except OSError:
            checkpoint = _newest_of(*self._checkpoints_of_run()) if self._settings.resumes_any_ranks else ""
            if not checkpoint:
                raise
            return _core.committed_step_of([checkpoint])

    # The run's name, and where its checkpoints are, as the first of its parts that can be read has them.
    def _checkpoints_of_run(self) -> Tuple[str, str]:
        dirs = self._settings.state_dirs
        try:
            there = _core.ranks_of(dirs)
        except OSError:
            return "", ""  # who looks for the parts says why
        for part in range(there):
            own = dirs if there == 1 else list(_core.rank_directories(dirs, part))
            try:
                return checkpoint_names.run_in(own), str(kept_in(own).get("checkpoints", ""))
            except (OSError, ValueError, RuntimeError):
                continue
        return "", ""

    def check_ranks(self, resumes: bool) -> None:
        """ValueError: the run in the directories is of another number of ranks, which is neither resumed nor replaced. With resume_ranks="any" it
        is made one of as many as there are, where the run that ``resumes`` is this one; where parts of it are gone, of its newest checkpoint.
        OSError: they cannot be read.
        """
        dirs, world = self._settings.state_dirs, self._run.ranks.world
        core = self._run.ranks.core if world > 1 else None
        if dirs and not (self._begun or self._made):
            _core.finish_change_of_ranks(dirs, core)
            if resumes and self._resume and self._settings.resumes_any_ranks and not self._settings.nothing_trains:
                checkpoint = self._newest_checkpoint()
                before, from_checkpoint = _core.change_ranks(self._settings, core, checkpoint)
                if from_checkpoint:
                    self._run.lines.append(f"{dirs[0]} is made anew of {checkpoint}, for {world}: parts of this run of {_ranks(before)} are gone")
                elif before:
                    self._run.lines.append(f"{dirs[0]} is cut anew: it was a run of {_ranks(before)}, and goes on with {world}")
        # What this engine itself has left there may be less than all ranks: each may have a directory of its own.
        there = _core.ranks_of(dirs) if dirs and not (self._begun or self._made) else 0
        known = self._run.ranks.texts("the number of ranks", str(there))
        for theirs in map(int, known):
            if theirs in (0, world):
                continue
            raise ValueError(
                f"{dirs[0]} holds a run of {_ranks(theirs)}, and there {'is one' if world == 1 else f'are {world}'}: go on with as many, with "
                "resume_ranks='any' beside resume, or in another state_dir with engine.load_checkpoint, which takes this directory, or a "
                "checkpoint, of any number of ranks"
            )
