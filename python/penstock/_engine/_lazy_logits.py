"""Logits that are not computed before something is asked of them: a loss of them is computed in chunks of tokens, whose memory is a chunk's.

``LazyLogits`` is a tensor with shape, type and device, and no memory. What losses do to logits before a number comes out (another type, a
division, a soft cap, views, the first or last tokens left out, log_softmax) is remembered; what gives a value for each token (cross_entropy,
logsumexp, gather, argmax, a sum over the vocabulary) is computed chunk by chunk. Anything else computes them whole, once, and is then what it is
with ordinary tensors.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import weakref
from dataclasses import dataclass, field
from typing import Any, Callable, ContextManager, Dict, List, Optional, Sequence, Tuple

import torch

from ._attributes import version_of
from ._autograd_settings import AutogradSettings
from ._hidden import without_overrides
from ._row_chunks import RowFunction, Step, backward_of

#: Hands out what was made of logits with a graph: it is given that, and how it is made of the logits once more.
Tell = Callable[[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]], torch.Tensor]
Weights = Tuple[torch.Tensor, Optional[torch.Tensor]]

IN_PLACE_AFTER = "{} of logits comes after {} of them was computed in chunks, which it would not see: call it before, or give logits_chunk_size=0"


class _Whole(Exception):
    """This is not computed in chunks."""


@dataclass
class Source:
    """One call of the head.

    weights: where its weight and bias are now; RuntimeError: nowhere any more. entered: within, they are read. keep: copies them, and returns
    what ``weights`` may be from then on. note_whole: told of an operation that asks for whole logits, and their bytes.
    """

    hidden: torch.Tensor
    chunk: int
    settings: AutogradSettings
    weights: Callable[[], Weights]
    note_whole: Callable[[str, int], None]
    steps: Tuple[Step, ...] = ()
    entered: Callable[[], ContextManager[Any]] = contextlib.nullcontext
    keep: Optional[Callable[[], Callable[[], Weights]]] = None
    #: Without a graph here: what is handed out begins one (``tell``).
    has_graph: bool = True
    tell: Optional[Tell] = None
    #: The first that was computed in chunks with a graph; empty: nothing was.
    reduced: str = ""
    is_used: bool = False
    changed: bool = False  # in place
    whole: Optional[torch.Tensor] = None
    values: Optional[torch.Tensor] = None
    made: List["weakref.ref[LazyLogits]"] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._given, self._version = self.hidden, version_of(self.hidden)

    def checked(self) -> Weights:
        if version_of(self._given) != self._version:
            raise RuntimeError("what the head was given was changed in place before its logits were computed, which are computed later: give logits_chunk_size=0")
        return self.weights()

    def outlive(self) -> None:
        """The weights, which are here, may go: what is asked of the logits later is computed with a copy."""
        if self.keep is not None and self.whole is None:
            self.weights, self.entered, self.keep = self.keep(), contextlib.nullcontext, None

    def compute(self, hidden: torch.Tensor, steps: Sequence[Step], graph: bool) -> torch.Tensor:
        """All of it at once."""
        with self.entered(), torch.set_grad_enabled(graph and self.has_graph):
            weight, bias = self.checked()
            rows = RowFunction(1, self.settings, tuple).head(hidden.reshape(-1, hidden.shape[-1]), weight, bias)
            for step in steps:
                rows = step(rows)
            return rows.reshape(*hidden.shape[:-1], rows.shape[-1])


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class LazyLogits(torch.Tensor):
    """See the module. ``becomes`` ordinary by ``whole``."""

    _source: Source
    _hidden: torch.Tensor  # of its tokens
    _steps: Tuple[Step, ...]
    _graph: bool
    _replay: Callable[[torch.Tensor], torch.Tensor]
    _known: Optional[torch.Tensor]

    @staticmethod
    def of(source: Source, dtype: torch.dtype, width: int, graph: bool) -> "LazyLogits":
        """The logits of this call of the head, all of them."""
        return _made(source, source.hidden, source.steps, dtype, width, graph, _same)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Tuple[Any, ...] = (), kwargs: Optional[Dict[str, Any]] = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func in _NATIVE or name in _NATIVE_NAMES:
            with without_overrides():
                return func(*args, **kwargs)
        if not args and is_lazy(kwargs.get("input")):
            kwargs = dict(kwargs)
            args = (kwargs.pop("input"),)
        served = _SERVED.get(name)
        if served is not None and args and is_lazy(args[0]) and args[0]._source.whole is None and not args[0]._source.changed:
            try:
                return served(func, *args, **kwargs)
            except (_Whole, TypeError):
                pass
        return _on_whole(func, name, args, kwargs)

    # What reaches a kernel and not Python: the graph, if one is made, is that of the tensor itself.
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Tuple[Any, ...] = (), kwargs: Optional[Dict[str, Any]] = None) -> Any:
        name = str(func).rpartition(".")[0] or str(func)
        with torch.no_grad():
            args, kwargs = _map_lazy((args, kwargs or {}), lambda lazy: lazy.whole(name).detach())
        return func(*args, **kwargs)

    def whole(self, asked_by: str = "") -> torch.Tensor:
        """An ordinary tensor. asked_by: the operation, which is noted; empty: nobody is to know."""
        graph = self._graph and torch.is_grad_enabled()
        if self._known is not None:
            return self._known if graph or not self._graph else self._known.detach()
        source = self._source
        small = source.whole is None and (graph or source.values is None) and math.prod(self.shape[:-1]) <= source.chunk
        if small:
            made = source.compute(self._hidden, self._steps, graph)
            if graph and source.tell is not None:
                made = source.tell(made, self._replay)
        else:
            base = _whole_of(source, graph, asked_by)
            with torch.set_grad_enabled(graph):
                made = self._replay(base)
        if graph or not self._graph:
            self._known = made
        return made

    def handed(self, tell: Tell, has_graph: bool) -> torch.Tensor:
        """The same for a caller outside of the model, who is given what is made of it by `tell`. has_graph: what the forward gave it has one."""
        source = self._source
        if source.whole is not None:
            return tell(self.whole(), _same)
        own = Source(
            self._hidden if has_graph else self._hidden.detach(), source.chunk, source.settings, source.weights, source.note_whole, self._steps,
            source.entered, source.keep, has_graph, tell, is_used=source.is_used,
        )  # fmt: skip
        own._given, own._version = source._given, source._version
        return LazyLogits.of(own, self.dtype, self.shape[-1], True)

    @property
    def source(self) -> Source:
        return self._source

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.whole("pickling").__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Dict[int, Any]) -> torch.Tensor:
        return self.whole("copy.deepcopy").__deepcopy__(memo)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return repr(self.whole("repr"))

    # torch's own would come here by way of the tensor's memory.
    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.whole("numpy").__array__(*args, **kwargs)

    def __iter__(self) -> Any:
        return iter(self.unbind(0))


def is_lazy(value: Any) -> bool:
    return type(value) is LazyLogits


# Of the head's outputs, and not of what was made of them: so that they are computed once, and a change in place is seen by all.
def _whole_of(source: Source, graph: bool, asked_by: str) -> torch.Tensor:
    if source.whole is not None:
        return source.whole if graph else source.whole.detach()
    if not graph and source.values is not None:
        return source.values
    made = source.compute(source.hidden, source.steps, graph)
    if asked_by:
        source.note_whole(asked_by, made.numel() * made.element_size())
    source.is_used = True
    if not graph:
        source.values = made
        return made
    if source.tell is not None:
        made = source.tell(made, _same)
    source.whole, source.values = made, None
    return made


class _Native(torch.autograd.Function):
    """The lazy tensor with a graph of its own, for functions that look at no class."""

    @staticmethod
    def forward(ctx: Any, function: RowFunction, hidden: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor], made: Callable[[], torch.Tensor]) -> Any:
        ctx.function = function
        ctx.save_for_backward(hidden, weight, bias)
        return made()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        rows = gradient.reshape(-1, gradient.shape[-1])
        return (*backward_of(ctx, ctx.function, [rows]), None)


def _made(
    source: Source, hidden: torch.Tensor, steps: Tuple[Step, ...], dtype: torch.dtype, width: int, graph: bool, replay: Callable[[torch.Tensor], torch.Tensor]
) -> LazyLogits:
    def wrapper(requires_grad: bool = False) -> LazyLogits:
        shape = (*hidden.shape[:-1], width)
        return torch.Tensor._make_wrapper_subclass(LazyLogits, shape, dtype=dtype, device=hidden.device, requires_grad=requires_grad)  # type: ignore[attr-defined,no-any-return]

    with without_overrides():
        if not graph:
            lazy = wrapper()
        elif not source.has_graph:
            lazy = wrapper(True)
            if source.tell is not None:
                # A function that looks at no class leaves its gradient at the tensor itself.
                twin = _made(source, hidden.detach(), steps, dtype, width, False, replay)
                lazy.register_hook(lambda gradient: _given_directly(source, twin, gradient))
        else:
            weight, bias = source.checked()
            function = RowFunction(source.chunk, source.settings, _all_steps(steps))
            rows = hidden.reshape(-1, hidden.shape[-1])
            lazy = _Native.apply(function, rows, weight, bias, wrapper)
    lazy._source, lazy._hidden, lazy._steps, lazy._graph, lazy._replay, lazy._known = source, hidden, steps, graph, replay, None
    source.made = [each for each in source.made if each() is not None] + [weakref.ref(lazy)]
    return lazy


def _given_directly(source: Source, lazy: LazyLogits, gradient: torch.Tensor) -> None:
    with torch.enable_grad():
        told = source.tell(lazy.whole(), lazy._replay)  # type: ignore[misc]
    torch.autograd.backward(told, gradient)


def _all_steps(steps: Sequence[Step]) -> Callable[..., Tuple[torch.Tensor, ...]]:
    def of(rows: torch.Tensor) -> Tuple[torch.Tensor, ...]:
        for step in steps:
            rows = step(rows)
        return (rows,)

    return of


def _map_lazy(value: Any, change: Callable[[LazyLogits], Any]) -> Any:
    if is_lazy(value):
        return change(value)
    if type(value) in (list, tuple):
        return type(value)(_map_lazy(each, change) for each in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map_lazy(each, change) for each in value))
    if isinstance(value, dict):
        return {key: _map_lazy(each, change) for key, each in value.items()}
    return value


def _lazy_in(value: Any) -> List[LazyLogits]:
    found: List[LazyLogits] = []
    _map_lazy(value, lambda lazy: found.append(lazy))
    return found


def _is_in_place(name: str, args: Sequence[Any], kwargs: Dict[str, Any]) -> bool:
    named = name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or (name.startswith("__i") and name not in ("__invert__", "__index__", "__int__"))
    return (named and bool(args) and is_lazy(args[0])) or bool(_lazy_in(kwargs.get("out")))


# What hands out the memory of a tensor.
_POINTERS = {"data_ptr", "untyped_storage", "storage", "_typed_storage", "__dlpack__", "__cuda_array_interface__"}


def _on_whole(func: Any, name: str, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
    lazies = _lazy_in((args, kwargs))
    asked = name if name != "__get__" else getattr(getattr(func, "__self__", None), "__name__", name)
    if asked in _POINTERS:
        raise RuntimeError(
            f"{asked} of logits that are computed in chunks: there is no memory that holds them, as a kernel of one's own wants it. Keep them whole: "
            'logits_chunk_size=0 (or "penstock": {"logits_chunk_size": 0})'
        )
    if name in ("register_hook", "retain_grad", "register_post_accumulate_grad_hook"):
        for lazy in lazies:
            if lazy._source.reduced:
                raise RuntimeError(IN_PLACE_AFTER.format(name, lazy._source.reduced))
            _whole_of(lazy._source, _graph_of(lazy), asked)  # also of a few tokens: what is computed after it goes by them
    if not _is_in_place(name, args, kwargs):
        args, kwargs = _map_lazy((args, kwargs), lambda lazy: lazy.whole(asked))
        return func(*args, **kwargs)
    # What was made of them before has the values of before, or is a view.
    for source in {id(lazy._source): lazy._source for lazy in lazies}.values():
        alive = [each for each in (known() for known in source.made) if each is not None]
        with torch.enable_grad():
            base = _whole_of(source, any(each._graph for each in alive), asked)
        source.changed = True
        for each in alive:
            with torch.set_grad_enabled(each._graph):
                each._known = each._replay(base)
    given = args[0] if args else None
    args, kwargs = _map_lazy((args, kwargs), lambda lazy: lazy._known)
    result = func(*args, **kwargs)
    return given if args and result is args[0] else result


# --- what leaves them lazy


def _graph_of(lazy: LazyLogits) -> bool:
    return lazy._graph and torch.is_grad_enabled()


# Another view of the same tokens. change: of the tensor of features, which has the same tokens.
def _tokens(lazy: LazyLogits, change: Callable[[torch.Tensor], Any], replay: Callable[[torch.Tensor], Any]) -> Any:
    graph, before = _graph_of(lazy), lazy._replay
    hidden = change(lazy._hidden)

    def made(each: torch.Tensor, again: Callable[[torch.Tensor], torch.Tensor]) -> LazyLogits:
        return _made(lazy._source, each, lazy._steps, lazy.dtype, lazy.shape[-1], graph, again)

    if isinstance(hidden, torch.Tensor):
        return made(hidden, lambda base: replay(before(base)))
    return type(hidden)(made(each, lambda base, number=number: replay(before(base))[number]) for number, each in enumerate(hidden))  # type: ignore[misc]


# A function of rows: of each element, or of each row.
def _step(lazy: LazyLogits, of: Callable[[torch.Tensor], torch.Tensor], func: Any, args: Sequence[Any], kwargs: Dict[str, Any]) -> LazyLogits:
    step = Step(of, AutogradSettings())
    with torch.no_grad():
        like = step(torch.empty((0, lazy.shape[-1]), dtype=lazy.dtype, device=lazy.device))
    before = lazy._replay
    graph = _graph_of(lazy) and like.is_floating_point()
    again = Step(lambda tensor: func(tensor, *args, **kwargs), step.settings)
    return _made(lazy._source, lazy._hidden, (*lazy._steps, step), like.dtype, like.shape[-1], graph, lambda base: again(before(base)))


def _is_constant(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return not is_lazy(value) and value.dim() == 0 and not value.requires_grad
    return value is None or isinstance(value, (bool, int, float, str, torch.dtype))


def _element_wise(func: Any, lazy: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    others = _lazy_in((args, kwargs))
    if others:
        return _of_two(func, lazy, args, kwargs)
    if not all(_is_constant(each) for each in (*args, *kwargs.values())):
        raise _Whole
    # As they are now: the step is made later.
    args = tuple(each.clone() if isinstance(each, torch.Tensor) else each for each in args)
    kwargs = {name: each.clone() if isinstance(each, torch.Tensor) else each for name, each in kwargs.items()}
    return _step(lazy, lambda rows: func(rows, *args, **kwargs), func, args, kwargs)


# Both of one call of the head, and of the same tokens: exp(x) * x.
def _of_two(func: Any, first: LazyLogits, args: Sequence[Any], kwargs: Dict[str, Any]) -> LazyLogits:
    second: Any = args[0] if len(args) == 1 and not kwargs else None
    if not is_lazy(second) or second._source is not first._source or second.shape != first.shape or not _same_tokens(first._hidden, second._hidden):
        raise _Whole
    common = len([0 for one, other in itertools.takewhile(lambda each: each[0] is each[1], zip(first._steps, second._steps))])
    left, right = (_all_steps(each._steps[common:]) for each in (first, second))
    settings = AutogradSettings()
    step = Step(lambda rows: func(left(rows)[0], right(rows)[0]), settings)
    source, shared = first._source, first._steps[:common]
    with torch.no_grad():
        rows = [torch.empty((0, each.shape[-1]), dtype=each.dtype, device=each.device) for each in (first, second)]
        with settings.autocast(cache_enabled=False):
            like = func(*rows)
    one, other = first._replay, second._replay

    def again(base: torch.Tensor) -> torch.Tensor:
        with settings.autocast(cache_enabled=False):
            return func(one(base), other(base))  # type: ignore[no-any-return]

    graph = (first._graph or second._graph) and torch.is_grad_enabled() and like.is_floating_point()
    if graph and not (first._graph and second._graph):
        raise _Whole  # one is detached, which steps do not know
    return _made(source, first._hidden, (*shared, step), like.dtype, like.shape[-1], graph, again)


def _same_tokens(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first is second or (
        first.data_ptr() == second.data_ptr() and first.shape == second.shape and first.stride() == second.stride()
    )


def _converted(func: Any, lazy: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    wanted: Optional[torch.dtype] = _TYPES.get(func.__name__)
    given = list(args)
    for value in [*args, *kwargs.values()]:
        if isinstance(value, torch.dtype):
            wanted = value
        elif isinstance(value, (str, torch.device, int)) and not isinstance(value, bool):
            if func.__name__ != "to" or not _is_device(value) or _device(value, lazy.device) != lazy.device:
                raise _Whole
        elif value is not None and not isinstance(value, (bool, torch.memory_format)):
            raise _Whole
    copies = kwargs.get("copy", False) or (func.__name__ == "to" and any(value is True for value in given[2:3]))
    if wanted is None or wanted == lazy.dtype:
        if func.__name__ == "type" or copies:
            raise _Whole
        return lazy
    kind = wanted
    return _step(lazy, lambda rows: rows.to(kind), func, args, kwargs)


def _is_device(value: Any) -> bool:
    try:
        torch.device(value)
    except (RuntimeError, TypeError):
        return False
    return True


def _device(value: Any, now: torch.device) -> torch.device:
    device = torch.device(value)
    return device if device.index is not None or device.type != now.type or now.index is None else torch.device(now.type, torch.cuda.current_device())


def _made_contiguous(func: Any, lazy: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    if any(isinstance(each, torch.memory_format) and each is not torch.contiguous_format for each in (*args, *kwargs.values())):
        raise _Whole
    return _tokens(lazy, lambda hidden: hidden, lambda base: base.contiguous())  # which may be a copy


def _cpu(func: Any, lazy: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    if lazy.device.type != "cpu":
        raise _Whole
    return lazy


def _detached(func: Any, lazy: LazyLogits) -> Any:
    before = lazy._replay
    return _made(lazy._source, lazy._hidden.detach(), lazy._steps, lazy.dtype, lazy.shape[-1], False, lambda base: before(base).detach())


def _is_last(lazy: LazyLogits, dim: Any) -> bool:
    return isinstance(dim, int) and not isinstance(dim, bool) and dim in (-1, lazy.dim() - 1)


def _row_wise(func: Any, lazy: LazyLogits, dim: Any = None, *args: Any, **kwargs: Any) -> Any:
    rest = {name: value for name, value in kwargs.items() if name != "_stacklevel"}
    if not _is_last(lazy, dim) or not all(_is_constant(each) for each in (*args, *rest.values())):
        raise _Whole
    dtype = next((each for each in (*args, *rest.values()) if isinstance(each, torch.dtype)), None)
    plain = torch.log_softmax if func.__name__ == "log_softmax" else torch.softmax
    return _step(lazy, lambda rows: plain(rows, -1, dtype), plain, (-1, dtype), {})


def _sizes(given: Sequence[Any]) -> List[int]:
    return [int(each) for each in (given[0] if len(given) == 1 and isinstance(given[0], (tuple, list)) else given)]


def _viewed(func: Any, lazy: LazyLogits, *shape: Any) -> Any:
    if len(shape) == 1 and isinstance(shape[0], torch.dtype):
        raise _Whole
    wanted = _sizes(shape)
    if wanted.count(-1) > 1 or not wanted:
        raise _Whole
    if -1 in wanted:
        known = -math.prod(wanted)
        if known <= 0 or lazy.numel() % known:
            raise _Whole
        wanted[wanted.index(-1)] = lazy.numel() // known
    if wanted[-1] != lazy.shape[-1] or math.prod(wanted) != lazy.numel():
        raise _Whole
    tokens = wanted[:-1]
    return _tokens(lazy, lambda hidden: hidden.reshape(*tokens, hidden.shape[-1]), lambda base: base.reshape(wanted))


def _flattened(func: Any, lazy: LazyLogits, start_dim: int = 0, end_dim: int = -1) -> Any:
    if end_dim % lazy.dim() == lazy.dim() - 1:
        raise _Whole
    return _tokens(lazy, lambda hidden: hidden.flatten(start_dim, end_dim), lambda base: base.flatten(start_dim, end_dim))


# func(tensor, ..., dim): of dimensions of tokens alone.
def _along_tokens(at: int, default: Optional[int] = None) -> Callable[..., Any]:
    def served(func: Any, lazy: LazyLogits, *args: Any, **kwargs: Any) -> Any:
        dim = kwargs["dim"] if "dim" in kwargs else args[at] if len(args) > at else default
        dims = lazy.dim() + (func.__name__ == "unsqueeze")
        if not isinstance(dim, int) or isinstance(dim, bool) or not -dims <= dim < dims or dim % dims == dims - 1:
            raise _Whole
        if any(isinstance(each, torch.Tensor) and each.is_floating_point() for each in (*args, *kwargs.values())):
            raise _Whole
        return _tokens(lazy, lambda hidden: func(hidden, *args, **kwargs), lambda base: func(base, *args, **kwargs))

    return served


def _indexed(func: Any, lazy: LazyLogits, index: Any) -> Any:
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(not (each is None or each is Ellipsis or isinstance(each, (int, slice, list, torch.Tensor))) or isinstance(each, bool) for each in parts):
        raise _Whole
    if _lazy_in(parts):
        raise _Whole

    def takes(each: Any) -> int:
        if each is None or each is Ellipsis:
            return 0
        return each.dim() if isinstance(each, torch.Tensor) and each.dtype in (torch.bool, torch.uint8) else 1

    taken = sum(map(takes, parts))
    dots = [number for number, each in enumerate(parts) if each is Ellipsis]
    if len(dots) > 1 or taken > lazy.dim():
        raise _Whole
    at = dots[0] if dots else len(parts)
    parts[at : at + 1] = [slice(None)] * (lazy.dim() - taken)
    last = len(parts) - 1
    while parts[last] is None:  # a dimension after that of the vocabulary
        raise _Whole
    vocabulary, tokens = parts[last], tuple(parts[:last])
    if not isinstance(vocabulary, slice):
        raise _Whole
    if isinstance(index, (torch.Tensor, list)) or any(isinstance(each, (torch.Tensor, list)) for each in tokens):
        if vocabulary != slice(None):
            raise _Whole
    made = _tokens(lazy, lambda hidden: hidden[(*tokens, slice(None))], lambda base: base[(*tokens, slice(None))])
    if vocabulary.indices(lazy.shape[-1]) == (0, lazy.shape[-1], 1):
        return made
    return _step(made, lambda rows: rows[:, vocabulary], lambda tensor: tensor[..., vocabulary], (), {})


# --- what is computed in chunks


# of: of rows of logits and of `along` to rows. along: with the same tokens. again: the same of an ordinary tensor of all tokens.
def _reduced(
    name: str, lazy: LazyLogits, of: Callable[..., Any], along: Sequence[torch.Tensor], again: Callable[[torch.Tensor], Any]
) -> Tuple[torch.Tensor, ...]:
    source, graph = lazy._source, _graph_of(lazy)
    source.is_used = True
    if lazy._known is not None or (not graph and source.values is not None):
        made = again(lazy.whole())
        return made if isinstance(made, tuple) else (made,)
    tokens = lazy.shape[:-1]
    count = math.prod(tokens)
    steps, settings = _all_steps(lazy._steps), AutogradSettings()

    def of_rows(rows: torch.Tensor, *given: torch.Tensor) -> Tuple[torch.Tensor, ...]:
        (rows,) = steps(rows)
        with settings.autocast(cache_enabled=False):
            result = of(rows, *given)
        return tuple(result) if isinstance(result, tuple) else (result,)

    flat = [each.reshape(count, *each.shape[len(tokens) :]) for each in along]
    function = RowFunction(source.chunk, source.settings, of_rows, flat)
    with source.entered():
        weight, bias = source.checked()
        hidden = lazy._hidden.reshape(count, lazy._hidden.shape[-1])
        results = function(hidden, weight, bias) if graph and source.has_graph else function.values(hidden, weight, bias)
    results = tuple(each.reshape(*tokens, *each.shape[1:]) for each in results)
    if not graph:
        return results
    source.reduced = source.reduced or name
    if source.tell is None:
        return results
    before = lazy._replay

    def told(number: int, result: torch.Tensor) -> torch.Tensor:
        def once_more(base: torch.Tensor) -> torch.Tensor:
            with settings.autocast(cache_enabled=False):
                made = again(before(base))
            return made[number] if isinstance(made, tuple) else made  # type: ignore[no-any-return]

        return source.tell(result, once_more) if result.is_floating_point() else result  # type: ignore[misc]

    return tuple(told(number, result) for number, result in enumerate(results))


# func(tensor, dim=-1, keepdim=False): one value, or one of each, for each row.
def _over_vocabulary(func: Any, lazy: LazyLogits, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    if not _is_last(lazy, dim) or not isinstance(keepdim, bool) or not all(map(_is_constant, kwargs.values())):
        raise _Whole
    kind: List[Any] = []

    def of(tensor: torch.Tensor) -> Any:
        result = func(tensor, -1, keepdim=keepdim, **kwargs)
        kind[:] = [type(result)]
        return tuple(result) if isinstance(result, tuple) else result

    made = _reduced(func.__name__, lazy, of, [], of)
    return kind[0](made) if issubclass(kind[0], tuple) else made[0]


# A sum or a mean of all elements is one of the rows'.
def _sum_or_mean(func: Any, lazy: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    if args and args[0] is not None or kwargs.get("dim") is not None:
        return _over_vocabulary(func, lazy, *args, **kwargs)
    if set(kwargs) - {"dtype"}:
        raise _Whole
    rows = _over_vocabulary(func, lazy, -1, **kwargs)
    return func(rows, **kwargs)


def _gathered(func: Any, lazy: LazyLogits, dim: Any, index: Any, **kwargs: Any) -> Any:
    if kwargs or not _is_last(lazy, dim) or not isinstance(index, torch.Tensor) or is_lazy(index) or index.shape[:-1] != lazy.shape[:-1]:
        raise _Whole
    return _reduced("gather", lazy, lambda rows, at: rows.gather(-1, at), [index], lambda tensor: tensor.gather(-1, index))[0]


def _taken_along(func: Any, lazy: LazyLogits, indices: Any, dim: Any = None) -> Any:
    return _gathered(func, lazy, dim, indices)


def _largest(func: Any, lazy: LazyLogits, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:  # noqa: A002
    if not _is_last(lazy, dim):
        raise _Whole
    kind: List[Any] = []

    def of(tensor: torch.Tensor) -> Any:
        result = torch.topk(tensor, k, -1, largest, sorted)
        kind[:] = [type(result)]
        return tuple(result)

    made = _reduced("topk", lazy, of, [], of)
    return kind[0](made)


def _cross_entropy(
    func: Any, lazy: LazyLogits, target: Any, weight: Optional[torch.Tensor] = None, size_average: Any = None, ignore_index: int = -100,
    reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> Any:  # fmt: skip
    return _of_labels(func, lazy, target, weight, size_average, ignore_index, reduce, reduction, {"label_smoothing": label_smoothing})


def _nll_loss(
    func: Any, lazy: LazyLogits, target: Any, weight: Optional[torch.Tensor] = None, size_average: Any = None, ignore_index: int = -100,
    reduce: Any = None, reduction: str = "mean",
) -> Any:  # fmt: skip
    return _of_labels(func, lazy, target, weight, size_average, ignore_index, reduce, reduction, {})


def _of_labels(
    func: Any, lazy: LazyLogits, target: Any, weight: Optional[torch.Tensor], size_average: Any, ignore_index: int, reduce: Any, reduction: str,
    more: Dict[str, Any],
) -> Any:  # fmt: skip
    served = lazy.dim() == 2 and isinstance(target, torch.Tensor) and not is_lazy(target) and target.dim() == 1 and not target.is_floating_point()
    if not served or target.shape[0] != lazy.shape[0] or size_average is not None or reduce is not None or reduction not in ("none", "mean", "sum"):
        raise _Whole
    if weight is not None and (is_lazy(weight) or weight.requires_grad):
        raise _Whole

    def each(rows: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return func(rows, labels, weight=weight, ignore_index=ignore_index, reduction="none", **more)  # type: ignore[no-any-return]

    losses = _reduced(func.__name__, lazy, each, [target], lambda tensor: each(tensor, target))[0]
    if reduction == "none":
        return losses
    # torch adds what 16 bits hold in more.
    kind = losses.dtype
    total = losses.sum(dtype=torch.promote_types(kind, torch.float32))
    if reduction == "mean":
        counted = target != ignore_index
        total = total / (counted.sum() if weight is None else (weight[target.masked_fill(~counted, 0)] * counted).sum())
    return total.to(kind)


_TYPES = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16, "double": torch.float64}

_NATIVE = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in ("shape", "dtype", "device", "layout", "requires_grad", "ndim", "is_leaf", "is_cuda", "is_meta", "is_sparse", "is_quantized", "names", "is_cpu", "grad_fn", "is_mps", "is_xpu")
    if hasattr(getattr(torch.Tensor, name, None), "__get__")
)
_NATIVE_NAMES = frozenset(
    "size dim numel nelement ndimension stride is_floating_point is_complex is_signed element_size get_device __len__ __hash__ is_contiguous is_inference "
    "is_same_size result_type is_tensor has_names _is_view".split()
)

_SERVED: Dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("float", "half", "bfloat16", "double", "to", "type"), _converted),
    "contiguous": _made_contiguous,
    "cpu": _cpu,
    "detach": _detached,
    **dict.fromkeys(
        "mul div true_divide divide multiply add sub neg negative tanh exp log sigmoid abs square pow clamp clip relu nan_to_num logsigmoid softplus "
        "rsub __mul__ __rmul__ __truediv__ __add__ __radd__ __sub__ __rsub__ __neg__ __pow__".split(),
        _element_wise,
    ),
    **dict.fromkeys(("log_softmax", "softmax"), _row_wise),
    **dict.fromkeys(("view", "reshape"), _viewed),
    "flatten": _flattened,
    "__getitem__": _indexed,
    "narrow": _along_tokens(0),
    "select": _along_tokens(0),
    "index_select": _along_tokens(0),
    "unsqueeze": _along_tokens(0),
    "squeeze": _along_tokens(0),
    "unbind": _along_tokens(0, 0),
    "split": _along_tokens(1, 0),
    "chunk": _along_tokens(1, 0),
    "tensor_split": _along_tokens(1, 0),
    **dict.fromkeys("logsumexp argmax argmin amax amin max min".split(), _over_vocabulary),
    **dict.fromkeys(("sum", "mean"), _sum_or_mean),
    "gather": _gathered,
    "take_along_dim": _taken_along,
    "topk": _largest,
    "cross_entropy": _cross_entropy,
    "nll_loss": _nll_loss,
}
