"""torch's settings of a thread, for a block that another thread computes, or that is computed later."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterator, Optional

import torch


class AutogradSettings:
    """What of torch's state belongs to a thread and is wanted in another: autocast, of the processor and of a GPU."""

    def __init__(self) -> None:
        kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        self._dtypes = {kind: _autocast_dtype(kind) if _autocasts(kind) else None for kind in kinds}
        self.autocasts = any(dtype is not None for dtype in self._dtypes.values())

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        with torch.autograd.set_grad_enabled(True), self.autocast():
            yield

    @contextlib.contextmanager
    def autocast(self, cache_enabled: Optional[bool] = None) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for kind, dtype in self._dtypes.items():
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=dtype is not None, cache_enabled=cache_enabled))
            yield


def _autocast_dtype(kind: str) -> torch.dtype:
    known = getattr(torch, "get_autocast_dtype", None)  # since torch 2.4
    if known is not None:
        return known(kind)  # type: ignore[no-any-return]
    return torch.get_autocast_cpu_dtype() if kind == "cpu" else torch.get_autocast_gpu_dtype()


def _autocasts(kind: str) -> bool:
    try:
        return bool(torch.is_autocast_enabled(kind))  # type: ignore[call-arg]
    except TypeError:  # before torch 2.4
        return bool(torch.is_autocast_cpu_enabled() if kind == "cpu" else torch.is_autocast_enabled())


def computed(original: Callable[..., Any], settings: AutogradSettings, args: Any, kwargs: Any) -> Any:
    """A block's forward, with the settings of forward in backward as well."""
    if not settings.autocasts:
        return original(*args, **kwargs)
    # Autocast would keep a copy of every weight until its context ends, and give it back when the weight is another: no cache.
    with settings.autocast(cache_enabled=False):
        return original(*args, **kwargs)
