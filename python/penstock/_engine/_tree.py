"""Tensors in what modules take and give: tuples, lists, dictionaries, data classes of transformers."""

from __future__ import annotations

import copy
from typing import Any, Callable, List, Tuple

import torch
from torch.utils import _pytree as pytree


def tensors_of(value: Any) -> List[torch.Tensor]:
    """All tensors within, in their order; what is no known container has none."""
    leaves, _ = pytree.tree_flatten(value)
    found = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif _is_mapping(leaf):
            found.extend(tensors_of(list(leaf.values())))
    return found


def objects_of(value: Any) -> List[Any]:
    """What is neither a tensor nor a container, and has attributes that may change: a cache of keys and values."""
    leaves, _ = pytree.tree_flatten(value)
    return [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor) and hasattr(leaf, "__dict__")]


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same structure with each tensor changed."""
    return map_leaves(value, torch.Tensor, change)


def map_leaves(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """The same structure with everything of this kind changed, which is no container."""
    leaves, spec = pytree.tree_flatten(value)
    changed = []
    for leaf in leaves:
        if isinstance(leaf, kind):
            leaf = change(leaf)
        elif _is_mapping(leaf):
            leaf = copy.copy(leaf)
            for key in list(leaf.keys()):
                leaf[key] = map_leaves(leaf[key], kind, change)
        changed.append(leaf)
    return pytree.tree_unflatten(changed, spec)


# transformers' ModelOutput is a dictionary that torch knows as a container only in new versions.
def _is_mapping(value: Any) -> bool:
    return isinstance(value, dict) and type(value) is not dict


def counted(args: Any, kwargs: Any) -> Tuple[int, int]:
    """(tokens, samples) of a batch: the elements of its ids, and the rows of these, or else of the first tensor. 0 tokens: not known."""
    tensors = tensors_of((args, kwargs))
    named = kwargs.get("input_ids")
    whole = (torch.int64, torch.int32)
    ids = named if isinstance(named, torch.Tensor) else next((each for each in tensors if each.dim() == 2 and each.dtype in whole), None)
    first = ids if ids is not None else next(iter(tensors), None)
    return 0 if ids is None else ids.numel(), 1 if first is None or not first.dim() else first.shape[0]
