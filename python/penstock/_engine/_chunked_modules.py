"""Modules that act on each token alone (an MLP), computed in chunks of tokens: what is between their matrices is a chunk's, in backward as well."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import torch
from torch import nn

from ._attributes import Attributes, version_of
from ._autograd_settings import AutogradSettings
from ._modules import replace_forward, restore_forward
from ._open_pass import PassFailed
from ._random import RandomState
from ._settings import Settings

# Calls of each module in which some of its tokens are computed once more, in another order and among others.
_COMPARED = 3
_SAMPLE = 256  # tokens
_TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-8}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

Call = Callable[[torch.Tensor], torch.Tensor]


class ChunkedModules:
    """The modules that ``chunked_modules`` names, with forwards that compute them in chunks. Owns these forwards."""

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        """ValueError: a name is no module's and no class's."""
        self._size = settings.chunk_size
        self.modules = _named(model, settings.chunked_modules)
        self._compared: Dict[int, int] = {}
        #: Modules with these forwards, and the forward of their own instance before.
        self.replaced: List[Tuple[nn.Module, Optional[Callable[..., Any]]]] = []

    def install(self) -> None:
        """The modules have their own forwards here, until ``remove``."""
        if not self.replaced:
            self.replaced = [(module, replace_forward(module, self._forward_of(name, module, module.forward))) for name, module in self.modules]

    def remove(self) -> None:
        for module, previous in self.replaced:
            restore_forward(module, previous)
        self.replaced = []

    def _forward_of(self, name: str, module: nn.Module, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            given = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
            if len(given) != 1 or given[0].dim() < 2 or not given[0].is_floating_point():
                raise PassFailed(
                    f"chunked_modules: {name} is called with {len(given)} tensors, and one of floating point whose last dimension has a token's "
                    "features is served: leave it out"
                )
            tokens = given[0].numel() // max(1, given[0].shape[-1])
            size = self._size or given[0].shape[-1]
            if tokens <= size:
                return original(*args, **kwargs)
            _refuse_hooks(name, module)
            others = [each for each in (*args, *kwargs.values()) if each is not given[0]]

            def compute(chunk: torch.Tensor) -> torch.Tensor:
                taken = tuple(chunk if each is given[0] else each for each in args)
                out = original(*taken, **{key: chunk if each is given[0] else each for key, each in kwargs.items()})
                if not isinstance(out, torch.Tensor) or out.shape[:-1] != chunk.shape[:-1]:
                    raise PassFailed(f"chunked_modules: {name} gives no tensor with the tokens that it is given, one for one: leave it out")
                return out

            def call(chunk: torch.Tensor) -> torch.Tensor:
                before = _Kept(module, others)
                out = compute(chunk)
                before.check(name)
                return out

            if given[0].device.type != "meta" and self._compared.get(id(module), 0) < _COMPARED:
                self._compared[id(module)] = self._compared.get(id(module), 0) + 1
                before = _Kept(module, others)
                if not _is_per_token(module, compute, given[0].detach()):
                    raise PassFailed(
                        f"chunked_modules: {name}, a {type(module).__name__}, gives a token something else among other tokens, so that it does not act "
                        "on each token alone: leave it out"
                    )
                before.check(name)
            return compute_in_chunks(call, given[0], [each for each in module.parameters() if each.requires_grad], size)

        return forward


def compute_in_chunks(call: Call, given: torch.Tensor, parameters: Sequence[torch.Tensor], size: int) -> torch.Tensor:
    """``call(given)``, of ``size`` tokens at one time. parameters: that gradients are wanted of. Backward computes each chunk again."""
    return _Chunks.apply(call, size, AutogradSettings(), given, *parameters)  # type: ignore[no-any-return]


def _chunks(given: torch.Tensor, size: int) -> List[torch.Tensor]:
    rows = given.reshape(-1, given.shape[-1])
    shape = (1,) * (given.dim() - 2)  # as many dimensions as it is used to
    return [each.reshape(*shape, *each.shape) for each in rows.split(size)]


class _Chunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, size: int, settings: AutogradSettings, given: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.call, ctx.size, ctx.settings, ctx.random = call, size, settings, RandomState.now()
        ctx.save_for_backward(given, *parameters)
        made: Optional[torch.Tensor] = None
        begin = 0
        for chunk in _chunks(given, size):
            with settings.autocast(cache_enabled=False):
                out = call(chunk)
            if made is None:
                made = torch.empty((given.numel() // max(1, given.shape[-1]), out.shape[-1]), dtype=out.dtype, device=out.device)
            rows = out.reshape(-1, out.shape[-1])
            made[begin : begin + rows.shape[0]] = rows
            begin += rows.shape[0]
        assert made is not None
        return made.reshape(*given.shape[:-1], made.shape[-1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        given, *parameters = ctx.saved_tensors
        of_given = torch.empty_like(given, memory_format=torch.contiguous_format) if ctx.needs_input_grad[3] else None
        # Sums of 16-bit parts in 16 bits would lose what each part adds.
        sums: List[Optional[torch.Tensor]] = [
            torch.zeros(each.shape, dtype=torch.promote_types(each.dtype, torch.float32), device=each.device) if wanted else None
            for each, wanted in zip(parameters, ctx.needs_input_grad[4:])
        ]
        now = RandomState.now()
        ctx.random.restore()
        try:
            begin = 0
            for chunk, came in zip(_chunks(given, ctx.size), gradient.reshape(-1, gradient.shape[-1]).split(ctx.size)):
                with torch.enable_grad(), ctx.settings.autocast(cache_enabled=False):
                    leaf = chunk.detach().requires_grad_(of_given is not None)
                    out = ctx.call(leaf)
                wanted = [leaf] * (of_given is not None) + [each for each, total in zip(parameters, sums) if total is not None]
                found = list(torch.autograd.grad([out], wanted, [came.reshape(out.shape)], allow_unused=True))
                if of_given is not None:
                    part = found.pop(0)
                    rows = of_given.view(-1, given.shape[-1])[begin : begin + came.shape[0]]
                    if part is None:
                        rows.zero_()
                    else:
                        rows.copy_(part.reshape(rows.shape))
                for total, part in zip([each for each in sums if each is not None], found):
                    if part is not None:
                        total += part
                begin += came.shape[0]
        finally:
            now.restore()
        return (None, None, None, of_given, *(None if total is None else total.to(each.dtype) for total, each in zip(sums, parameters)))


class _Kept:
    """What a module, and what else it is called with, keeps between calls, as it is when this is made: attributes and buffers."""

    def __init__(self, module: nn.Module, others: Sequence[Any]) -> None:
        self._module = module
        self._attributes = Attributes(module.modules(), given=others, copies=())
        self._buffers = [(name, each, version_of(each)) for name, each in module.named_buffers()]

    def check(self, name: str) -> None:
        """PassFailed: the module's forward has changed some of it, so that it would be left with a chunk's, or with as many changes as there are chunks."""
        now = dict(self._module.named_buffers())
        changed = [short for short, each, version in self._buffers if now.get(short) is not each or version_of(each) != version]
        if not changed and not self._attributes.any_changed():
            return
        changed += self._attributes.names_changed()
        of = f" ({', '.join(sorted(set(changed)))})" if changed else ""
        raise PassFailed(
            f"chunked_modules: {name}, a {type(self._module).__name__}, keeps something of each call{of}, which would be a chunk's and without a "
            "gradient, so that it does not act on each token alone: leave it out"
        )


# PassFailed: a module within has hooks, which would be called with chunks. Those of the module itself are called with all tokens.
def _refuse_hooks(name: str, module: nn.Module) -> None:
    for short, each in module.named_modules():
        hooks = [hook for kind in _HOOKS for hook in vars(each).get(kind, {}).values()] if each is not module else []
        if any(not str(getattr(hook, "__module__", "")).startswith("penstock.") for hook in hooks):
            raise PassFailed(
                f"chunked_modules: {name}.{short}, a {type(each).__name__}, has a hook, which would be called with chunks of tokens: leave {name} out, or "
                f"put the hook on {name}, where it is called with all of them"
            )


# Whether tokens from all of the input give the same in another order, in two parts, as they do together.
def _is_per_token(module: nn.Module, call: Call, given: torch.Tensor) -> bool:
    rows = given.reshape(-1, given.shape[-1])
    count = min(_SAMPLE, rows.shape[0])
    rows = rows[torch.arange(count, device=given.device) * rows.shape[0] // count]
    random = RandomState.now()

    def compare() -> bool:
        def of(part: torch.Tensor) -> torch.Tensor:
            (chunk,) = _chunks(part.reshape(*(1,) * (given.dim() - 2), *part.shape), part.shape[0])
            random.restore()
            return call(chunk).reshape(part.shape[0], -1)

        together, half = of(rows), count // 2
        turned = rows.flip(0)
        apart = torch.cat([of(turned[:half]), of(turned[half:])]).flip(0)
        largest = float(together.abs().max()) if together.numel() else 0.0
        return bool((together - apart).abs().max() <= _TOLERANCES.get(together.dtype, 3e-2) * max(largest, 1e-30)) or not together.isfinite().all()

    try:
        with torch.no_grad():
            if compare():
                return True
            with _without_dropout(module):
                return compare()
    finally:
        random.restore()


# Each of two calls draws its own numbers. What a normalization does over tokens in training stays.
@contextlib.contextmanager
def _without_dropout(module: nn.Module) -> Iterator[None]:
    modes = [(each, each.training) for each in module.modules() if not isinstance(each, nn.modules.batchnorm._NormBase)]
    for each, _ in modes:
        each.training = False
    try:
        yield
    finally:
        for each, training in modes:
            each.training = training


# By a whole name, the end of one, or a class. A module within another that is named is part of it.
def _named(model: nn.Module, names: Sequence[str]) -> List[Tuple[str, nn.Module]]:
    found: Dict[str, nn.Module] = {}
    for wanted in names:
        ends = "." + wanted
        of_name = {name: each for name, each in model.named_modules() if name and (name == wanted or name.endswith(ends) or wanted in _classes(each))}
        if not of_name:
            raise ValueError(f"chunked_modules: the model has no module {wanted!r}, none whose name ends in it, and none of a class of this name")
        found.update(of_name)
    return [(name, each) for name, each in found.items() if not any(name.startswith(other + ".") for other in found)]


def _classes(module: nn.Module) -> List[str]:
    return [each.__name__ for each in type(module).__mro__ if each.__module__.split(".")[0] != "torch" or each is type(module)]
