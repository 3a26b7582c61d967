"""An engine goes on from a checkpoint of Penstock's or DeepSpeed's, or takes its weights."""

from __future__ import annotations

import errno
import os
import warnings
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from torch import nn

from .. import _client_state, _core
from .._buffers import truth
from . import _checkpoint_names as checkpoint_names
from . import _deepspeed_checkpoint as deepspeeds
from ._checkpoint_copy import CheckpointCopy
from ._given import Given, closed_forward
from ._modules import persistent_buffers
from ._on_disk import give_back
from ._places import Places
from ._preparation import Preparation, Source
from ._record import MOST_BUFFERS, Record, kept_in
from ._run import Run
from ._settings import PathLike
from ._state import State
from ._training import Training


def place_of(directory: str, tag: Optional[str]) -> Optional[str]:
    """Of the checkpoint of Penstock's with this tag, or that the file `latest` names. None: the directory holds none. FileNotFoundError: it holds
    some, and does not say which one is meant.
    """
    if tag is None:
        tag = checkpoint_names.newest(directory)
        if tag is None:
            there = _core.checkpoints_in(directory)
            if there:
                raise FileNotFoundError(
                    errno.ENOENT,
                    f"there is no file `{checkpoint_names.LATEST}` (a full disk leaves none), and {len(there)} of Penstock's checkpoints: "
                    f"say which one is meant, the newest with tag={there[-1]!r}",
                    directory,
                )
            return None
        if not tag:
            raise ValueError(f"{os.path.join(directory, checkpoint_names.LATEST)} is empty: name the checkpoint, with tag=")
    return checkpoint_names.place_of(directory, tag)


def record_of(path: str) -> Dict[str, Any]:
    """What the checkpoint has kept for Python. OSError: it is damaged."""
    try:
        return kept_in([path])
    except FileNotFoundError as error:  # "never committed": it has its name since it was whole
        raise OSError(errno.EIO, f"the checkpoint is damaged ({error.strerror}): load another one, with tag=", path) from None


def matched(model: nn.Module, weights: Any, path: str, strict: bool) -> List[Tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers of the model that the checkpoint has, each once. ValueError: one has another shape there, or, where that is
    strict, is missing on either side.
    """
    own: Dict[str, torch.Tensor] = {
        **{name: module._buffers[short] for name, (module, short, _, _) in persistent_buffers(model).items()},  # type: ignore[dict-item]
        **{
            f"{prefix}.{name}" if prefix else name: parameter
            for prefix, module in model.named_modules(remove_duplicate=False)
            for name, parameter in module._parameters.items()
            if parameter is not None
        },
    }
    there = weights.names(exclude_frozen=False)
    if strict:
        for names, holder, other in ((own, path, "the model"), (there, "the model", path)):
            lacking = next((name for name in names if name not in (there if names is own else own)), None)
            if lacking is not None:
                raise ValueError(f"{holder} has no {lacking}, which {other} has: load_module_strict=False leaves it out")
    taken = {id(own[name]): (name, own[name]) for name in there if name in own}
    for name, tensor in taken.values():
        shape = weights.kind_of(name)[0]
        if list(tensor.shape) != shape:
            raise ValueError(f"{path}: {name} is {shape} there and {list(tensor.shape)} in this model")
    return list(taken.values())


class Loading:
    """Finds a checkpoint and verifies it before anything is given up for it. Owns nothing: what is loaded is ``Preparation``'s source.

    close: of the engine, which ends where the run of the checkpoint cannot be made.
    """

    def __init__(
        self,
        given: Given,
        run: Run,
        places: Places,
        record: Record,
        copy: CheckpointCopy,
        training: Training,
        state: State,
        preparation: Preparation,
        close: Callable[[], None],
    ) -> None:
        self._given = given
        self._run = run
        self._places = places
        self._record = record
        self._copy = copy
        self._training = training
        self._state = state
        self._preparation = preparation
        self._close = close

    def load_checkpoint(
        self,
        load_dir: PathLike,
        tag: Optional[str] = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
        *,
        names: deepspeeds.Names = None,
        trust_client_state: bool = False,
    ) -> Tuple[Optional[str], Dict[str, Any]]:
        """Goes on from a checkpoint. Returns its path and its ``client_state``. Waits for what ``save_checkpoint`` copies into load_dir.

        Before the first forward that one reads it; later the run ends, and another one begins in its place. The state directory must hold
        no run, or ``overwrite=True`` was given. The checkpoint may be of any number of ranks.

        tag: default: the one that the file `latest` names. Without that file: FileNotFoundError where checkpoints of Penstock's are there,
        else a warning and (None, {}).
        load_lr_scheduler_states: False leaves the scheduler as it is; learning rates go on from the checkpoint until its next step.
        load_module_only: the model gets the values of a checkpoint of Penstock's, in its own types, and nothing else goes on: in an engine
        that has begun, moments stay. load_module_strict: False leaves those that the checkpoint has not as they are, and what it has
        besides alone; for load_module_only, since a run goes on with the very parameters that it had. load_optimizer_states=False: as
        load_module_only, with the scheduler and its learning rates where these are taken; steps are counted anew. custom_load_fn is refused.

        It may be DeepSpeed's: ZeRO-1, 2, 3 of any number of ranks, or universal. Masters, moments, steps, loss scale, learning rates and
        the scheduler's count go on, and nothing in its files is executed. names: where parameters are called otherwise there, a mapping
        from the module's names to the checkpoint's, or the path of a JSON file with one. Raises ValueError naming a parameter that is
        missing there, of another shape, or left over.

        trust_client_state: values of client_state that are in a file of the checkpoint (a save under DeepSpeed's name) may be of classes
        that execute what the file says. FileNotFoundError, RuntimeError: that file is missing, or would execute something; the engine is as it
        was. With load_module_only that is a warning, and client_state comes back without these values.
        """
        if custom_load_fn is not None:
            raise NotImplementedError("custom_load_fn is not served: load_module_only=True takes the weights, by their names")
        directory = os.fspath(load_dir)
        module_only = truth(load_module_only, "load_module_only")
        only = not truth(load_optimizer_states, "load_optimizer_states") or module_only
        strict = truth(load_module_strict, "load_module_strict")
        takes_scheduler = truth(load_lr_scheduler_states, "load_lr_scheduler_states")
        trusts = truth(trust_client_state, "trust_client_state")
        if tag is not None and "\0" in str(tag):
            raise ValueError(f"tag is {tag!r}: no checkpoint has a zero byte in its name")
        self._check_may_load(only)
        self._copy.wait_for_checkpoint()
        checkpoint_names.settle(directory)
        if deepspeeds.is_deepspeeds(directory, tag):
            path = directory if tag is None else os.path.join(directory, tag)
            if only:
                raise ValueError(
                    f"{path}: {'load_module_only' if module_only else 'load_optimizer_states=False'}: all of a checkpoint of DeepSpeed's is loaded; its "
                    "weights alone are taken by the model's load_state_dict (deepspeed.utils.zero_to_fp32)"
                )
            found = self._load_deepspeeds(path, deepspeeds.names_of(names), takes_scheduler)
            self._start_over()
            return found
        place = place_of(directory, tag)
        if names is not None:
            raise ValueError(f"{directory} holds no checkpoint of DeepSpeed's: only those may have other names=")
        if place is None:
            warnings.warn(f"{directory} holds no checkpoint (no file `{checkpoint_names.LATEST}`): the run begins anew", stacklevel=3)
            return None, {}
        path, kept = place, record_of(place)
        client: Dict[str, Any] = {}

        def look(rank: int, world: int) -> None:
            client.update(_client_state.whole(kept.get("client", {}), path, trusts, needs_all=not module_only))
            if not only and self._run.begun:
                _core.verify_checkpoint(path, rank, world)

        self._verify_before_giving_up(look, always=True)
        if only:
            self._take_weights(path, strict)
            if takes_scheduler and not module_only:
                self._record.take_scheduler(kept)
        else:
            self._preparation.begin_with(Source(path, takes_scheduler))
            self._start_over()
        return path, client

    # The engine goes on with what it has where what is to take its place is damaged: known on all ranks before any gives it up. One that has
    # not begun has nothing yet; the run that its first forward replaces is looked after there.
    def _verify_before_giving_up(self, verify: Callable[[int, int], None], always: bool = False) -> None:
        if not self._run.begun:
            if always:
                verify(0, 1)
            return
        failure: Optional[Exception] = None
        try:
            verify(self._run.ranks.rank, self._run.ranks.world)
        except Exception as error:  # noqa: B902
            failure = error
        told = self._run.ranks.texts("whether the checkpoint is whole", "" if failure is None else str(failure))
        if failure is not None:
            raise failure
        for rank, text in enumerate(told):
            if text:
                raise OSError(errno.EIO, f"rank {rank}: {text}")

    def _check_may_load(self, only_weights: bool) -> None:
        if self._run.closed:
            raise RuntimeError("this engine was closed")
        if not self._run.begun:
            return
        if self._run.ready().is_open or self._training.is_under_way:
            raise RuntimeError("a step is open: a checkpoint is loaded between step() and the next forward")
        if not only_weights:
            self._places.check_begun()

    # Values of another run, in the types of the parameters, and its buffers.
    def _take_weights(self, path: str, strict: bool) -> None:
        from .._fp32 import open_weights

        weights = open_weights(path)
        begun = self._run.begun
        if self._given.values_are_gone and not begun:
            raise ValueError("this model's values went with its engine that was closed: build the model anew, or load the checkpoint whole")
        taken = matched(self._given.module, weights, path, strict)
        buffers = persistent_buffers(self._given.module)
        # A half of its values would be worse than none.
        self._verify_before_giving_up(lambda rank, world: _core.verify_checkpoint(path, rank, world), always=True)
        self._record.mark_partly_written(begun)
        for name, tensor in taken:
            value = weights.read(weights.tied.get(name, name))
            if begun and name not in buffers:
                self._state.write_state(tensor, value.to(self._given.dtypes[id(tensor)]))  # type: ignore[arg-type]
                continue
            with torch.no_grad():
                tensor.data.copy_(value)
            give_back(tensor)
        self._record.mark_partly_written(False)

    def _load_deepspeeds(self, path: str, names: Dict[str, str], takes_scheduler: bool) -> Tuple[str, Dict[str, Any]]:
        if not self._run.begun:
            self._given.look_at_parameters()
        deepspeeds.check_served(self._given.parameters(), self._given.groups(), self._given.described)
        found = deepspeeds.open_checkpoint(
            path,
            names,
            self._given.parameters(),
            list(persistent_buffers(self._given.module)),
            MOST_BUFFERS,
            takes_scheduler,
        )
        client = deepspeeds.client_state_of(found)
        self._verify_before_giving_up(lambda rank, world: deepspeeds.verify(found, self._given.parameters(), rank, world))
        self._preparation.begin_with(Source(found.path, found=found))
        self._record.steps, self._record.skipped_steps = found.said["step"], found.said["step"] - found.said["updates"]
        return found.path, client

    # The run that has begun ends, and another one takes its place.
    def _start_over(self) -> None:
        if not self._run.begun:
            return
        try:
            self._preparation.again()
        except BaseException:
            self._close()
            self._given.module.forward = closed_forward  # type: ignore[method-assign]
            raise
