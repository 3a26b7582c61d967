"""penstock.wear_budget_tb: the bytes that a run may write to its drives."""

from __future__ import annotations

import warnings

from ._record import Record
from ._run import Run
from ._settings import Settings


class WearBudget:
    """Of all ranks, which know the same. Owns nothing: ``Record`` counts what was written."""

    def __init__(self, settings: Settings, run: Run, record: Record) -> None:
        self._settings = settings
        self._run = run
        self._record = record

    def check(self) -> None:
        """Commits the last step and raises RuntimeError where the budget is used up."""
        most, written = self._settings.wear_budget, self._record.written_bytes()
        if not most or written <= most:
            return
        self._run.core.flush()
        raise RuntimeError(
            f"after step {self._record.steps}, which is committed: penstock.wear_budget_tb: the run has written {written * 1e-12:.4g} TB to its "
            f"drives, of {most * 1e-12:.4g} TB that it may: raise the budget and go on with resume=True, or from engine.save_checkpoint"
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
