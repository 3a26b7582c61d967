"""Parameters as views of the engine's memory, or of its copy on a device, while it is theirs.

A parameter that is not in memory has its own shape and dtype, and takes four bytes, which are NaN: numel() and shape tell the truth.
What is computed with it reads its value, or is refused by name; so is a write.
"""

from __future__ import annotations

import ctypes
import enum
import functools
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import nn

from ._blocks import Block
from ._device import DeviceMemory, Streams, view_of
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
_without_overrides = getattr(torch._C, "DisableTorchFunctionSubclass", torch._C.DisableTorchFunction)


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
        with _without_overrides():
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
        with _without_overrides():
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
            with _without_overrides():
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


class Weights:
    """Attaches and hides the parameters of all blocks, in the engine's type."""

    def __init__(
        self,
        blocks: Sequence[Block],
        dtype: torch.dtype,
        places: Sequence[Sequence[int]],
        device: torch.device,
        value_of: ValueOf,
        arena: Tuple[int, int] = (0, 0),
        apart: bool = False,
        streams: Optional[Streams] = None,
    ) -> None:
        """places: where each parameter begins in its block's weights, in elements (zero/compute/flat_layout.h).

        value_of: the value of a parameter that is hidden, for who copies it. arena: address and bytes of the engine's memory. apart: blocks
        are copied to the device, which has memory of its own. streams: of the device in whose memory the engine has blocks; None: it has
        them in host memory.
        """
        #: Of the device that the engine's addresses are of; None: they are of host memory.
        self.streams = streams
        self._parameters = [[parameter for _, parameter in block.parameters] for block in blocks]
        self._names = {id(parameter): name for block in blocks for name, parameter in block.parameters}
        self._value_of = value_of
        self._resident = [block.resident for block in blocks]
        self._residents: Dict[int, torch.Tensor] = {}  # by block: the memory of its parameters, while a pass is open
        self._dtype = dtype
        self._width = torch.empty((), dtype=dtype).element_size()
        self._places = places
        self._hide_on(device)
        self._bytes = [
            max((place + parameter.numel() for place, parameter in zip(places_of, parameters)), default=0) * self._width
            for places_of, parameters in zip(places, self._parameters)
        ]
        self._spans: Dict[int, Tuple[int, int]] = {}
        self._views: Dict[Tuple[int, int], List[torch.Tensor]] = {}
        self._versions: Dict[int, List[int]] = {}  # of each block's parameters, when they got their values
        # Of one element: torch takes arithmetic in place for them, which leaves NaN as it is. Their versions, when they were hidden.
        self._single = [[parameter for parameter in block if parameter.numel() == 1] for block in self._parameters]
        self._single_versions: Dict[int, int] = {}
        #: None where the model is computed in the engine's memory. Last: from here on the arena is pinned until ``release``.
        moved = max((size for size, stays in zip(self._bytes, self._resident) if not stays), default=0)
        self.on_device = DeviceMemory(device, moved, arena) if apart else None

    def _hide_on(self, device: torch.device) -> None:
        self._device = device
        with torch.inference_mode(False):  # what is made in it could not be trained on later
            self._nan = torch.full((1,), float("nan"), dtype=self._dtype, device=device)
            self._hidden = [
                [self._nan.expand(parameter.shape) if parameter.dim() else self._nan[0] for parameter in block] for block in self._parameters
            ]

    def release(self) -> None:
        """The engine's memory is not read any more, and may go. The parameters stay as they are."""
        if self.on_device is not None:
            self.on_device.close()

    def close(self) -> None:
        """The engine's memory is not read any more. The parameters stay without values, in host memory."""
        if self.on_device is None and self.streams is None:
            return
        try:
            self.release()
        finally:
            self._views.clear()
            self._hide_on(torch.device("cpu"))
            self.hide_all()

    def attach(self, block: int, address: int) -> None:
        """The block's parameters are what lies at `address` of the engine's memory from here on."""
        memory: Optional[torch.Tensor] = None
        if self._resident[block]:
            if block in self._residents:
                return  # backward's: the values are those of forward
            memory = self._copied(block, address)
            address = memory.data_ptr()
        elif self.on_device is not None and self._bytes[block]:
            memory = self.on_device.bring(block, address, self._bytes[block])
            address = memory.data_ptr()
        self._spans[block] = (address, address + self._bytes[block])
        views = None if self._resident[block] else self._views.get((block, address))
        if views is None:
            with torch.inference_mode(False):
                if memory is None and self.streams is not None and self._bytes[block]:
                    memory = view_of(address, self._bytes[block], self._device)
                views = self._cut(block, address, memory)
            if not self._resident[block]:
                self._views[block, address] = views
        for parameter, view in zip(self._parameters[block], views):
            show_copies(parameter)
            parameter.data = view
        self._versions[block] = [parameter._version for parameter in self._parameters[block]]

    # The engine's memory at `address` is not read any more when this returns.
    def _copied(self, block: int, address: int) -> torch.Tensor:
        with torch.inference_mode(False):
            memory = self._residents[block] = torch.empty(self._bytes[block], dtype=torch.uint8, device=self._device)
            if self._bytes[block]:
                where = torch.device("cpu") if self.streams is None else self._device
                memory.copy_(view_of(address, self._bytes[block], where))
        return memory

    def changed(self, block: int) -> Optional[int]:
        """The first of the block's parameters, which have their values, that was changed in place since; None: none was."""
        for number, (parameter, version) in enumerate(zip(self._parameters[block], self._versions.get(block, ()))):
            if parameter._version != version:
                return number
        return None

    def owned(self, block: int, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies in the memory of the block's weights, which is the engine's again when the block is left."""
        span = self._spans.get(block)
        return span is not None and span[0] <= tensor.data_ptr() < span[1]

    def check_hidden(self, blocks: Sequence[Block]) -> None:
        """RuntimeError naming a parameter that was given a value where the engine does not see it."""
        with _without_overrides():  # a call of Python's for each attribute of each parameter would be felt
            self._check_hidden(blocks)

    def _check_hidden(self, blocks: Sequence[Block]) -> None:
        if not bool(torch.isnan(self._nan).all()):
            self._nan.fill_(float("nan"))
            raise RuntimeError("a parameter was written to outside of engine.gathered(write_back=True): the value is lost")
        place = self._nan.data_ptr()
        changed = {id(each) for block in self._single for each in block if each._version != self._single_versions.get(id(each), each._version)}
        self.note_hidden()
        for block in blocks:
            for name, parameter in block.parameters:
                if id(parameter) in changed:
                    raise RuntimeError(f"{name} was changed in place outside of engine.gathered(write_back=True): it has no value there, and keeps its own")
            for name, parameter in block.parameters:
                if parameter.device != self._device or (parameter.data_ptr() != place and parameter.numel()):
                    self.hide_all()
                    raise RuntimeError(
                        f"{name} was given a value outside of engine.gathered(write_back=True), or another type or device: the engine has "
                        "another, which the next forward goes on with"
                    )

    def computed(self) -> None:
        """Backward of the use that is entered was enqueued, or the current stream waits for it."""
        if self.on_device is not None:
            self.on_device.computed()
        elif self.streams is not None:
            self.streams.computed()

    def begin_pass(self) -> None:
        """The weights of a block may be others than in the pass before."""
        if self.on_device is not None:
            self.on_device.begin_pass()

    def hide(self, block: int) -> None:
        """The block's parameters have no values from here on, and its place in the engine's memory is not read any more.

        Resident ones keep theirs until ``end_pass``.
        """
        if self._resident[block]:
            return
        if self.on_device is not None:
            self.on_device.leave()
        self._hide(block)

    def end_pass(self) -> None:
        """Resident parameters have no values from here on."""
        for block in self._residents:
            self._hide(block)
        self._residents.clear()

    def _hide(self, block: int) -> None:
        for parameter, hidden in zip(self._parameters[block], self._hidden[block]):
            self._hide_one(parameter, hidden)
        self._note_hidden(block)

    def _hide_one(self, parameter: nn.Parameter, hidden: torch.Tensor) -> None:
        parameter.data = hidden
        hide_copies(parameter, self._names[id(parameter)], self._value_of)

    def is_hidden(self, parameter: nn.Parameter) -> bool:
        return parameter.data_ptr() == self._nan.data_ptr()

    def lend(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """The parameter has this value, until take_back."""
        show_copies(parameter)
        parameter.data = value

    def take_back(self, parameters: Sequence[nn.Parameter]) -> None:
        """They have no values again."""
        wanted = {id(parameter) for parameter in parameters}
        for block, hidden in zip(self._parameters, self._hidden):
            for parameter, nothing in zip(block, hidden):
                if id(parameter) in wanted:
                    self._hide_one(parameter, nothing)

    def note_hidden(self) -> None:
        """What was changed in place until now was no mistake, or was reported."""
        for block in range(len(self._single)):
            self._note_hidden(block)

    def _note_hidden(self, block: int) -> None:
        for parameter in self._single[block]:
            self._single_versions[id(parameter)] = parameter._version

    def hide_all(self) -> None:
        if self.on_device is not None:
            self.on_device.leave()
        for block in range(len(self._parameters)):
            self._hide(block)
        self._residents.clear()

    # memory: the block's weights on a device; None: they lie at `address` of the engine's.
    def _cut(self, block: int, address: int, memory: Optional[torch.Tensor]) -> List[torch.Tensor]:
        views = []
        for place, parameter in zip(self._places[block], self._parameters[block]):
            count, shape = parameter.numel(), parameter.shape
            if count == 0:
                views.append(torch.empty(shape, dtype=self._dtype, device=self._device))
                continue
            if memory is not None:
                views.append(memory[place * self._width : (place + count) * self._width].view(self._dtype).view(shape))
                continue
            here = (ctypes.c_char * (count * self._width)).from_address(address + place * self._width)
            views.append(torch.frombuffer(here, dtype=self._dtype, count=count).view(shape))
        return views
