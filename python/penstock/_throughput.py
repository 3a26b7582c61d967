"""Samples a second, as DeepSpeed's timer of an engine tells them."""

from __future__ import annotations

import time
from typing import Any, Callable, Optional


class ThroughputTimer:
    """Counts micro-batches and steps between ``start()`` and ``stop()``, and says how many samples a second passed.

    config: an object whose ``enabled`` says whether logging_fn is called at all; None: it is. batch_size: samples of a step, of all ranks. The
    first start_step steps are not counted, since they make what the others have. steps_per_output: steps from one call of logging_fn, with a
    line of text, to the next; None: it is never called. monitor_memory has no effect: engine.report() has the memory.
    """

    def __init__(
        self,
        config: Any = None,
        batch_size: Optional[int] = None,
        start_step: int = 2,
        steps_per_output: Optional[int] = None,
        monitor_memory: bool = False,
        logging_fn: Optional[Callable[[str], Any]] = None,
    ) -> None:
        self.enabled = bool(getattr(config, "enabled", True))
        self.batch_size = max(1, batch_size or 1)
        self.start_step = start_step
        self.steps_per_output = steps_per_output
        self.logging = logging_fn
        self.epoch_count = 0
        self.micro_step_count = 0
        self.global_step_count = 0
        self.total_elapsed_time = 0.0
        self._started: Optional[float] = None

    def update_epoch_count(self) -> None:
        """An epoch begins: its micro-batches are counted anew."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        """Of several before a ``stop()``, as of the forwards of one loss, the first counts."""
        if self._started is None:
            self._started = time.monotonic()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """Adds what has passed since ``start()``; without one nothing is counted. global_step: the step is over with it."""
        if self._started is None:
            return
        passed, self._started = time.monotonic() - self._started, None
        self.micro_step_count += 1
        self.global_step_count += global_step
        if self.global_step_count > self.start_step or (self.global_step_count == self.start_step and not global_step):
            self.total_elapsed_time += passed
        if self.enabled and global_step and report_speed and self.logging is not None and self.steps_per_output:
            if self.global_step_count % self.steps_per_output == 0:
                self.logging(
                    f"epoch {self.epoch_count}, micro-batch {self.micro_step_count}, step {self.global_step_count}: "
                    f"{self.avg_samples_per_sec():.4g} samples/s since step {self.start_step}"
                )

    def avg_samples_per_sec(self) -> float:
        """Of the steps that are counted. -inf: none is over."""
        steps = self.global_step_count - self.start_step
        return steps * self.batch_size / self.total_elapsed_time if steps > 0 and self.total_elapsed_time > 0 else float("-inf")
