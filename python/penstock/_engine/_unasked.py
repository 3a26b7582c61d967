"""Ways to torch's C++ that ask no tensor's class: the wrappers of torch.func's transforms, TorchScript's functions, DLPack."""

from __future__ import annotations

import contextlib
import functools
import importlib
from typing import Any, Callable, ContextManager, Dict, Tuple

import torch

from ._tree import tensors_of

# What each hands over is its first argument. A torch without one of them has nothing to ask there.
_OF_ONE_TENSOR = (
    ("torch._functorch.vmap", "_add_batch_dim"),
    ("torch._functorch.eager_transforms", "_wrap_for_grad"),
    ("torch._functorch.eager_transforms", "_wrap_functional_tensor"),
    ("torch.utils.dlpack", "to_dlpack"),
    ("torch", "to_dlpack"),
)

#: Calls a function with these arguments, among which are tensors of the kinds that ask.
Asking = Callable[[Callable[..., Any], Tuple[Any, ...], Dict[str, Any]], Any]


@functools.lru_cache(maxsize=None)
def ask(kinds: Tuple[type, ...], call: Asking) -> None:
    """From here on these functions are called by ``call`` where a tensor of one of the kinds is among their arguments, and as they are elsewhere."""
    for place, name in _OF_ONE_TENSOR:
        with contextlib.suppress(ImportError, AttributeError):
            module = importlib.import_module(place)
            setattr(module, name, _asking(getattr(module, name), kinds, call, first_alone=True))
    script = getattr(torch._C, "ScriptFunction", None)
    if script is not None:
        script.__call__ = _asking(script.__call__, kinds, call)


def _asking(func: Callable[..., Any], kinds: Tuple[type, ...], call: Asking, first_alone: bool = False) -> Callable[..., Any]:
    @functools.wraps(func)
    def asking(*args: Any, **kwargs: Any) -> Any:
        asked = args[:1] if first_alone else (args, kwargs)
        if any(isinstance(each, kinds) for each in tensors_of(asked)):
            return call(func, args, kwargs)
        return func(*args, **kwargs)

    return asking


def is_transformed() -> bool:
    """Whether a transform of torch.func is under way."""
    peek = getattr(getattr(torch._C, "_functorch", None), "peek_interpreter_stack", None)
    return peek is not None and peek() is not None


def outside_of_transforms() -> ContextManager[Any]:
    """Within, tensors are none of those of a transform of torch.func that is under way."""
    if not is_transformed():
        return contextlib.nullcontext()
    from torch._functorch import pyfunctorch

    clear = getattr(pyfunctorch, "temporarily_clear_interpreter_stack", contextlib.nullcontext)
    return clear()  # type: ignore[no-any-return]
