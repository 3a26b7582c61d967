"""A model's head, whose logits are computed in chunks of tokens, with their loss, where whole ones would be large."""

from __future__ import annotations

import contextlib
import sys
import warnings
import weakref
from typing import Any, Callable, ContextManager, Dict, List, NamedTuple, Optional, Tuple

import torch
from torch import nn
from torch.nn import functional

from ._autograd_settings import AutogradSettings
from ._lazy_logits import LazyLogits, Source, Weights
from ._modules import replace_forward, restore_forward
from ._settings import Settings


class Place(NamedTuple):
    """Where a head's weights are while its logits may be computed.

    weights: RuntimeError: they are not there any more. entered: within, they are read. note: is given the logits that are made of them.
    """

    weights: Callable[[], Weights]
    entered: Callable[[], ContextManager[Any]] = contextlib.nullcontext
    note: Optional[Callable[[Source], Any]] = None


class _Kept:
    """A copy of a head's weights, for logits that are asked for when the weights themselves may be gone."""

    def __init__(self, module: nn.Linear) -> None:
        self.weight = module.weight.detach().clone()
        self.bias = None if module.bias is None else module.bias.detach().clone()

    def is_of(self, module: nn.Linear) -> bool:
        same = self.weight.dtype == module.weight.dtype and torch.equal(self.weight, module.weight)
        return same and (self.bias is None or torch.equal(self.bias, module.bias))

    def weights(self) -> Weights:
        return self.weight, self.bias


class Heads:
    """The linear layers of a model that make its logits, with forwards that compute them later. Owns these forwards."""

    # Set by who computes the model: where this head's weights are during the call that is under way; None: its logits are computed in it.
    place: Callable[[nn.Linear], Optional[Place]]

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        self.place = _nowhere
        self._size = settings.logits_chunk_size or 0
        self.modules = _heads_of(model) if self._size else []
        #: Modules with these forwards, and the forward of their own instance before.
        self.replaced: List[Tuple[nn.Module, Optional[Callable[..., Any]]]] = []
        self._kept: Dict[int, "weakref.ref[_Kept]"] = {}
        self._told_whole = False
        #: Of a chunk, in the forward with the most logits that were computed in chunks; 0: all were whole.
        self.tokens = 0
        #: What these logits would have taken in fp32.
        self.whole_bytes = 0
        self._why_whole = ""
        if not hasattr(torch.Tensor, "_make_wrapper_subclass"):
            self.modules = []
            self._why_whole = f"torch {torch.__version__} has no tensors without memory"
        elif not self.modules:
            self._why_whole = (
                f"{type(model).__name__} has no head that is known (get_output_embeddings(), or an nn.Linear with as many outputs as the vocabulary has "
                "entries)"
            )

    def install(self) -> None:
        """The heads have their own forwards here, until ``remove``."""
        if self._size and self._why_whole:
            warnings.warn(f"logits_chunk_size: {self._why_whole}, and logits are computed whole", stacklevel=2)
        if not self.replaced:
            self.replaced = [(module, replace_forward(module, self._forward_of(module, module.forward))) for module in self.modules]

    def remove(self) -> None:
        for module, previous in self.replaced:
            restore_forward(module, previous)
        self.replaced = []
        self.place = _nowhere

    def chunk_of(self, tokens: int) -> int:
        """The tokens of a chunk, for the logits of `tokens` tokens. 0: they are computed whole."""
        return 0 if tokens <= self._size else self._size

    def _forward_of(self, module: nn.Linear, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            hidden = args[0] if len(args) == 1 and not kwargs else kwargs.get("input") if not args and len(kwargs) == 1 else None
            if not isinstance(hidden, torch.Tensor) or hidden.dim() < 2:
                return original(*args, **kwargs)
            chunk = self.chunk_of(hidden.numel() // max(1, hidden.shape[-1]))
            place = self.place(module) if chunk else None
            if place is None or _is_compiling():
                return original(*args, **kwargs)
            return self._logits(module, hidden, chunk, place)

        return forward

    def _logits(self, module: nn.Linear, hidden: torch.Tensor, chunk: int, place: Place) -> LazyLogits:
        weight, bias = place.weights()
        like = functional.linear(hidden.detach().reshape(-1, hidden.shape[-1])[:0], weight.detach(), None if bias is None else bias.detach())
        source = Source(
            hidden, chunk, AutogradSettings(), place.weights, self._note_whole, entered=place.entered, keep=lambda: self._copy_of(module).weights,
        )  # fmt: skip
        if place.note is not None:
            place.note(source)
        graph = torch.is_grad_enabled() and any(each.requires_grad for each in (hidden, weight, bias) if each is not None)
        logits = LazyLogits.of(source, like.dtype, module.out_features, graph)
        if logits.numel() * 4 >= self.whole_bytes:
            self.tokens, self.whole_bytes = chunk, logits.numel() * 4
        return logits

    # One for all forwards between whose calls the weights have not changed.
    def _copy_of(self, module: nn.Linear) -> _Kept:
        known = self._kept.get(id(module), lambda: None)()
        if known is None or not known.is_of(module):
            known = _Kept(module)
            self._kept[id(module)] = weakref.ref(known)
        return known

    def _note_whole(self, asked_by: str, size: int) -> None:
        if not self._told_whole:
            self._told_whole = True
            warnings.warn(
                f"{asked_by} asked for whole logits, which take {_size(size)}: computed in chunks of {self.tokens} tokens are cross_entropy, nll_loss, "
                "log_softmax with gather, logsumexp, argmax, topk, max, sum and mean of them (docs/from-plain-pytorch.md)",
                stacklevel=_callers_level(),
            )


# Of the line of the program, or of its libraries, that asked: the first one outside of this package and torch.
def _callers_level() -> int:
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("penstock", "torch"):
        level, frame = level + 1, frame.f_back
    return level


def _nowhere(_: nn.Linear) -> Optional[Place]:
    return None


def _size(count: int) -> str:
    unit, power = ("GiB", 30) if count >= 1 << 30 else ("MiB", 20) if count >= 1 << 20 else ("KiB", 10)
    return f"{count / (1 << power):.3g} {unit}"


def _is_compiling() -> bool:
    compiler = getattr(torch, "compiler", None)
    return bool(compiler is not None and getattr(compiler, "is_compiling", bool)())


# What transformers calls the output embeddings, and what has as many outputs as the vocabulary has entries.
def _heads_of(model: nn.Module) -> List[nn.Linear]:
    found: List[nn.Module] = []
    widths = set()
    for part in model.modules():
        get = getattr(type(part), "get_output_embeddings", None)
        if get is not None:
            try:
                head = part.get_output_embeddings()  # type: ignore[operator]
            except (AttributeError, NotImplementedError):
                head = None
            found += [] if head is None else list(head.modules())
        vocabulary = getattr(getattr(part, "config", None), "vocab_size", None)
        widths.update([vocabulary] if isinstance(vocabulary, int) else [])
    embeddings = [part.num_embeddings for part in model.modules() if isinstance(part, nn.Embedding)]
    widths.update([max(embeddings)] if embeddings and not found else [])
    found += [part for part in model.modules() if isinstance(part, nn.Linear) and part.out_features in widths]
    own = {id(part): part for part in found if isinstance(part, nn.Linear) and _is_plain(part)}
    return list(own.values())


# What it computes is nn.Linear's, of its own two parameters, and nobody looks at it.
def _is_plain(module: nn.Linear) -> bool:
    own = type(module).forward is nn.Linear.forward and "forward" not in module.__dict__
    return own and isinstance(module.weight, nn.Parameter) and not module._forward_hooks and not module._forward_pre_hooks and not module._backward_hooks
