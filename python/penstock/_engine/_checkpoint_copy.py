"""The checkpoint that is copied beside the steps that follow it."""

from __future__ import annotations

import os
from typing import Optional

from .._files import NewFile
from . import _checkpoint_names as checkpoint_names
from ._run import Run


class CheckpointCopy:
    """One at a time. Owns the path of the one that is being copied, or whose end nobody has heard of: its error is raised once; and its file."""

    def __init__(self, run: Run, world: int) -> None:
        self._run = run
        self._world = world
        self._path: Optional[str] = None
        self._next_file: Optional[NewFile] = None
        self._file: Optional[NewFile] = None

    def take_in(self, file: Optional[NewFile]) -> None:
        """The next checkpoint that is begun holds this rank's file, settled beside it, under the name that it is for. Takes its ownership. None: none."""
        if self._next_file is not None:
            self._next_file.discard()
        self._next_file = file

    def begin(self, parent: str, tag: str, latest: bool, description: str, name: str) -> str:
        """Returns its path when the commit is retained. name: its own, beside its tag. OSError: it cannot be begun."""
        file, self._next_file = self._next_file, None
        beside, inside = ("", "") if file is None else (file.settled, os.path.basename(file.path))
        try:
            self._path = path = str(self._run.core.begin_checkpoint(parent, tag, latest, description, name, beside, inside))
        except Exception:
            if file is not None:
                file.discard()
            raise
        self._let_go_of_file()
        self._file = file
        checkpoint_names.begun(self, parent)
        return path

    # It is in the checkpoint, or that has failed.
    def _let_go_of_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.discard()

    def wait_for_checkpoint(self) -> None:
        """Blocks until the checkpoint of the last ``save_checkpoint`` is whole and durable under its name, and raises its error.

        Returns at once where none is being copied. Between steps. Over several ranks all of them call it.
        """
        if self._run.core is None or self._run.core.closed or self._path is None:
            return
        self._path = None
        try:
            self._run.core.finish_checkpoint()
        except Exception:
            self._let_go_of_file()
            raise
        self._let_go_of_file()  # not where Ctrl-C has ended the wait: it may not be in the checkpoint yet

    def raise_error(self) -> None:
        """OSError: it could not be written. Returns at once."""
        if self._path is None:
            return
        try:
            self._run.core.take_checkpoint_error()
        except BaseException:
            self._path = None
            self._let_go_of_file()
            raise

    def settle(self) -> None:
        """For others of this process who read it, of one rank. Its error is raised as ever. A pass that is open is not waited for."""
        runtime = self._run.runtime
        if self._world == 1 and self._path is not None and runtime is not None and not self._run.closed and not runtime.is_open:
            self._run.core.settle_checkpoint()
