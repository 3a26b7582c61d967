"""Modules of a model by their names."""

from typing import Any

from .._refused import absent_below


def recursive_getattr(model: Any, module_name: str) -> Any:
    """The attribute of this name, with dots for what is within."""
    for name in module_name.split("."):
        model = getattr(model, name)
    return model


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    """Sets it. What is around it is there."""
    within, _, name = module_name.rpartition(".")
    setattr(recursive_getattr(model, within) if within else model, name, module)


__getattr__ = absent_below(__name__)
