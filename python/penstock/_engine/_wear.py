"""penstock.wear_budget_tb: the bytes that a run may write to its drives."""

from __future__ import annotations

import contextlib
import json
import warnings
from typing import Any, Dict, Optional

from .. import _core
from ._record import Record
from ._run import Run
from ._settings import Settings


class WearBudget:
    """Of all ranks, which know the same. ``Record`` counts what was written.

    Owns the count in a file beside the state, which rank 0 keeps for what is killed before a commit says so (run/watch/written_count.h).
    """

    def __init__(self, settings: Settings, run: Run, record: Record) -> None:
        self._settings = settings
        self._run = run
        self._record = record
        self._count: Any = None  # None: there is no budget, or another rank has it
        self._before = 0  # by all ranks, before this engine

    @property
    def counts(self) -> bool:
        """Whether there is a budget, and a drive to write to."""
        return bool(self._settings.wear_budget) and self._settings.offload == "nvme"

    @property
    def count(self) -> Any:
        """For the core, which says in it what it is about to write."""
        return self._count

    def look(self, place: str, recorded: Optional[Dict[str, Any]], counts: bool, refuses: bool, stands: str) -> None:
        """Before anything is planned or written: what the run has written. RuntimeError, where it `refuses`: the budget is used up.

        place: of rank 0's state. recorded: of the run that goes on; None: it begins. counts: it may have been begun before. stands: for the error.
        """
        self._count = None
        self._before = self._record.written_bytes()  # of a run that this one takes the place of
        if not self.counts:
            return
        ranks = self._run.ranks
        if ranks.rank == 0:
            self._count = _core.WrittenCount.read(place, json.dumps(recorded)) if counts else _core.WrittenCount(place)
            self._before = max(self._before, self._count.before)
        self._before = int(ranks.texts("what the run has written", str(self._before))[0])
        if refuses and self._before > self._settings.wear_budget:
            raise self._used_up(stands, self._before)

    def made(self, run_id: str, state_bytes: int) -> None:
        """The run has begun. state_bytes: that were written for it apart from the core's own count."""
        self._record.has_written(max(self._before, self._record.written_bytes()) + state_bytes)
        self.save(run_id)

    def failed(self, is_new: bool) -> None:
        """The run could not be made: of a new one the file is again what it was for the run that was to be replaced."""
        if self._count is not None and is_new:
            with contextlib.suppress(OSError):  # the error that brought us here is the one to raise
                self._count.revert()

    def save(self, run_id: str) -> None:
        """The file says what was written by now. OSError: it cannot."""
        if self._count is not None:
            self._count.save(run_id, self._record.written_bytes())

    def check(self) -> None:
        """Commits the last step and raises RuntimeError where the budget is used up."""
        self.save(self._run.id)
        most, written = self._settings.wear_budget, self._record.written_bytes()
        if not most or written <= most:
            return
        self._run.core.flush()
        raise self._used_up(f"after step {self._record.steps}, which is committed", written)

    def end(self) -> None:
        """Before the engine is closed, all of whose steps are committed."""
        if self._count is not None:
            # Of other ranks this one knows that they write alike.
            self._record.wrote(self._run.ranks.world * self._run.info()["written_bytes"])
            self.save(self._run.id)

    def _used_up(self, stands: str, written: int) -> RuntimeError:
        return RuntimeError(
            f"{stands}: penstock.wear_budget_tb: the run has written {written * 1e-12:.4g} TB to its drives, of "
            f"{self._settings.wear_budget * 1e-12:.4g} TB that it may: raise the budget and go on with resume=True, or from "
            "engine.save_checkpoint"
        )

    def warn(self) -> None:
        """Warns before the first step where the budget ends before the schedule does."""
        most = self._settings.wear_budget
        if not most or self._run.runtime is None or not self._run.runtime.trains:
            return
        step = self._run.ranks.world * self._run.info()["nvme_write_bytes_per_step"]
        if not step:
            return
        left = max(0, int((most - self._record.written_bytes()) / step))
        schedule = (self._settings.schedule or {}).get("params", {})
        if schedule.get("total_num_steps") is not None and schedule["total_num_steps"] <= self._record.steps + left:
            return
        warnings.warn(
            f"penstock.wear_budget_tb: a step writes {step * 1e-12:.4g} TB, so that {most * 1e-12:.4g} TB are used up {left} steps from here: the "
            'run stops then. optimizer_states "8bit", durability "checkpoint", more host_memory and larger steps write less',
            stacklevel=2,
        )
