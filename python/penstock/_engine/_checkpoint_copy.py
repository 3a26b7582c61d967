"""The checkpoint that is copied beside the steps that follow it."""

from __future__ import annotations

from typing import Optional

from . import _checkpoint_names as checkpoint_names
from ._run import Run


class CheckpointCopy:
    """One at a time. Owns the path of the one that is being copied, or whose end nobody has heard of: its error is raised once."""

    def __init__(self, run: Run, world: int) -> None:
        self._run = run
        self._world = world
        self._path: Optional[str] = None
        #: How many copies may have been begun: what they name may be durable, also where their caller got an error.
        self.begins = 0

    def begin(self, parent: str, tag: str, latest: bool, description: str) -> str:
        """Returns its path when the commit is retained. OSError: it cannot be begun."""
        self.begins += 1
        try:
            self._path = path = str(self._run.core.begin_checkpoint(parent, tag, latest, description, "", "", ""))
        except Exception:
            self.begins -= 1
            raise
        checkpoint_names.begun(self, parent)
        return path

    def wait_for_checkpoint(self) -> None:
        """Blocks until the checkpoint of the last ``save_checkpoint`` is whole and durable under its name, and raises its error.

        Returns at once where none is being copied. Between steps. Over several ranks all of them call it.
        """
        if self._run.core is None or self._run.core.closed or self._path is None:
            return
        self._path = None
        self._run.core.finish_checkpoint()

    def raise_error(self) -> None:
        """OSError: it could not be written. Returns at once."""
        if self._path is None:
            return
        try:
            self._run.core.take_checkpoint_error()
        except BaseException:
            self._path = None
            raise

    def settle(self) -> None:
        """For others of this process who read it, of one rank. Its error is raised as ever. A pass that is open is not waited for."""
        runtime = self._run.runtime
        if self._world == 1 and self._path is not None and runtime is not None and not self._run.closed and not runtime.is_open:
            self._run.core.settle_checkpoint()
