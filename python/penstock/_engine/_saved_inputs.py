"""What blocks were given, until backward computes them again: in torch's memory, or where the engine's plan has it wait meanwhile.

Of a use whose inputs leave, forward is left with their addresses. The engine writes them to the drive, or from a device to host memory, and says
when they have gone: from then on nothing here refers to them, and their memory is free unless the model refers to them itself. Before backward of the
use is entered they have come back, as tensors of the same type, sizes and strides. The bits are the same.

A tensor leaves where one use alone was given it in the first forward (a layer's hidden states). What several are given (masks, rotary positions), what the
model itself is given, parameters, and what is small or has gaps stays in torch's memory.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any, Dict, List, Mapping, Optional, Sequence, Set, Tuple

import torch

from ._device import cuda_of
from ._given_tensors import SMALL, GivenTensors, bytes_of, ends_are_told, is_dense, storage_of
from ._open_pass import PassFailed
from ._tree import map_leaves, tensors_of

_CHANGED = (
    "{} changes one of its inputs in place, or it was changed after it: backward computes the block again and would be given the changed input. "
    "Work on a copy"
)
_ALIGNMENT = 64  # of a tensor, in memory that several come back to together (zero/compute/driven_compute.cc)


class Inputs:
    """Of one use: what its forward was given, and its backward will be."""

    def __init__(self, name: str, args: Any, kwargs: Any) -> None:
        """name: of the use."""
        self._name = name
        # Containers of our own: theirs may grow later.
        self._given = map_leaves((args, kwargs), torch.Tensor, lambda tensor: tensor)
        #: Those that stay where they are.
        self.tensors = tensors_of(self._given)
        self._versions = [tensor._version for tensor in self.tensors]
        self._moved: List[Moved] = []

    def now(self) -> Tuple[Any, Any]:
        """(args, kwargs). Of a use whose inputs left: within its backward."""
        args, kwargs = map_leaves(self._given, Moved, lambda moved: moved.value())
        return args, kwargs

    def check(self) -> None:
        """PassFailed: one was changed in place."""
        if any(tensor._version != version for tensor, version in zip(self.tensors, self._versions)):
            raise PassFailed(_CHANGED.format(self._name))
        for moved in self._moved:
            moved.check()

    def moving(self, number: int) -> "Moved":
        """The tensor of this number, as one that leaves."""
        return Moved(self._name, self.tensors[number], self._versions[number])

    def leave(self, moved: Mapping[int, "Moved"]) -> None:
        """These, by the tensor's id, are referred to no more."""
        self._moved += moved.values()
        self._given = map_leaves(self._given, torch.Tensor, lambda tensor: moved.get(id(tensor), tensor))
        stay = [number for number, tensor in enumerate(self.tensors) if id(tensor) not in moved]
        self._versions = [self._versions[number] for number in stay]
        self.tensors = [self.tensors[number] for number in stay]


class Moved:
    """A tensor that leaves torch's memory and comes back."""

    def __init__(self, name: str, tensor: torch.Tensor, version: int) -> None:
        """version: that it had when forward of the use began."""
        self._name = name
        self._tensor: Optional[torch.Tensor] = tensor  # until it has left
        self._known = weakref.ref(tensor)
        # Since torch 2.1 a storage is one object of Python's as long as it lives: who has a view of it has its memory.
        self._memory = weakref.ref(storage_of(tensor)) if ends_are_told() else self._known
        self._version = version
        self._like = (tensor.dtype, tensor.size(), tensor.stride())
        self._requires_grad, self._is_leaf = tensor.requires_grad, tensor.is_leaf
        self.bytes = bytes_of(tensor)
        self._back: Optional[torch.Tensor] = None
        self._value: Optional[torch.Tensor] = None

    def place(self) -> Tuple[int, int]:
        """Address and bytes."""
        assert self._tensor is not None
        return self._tensor.data_ptr(), self.bytes

    def check(self) -> None:
        """PassFailed: it was changed in place. What has left, and nobody else has, cannot be."""
        tensor = self._known()
        if tensor is not None and tensor._version != self._version:
            raise PassFailed(_CHANGED.format(self._name))

    def left(self) -> None:
        """What was written is all that is wanted of it. PassFailed: it was changed meanwhile."""
        self.check()
        self._tensor = None

    @property
    def is_kept(self) -> bool:
        """Whether the model, or who called it, has it in memory all the same."""
        return self._tensor is None and self._memory() is not None

    def came_back(self, memory: torch.Tensor) -> None:
        """memory: its bytes."""
        self._back = memory

    def value(self) -> torch.Tensor:
        """The tensor. Within backward of its use."""
        if self._tensor is not None:
            return self._tensor
        if self._value is None:
            if self._back is None:
                raise PassFailed(f"the inputs of {self._name} have left memory, and its pass is over")
            dtype, size, stride = self._like
            made = self._back.view(dtype).as_strided(size, stride)
            if self._requires_grad:
                made = made.detach().requires_grad_()
                if not self._is_leaf:
                    with torch.enable_grad():
                        made = made.view_as(made)
            self._value = made
        return self._value

    def forget(self) -> None:
        self._tensor = self._back = self._value = None


class SavedInputs:
    """Those of the pass that is open, by use and micro-batch. Threads: one at a time, but ``room``."""

    def __init__(self, core: Any, planned: Mapping[str, Any], uses: Sequence[Any], device: torch.device, on_device: bool) -> None:
        """planned: of the engine (python/src/engine_options.cc). on_device: the engine's memory is that of the device."""
        self._core = core
        self._uses = uses
        self._device = device
        self._on_device = on_device
        self._moved: Dict[Tuple[int, int], List[Moved]] = {}
        self._seen = GivenTensors()  # by uses of the pass, whose inputs leave or not
        self._stream: Any = None
        self._rooms: Dict[Tuple[int, int], torch.Tensor] = {}
        self._left_bytes = self._kept_bytes = 0
        self._notes: Dict[str, str] = {}  # of what was not as planned, by kind
        self._told: Set[str] = set()
        self._most = [sum(use.inputs.bytes.values()) for use in uses]
        self.planned(planned)

    def planned(self, planned: Mapping[str, Any]) -> None:
        """What the engine has planned for the passes from here on."""
        self._leaves: List[bool] = list(planned["leaves"])
        self._room: Optional[int] = planned["room"]  # None: no bound
        #: Whether any use's inputs leave.
        self.move = any(self._leaves)
        if self.move and self._on_device:
            own = weakref.ref(self)  # the core would keep this, and this the core
            self._core.set_room(lambda stage, number, size: own().make_room(stage, number, size))  # type: ignore[union-attr]

    def leaves(self, stage: int) -> bool:
        """Whether the inputs of this use wait for backward elsewhere."""
        return self._leaves[stage]

    def begin(self, given: Any) -> None:
        """A micro-batch of a training pass begins. given: to the model."""
        if self.move:
            self._seen.outside(given)

    def take(self, stage: int, number: int, inputs: Inputs) -> None:
        """The use of forward is about to be left: what of its inputs leaves is referred to by the engine alone, from ``left`` on."""
        known = self._uses[stage].inputs
        moved: Dict[int, Moved] = {}
        already = sum(_aligned(each.bytes) for each in self._moved.get((stage, number), ()))
        for index, tensor in enumerate(inputs.tensors):
            if id(tensor) in moved or not self._may_leave(tensor):
                continue
            expected = len(inputs.tensors) != known.count or index in known.bytes
            if self._seen.is_known(tensor) or not expected:
                continue
            size = _aligned(bytes_of(tensor))
            if self._room is not None and already + size > self._room:
                self._note_long(stage, already + size)
                continue
            already += size
            moved[id(tensor)] = inputs.moving(index)
        self._seen.outside(inputs.tensors)
        if already > self._most[stage] and self._room is None:
            self._note_long(stage, already)
        if moved:
            self._moved.setdefault((stage, number), []).extend(moved.values())
            inputs.leave(moved)

    def _may_leave(self, tensor: torch.Tensor) -> bool:
        if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or tensor.device != self._device:
            return False
        return bytes_of(tensor) >= SMALL and is_dense(tensor) and not tensor.is_conj() and not tensor.is_neg() and not tensor.is_inference()

    def _note_long(self, stage: int, size: int) -> None:
        most = max(self._most)
        if size <= most:
            return
        more = f"what has no place beside {self._room} bytes stays in the memory of the device" if self._room is not None else (
            "those that stay in memory take as much more than host_memory was divided for"
        )
        self._notes["long"] = (
            f"saved activations: a micro-batch's inputs of {self._uses[stage].name} take {size} bytes, and the plan was made by the first forward's, {most}: "
            f"{more}. Where the first batch is the longest, the plan counts it"
        )
        self._most[stage] = size

    def check(self) -> None:
        """The model's forward is over. PassFailed: it changed in place what was given to a block, whose backward wants it as it was."""
        for uses in self._moved.values():
            for moved in uses:
                moved.check()

    def places(self, stage: int, number: int) -> List[Tuple[int, int]]:
        """Address and bytes of what leaves."""
        return [each.place() for each in self._moved.get((stage, number), ())]

    def entered(self, backward: bool, stage: int, number: int) -> None:
        """A use has been entered: what has left until now is not referred to any more; of one of backward the inputs are back."""
        if cuda_of(self._device) is not None:
            self._stream = cuda_of(self._device).current_stream(self._device)
        for use in self._core.dropped():
            for moved in self._moved.get(use, ()):
                moved.left()
                self._left_bytes += moved.bytes
        if not backward or not self._leaves[stage]:
            return
        memories = self._core.inputs(stage, number)
        here = self._moved.get((stage, number), [])
        if memories:
            for moved, memory in zip(here, memories):
                moved.came_back(torch.from_dlpack(memory))
        elif (stage, number) in self._rooms:
            at, room = 0, self._rooms.pop((stage, number))
            for moved in here:
                moved.came_back(room[at : at + moved.bytes])
                at += _aligned(moved.bytes)
        self._kept_bytes += sum(moved.bytes for moved in here if moved.is_kept)

    def make_room(self, stage: int, number: int, size: int) -> int:
        """Memory of the device that so many bytes come back to. On the engine's thread."""
        cuda = cuda_of(self._device)
        if cuda is None or self._stream is None:
            room = torch.empty(size, dtype=torch.uint8, device=self._device)
        else:
            with cuda.stream(self._stream):
                room = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._rooms[stage, number] = room
        return int(room.data_ptr())

    def forget(self, stage: int, number: int) -> None:
        """The use of backward is about to be left."""
        for moved in self._moved.pop((stage, number), ()):
            moved.forget()

    def give_up(self) -> None:
        """The pass has failed, and the engine looks at nothing of it any more."""
        for use in list(self._moved):
            self.forget(*use)
        self._rooms.clear()
        self._seen = GivenTensors()
        self._left_bytes = self._kept_bytes = 0

    def end(self) -> None:
        """Backward of the pass is over."""
        self._seen = GivenTensors()
        if self._kept_bytes > self._left_bytes // 2:
            self._notes["kept"] = (
                f"saved activations: {self._kept_bytes} of the {self._left_bytes} bytes that left memory for backward are held by the model's outputs as well "
                "(output_hidden_states=True, say), and take memory all the same: let the model return what the loss needs"
            )
        self._left_bytes = self._kept_bytes = 0

    def complain(self) -> None:
        """Warns, once of each kind, of what was not as planned."""
        notes, self._notes = self._notes, {}
        for kind, note in notes.items():
            if kind not in self._told:
                self._told.add(kind)
                warnings.warn(note, stacklevel=4)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
