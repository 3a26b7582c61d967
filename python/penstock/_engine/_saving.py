"""Checkpoints of an engine's run."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
from typing import Any, Dict, List, Mapping, Optional, Tuple

from .._buffers import truth
from .._small_files import exists, is_link
from . import _checkpoint_names as checkpoint_names
from . import _parameters
from ._checkpoint_copy import CheckpointCopy
from ._record import Record
from ._run import Run
from ._settings import PathLike


class Saving:
    """Names a checkpoint, and begins its copy. Owns the paths of those that the engine has written, which it may replace, with their tags."""

    def __init__(self, run: Run, record: Record, copy: CheckpointCopy) -> None:
        self._run = run
        self._record = record
        self._copy = copy
        self._written: Dict[str, str] = {}

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
        two versions, that of the step after. With three none does: the copy is spread over as many steps as there were between the last
        two, and 24 at most.

        tag: a name for it beside its own, ``step-N``. client_state: JSON, given back by ``load_checkpoint``. save_latest: False leaves
        ``latest`` as it is, which names the checkpoint that is loaded without a tag. A second one of the same step and tag takes the place of
        the first, and is waited for; one with another tag is ``step-N.2`` beside it. A ``step-N`` that this engine has not written is a
        FileExistsError; replaces_others: another engine's of the same run is replaced, where it has this tag and no other; what another run has
        made, or is no checkpoint, keeps its place, and this one is ``step-N.2``. wait: it is whole when this returns. Over
        several ranks all of them call it, for one directory that all of them see; each writes its part, and each gets its own client_state
        back.
        """
        self._run.ready()
        self._copy.wait_for_checkpoint()
        checkpoint_names.settle(os.fspath(save_dir))
        save_latest, wait = truth(save_latest, "save_latest"), truth(wait, "wait")
        replaces_others = truth(replaces_others, "replaces_others")
        self._check_tag(os.fspath(save_dir), tag)
        record = self._record
        before = record.client_state, record.checkpoints
        record.client_state = record.client_state if client_state is None else dict(client_state)
        record.checkpoints = os.path.abspath(save_dir)
        try:
            record.text()
        except (TypeError, ValueError):
            record.client_state = before[0]
            raise
        finally:
            record.checkpoints = before[1]
        if client_state is not None:
            record.kept_apart = []
        record.describe()
        path = self._checkpoint(os.fspath(save_dir), tag or "", save_latest, replaces_others, wait)
        record.checkpoints = os.path.abspath(save_dir)  # the next commit says it
        return path

    # ValueError: a name that is none, or a checkpoint's own. Before the checkpoint is written, which takes its time.
    def _check_tag(self, save_dir: str, tag: Any) -> None:
        if tag is None:
            return
        name = checkpoint_names.name_of(self._record.steps)
        own = checkpoint_names.is_own(tag) and tag != name
        if own or not checkpoint_names.is_tag(tag):
            raise ValueError(f"tag is {tag!r}: a name within the directory, not beginning with a dot, that no other checkpoint has or will have")
        link = os.path.join(save_dir, tag)
        if exists(link, follow=False) and not is_link(link) and tag != name:
            raise FileExistsError(errno.EEXIST, "something else than a checkpoint's tag has this name", link)

    # One of the same step that is there already stands until the new one does, which is waited for then.
    def _checkpoint(self, parent: str, tag: str, latest: bool, replaces_others: bool, wait: bool) -> str:
        with contextlib.ExitStack() as lock:
            self._run.ranks.on_first("the directory of checkpoints", lambda: lock.enter_context(checkpoint_names.locked(parent)))
            path = self._begin_checkpoint(parent, tag, latest, replaces_others)
        if wait:
            self._copy.wait_for_checkpoint()
        return path

    # On rank 0: the name that it gets, and what stands under it and aside, which it then replaces. One that another run has made, that has other
    # tags, or that is no checkpoint keeps its place.
    def _choose(self, parent: str, tag: str, replaces_others: bool) -> Tuple[str, str]:
        checkpoint_names.remove_superseded(parent)
        for number in itertools.count(1):
            name = checkpoint_names.name_of(self._record.steps, number)
            if checkpoint_names.is_own(tag) and name != tag:
                why = "tag is the name of something that is no checkpoint of this run without other tags: give another tag, or another directory"
                raise FileExistsError(errno.EEXIST, why, os.path.join(parent, tag))
            place, aside = os.path.join(parent, name), os.path.join(parent, checkpoint_names.REPLACED % name)
            there = "".join("yn"[not exists(each, follow=False)] for each in (place, aside))
            if there == "nn":
                if number > 1:
                    first = checkpoint_names.name_of(self._record.steps)
                    self._run.lines.append(f"{place}: {first} there is another run's, has another tag or holds another file, and keeps its place beside this checkpoint of its step")
                return name, there
            known = os.path.realpath(place) in self._written
            if not (known or replaces_others) and number == 1:
                if there[0] == "y":
                    why = "a checkpoint of this step is there that this engine has not written: remove it, or use another directory"
                    raise FileExistsError(errno.EEXIST, why, place)
                if checkpoint_names.run_of(aside) != self._run.id:
                    why = "a checkpoint of this step is there, of another run, whose replacement was interrupted: rename it to step-N or remove it"
                    raise FileExistsError(errno.EEXIST, why, aside)
            if there != "yy" and (known or replaces_others or there == "ny") and self._may_replace(parent, name, place if there[0] == "y" else aside, tag):
                return name, there
        raise AssertionError

    def _may_replace(self, parent: str, name: str, stands: str, tag: str) -> bool:
        if checkpoint_names.run_of(stands) != self._run.id:
            return False
        wanted = "" if tag == name else tag
        tags = checkpoint_names.tags_of(parent, name)
        return tags == ({wanted} if wanted else set()) or (not tags and self._written.get(os.path.realpath(os.path.join(parent, name))) == wanted)

    def _begin_checkpoint(self, parent: str, tag: str, latest: bool, replaces_others: bool) -> str:
        description = _parameters.text_of(_parameters.with_buffers(self._run.layout, self._run.buffers))
        chosen: List[str] = []
        what = "where this checkpoint goes"
        self._run.ranks.on_first(what, lambda: chosen.extend(self._choose(parent, tag, replaces_others)))
        name, there = self._run.ranks.texts(what, " ".join(chosen))[0].split(" ")
        old, aside = os.path.join(parent, name), os.path.join(parent, checkpoint_names.REPLACED % name)

        def begin() -> None:
            # From here on what has its name is this engine's, however the copy ends.
            self._written[os.path.realpath(self._copy.begin(parent, tag, latest, description, name))] = "" if tag == name else tag

        if there == "nn":
            begin()
            return old
        if there[0] == "y":
            self._run.ranks.on_first("the old checkpoint", lambda: os.rename(old, aside))
        try:
            begin()
            self._copy.wait_for_checkpoint()
        except BaseException:
            if self._run.ranks.rank == 0 and there[0] == "y" and not exists(old, follow=False):
                os.rename(aside, old)
            raise
        if self._run.ranks.rank == 0 and checkpoint_names.run_of(aside) == self._run.id:  # nobody has put files into it meanwhile
            shutil.rmtree(aside, ignore_errors=True)
        return old
