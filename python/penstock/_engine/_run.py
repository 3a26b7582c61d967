"""What an engine has from its first forward until it is closed."""

from __future__ import annotations

import contextlib
import json
from typing import Any, Dict, List, Mapping, Optional, Tuple

import torch
from torch import nn

from ._modules import move_buffers
from ._ranks import Alone
from ._report import Report
from ._runtime import Runtime
from ._watch import Watch
from ._weights import Weights
from ._whole import Whole


class Run:
    """The run of one engine. Owns the core, the patched modules, the weights, the watch and the connections to other ranks.

    ``Preparation`` makes them with the first forward, and anew where a checkpoint takes the place of the run.
    """

    weights: Weights
    whole: Whole
    names: Dict[int, str]  # of parameters, by id: the core's
    layout: Dict[str, Any]  # what a directory says of the parameters in it
    buffers: Mapping[str, Tuple[nn.Module, str, torch.Tensor, int]]  # persistent ones: module, name, as it was first, its version

    def __init__(self) -> None:
        self.core: Any = None
        self.runtime: Optional[Runtime] = None
        self.watch: Optional[Watch] = None
        self.ranks: Alone = Alone()  # until they have met
        self.id = ""
        self.closed = False
        #: Whether parameters have values of the caller's, for ``engine.gathered``.
        self.gathered = False
        #: What there is to say beside the engine's own lines.
        self.lines: List[str] = []
        #: Bytes of torch's tensors in a step beside host_memory, as the first forward has shown; 0: not known.
        self.torch_bytes = 0
        self._last_report: Optional[Report] = None  # of a closed engine

    @property
    def begun(self) -> bool:
        return self.runtime is not None

    def ready(self) -> Runtime:
        """RuntimeError: there is no run yet, or it has ended."""
        if self.closed:
            raise RuntimeError("this engine was closed")
        if self.runtime is None:
            raise RuntimeError("the engine has not seen the model yet: call it on a batch first")
        if self.runtime.spoiled:
            raise RuntimeError(f"{self.runtime.spoiled}. This engine ends here: close() it, and go on from its last commit with resume=True")
        return self.runtime

    def info(self) -> Dict[str, Any]:
        return dict(json.loads(self.core.info()))

    def plan(self) -> Dict[str, Any]:
        """What was planned and used so far: bytes of state, of the drive, of the budget, and the least that would do."""
        self.ready()
        told = self.info()
        told["saved_activations"]["torch_bytes"] = self.torch_bytes
        return told

    def report(self) -> Report:
        """What this process has trained: losses, bytes, seconds, peaks, what bounds a step, a list of steps; of a closed engine the last.

        A dictionary; ``report().html(path)`` is a page, and a notebook shows it as one. Between steps only.
        """
        if self._last_report is not None:
            return Report(self._last_report)
        if self.ready().is_open:
            raise RuntimeError("a step is open: the report is given between step() and the next forward")
        return self._report_of(self.ready())

    def keep_report(self) -> None:
        """Keeps the present report for when the engine is closed."""
        self._last_report = self._report_of(self.runtime)  # type: ignore[arg-type]

    def _report_of(self, runtime: Runtime) -> Report:
        told = Report.of(self.core.report(), runtime.device_report(), self.watch.product_flops_per_second if self.watch is not None else 0.0)
        told.update(runtime.pieces.report())
        return told

    def log(self) -> List[str]:
        """What the engine had to say since the last call."""
        lines, self.lines = self.lines, []
        return lines + (list(self.core.take_log()) if self.core is not None else [])

    def let_go(self, module: nn.Module) -> None:
        """The module has its own functions again, and the engine's memory and files are given up. The parameters have no values."""
        for name in ("state_dict", "load_state_dict", "zero_grad"):
            module.__dict__.pop(name, None)
        with contextlib.ExitStack() as all_of_it:  # from the last to the first, whatever a broken device says to one of them
            all_of_it.callback(self.ranks.close)
            all_of_it.callback(self.core.close)
            all_of_it.callback(move_buffers, module, torch.device("cpu"))
            all_of_it.callback(self.runtime.let_go)  # type: ignore[union-attr]
