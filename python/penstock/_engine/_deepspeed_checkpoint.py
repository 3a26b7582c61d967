"""DeepSpeed's checkpoints as an engine has them: where a run stood, as the engine's own commits say it, and the other way.

Values go from file to drive in the core; here is what is said beside them.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import torch
from torch import nn

from .. import _core
from .._small_files import read_json
from ._identity import values_of
from ._json import decode
from ._optimizer import ConfigScheduler
from ._settings import PathLike

Names = Union[None, PathLike, Mapping[str, str]]

_LAST = "last_batch_iteration"  # of the schedulers of DeepSpeed's configurations
_OPTIONS = ("betas", "weight_decay")  # of a group, beside its learning rate
_OWN = frozenset(_core.deepspeed_keys())  # beside the client_state


class Found:
    """A checkpoint of DeepSpeed's that fits the model. path: of its tag. ``said``: what its files say of the run."""

    def __init__(self, path: str, names: Dict[str, str], said: Dict[str, Any], takes_scheduler: bool) -> None:
        self.path = path
        self.names = names
        self.said = said
        self.takes_scheduler = takes_scheduler


def is_deepspeeds(directory: str, tag: Optional[str]) -> bool:
    return bool(_core.is_deepspeed_checkpoint(directory if tag is None else os.path.join(directory, tag)))


def names_of(given: Names) -> Dict[str, str]:
    """Of parameters: in the module -> in the checkpoint. given: a mapping, or the path of a JSON file with one."""
    if given is None:
        return {}
    source = "names"
    if isinstance(given, (str, os.PathLike)):
        source = os.fspath(given)
        given = read_json(source)
    if not isinstance(given, Mapping) or not all(isinstance(each, str) for pair in given.items() for each in pair):
        raise TypeError(f"{source}: a mapping from the module's names to the checkpoint's: {{'embed.weight': 'transformer.wte.weight'}}")
    return dict(given)


def check_served(parameters: Sequence[Tuple[str, nn.Parameter]], groups: Mapping[int, int], described: Mapping[str, Any]) -> None:
    """ValueError: the state of such a model and optimizer is no checkpoint of DeepSpeed's."""
    if described["type"] not in ("Adam", "AdamW"):
        raise ValueError(f"a checkpoint of DeepSpeed's has Adam's moments, and this optimizer is {described['type']}")
    for name, parameter in parameters:
        if not parameter.requires_grad or id(parameter) not in groups:
            raise ValueError(f"{name} is frozen: a checkpoint of DeepSpeed's is served where all parameters train")


def open_checkpoint(
    path: str, names: Dict[str, str], parameters: Sequence[Tuple[str, nn.Parameter]], buffers: Sequence[str], most_bytes: int, takes_scheduler: bool
) -> Found:
    """Raises what is wrong with it, or names a parameter that is missing there, of another shape, or left over."""
    shapes = [(name, list(parameter.shape)) for name, parameter in parameters]
    said = json.loads(_core.deepspeed_checkpoint(path, shapes, names, list(buffers), most_bytes))
    return Found(said["directory"], {name: theirs for name, theirs in names.items() if name not in buffers}, said, takes_scheduler)


def verify(found: Found, parameters: Sequence[Tuple[str, nn.Parameter]], rank: int, world: int) -> None:
    """Reads all of it and checks its checksums; of several ranks each its share. OSError: it is damaged, or cannot be read."""
    _core.verify_deepspeed_checkpoint(found.path, [(name, list(parameter.shape)) for name, parameter in parameters], found.names, rank, world)


def client_state_of(found: Found) -> Dict[str, Any]:
    unread = found.said["unread"]
    if unread:
        warnings.warn(
            f"client_state of {found.path}: {', '.join(unread)} cannot be kept with a commit, or would take executing what is in the file, and is "
            "left out",
            stacklevel=3,
        )
    return dict(decode(found.said["client"]))


def groups_of(found: Found, groups: Sequence[Mapping[str, Any]]) -> Tuple[List[float], List[Dict[str, Any]]]:
    """Of each group its learning rate and its other values, as the checkpoint has them; told where others were given."""
    theirs = found.said["groups"]
    if len(theirs) != len(groups) and theirs:
        options = [{name: group.get(name) for name in ("lr", *_OPTIONS)} for group in theirs]
        if any(each != options[0] for each in options):
            raise ValueError(
                f"{found.path} has {len(theirs)} parameter groups of different options, and the optimizer {len(groups)}: make its groups as they were"
            )
        theirs = [theirs[0]] * len(groups)
    rates = [float(group["lr"]) for group in groups]
    values = [values_of(group) for group in groups]
    told = []
    for number, (own, other) in enumerate(zip(values, theirs)):
        if isinstance(other.get("lr"), (int, float)):
            rates[number] = float(other["lr"])
        for name in _OPTIONS:
            given, there = own.get(name), other.get(name)
            if given is None or there is None or given == there:
                continue
            own[name] = there
            told.append(f"{name} of group {number} is {there}, as the checkpoint has it, and {given} was given")
        eps = groups[number].get("eps")
        if eps is not None and other.get("eps") not in (None, eps):
            told.append(f"eps is {eps}, and was {other['eps']}")
    if told:
        warnings.warn(f"load_checkpoint: {'; '.join(told)}", stacklevel=2)
    return rates, values


# What a state of JSON's values may replace. Of dicts, and of lists of dicts, see _merged.
def _alike(own: Any, other: Any) -> bool:
    if isinstance(own, bool) or isinstance(other, bool) or own is None or isinstance(own, str):
        return type(own) is type(other)
    if isinstance(own, (int, float)):
        return isinstance(other, (int, float))
    if isinstance(own, (list, tuple)):
        return isinstance(other, list) and len(own) == len(other) and all(_alike(a, b) for a, b in zip(own, other))
    return False


def _merged(own: Any, other: Any, name: str, left: List[str]) -> Any:
    """`own` with the values of `other` wherever they are alike. left: gets the names of those that are not."""
    if isinstance(own, dict) and isinstance(other, dict):
        if any(not isinstance(key, str) for key in own):  # JSON's keys are texts
            if {str(key): value for key, value in own.items()} != other:
                left.append(name)
            return own
        inner = f"{name}." if name else ""
        left.extend(f"{inner}{key}" for key in other if key not in own)
        return {key: _merged(value, other[key], f"{inner}{key}", left) if key in other else value for key, value in own.items()}
    if isinstance(own, (list, tuple)) and isinstance(other, list) and len(own) == len(other) and any(isinstance(each, dict) for each in own):
        return type(own)([_merged(a, b, f"{name}.{number}", left) for number, (a, b) in enumerate(zip(own, other))])
    if _alike(own, other):
        return other
    left.append(name)
    return own


def scheduler_of(found: Found, scheduler: Any) -> Optional[Dict[str, Any]]:
    """The state that the engine's scheduler goes on with; None: as it is."""
    if scheduler is None or not found.takes_scheduler:
        return None
    theirs = found.said["lr_scheduler"] or {}
    if isinstance(scheduler, ConfigScheduler):
        # It counts updates, as DeepSpeed's do; of another scheduler's steps there are as many.
        last = theirs.get(_LAST)
        return {"last_update": found.said["updates"] if last is None else last + 1}
    own = scheduler.state_dict()
    left: List[str] = []
    merged = _merged(own, theirs, "", left)
    if not set(own).intersection(theirs).difference(left):
        warnings.warn(
            f"load_checkpoint: the state of its scheduler is none of {type(scheduler).__name__}'s: what it has counted is not taken over",
            stacklevel=2,
        )
        return None
    if left:
        warnings.warn(f"load_checkpoint: not taken over of its scheduler's state: {', '.join(left)}", stacklevel=2)
    return dict(merged)


def buffers_of(found: Found, buffers: Mapping[str, torch.Tensor]) -> Dict[str, torch.Tensor]:
    """Those that the checkpoint has otherwise."""
    changed = {}
    for name, value in decode(found.said["buffers"]).items():
        own = buffers.get(name)
        if own is None:
            continue
        if tuple(own.shape) != tuple(value.shape):
            raise ValueError(f"{found.path}: the buffer {name} is {list(value.shape)} there and {list(own.shape)} in this model")
        if not torch.equal(own.detach().cpu(), value.to(own.dtype)):
            changed[name] = value
    told = {"large": "too large for a commit", "missing": "that the checkpoint does not have", "unreadable": "that cannot be read there"}
    for key, which in told.items():
        kept = [name for name in found.said[f"{key}_buffers"] if name in buffers]
        if kept:
            warnings.warn(f"load_checkpoint: buffers {which} keep the values that the model has: {', '.join(kept)}", stacklevel=2)
    return changed


# --- out


def plain(values: Mapping[str, Any]) -> Tuple[Dict[str, Any], List[str]]:
    """What of it needs nothing but numbers of 64 bits, texts, lists and dicts of names; and the names of the rest."""

    def is_plain(value: Any) -> bool:
        if isinstance(value, float):
            return math.isfinite(value)
        if isinstance(value, (list, tuple)):
            return all(is_plain(each) for each in value)
        if type(value) is dict:
            return all(isinstance(key, str) and is_plain(each) for key, each in value.items())
        if isinstance(value, int):
            return -(2**63) <= value < 2**63
        return value is None or isinstance(value, str)

    kept = {name: value for name, value in values.items() if isinstance(name, str) and is_plain(value)}
    return kept, [str(name) for name in values if name not in kept]


def plain_client(values: Mapping[str, Any]) -> Tuple[Dict[str, Any], List[str]]:
    """As plain. What DeepSpeed has under names of its own would take the place of the rest."""
    kept, left_out = plain(values)
    return {name: value for name, value in kept.items() if name not in _OWN}, left_out + [name for name in kept if name in _OWN]


def scheduler_state(scheduler: Any, updates: int) -> Dict[str, Any]:
    """As DeepSpeed's, or the very scheduler's, load_state_dict wants it."""
    if scheduler is None or isinstance(scheduler, ConfigScheduler):
        return {_LAST: (updates if scheduler is None else scheduler.last_update) - 1}
    state, left_out = plain(scheduler.state_dict())
    if left_out:
        warnings.warn(f"the scheduler's state: {', '.join(left_out)} is more than numbers, texts, lists and dicts, and left out", stacklevel=3)
    return state


def group_options(groups: Sequence[Mapping[str, Any]]) -> List[Dict[str, Any]]:
    return [{"lr": float(group["lr"]), "eps": float(group["eps"]), **values_of(group)} for group in groups]
