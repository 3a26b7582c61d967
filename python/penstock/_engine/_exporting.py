"""The state of an engine as DeepSpeed's universal checkpoint."""

from __future__ import annotations

import errno
import json
import os
import warnings
from typing import List, Optional

from .._buffers import truth
from .._small_files import exists
from . import _checkpoint_names as checkpoint_names
from . import _deepspeed_checkpoint as deepspeeds
from ._checkpoint_copy import CheckpointCopy
from ._given import Given
from ._modules import persistent_buffers
from ._record import Record
from ._run import Run
from ._settings import PathLike


class Exporting:
    """Collects what Python knows of the run for the core, which writes the files. Owns nothing."""

    def __init__(self, given: Given, run: Run, record: Record, copy: CheckpointCopy) -> None:
        self._given = given
        self._run = run
        self._record = record
        self._copy = copy

    def export_checkpoint(
        self,
        save_dir: PathLike,
        tag: Optional[str] = None,
        *,
        names: deepspeeds.Names = None,
        torch_optimizer: Optional[bool] = None,
        overwrite: bool = False,
    ) -> str:
        """Writes the state as DeepSpeed's universal checkpoint, which it loads with ``"checkpoint": {"load_universal": true}`` under any stage
        and number of ranks. Returns its path.

        tag: ``global_stepN_universal``. names: where parameters are called otherwise there, as for ``load_checkpoint``. torch_optimizer:
        it will be one of torch's own (an optimizer handed to deepspeed.initialize, or ``"torch_adam": true``), which counts steps in a
        tensor; default: as in the checkpoint that was loaded, else whether the configuration says so or an optimizer was handed over.
        overwrite: a universal checkpoint of that tag may be replaced: the old one stands until the new one is whole. Memory: a tile, and
        48 MiB. Between steps. Over several ranks all of them call it, and the first one writes.
        """
        if self._run.ready().is_open:
            raise RuntimeError("a step is open: the state is written between step() and the next forward")
        self._copy.wait_for_checkpoint()
        deepspeeds.check_served(self._given.parameters(), self._given.groups(), self._given.described)
        if self._record.steps == self._record.skipped_steps:
            raise ValueError("no step has changed the weights yet: there are no moments to export")
        if tag is None:
            tag = f"global_step{self._record.steps}_universal"
        if not checkpoint_names.is_tag(tag) or checkpoint_names.is_own(tag):
            raise ValueError(f"tag is {tag!r}: a name within the directory, not beginning with a dot, that no checkpoint of save_checkpoint has")
        path = os.path.join(os.fspath(save_dir), tag)
        there: List[str] = []
        self._run.ranks.on_first("whether the checkpoint is there", lambda: there.extend(["y"] if exists(path, follow=False) else []))
        if self._run.ranks.texts("whether the checkpoint is there", "".join(there))[0] and not overwrite:
            raise FileExistsError(errno.EEXIST, "a checkpoint is there already: overwrite=True replaces it", path)
        mapped = {name: theirs for name, theirs in deepspeeds.names_of(names).items() if name not in persistent_buffers(self._given.module)}
        known = [name for name, _ in self._given.parameters()]
        unknown = [name for name in mapped if name not in known]
        if unknown:
            raise ValueError(f"names= has {unknown[0]}, which is no parameter of this model")
        client, left_out = deepspeeds.plain_client(self._record.client_state)
        left_out += self._record.kept_apart
        if left_out:
            warnings.warn(
                f"client_state: {', '.join(left_out)} is more than numbers of 64 bits, texts, lists and dicts, has a name of DeepSpeed's own, or is in a "
                "file beside the last checkpoint, and left out",
                stacklevel=3,
            )
        if len({group["lr"] for group in self._given.optimizer.param_groups}) > 1:
            taken = "leaves them as its own optimizer has them"
            if self._given.scheduler is not None:
                taken = "gives all the first one's for a step, unless its script sets them after load_checkpoint (docs/deepspeed.md)"
            warnings.warn(f"groups have different learning rates: DeepSpeed's stage 3 {taken}", stacklevel=3)
        buffers = ", ".join(self._record.changed_buffers())
        if buffers:
            warnings.warn(
                f"DeepSpeed loads no buffers from a universal checkpoint: {buffers} will be as the model has them there",
                stacklevel=3,
            )
        if torch_optimizer is None:
            torch_optimizer = self._torch_optimizer()
        self._record.describe()
        what = {
            "directory": os.fspath(save_dir),
            "tag": tag,
            "overwrite": truth(overwrite, "overwrite"),
            "names": mapped,
            "groups": deepspeeds.group_options(self._given.optimizer.param_groups),
            "lr_scheduler": deepspeeds.scheduler_state(self._given.scheduler, self._record.steps - self._record.skipped_steps),
            "client": client,
            "samples": self._record.samples,
            "torch_optimizer": truth(torch_optimizer, "torch_optimizer"),
            "has_scheduler": self._given.scheduler is not None,
        }
        self._run.core.export_checkpoint(json.dumps(what, allow_nan=False), [[name for name, _ in block.parameters] for block in self._given.blocks])
        return path

    # Whether DeepSpeed's script has one of torch's own, as far as is known.
    def _torch_optimizer(self) -> bool:
        imported = self._run.info()["run"].get("imported")
        if imported is not None:
            return bool(imported["torch_optimizer"])
        if self._given.optimizer_was_given:
            return type(self._given.torch_optimizer).__module__.startswith("torch.")
        described = self._given.settings.config.get("optimizer") or {}
        return bool((described.get("params") or {}).get("torch_adam"))
