"""What a program has of parameters that are not in memory: ``Hidden`` in their place, and ``Copy`` of a value that was read.

Between steps both are as the parameter itself: what is computed with them is computed with its value, and a change in place is written to the
engine before the call returns, as engine.gathered(write_back=True) does it.
"""

from __future__ import annotations

import enum
import functools
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import nn

from ._attributes import version_of
from ._tree import map_tensors, tensors_of
from ._unasked import ask, is_transformed, outside_of_transforms


class ZeroParamStatus(enum.Enum):
    """DeepSpeed's, of a parameter's ds_status."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class Read:
    """A parameter's value as it was read, and the memory of all its copies."""

    def __init__(
        self, name: str, value: torch.Tensor, write: Callable[[torch.Tensor], None], took: Callable[[torch.Tensor], None]
    ) -> None:
        """write: makes this the parameter's value, of which what was read before is none. took: knows the tensor that the program has given it."""
        self.name = name
        self.value = value
        #: Whether it is the parameter's value still, so that a change in place of it is one of the parameter.
        self.current = True
        #: Gives the value a graph whose gradient is the parameter's. None: no gradient may come to it.
        self.with_graph: Optional[Callable[[torch.Tensor], torch.Tensor]] = None
        self._write = write
        self._took = took

    def changed(self) -> None:
        """The value was changed in place: so is the parameter. RuntimeError: it cannot be, and is as it was."""
        if not self.current:
            raise RuntimeError(_STALE.format(self.name))
        try:
            self._write(self.value)
        except BaseException:
            self.current = False
            raise

    def give(self, given: torch.Tensor) -> None:
        """The parameter becomes the given tensor's value, which is of the same shape and type. The copies of this one keep theirs, as another
        tensor's memory does in plain PyTorch, and are the parameter's no more."""
        with torch.no_grad(), torch.inference_mode(False):
            value = torch.empty_like(self.value).copy_(given.detach())
        self._write(value)
        self.current = False
        self._took(given)


#: A hidden parameter's value, for who wants it with a graph, or by itself. RuntimeError naming it: there is none just now.
ValueOf = Callable[[nn.Parameter, bool], Read]

#: What is wrong with a weight, by its name, that is used where no gradient would come to it.
OUTSIDE = (
    "{} is used outside of the forward of its module, by the model or the loss: no gradient would come to it. Give blocks=[...] with a module "
    "around all its uses; a loss that is made of it has its backward by engine.backward(loss); else its value is read under torch.no_grad(), or by "
    "detach(), between steps"
)
#: Of a module, by its name, whose gradient is asked for and not known.
CALLED_ALONE = (
    "{} was called outside of the model's forward: gradients are known of whole forwards only; call the model, or this under torch.no_grad()"
)
_STALE = (
    "a value of {} that was read before a forward, or before another change of it, is changed in place: the parameter has another value since, and "
    "the change would be lost. Read it again (parameter.data), and change that; a clone() of it is a tensor of the program's own"
)
_OTHER_SHAPE = "{} is given another shape, type or memory ({}): the engine has it as it was in the first forward, and so it stays"
_IN_A_GRAPH = "{} is changed in place by a tensor that requires a gradient, which would not come to it: under torch.no_grad() it is written"
_GIVEN_A_GRADIENT = (
    "{} is given a gradient, which would count for nothing: gradients of its parameters are the engine's. engine.backward(loss) makes them, and a hook "
    "(parameter.register_hook) changes them"
)
_FUNCTIONALIZED = "{} is given to torch.func.functionalize, which wants the memory of a tensor: give it a clone() of parameter.detach()"

# Of a hidden parameter: where its value is read, its name, and its class when it has its value.
_VALUE_OF, _NAME, _OWN_CLASS = "_penstock_value_of", "_penstock_name", "_penstock_class"
# Of a copy: what was read; whether it stands for its parameter in a call; whether that has changed it.
_READ, _STANDS_IN, _WROTE = "_penstock_read", "_penstock_stands_in", "_penstock_wrote"
_IN_PLACE = ("__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__", "__iand__", "__ior__", "__ixor__")
_KEEP_VALUES = ("requires_grad_", "detach_", "share_memory_", "rename_")
# Functions of a parameter that do not look at its values. Those of a name is_* do not either.
_WITHOUT_VALUES = frozenset(
    "size dim ndimension numel nelement stride storage_offset data_ptr element_size get_device register_hook register_post_accumulate_grad_hook "
    "retain_grad has_names dim_order untyped_storage storage storage_type _typed_storage result_type __hash__ __len__ __dir__ __set__ __delete__ "
    "__dlpack_device__ empty_like zeros_like ones_like full_like rand_like randn_like randint_like new new_empty new_zeros new_ones new_full "
    "new_empty_strided".split()
) | frozenset(_KEEP_VALUES)
_OF_THE_GRAPH = frozenset((torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward))
# Of the second tensor these look at shape, type and device alone.
_AS_ANOTHER = ("view_as", "expand_as", "reshape_as", "type_as", "to", "new_tensor", "resize_as_")
_DETACHED = frozenset((torch.Tensor.detach, torch.Tensor.data.__get__))
_SET_DATA = torch.Tensor.data.__set__
_SET_GRAD = torch.Tensor.grad.__set__  # type: ignore[attr-defined]
_READING = frozenset(getattr(torch.Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "real", "imag", "data"))
#: Within, no class of a tensor is asked.
without_overrides = getattr(torch._C, "DisableTorchFunctionSubclass", torch._C.DisableTorchFunction)


# -1: it has none of its own, as one of a transform of torch.func.
def _memory_of(tensor: torch.Tensor) -> int:
    try:
        storage = tensor.untyped_storage() if hasattr(tensor, "untyped_storage") else tensor.storage()
        return int(storage.data_ptr())
    except (NotImplementedError, RuntimeError):
        return -1


# What this function's name says that it changes in place. Most such changes are seen by tensors' versions, and some (apply_) are not.
def _named_in_place(name: str, args: Tuple[Any, ...], kwargs: Mapping[str, Any]) -> List[torch.Tensor]:
    name = name.partition(".")[0]  # of torch.ops.aten's
    if name in _KEEP_VALUES or not (name == "__setitem__" or name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))):
        return []
    return tensors_of(args[0] if args else next(iter(kwargs.values()), None))


# Those that the call has changed are written; all are looked at first. RuntimeError: one of them cannot be, and nothing was written.
def _write_changed(copies: Sequence["Copy"], versions: Sequence[int], name: str, named: Sequence[torch.Tensor]) -> None:
    changed: Dict[int, Read] = {}
    for copy, version in zip(copies, versions):
        read: Read = copy.__dict__[_READ]
        if copy.__dict__.get(_STANDS_IN) and (copy.shape != read.value.shape or _memory_of(copy) != _memory_of(read.value) or copy.dtype != read.value.dtype):
            raise RuntimeError(_OTHER_SHAPE.format(read.name, name))
        if version_of(copy) == version and not any(copy is each for each in named):
            continue
        if copy.__dict__.get(_STANDS_IN) and copy.requires_grad:
            read.current = False
            raise RuntimeError(_IN_A_GRAPH.format(read.name))
        copy.__dict__[_WROTE] = True
        changed[id(read)] = read
    for read in changed.values():
        read.changed()


class Copy(torch.Tensor):
    """Of a parameter's value, where the program may take it for the parameter's memory. What is computed with it is an ordinary tensor."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Tuple[Any, ...] = (), kwargs: Optional[Dict[str, Any]] = None) -> Any:
        if any(issubclass(each, Hidden) for each in types):
            return NotImplemented  # whose values are read first
        return cls._call(func, args, kwargs or {})

    @classmethod
    def _call(cls, func: Any, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
        name = getattr(func, "__name__", "")
        with without_overrides():
            copies = [each for each in tensors_of((args, kwargs)) if type(each) is cls]
            versions = [version_of(each) for each in copies]
            try:
                result = func(*args, **kwargs)
            except BaseException:
                for copy, version in zip(copies, versions):
                    if version_of(copy) != version:
                        copy.__dict__[_READ].current = False  # a part of it may have been changed
                raise
            _write_changed(copies, versions, name, _named_in_place(name, args, kwargs))
            # A view of the copy is one more: a change in place is the parameter's as well.
            if type(result).__module__ == "numpy" and hasattr(result, "setflags"):
                result.setflags(write=False)
            if not isinstance(result, (torch.Tensor, list, tuple)) or any(result is each for each in (*args, *copies)):
                return result
            reads = {_memory_of(each): each.__dict__[_READ] for each in copies}
            if isinstance(result, torch.Tensor):
                return _as_copy(result, reads[_memory_of(result)]) if _memory_of(result) in reads else result
            views = [isinstance(each, torch.Tensor) and type(each) is not cls and _memory_of(each) in reads for each in result]
            return type(result)(_as_copy(each, reads[_memory_of(each)]) for each in result) if views and all(views) else result

    def plain(self) -> torch.Tensor:
        """An ordinary tensor of this memory, which is not the parameter's any more."""
        self.__dict__[_READ].current = False
        return self._seen_plain()

    def _seen_plain(self) -> torch.Tensor:
        with without_overrides():
            return self.as_subclass(torch.Tensor)

    # nn.Parameter(copy) and nn.Buffer(copy) say so: what a program makes of it there is its own, and an ordinary one.
    def _becomes(self, kind: type) -> None:
        self.__dict__.pop(_READ).current = False
        self.__class__ = kind  # type: ignore[assignment]

    _is_param = property(lambda self: False, lambda self, _: self._becomes(nn.Parameter))
    _is_buffer = property(lambda self: False, lambda self, _: self._becomes(torch.Tensor))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._seen_plain().__reduce_ex__(protocol)  # it is looked at only

    def __deepcopy__(self, memo: Dict[int, Any]) -> torch.Tensor:
        return self._seen_plain().clone()


# With this class it is seen by what is made of it, and by changes in place.
def _as_copy(tensor: torch.Tensor, read: Read) -> Copy:
    copy = tensor.as_subclass(Copy)
    copy.__dict__[_READ] = read
    return copy


# Of a parameter's value. A gradient that comes to one with a graph is the parameter's, or is refused.
def _copy_of(parameter: torch.Tensor, wants_graph: bool = False) -> Copy:
    has_own_graph = is_transformed()  # whose gradients are no loss's
    with outside_of_transforms():
        read: Read = parameter.__dict__[_VALUE_OF](parameter, wants_graph and not has_own_graph)
        # In grad mode: torch refuses to change a view there that was made in another.
        with torch.inference_mode(False), without_overrides(), torch.enable_grad():
            value = read.value.data
            if wants_graph:
                with_graph = None if has_own_graph else read.with_graph
                value = without_gradient(OUTSIDE.format(read.name), value) if with_graph is None else with_graph(value)
            return _as_copy(value, read)


def without_gradient(why: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, which has no graph, with one that ends in a RuntimeError that says why."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor

    def refuse(_: torch.Tensor) -> None:
        raise RuntimeError(why)

    with torch.enable_grad():
        leaf = tensor.detach().requires_grad_()
        leaf.register_hook(refuse)
        return leaf.view_as(leaf)


class Hidden(nn.Parameter):
    """A parameter that is not in memory. What is computed with it is computed with its value, which is read for that, between steps; what is
    changed in place is written.

    What is made of it in a loss is part of the step, and costs it its forward once more. RuntimeError where it is read otherwise within a
    step, and where a gradient would come to it that is not of ``engine.backward``.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Tuple[Any, ...] = (), kwargs: Optional[Dict[str, Any]] = None) -> Any:
        kwargs = kwargs or {}
        sets_data = func == _SET_DATA
        if func == _SET_GRAD and is_hidden_class(args[0]) and args[1] is not None:
            raise RuntimeError(_GIVEN_A_GRADIENT.format(args[0].__dict__[_NAME]))
        if not sets_data and not cls._looks_at_values(func, args):
            if any(issubclass(each, Copy) for each in types):  # of another: copy.view_as(parameter)
                return Copy._call(func, args, kwargs)
            with without_overrides():
                return func(*args, **kwargs)
        if func in _DETACHED:
            return _copy_of(args[0])
        if sets_data and is_hidden_class(args[0]):
            return _set_data(args[0], args[1])
        lent: Dict[int, Tuple[torch.Tensor, Copy]] = {}

        def value(tensor: torch.Tensor) -> torch.Tensor:
            if not is_hidden_class(tensor):
                return tensor
            if id(tensor) not in lent:
                # Those of torch.nn.init switch grad mode off by themselves, once they have the tensor.
                copy = _copy_of(tensor, torch.is_grad_enabled() and tensor.requires_grad and getattr(func, "__module__", "") != nn.init.__name__)
                copy.__dict__[_STANDS_IN] = True
                lent[id(tensor)] = tensor, copy
            return lent[id(tensor)][1]

        args, kwargs = map_tensors((args, kwargs), value)
        result = func(*args, **kwargs)
        for _, copy in lent.values():
            copy.__dict__.pop(_STANDS_IN)
        written = {id(copy): parameter for parameter, copy in lent.values() if copy.__dict__.pop(_WROTE, False)}
        if type(result) in (list, tuple):
            return type(result)(written.get(id(each), each) for each in result) if written else result
        return written.get(id(result), result)

    @staticmethod
    def _looks_at_values(func: Any, args: Tuple[Any, ...]) -> bool:
        name = getattr(func, "__name__", "")
        if name == "__get__":
            return func in _READING
        if name in _WITHOUT_VALUES or (name.startswith("is_") and name != "is_nonzero") or func in _OF_THE_GRAPH:
            return False
        if name == "type" and len(args) == 1:
            return False
        return not (name in _AS_ANOTHER and not is_hidden_class(args[0]))

    def __repr__(self) -> str:
        return f"Parameter of {tuple(self.shape)}, {self.dtype}, which is not in memory: engine.gathered() has its values"

    @property
    def ds_status(self) -> ZeroParamStatus:
        """Where deepspeed.initialize made its engine the parameter has ds_id, ds_shape and ds_numel too."""
        return ZeroParamStatus.NOT_AVAILABLE

    @property
    def ds_tensor(self) -> torch.Tensor:
        """Its value, flat: the part of this process, which is the whole."""
        return self.detach().reshape(-1)


# A function that asks no tensor's class, of which some are hidden parameters' or copies'.
def _call_unasked(func: Callable[..., Any], args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
    @functools.wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        return Copy._call(func, args, kwargs)

    if getattr(func, "__name__", "") == "_wrap_functional_tensor":  # which wants the very tensor back
        name = next(each.__dict__[_NAME] if is_hidden_class(each) else each.__dict__[_READ].name for each in tensors_of(args) if isinstance(each, (Hidden, Copy)))
        raise RuntimeError(_FUNCTIONALIZED.format(name))
    if any(is_hidden_class(each) for each in tensors_of((args, kwargs))):
        return Hidden.__torch_function__(call, (Hidden,), args, kwargs)
    return call(*args, **kwargs)


# parameter.data = tensor. One of another shape or type is refused by the next forward, which names the parameter.
def _set_data(parameter: torch.Tensor, given: torch.Tensor) -> None:
    given = _copy_of(given) if is_hidden_class(given) else given
    with without_overrides():
        own = given.__dict__.get(_READ) if type(given) is Copy else None
        if given.shape == parameter.shape and given.layout == torch.strided:
            read: Read = parameter.__dict__[_VALUE_OF](parameter, False)
            if given.dtype == read.value.dtype:
                whole = given.data_ptr() == read.value.data_ptr() and given.stride() == read.value.stride()
                if own is not read or not whole:
                    read.give(given)
                return
        torch.Tensor.data.__set__(parameter, given)


# Of a parameter of such a class (peft's, bitsandbytes'), while it is hidden.
@functools.lru_cache(maxsize=None)
def _hidden_class(kind: type) -> type:
    return Hidden if kind is nn.Parameter else type(f"Hidden{kind.__name__}", (Hidden, kind), {})


def is_hidden_class(parameter: torch.Tensor) -> bool:
    """Whether what is computed with the parameter reads its value."""
    return issubclass(type(parameter), Hidden)


def own_class(parameter: nn.Parameter) -> type:
    """The parameter's class when it has its value."""
    return parameter.__dict__[_OWN_CLASS] if is_hidden_class(parameter) else type(parameter)  # type: ignore[no-any-return]


def hide_copies(parameter: nn.Parameter, name: str, value_of: ValueOf) -> None:
    """The parameter has no value of its own from here on. Those of classes that are not nn.Parameter's stay what they are."""
    kind = type(parameter)
    if issubclass(kind, nn.Parameter) and not issubclass(kind, Hidden):
        ask((Hidden, Copy), _call_unasked)
        parameter.__dict__.update({_VALUE_OF: value_of, _NAME: name, _OWN_CLASS: kind})
        parameter.__class__ = _hidden_class(kind)  # type: ignore[assignment,arg-type]


def show_copies(parameter: nn.Parameter) -> None:
    """What the parameter has is its value."""
    if is_hidden_class(parameter):
        parameter.__class__ = parameter.__dict__[_OWN_CLASS]
        for name in (_VALUE_OF, _NAME, _OWN_CLASS):
            del parameter.__dict__[name]
