"""What is changed of modules while an engine has them, and put back."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import weakref
from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple

import torch
from torch import nn


# torch.compile of a module that is or has one of these forwards reaches frames of this package, which dynamo would trace: it then asks parameters for
# values that they do not have. What these frames call is compiled all the same.
def _keep_from_dynamo() -> None:
    rules: Any = getattr(sys.modules.get("torch._dynamo"), "trace_rules", None)
    if not hasattr(rules, "add") or not hasattr(rules, "SKIP_DIRS"):
        return
    name = __name__.partition(".")[0]
    if os.path.join(os.path.dirname(sys.modules[name].__file__ or ""), "") not in rules.SKIP_DIRS:
        rules.add(name)


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Optional[Callable[..., Any]]:
    """The module's forward is another from here on, with the signature of its own. Returns what restore_forward wants."""
    _keep_from_dynamo()
    previous = module.__dict__.get("forward")

    @functools.wraps(module.forward)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    replaced._penstock_forward = True  # type: ignore[attr-defined]
    module.forward = replaced  # type: ignore[method-assign]
    return previous


def forward_of_another(module: nn.Module) -> Optional[Callable[..., Any]]:
    """The forward that was put in the place of the one of ``replace_forward``, as Lightning does for one call: its training_step, say.

    None: there is no such forward. One that wraps the replaced forward (functools.wraps) is none.
    """
    forward = module.__dict__.get("forward")
    return None if forward is None or hasattr(forward, "_penstock_forward") else forward


def restore_forward(module: nn.Module, previous: Optional[Callable[..., Any]]) -> None:
    """The class's forward again, or the instance's own."""
    if previous is None:
        module.__dict__.pop("forward", None)
    else:
        module.forward = previous  # type: ignore[method-assign]


def parts_with_all_parameters(model: nn.Module) -> List[nn.Module]:
    """Modules below the model that have a forward and all of its parameters, in the model's order."""
    every = {id(parameter) for parameter in model.parameters()}
    found: Dict[int, nn.Module] = {}

    # What a module does not have, none below it has.
    def look_below(module: nn.Module) -> None:
        for child in module.children():
            if id(child) not in found and {id(parameter) for parameter in child.parameters()} == every:
                found[id(child)] = child
                look_below(child)

    look_below(model)
    return [part for part in found.values() if type(part).forward is not nn.Module.forward]


def switch_off_checkpointing(modules: Iterable[nn.Module]) -> bool:
    """transformers' gradient_checkpointing: blocks are computed again already, by the engine's own rule. Whether it was to offload its inputs."""
    offloads = False
    for module in modules:
        if getattr(module, "gradient_checkpointing", False):
            module.gradient_checkpointing = False  # type: ignore[assignment]
            offloads = offloads or _offloads(getattr(module, "_gradient_checkpointing_func", None))
    return offloads


# transformers makes a function of its own for it, of which nothing but its code tells.
def _offloads(function: Any) -> bool:
    code = getattr(getattr(function, "func", None), "__code__", None)
    return "save_on_cpu" in getattr(code, "co_names", ())


def without_cache(forward: Callable[..., Any], kwargs: Dict[str, Any]) -> Dict[str, Any]:
    """A cache of keys and values is filled by forward, and would be filled again when a block is computed again."""
    if "use_cache" not in inspect.signature(forward).parameters:
        return kwargs
    return {**kwargs, "use_cache": False}


def persistent_buffers(model: nn.Module) -> Dict[str, Tuple[nn.Module, str, torch.Tensor, int]]:
    """Those that a state_dict has, by name: their module, their name there, the tensor, and its version just now."""
    return {
        f"{prefix}.{name}" if prefix else name: (module, name, buffer, buffer._version)
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Buffers are on the device from here on; modules that share one share it still."""
    moved: Dict[int, Tuple[torch.Tensor, torch.Tensor]] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device and buffer.device.type != "meta":
                if id(buffer) not in moved:
                    moved[id(buffer)] = (buffer, buffer.to(device))
                module._buffers[name] = moved[id(buffer)][1]


class Structure:
    """Which modules and parameters a model has, where."""

    def __init__(self, model: nn.Module) -> None:
        places = [
            (f"{prefix}.{name}" if prefix else name, held, name, value)
            for prefix, module in model.named_modules(remove_duplicate=False)
            for held in (module._parameters, module._modules)
            for name, value in held.items()  # type: ignore[attr-defined]
            if value is not None
        ]
        self._places: List[Tuple[str, Dict[str, Any], str, Any]] = places

    def changed(self) -> Optional[str]:
        """The name of one that is another now, or gone."""
        return next((full for full, held, name, value in self._places if held.get(name) is not value), None)


def counts_no_versions(module: nn.Module) -> bool:
    """torch changes the running means of these in place without telling."""
    return isinstance(module, nn.modules.batchnorm._NormBase)


def heed_no_set_to_itself(parameter: nn.Parameter) -> None:
    """``parameter.set_(parameter)`` does nothing from here on, where it would count as a change in place.

    torch.nn.utils.parametrize does it when a parametrization is registered, and peft registers some within a forward (target_parameters).
    """
    known = weakref.ref(parameter)

    def set_(source: Any = None, *more: Any, **named: Any) -> torch.Tensor:
        own = known()
        assert own is not None
        return own if source is own and not (more or named) else type(own).set_(own, *(() if source is None else (source,)), *more, **named)

    parameter.__dict__["set_"] = set_


def heed_set_to_itself(parameter: nn.Parameter) -> None:
    """``set_`` is its class's again."""
    parameter.__dict__.pop("set_", None)
