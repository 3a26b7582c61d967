"""Weights of frozen parameters that are read where they lie, as they are published or as ``penstock pack`` coded them, and kept nowhere else."""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import Any, Dict, Iterator, List, Optional, Sequence, Set, Tuple

import torch
from torch import nn

from .. import _core
from .._small_files import exists
from ._blocks import Block
from ._settings import Settings

# Of peft, in the names of what it puts a module around, which has another name where it is published.
_AROUND = ("base_layer", "original_module")


def check(settings: Settings) -> None:
    """ValueError: what is given beside base_weights does not go with it."""
    if not settings.base_weights:
        return
    for wrong, why in (
        (settings.world > 1, "it is served in one process, and there are several ranks: leave it out, and each rank has its part of them"),
        (settings.offload != "nvme", "it is served with state on a drive: give state_dir="),
    ):
        if wrong:
            raise ValueError(f"base_weights: {why}")


# NaN: what is made of it, as a copy that is to train, is known for one without a value.
def _without_value(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.full((1,), float("nan"), dtype=parameter.dtype).expand(parameter.shape), requires_grad=parameter.requires_grad)


def take_from_meta(modules: Sequence[nn.Module], frozen_alone: bool) -> None:
    """Parameters on the meta device are in host memory from here on, NaN that take a few bytes. frozen_alone: those that require no gradient."""
    made: Dict[int, nn.Parameter] = {}
    for module in modules:
        for name, parameter in list(module._parameters.items()):
            if parameter is None or parameter.device.type != "meta" or (frozen_alone and parameter.requires_grad):
                continue
            module._parameters[name] = made.setdefault(id(parameter), _without_value(parameter))


@contextlib.contextmanager
def init_without_values() -> Iterator[None]:
    """Models that are built within have parameters without values, which take no memory: NaN, each a few bytes.

    For a constructor and transformers' ``from_config``, before peft's ``get_peft_model``, whose adapters then have their own values as
    they would have them on any model; ``penstock.initialize(base_weights=DIR)`` reads the others from there. Buffers have their values.

    Give the type when the model is made (``dtype=``, ``torch.set_default_dtype``): ``to(dtype)`` would make whole tensors. What is to train and was
    made within, or of what was (a copy of the head, DoRA's magnitudes), has no value to begin with, and is refused by name.
    """
    register = nn.Module.register_parameter
    modules: Dict[int, nn.Module] = {}
    known: Dict[int, Tuple[Any, nn.Parameter]] = {}  # what stands in the place of a parameter, and whose place (weak)

    def without_memory(parameter: nn.Parameter) -> nn.Parameter:
        former = known.get(id(parameter))
        if former is None or former[0]() is not parameter:  # another has its number by now
            former = (weakref.ref(parameter), nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad))
            known[id(parameter)] = former
        return former[1]

    def register_parameter(module: nn.Module, name: str, param: Optional[nn.Parameter]) -> None:
        register(module, name, param)
        made = module._parameters.get(name)
        if made is None or type(made) is not nn.Parameter:
            return
        modules[id(module)] = module
        if made.device.type == "cpu":
            module._parameters[name] = without_memory(made)

    nn.Module.register_parameter = register_parameter  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
        take_from_meta(list(modules.values()), frozen_alone=False)


# Also of a copy that was made of one without.
def _has_no_value(parameter: torch.Tensor) -> bool:
    return parameter.numel() > 0 and bool(torch.isnan(parameter.detach().flatten()[0]))


def _takes_no_memory(parameter: torch.Tensor) -> bool:
    return all(stride == 0 for stride, size in zip(parameter.stride(), parameter.shape) if size > 1) and parameter.numel() > 1


def _names_of(model: nn.Module) -> Dict[int, List[str]]:
    names: Dict[int, List[str]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for short, parameter in module._parameters.items():
            if parameter is not None:
                names.setdefault(id(parameter), []).append(f"{prefix}.{short}" if prefix else short)
    return names


# The name there of what the model calls so: its end, without what was put around it.
def _name_there(name: str, there: Set[str], prefix: str) -> Optional[str]:
    parts = [part for part in name.split(".") if part not in _AROUND]
    for at in range(len(parts)):
        short = ".".join(parts[at:])
        for each in (short, f"{prefix}.{short}"):
            if each in there:
                return each
    return None


def _prefix_of(model: nn.Module) -> str:
    found = (getattr(module, "base_model_prefix", "") for module in model.modules())
    return next((prefix for prefix in found if isinstance(prefix, str) and prefix and prefix != "base_model"), "model")


def describe(model: nn.Module, blocks: Sequence[Block], trains: Sequence[Sequence[bool]], path: str, record: Any, is_planned: bool) -> Dict[str, Any]:
    """What python/src/base_weights.h reads. trains: of each parameter of each block.

    record: of the run that is gone on with; None: it is a new one. ValueError: they are no weights of this model. RuntimeError: the files that the
    record names are not there.
    """
    where = path or str(record["path"])
    if not path and not exists(where):
        raise RuntimeError(f"{where}: the weights of this run's frozen parameters are not there: say where they are (base_weights=DIR)")
    names, bits = _core.names_of_weights(where)
    there, prefix, known = set(names), _prefix_of(model), _names_of(model)
    turned = {id(each) for module in model.modules() if type(module).__name__ == "Conv1D" for each in module._parameters.values() if each is not None}
    found: Dict[str, str] = {}
    others: Set[str] = set()  # tensors that a parameter has under another name, or that trains
    described = []
    for block, marks in zip(blocks, trains):
        of_block = []
        for (name, parameter), mark in zip(block.parameters, marks):
            candidates = [each for each in (_name_there(alias, there, prefix) for alias in [name, *known.get(id(parameter), [])]) if each]
            others.update(candidates)
            if mark:
                of_block.append("")
                continue
            if not candidates:
                raise ValueError(
                    f"base_weights {where}: {name} is frozen, and no tensor there has its name: give the directory that has this model's weights, or "
                    "leave it out"
                )
            if bits and id(parameter) in turned and parameter.dim() == 2:
                raise ValueError(
                    f"base_weights {where}: packed matrices are kept as [out, in], and {name}, of a Conv1D, is [in, out]: give the directory that they were "
                    "packed of"
                )
            if candidates[0] in found:
                raise ValueError(f"base_weights {where}: {candidates[0]} would be {found[candidates[0]]} and {name}: not the weights of this model")
            found[candidates[0]] = name
            of_block.append(candidates[0])
        described.append(of_block)
    return {
        "path": os.path.abspath(path) if path else "",
        "names": described,
        "passed_over": sorted(others - set(found)),
        "record": record,
        "is_planned": is_planned,
    }


def check_values(blocks: Sequence[Block], trains: Sequence[Sequence[bool]], has_base: bool) -> None:
    """ValueError naming a parameter of a new run that was built without a value, and has none elsewhere."""
    for block, marks in zip(blocks, trains):
        for (name, parameter), mark in zip(block.parameters, marks):
            if not (mark if has_base else _takes_no_memory(parameter)) or not _has_no_value(parameter):
                continue
            why = "and trains: load or initialise it first" if mark else "and is frozen: base_weights=DIR says where its values are"
            raise ValueError(f"{name} was built without a value (init_without_values), or is made of what was, {why}")
