"""Checkpoints of an engine's run."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from typing import Any, List, Mapping, Optional, Set

from .. import _core
from .._buffers import truth
from .._small_files import exists, is_link
from . import _checkpoint_names as checkpoint_names
from . import _parameters
from ._checkpoint_copy import CheckpointCopy
from ._record import Record
from ._run import Run
from ._settings import PathLike

_STEP = "step-%08d"  # a checkpoint's name (swap/checkpoint_files.cc)


class Saving:
    """Names a checkpoint, and begins its copy. Owns the paths of those that the engine has written, which it may replace."""

    def __init__(self, run: Run, record: Record, copy: CheckpointCopy) -> None:
        self._run = run
        self._record = record
        self._copy = copy
        self._written: Set[str] = set()

    def save_checkpoint(
        self,
        save_dir: PathLike,
        tag: Optional[str] = None,
        client_state: Optional[Mapping[str, Any]] = None,
        *,
        save_latest: bool = True,
        replaces_others: bool = False,
        wait: bool = False,
    ) -> str:
        """A whole copy of the run in ``save_dir``, which stays as it is while training goes on. Returns its path.

        It returns when the commit is retained; a thread copies it beside the steps that follow, and the path, the tag and ``latest`` are
        there once the copy is whole and durable. What it has, client_state, random numbers, scheduler and loss scale too, is of the moment
        of the call. The next ``save_checkpoint``, ``load_checkpoint``, ``export_checkpoint``, ``wait_for_checkpoint`` and ``close`` wait
        for it. An error of the copy is raised once, by the first of these and ``step`` and ``train_batch``: ``step`` raises it before
        it does anything, and may be called again. With state in memory the update of the next step waits for the copy; on a drive with
        two versions, that of the step after.

        tag: a name for it beside its own, ``step-N``. client_state: JSON, given back by ``load_checkpoint``. save_latest: False leaves
        ``latest`` as it is, which names the checkpoint that is loaded without a tag. A second one of the same step takes the place of the
        first, and is waited for; replaces_others: also where another engine has written that. wait: it is whole when this returns. Over
        several ranks all of them call it, for one directory that all of them see; each writes its part, and each gets its own client_state
        back.
        """
        self._run.ready()
        self._copy.wait_for_checkpoint()
        save_latest, wait = truth(save_latest, "save_latest"), truth(wait, "wait")
        replaces_others = truth(replaces_others, "replaces_others")
        self._check_tag(os.fspath(save_dir), tag)
        if client_state is not None:
            before, self._record.client_state = self._record.client_state, dict(client_state)
            try:
                self._record.text()
            except (TypeError, ValueError):
                self._record.client_state = before
                raise
            self._record.kept_apart = []
        self._record.describe()
        return self._checkpoint(os.fspath(save_dir), tag or "", save_latest, replaces_others, wait)

    # ValueError: a name that is none, or a checkpoint's own. Before the checkpoint is written, which takes its time.
    def _check_tag(self, save_dir: str, tag: Any) -> None:
        if tag is None:
            return
        own = checkpoint_names.is_own(tag) and tag != _STEP % self._record.steps
        if own or not checkpoint_names.is_tag(tag):
            raise ValueError(f"tag is {tag!r}: a name within the directory, not beginning with a dot, that no other checkpoint has or will have")
        link = os.path.join(save_dir, tag)
        if exists(link, follow=False) and not is_link(link) and tag != _STEP % self._record.steps:
            raise FileExistsError(errno.EEXIST, "something else than a checkpoint's tag has this name", link)

    # What a kill has left of a replacement is whole, and this engine may put its own in its place if the run is the same.
    def _check_is_of_this_run(self, path: str) -> None:
        if (json.loads(_core.record_of([path])) or {}).get("run_id") != self._run.id:
            why = "a checkpoint of this step is there, of another run, whose replacement was interrupted: rename it to step-N or remove it"
            raise FileExistsError(errno.EEXIST, why, path)

    # One of the same step that is there already stands until the new one does, which is waited for then.
    def _checkpoint(self, parent: str, tag: str, latest: bool, replaces_others: bool, wait: bool) -> str:
        with contextlib.ExitStack() as lock:
            self._run.ranks.on_first("the directory of checkpoints", lambda: lock.enter_context(checkpoint_names.locked(parent)))
            path = self._begin_checkpoint(parent, tag, latest, replaces_others)
        if wait:
            self._copy.wait_for_checkpoint()
        return path

    def _begin_checkpoint(self, parent: str, tag: str, latest: bool, replaces_others: bool) -> str:
        name = _STEP % self._record.steps
        old, aside = os.path.join(parent, name), os.path.join(parent, checkpoint_names.REPLACED % name)
        description = _parameters.text_of(_parameters.with_buffers(self._run.layout, self._run.buffers))

        def begin() -> None:
            # From here on what has its name is this engine's, however the copy ends.
            self._written.add(os.path.realpath(self._copy.begin(parent, tag, latest, description)))

        found: List[str] = []
        what = "which directories of this step exist"
        self._run.ranks.on_first(what, lambda: found.extend("yn"[not exists(each, follow=False)] for each in (old, aside)))
        there = self._run.ranks.texts(what, "".join(found))[0]
        if there == "ny" and not (replaces_others or os.path.realpath(old) in self._written):
            self._run.ranks.on_first("the checkpoint that stands in", lambda: self._check_is_of_this_run(aside))
        if there == "nn":
            begin()
            return old
        if there[0] == "y":
            if os.path.realpath(old) not in self._written and not replaces_others:
                raise FileExistsError(
                    errno.EEXIST, "a checkpoint of this step is there that this engine has not written: remove it, or use another directory", old
                )

            def move_aside() -> None:
                shutil.rmtree(aside, ignore_errors=True)
                os.rename(old, aside)

            self._run.ranks.on_first("the old checkpoint", move_aside)
        try:
            begin()
            self._copy.wait_for_checkpoint()
        except BaseException:
            if self._run.ranks.rank == 0 and there[0] == "y" and not exists(old, follow=False):
                os.rename(aside, old)
            raise
        if self._run.ranks.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)  # also where a kill came before this line the last time
        return old
