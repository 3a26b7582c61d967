"""Leaf modules of ZeRO-3: kept as marks alone. Blocks are fetched whole, with the experts in them, so there is nothing that a mark would change."""

from typing import Any, Callable, List, Sequence, Tuple, Type, Union

from torch import nn

_MARK = "_z3_leaf"


def z3_leaf_module(model: nn.Module) -> bool:
    return bool(getattr(model, _MARK, False))


def z3_leaf_parameter(model: nn.Parameter) -> bool:
    """False: no parameter is fetched with a module that is marked."""
    return False


def get_z3_leaf_modules(model: nn.Module) -> List[nn.Module]:
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    setattr(model, _MARK, flag)


# Marks the modules that any of `wanted` names. Returns them, and those of `wanted` that name none.
def _mark(model: nn.Module, wanted: Sequence[Any], names: Callable[[Any, str, nn.Module], bool], flag: bool) -> Tuple[List[nn.Module], List[Any]]:
    found: List[nn.Module] = []
    missing: List[Any] = []
    for each in wanted:
        of = [module for name, module in model.named_modules() if names(each, name, module)]
        found += [module for module in of if not any(module is other for other in found)]
        if not of:
            missing.append(each)
    for module in found:
        set_z3_leaf_module(module, flag)
    return found, missing


def _refuse(call: str, model: nn.Module, missing: Sequence[Any]) -> None:
    named = ", ".join(each.__name__ if isinstance(each, type) else repr(each) for each in missing)
    raise ValueError(
        f"{call}: no module of this {type(model).__name__} is {named}: model.named_modules() has their names, and raise_if_not_found=False passes over it"
    )


def _is_a(kind: Union[type, str], _: str, module: nn.Module) -> bool:
    own = type(module)
    return isinstance(module, kind) if isinstance(kind, type) else kind in (own.__name__, f"{own.__module__}.{own.__qualname__}")


def _by_class(call: str, model: nn.Module, classes: Sequence[Any], flag: bool, raise_if_not_found: bool) -> List[nn.Module]:
    if isinstance(classes, (str, type)) or not all(isinstance(each, (type, str)) for each in classes):
        raise TypeError(f"{call}: leaf_module_classes is a list of classes, or of their names, and not {classes!r}")
    found, missing = _mark(model, classes, _is_a, flag)
    if not found and raise_if_not_found:
        _refuse(call, model, missing)
    return found


def set_z3_leaf_modules(model: nn.Module, leaf_module_classes: Union[List[Type[Any]], List[str]], raise_if_not_found: bool = True) -> List[nn.Module]:
    """Marks the modules of these classes, and returns them. ValueError: there is none."""
    return _by_class("set_z3_leaf_modules", model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(model: nn.Module, leaf_module_classes: List[Type[Any]], raise_if_not_found: bool = True) -> List[nn.Module]:
    """Takes the marks of the modules of these classes, and returns them. ValueError: there is none."""
    return _by_class("unset_z3_leaf_modules", model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: List[str], flag: bool = True, raise_if_not_found: bool = True
) -> Tuple[List[nn.Module], List[str]]:
    """Marks the modules of these names. Returns them, and the names of none. ValueError: a name is of none."""
    found, missing = _mark(model, module_names, lambda wanted, name, _: name == wanted, flag)
    if missing and raise_if_not_found:
        _refuse("set_z3_leaf_modules_by_name", model, missing)
    return found, missing


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: List[str], flag: bool = True, raise_if_not_found: bool = True
) -> Tuple[List[nn.Module], List[str]]:
    """Marks the modules whose names end so. Returns them, and the endings of none. ValueError: an ending is of none."""
    found, missing = _mark(model, module_name_suffixes, lambda wanted, name, _: name.endswith(wanted), flag)
    if missing and raise_if_not_found:
        _refuse("set_z3_leaf_modules_by_suffix", model, missing)
    return found, missing
