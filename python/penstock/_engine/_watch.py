"""Who looks on while a model trains: the progress line, DeepSpeed's monitors, the count of FLOPs, where the time went."""

from __future__ import annotations

import json
import math
import os
import sys
import time
import warnings
from collections import deque
from typing import Any, Deque, Dict, List, Optional, Sequence

import torch

from .. import _core
from .._small_files import open_regular
from ._progress import Progress, count
from ._ranks import Alone
from ._settings import DTYPES, Settings


def product_rate(dtype: torch.dtype, size: int, device: torch.device, settles: float = 0.3, most: float = 2.0) -> float:
    """FLOPs a second of the best product of two matrices of size x size.

    As long as they become faster other work is in their way: `settles` seconds where nothing is, and `most` at the most.
    """
    first, second = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    best = settled = math.inf
    start = settled_at = now = time.perf_counter()
    with torch.no_grad():
        while now - settled_at < settles and now - start < most:
            begin = time.perf_counter()
            torch.mm(first, second)
            if device.type != "cpu":
                torch.cuda.synchronize(device)
            now = time.perf_counter()
            best = min(best, now - begin)
            if best < 0.98 * settled:
                settled, settled_at = best, now
    return 2 * size**3 / best


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


class Wandb:
    """Weights & Biases, under DeepSpeed's names."""

    def __init__(self, config: Dict[str, Any]) -> None:
        import wandb  # type: ignore[import-not-found]

        self._own = wandb.run is None
        self._run = wandb.run or wandb.init(project=config.get("project", "deepspeed"), group=config.get("group"), entity=config.get("team"))

    def append(self, entry: Dict[str, Any], scales_loss: bool) -> None:
        names = {"train_loss": "loss", "lr": "lr", **({"loss_scale": "loss_scale"} if scales_loss else {})}
        self._run.log({f"Train/Samples/{name}": _number(entry[key]) for name, key in names.items()}, step=entry["samples"])

    def close(self) -> None:
        if self._own:
            self._run.finish()


class Watch:
    """Of one engine. `samples`: that were trained on before this process. Over several ranks the first one tells for all."""

    def __init__(
        self, core: Any, settings: Settings, run_id: str, resumes: bool, replaces: Sequence[str], samples: int, ranks: Alone
    ) -> None:
        self._core = core
        self._settings = settings
        self._scales_loss = settings.dtype == "fp16"
        self.samples = samples
        self._pending: Deque[Dict[str, Any]] = deque()  # of steps that are not committed yet
        self._failing = False
        self._stepped = False  # in this process: what only evaluates leaves the monitors as they are
        self._half_told = False  # the first of these: DeepSpeed's monitors have it, and wandb has not
        self.complaint = ""
        self._monitors = None
        self._first, self._world = ranks.rank == 0, ranks.world
        if settings.monitors and self._first:
            self._monitors = _core.Monitors(settings, run_id, resumes, list(replaces), self._scales_loss)
        self._begins_at: Optional[int] = samples  # what the monitors have behind it goes with the first step; None: it has
        self._wandb = Wandb(settings.wandb) if settings.wandb is not None and self._first else None
        self._progress = Progress(settings.progress, self._first)
        self._ended = time.perf_counter()
        #: Of a forward, by the unit that batches are counted in; None: not known.
        self.forward_flops: Optional[float] = None
        #: Of a forward, by time: what backward comes to.
        self.backward_share = 1.0
        self._rate = 0.0
        self._profiled = False
        self._size = 1024 if settings.device.type == "cpu" else 8192  # of the matrices of a product that says what the device can

    def counts_flops(self, flops: float, units: int) -> None:
        """flops: of a forward's matrix products over `units` (tokens where they are known, else samples)."""
        self.forward_flops = flops / max(1, units)
        self._rate = self._world * product_rate(DTYPES[self._settings.dtype], self._size, self._settings.device)

    @property
    def product_flops_per_second(self) -> float:
        """Of the best product of matrices on a rank; 0: not measured."""
        return self._rate / self._world

    def flops(self, tokens: int, samples: int) -> float:
        """Of a step: its forwards, and twice that for backward of what that comes to. 0: not known."""
        return (1 + 2 * self.backward_share) * (self.forward_flops or 0.0) * (tokens or samples)

    def again(self, entry: Optional[Dict[str, Any]]) -> None:
        """A step whose commit another process has made: the monitors may not have heard of it. They do with the next step."""
        if entry is not None:
            self._pending.append(entry)

    def stepped(self, result: Dict[str, Any], tokens: int, samples: int) -> Dict[str, Any]:
        """Returns the step's entry, for its commit."""
        self._stepped = True
        self.samples += self._settings.train_batch_size or samples
        entry = {name: result[name] for name in ("step", "loss", "lr", "loss_scale")}
        entry["loss"] = entry["loss"] if math.isfinite(entry["loss"]) else None
        entry["samples"] = self.samples
        if self._monitors is not None or self._wandb is not None:
            self._pending.append(entry)
            self._tell(self._core.committed_step)
        now = time.perf_counter()
        seconds, self._ended = now - self._ended, now
        breakdown = result.pop("breakdown", "")
        if breakdown and self._first:
            self._progress.tell(breakdown)
        self._show(result, tokens, self.flops(tokens, samples), seconds)
        self._profile(result, self.flops(tokens, samples), seconds)
        return entry

    def _show(self, result: Dict[str, Any], tokens: int, flops: float, seconds: float) -> None:
        if not self._progress.on:
            return
        parts = [(0, f"step {result['step']}"), (1, f"loss {result['loss']:.4f}")]
        if tokens:
            parts.append((2, f"{count(tokens / seconds)} tok/s"))
        if flops and self._rate and flops / seconds <= self._rate:
            parts.append((3, f"MFU {flops / seconds / self._rate:.0%}"))
        for name, key in (("read", "nvme_read_bytes"), ("write", "nvme_write_bytes")):
            if result[key]:
                parts.append((4, f"{name} {count(result[key] / seconds)}B/s"))
        if result["stall_io_seconds"] > 0.1 * seconds:
            parts.append((5, f"waits for the drive {result['stall_io_seconds'] / seconds:.0%}"))
        self._progress.show(parts)

    def _profile(self, result: Dict[str, Any], flops: float, seconds: float) -> None:
        wanted = self._settings.flops_profiler
        if not flops or not self._first or result["step"] != wanted["profile_step"]:
            return
        self._profiled = True
        # Nothing is faster than the machine: where a step seems to be, the measure was wrong.
        share = flops / seconds / self._rate
        told = f"{share:.1%}" if share <= 1 else "and other work disturbed what it is held against, the best"
        text = (
            f"flops_profiler: step {result['step']}: {count(flops)}FLOP in matrix products (forward, and twice that for backward) in "
            f"{seconds:.3f} s: {count(flops / seconds)}FLOP/s, {told} of a product of {self._size} x {self._size} in "
            f"{self._settings.dtype} ({count(self._rate)}FLOP/s)\n"
        )
        try:
            if wanted["output_file"]:
                with os.fdopen(open_regular(wanted["output_file"], os.O_WRONLY | os.O_CREAT | os.O_APPEND), "a", encoding="utf-8") as file:
                    file.write(text)
                return
        except OSError as error:
            self.complaint = f"flops_profiler: {error}"
        sys.stderr.write(text)

    # Monitors hold a step when it is committed, and each once: what could not be written comes again with the next.
    def _tell(self, committed: int) -> None:
        told: List[str] = []
        while self._pending and self._pending[0]["step"] <= committed:
            entry = self._pending[0]
            try:
                if self._monitors is not None and not self._half_told:
                    if self._begins_at is not None:
                        self._monitors.begin(self._begins_at)
                        self._begins_at = None
                    self._monitors.append(json.dumps(entry))
                self._half_told = True
                if self._wandb is not None:
                    self._wandb.append(entry, self._scales_loss)
            except Exception as error:  # noqa: B902  # wandb's are no OSError
                told.append(f"{type(error).__name__}: {error}")
                break
            self._half_told = False
            self._pending.popleft()
        if told and not self._failing:
            self.complaint = f"a monitor could not be written, which is tried again with every step: {told[0]}"
        self._failing = bool(told)

    def complain(self) -> None:
        """Warns of what could not be written, once the step is whole: a warning may be an error."""
        complaint, self.complaint = self.complaint, ""
        if complaint:
            warnings.warn(complaint, stacklevel=3)

    def release(self) -> None:
        """Gives up the monitors' files, which another engine may write from here on."""
        self._monitors = None
        self._pending.clear()

    def close(self) -> None:
        """The last step is committed."""
        if self._stepped:
            self._tell(self._core.committed_step)
        self.release()
        self._progress.finish()
        wanted, last = self._settings.flops_profiler, self._core.committed_step
        if wanted["enabled"] and self._first and not self._profiled and last < wanted["profile_step"]:
            self._progress.tell(
                f"flops_profiler.profile_step: step {wanted['profile_step']} was never reached, the last one was {last}: "
                "no profile was made; name a step that is"
            )
        exchanges = self._core.exchanges()
        if exchanges and self._first:
            self._progress.tell(exchanges.rstrip("\n"))
        try:
            if self._wandb is not None:
                self._wandb.close()
        except Exception as error:  # noqa: B902
            self.complaint = f"wandb: {type(error).__name__}: {error}"
