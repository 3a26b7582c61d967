"""What a training is made with, as far as its numbers depend on it: kept with every commit, and compared where a run goes on.

Of a group's values the run's own go on, as its schedule or the program has set them, unless another one is given than at the
beginning. Of the learning rate the run's goes on in any case.
"""

from __future__ import annotations

import json
from typing import Any, Dict, List, Mapping, Optional, Sequence

from .. import _tensors
from ._json import encode
from ._settings import Settings

_OF_GROUPS = ("lr", "beta1", "beta2", "weight_decay")  # of the description, whose groups are compared one by one
_OF_RATES = ("base_lrs", "_last_lr")  # of a scheduler: they say what the groups say


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, (bool, str)) else _tensors.number(value, "a group's value")


def values_of(group: Mapping[str, Any]) -> Dict[str, Any]:
    """What a group has besides its learning rate."""
    return {name: _plain(group[name]) for name in ("betas", "weight_decay") if name in group}


def scheduler_of(scheduler: Any) -> Optional[Dict[str, Any]]:
    """Type and state of a scheduler, but for the rates."""
    if scheduler is None:
        return None
    state = {}
    for name, value in getattr(scheduler, "state_dict", dict)().items():
        try:
            state[name] = encode(value)
        except TypeError:
            pass  # functions are its program's
    return {"type": type(scheduler).__name__, **{name: value for name, value in state.items() if name not in _OF_RATES}}


def identity_of(described: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], settings: Settings, scheduler: Any) -> Dict[str, Any]:
    """As JSON."""
    return {
        "optimizer": {name: value for name, value in described.items() if name not in _OF_GROUPS},
        "groups": [{"lr": _plain(group.get("initial_lr", group["lr"])), **values_of(group)} for group in groups],
        **settings.kept,
        "schedule": None if settings.schedule is None else json.dumps(settings.schedule),
        "scheduler": scheduler_of(scheduler),
    }


def same_scheduler(before: Optional[Mapping[str, Any]], now: Mapping[str, Any]) -> bool:
    """Whether the state of the one is the other's; true of a run that has not kept what it was made with."""
    if before is None:
        return True
    first, second = before.get("scheduler"), now["scheduler"]
    return first is not None and second is not None and bool(first["type"] == second["type"])


def groups_go_on(
    groups: Sequence[Dict[str, Any]],
    rates: Sequence[float],
    values: Sequence[Mapping[str, Any]],
    before: Optional[Mapping[str, Any]],
    now: Mapping[str, Any],
) -> None:
    """Gives groups the run's values. rates, values: of its last commit."""
    for group, lr in zip(groups, rates):
        group["lr"] = lr
    if before is None:
        return
    for group, kept, first, given in zip(groups, values, before["groups"], now["groups"]):
        for name, value in kept.items():
            if name in given and first.get(name) == given[name]:
                group[name] = tuple(value) if isinstance(value, list) else value


def changes(before: Optional[Mapping[str, Any]], now: Mapping[str, Any]) -> List[str]:
    """What is given otherwise than before, in words."""
    if before is None:
        return []
    told = []
    for name in sorted({*before["optimizer"], *now["optimizer"]}):
        was, is_now = before["optimizer"].get(name), now["optimizer"].get(name)
        if was != is_now:
            told.append(f"the optimizer's {name} is {is_now} and was {was}")
    for number, (first, given) in enumerate(zip(before["groups"], now["groups"])):
        for name, value in given.items():
            if first.get(name) == value:
                continue
            end = ": the run's own goes on, and engine.optimizer.param_groups changes it" if name == "lr" else ""
            told.append(f"{name} of group {number} is {value} and was {first.get(name)}{end}")
    for name in [name for name in now if name not in ("optimizer", "groups", "scheduler")]:
        was = before.get(name, False)  # a version that did not have the setting did without
        if (was or False) != (now[name] or False):
            told.append(f"{name} is {now[name]} and was {was}")
    told += _changes_of_scheduler(before.get("scheduler"), now["scheduler"])
    return told


def _changes_of_scheduler(before: Optional[Mapping[str, Any]], now: Optional[Mapping[str, Any]]) -> List[str]:
    if before == now:
        return []
    if before is None or now is None or before["type"] != now["type"]:
        names = [None if each is None else each["type"] for each in (before, now)]
        return [f"the scheduler is {names[1]} and was {names[0]}: what it has counted is not taken over"]
    other = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
    return [f"{', '.join(other)} of the scheduler: what the run has goes on, as torch's load_state_dict does it"]
