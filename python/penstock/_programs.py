"""The wheel's console scripts: ``penstock``, ``ds_io``, ``ds_nvme_tune``, as far as they need no LibTorch."""

from __future__ import annotations

import signal
import sys
from typing import Callable, List

from . import _core


def _run(program: Callable[[List[str]], int]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # compiled code does not hear Python's
    sys.exit(program(sys.argv[1:]))


def penstock() -> None:
    """report, estimate, inspect, verify and env; what needs LibTorch says so."""
    _run(_core.run_penstock)


def ds_io() -> None:
    _run(_core.run_ds_io)


def ds_nvme_tune() -> None:
    _run(_core.run_ds_nvme_tune)
