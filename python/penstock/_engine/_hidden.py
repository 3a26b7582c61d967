"""What a program has of parameters that are not in memory: ``Hidden`` in their place, and ``Copy`` of a value that was read."""

from __future__ import annotations

import enum
import functools
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

import torch
from torch import nn

from ._tree import map_tensors, tensors_of


class ZeroParamStatus(enum.Enum):
    """DeepSpeed's, of a parameter's ds_status."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


#: A hidden parameter's value, as its caller wants it: with a graph, or by itself. RuntimeError naming it: there is none just now.
ValueOf = Callable[[nn.Parameter, bool], torch.Tensor]

#: What is wrong with a weight, by its name, that is used where it has no values.
OUTSIDE = (
    "{} is used outside of the forward of its module, by the model or the loss: it has no values there, and no gradient would come to it. "
    "Give blocks=[...] with a module around all its uses; for decay there is weight_decay; between steps its value is read under "
    "torch.no_grad(), or by detach()"
)

# Of a hidden parameter: where its value is read, its name, and its class when it has its value.
_VALUE_OF, _NAME, _OWN_CLASS = "_penstock_value_of", "_penstock_name", "_penstock_class"
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
_READING = frozenset(getattr(torch.Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "real", "imag", "data"))
#: Within, no class of a tensor is asked.
without_overrides = getattr(torch._C, "DisableTorchFunctionSubclass", torch._C.DisableTorchFunction)


def _memory_of(tensor: torch.Tensor) -> int:
    storage = tensor.untyped_storage() if hasattr(tensor, "untyped_storage") else tensor.storage()
    return int(storage.data_ptr())


# RuntimeError where this call changes a tensor of `kind` in place.
def _refuse_change(kind: type, name: str, args: Tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    out = kwargs.get("out")
    changed = list(out) if isinstance(out, (list, tuple)) else [out]
    if name == "__setitem__" or name in _IN_PLACE or (name.endswith("_") and not name.endswith("__")):
        first = args[0] if args else next(iter(kwargs.values()), None)
        if name not in _KEEP_VALUES:
            changed += first if isinstance(first, (list, tuple)) else [first]
    if any(issubclass(type(each), kind) for each in changed):
        raise RuntimeError(
            f"a parameter that is not in memory is changed in place ({name}), which would be lost: within engine.gathered(write_back=True), or "
            "deepspeed.zero.GatheredParameters(..., modifier_rank=0), it is written"
        )


class Copy(torch.Tensor):
    """Of a parameter's value, where the program may take it for the parameter's memory. All that is made of it is an ordinary tensor."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Tuple[Any, ...] = (), kwargs: Optional[Dict[str, Any]] = None) -> Any:
        if any(issubclass(each, Hidden) for each in types):
            return NotImplemented  # whose values are read first
        kwargs = kwargs or {}
        _refuse_change(cls, getattr(func, "__name__", ""), args, kwargs)
        with without_overrides():
            result = func(*args, **kwargs)
            # A view of the copy is one more: a change in place would be lost as well.
            if type(result).__module__ == "numpy" and hasattr(result, "setflags"):
                result.setflags(write=False)
            if not isinstance(result, (torch.Tensor, list, tuple)) or any(result is each for each in args):
                return result
            memory = {_memory_of(each) for each in tensors_of((args, kwargs)) if type(each) is cls}
            if isinstance(result, torch.Tensor):
                return result.as_subclass(cls) if _memory_of(result) in memory else result
            views = [isinstance(each, torch.Tensor) and _memory_of(each) in memory for each in result]
            return type(result)(each.as_subclass(cls) for each in result) if views and all(views) else result

    def plain(self) -> torch.Tensor:
        with without_overrides():
            return self.as_subclass(torch.Tensor)

    # nn.Parameter(copy) and nn.Buffer(copy) say so: what a program makes of it there is its own, and an ordinary one.
    def _becomes(self, kind: type) -> None:
        self.__class__ = kind  # type: ignore[assignment]

    _is_param = property(lambda self: False, lambda self, _: self._becomes(nn.Parameter))
    _is_buffer = property(lambda self: False, lambda self, _: self._becomes(torch.Tensor))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Dict[int, Any]) -> torch.Tensor:
        return self.plain().clone()


class Hidden(nn.Parameter):
    """A parameter that is not in memory. What is computed with it is computed with its value, which is read for that, between steps.

    RuntimeError where it would be part of a graph (a gradient would not come to it), be changed, or is read within a step.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Tuple[Any, ...] = (), kwargs: Optional[Dict[str, Any]] = None) -> Any:
        kwargs = kwargs or {}
        if not cls._looks_at_values(func, args):
            with without_overrides():
                return func(*args, **kwargs)
        _refuse_change(Hidden, getattr(func, "__name__", ""), args, kwargs)
        if func in _DETACHED:
            return _value_of(args[0], False)
        in_graph: List[torch.Tensor] = []

        def value(tensor: torch.Tensor) -> torch.Tensor:
            if not is_hidden_class(tensor):
                return tensor
            wants_graph = torch.is_grad_enabled() and tensor.requires_grad
            if wants_graph:
                in_graph.append(tensor)
            return _value_of(tensor, wants_graph)

        args, kwargs = map_tensors((args, kwargs), value)
        if not in_graph:
            return func(*args, **kwargs)
        with torch.no_grad():
            result = func(*args, **kwargs)
        if any(each.is_floating_point() or each.is_complex() for each in tensors_of(result)):
            raise RuntimeError(OUTSIDE.format(in_graph[0].__dict__[_NAME]))
        return result

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


def _value_of(parameter: torch.Tensor, wants_graph: bool) -> torch.Tensor:
    return parameter.__dict__[_VALUE_OF](parameter, wants_graph).as_subclass(Copy)  # type: ignore[no-any-return]


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
        parameter.__dict__.update({_VALUE_OF: value_of, _NAME: name, _OWN_CLASS: kind})
        parameter.__class__ = _hidden_class(kind)  # type: ignore[assignment,arg-type]


def show_copies(parameter: nn.Parameter) -> None:
    """What the parameter has is its value."""
    if is_hidden_class(parameter):
        parameter.__class__ = parameter.__dict__[_OWN_CLASS]
        for name in (_VALUE_OF, _NAME, _OWN_CLASS):
            del parameter.__dict__[name]
