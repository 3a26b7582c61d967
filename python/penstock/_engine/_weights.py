"""Parameters as views of the engine's memory, or of its copy on a device, while it is theirs.

A parameter that is not in memory has its own shape and dtype, and takes four bytes, which are NaN: numel() and shape tell the truth.
What is computed with it reads its value (``_hidden``).
"""

from __future__ import annotations

import ctypes
import warnings
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Set, Tuple

import torch
from torch import nn

from ._blocks import Block
from ._device import DeviceMemory, Streams, view_of
from ._hidden import OUTSIDE as OUTSIDE
from ._hidden import ValueOf, hide_copies, show_copies, without_overrides
from ._lazy_logits import is_lazy

#: Of a storage: how many tensors share it. None: this torch does not say.
_use_count: Optional[Callable[[int], int]] = getattr(torch._C, "_storage_Use_Count", None)

#: Address and bytes of the engine's memory, and an object while whose life it stays mapped.
Arena = Tuple[int, int, Any]


class _Views:
    """The weights of a block where they lie."""

    def __init__(self, views: List[torch.Tensor]) -> None:
        self.views = views
        #: Of each: its storage, and how many tensors share that while nobody else has it.
        self._alone: List[Tuple[int, int]] = []
        if _use_count is not None:
            storages = [view.untyped_storage()._cdata for view in views]
            self._alone = [(storage, _use_count(storage)) for storage in storages]

    def kept(self) -> Optional[int]:
        """The first of them whose memory another tensor shares, while no parameter has it; None: none, or this torch does not say."""
        if _use_count is None:
            return None
        return next((number for number, (storage, alone) in enumerate(self._alone) if _use_count(storage) > alone), None)


class Weights:
    """Attaches and hides the parameters of all blocks, in the engine's type."""

    def __init__(
        self,
        blocks: Sequence[Block],
        dtype: torch.dtype,
        places: Sequence[Sequence[int]],
        device: torch.device,
        value_of: ValueOf,
        arena: Arena = (0, 0, None),
        apart: bool = False,
        streams: Optional[Streams] = None,
    ) -> None:
        """places: where each parameter begins in its block's weights, in elements (zero/compute/flat_layout.h).

        value_of: the value of a parameter that is hidden, for who copies it. arena: of the engine's memory, which stays mapped while a tensor
        lies in it. apart: blocks are copied to the device, which has memory of its own. streams: of the device in whose memory the engine has blocks; None: it has
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
        self._views: Dict[Tuple[int, int], _Views] = {}
        self._arena = arena
        self._told_of_kept = False
        self._in_graphs: Set[int] = set()
        self._versions: Dict[int, List[int]] = {}  # of each block's parameters, when they got their values
        # Of one element: torch takes arithmetic in place for them, which leaves NaN as it is. Their versions, when they were hidden.
        self._single = [[parameter for parameter in block if parameter.numel() == 1] for block in self._parameters]
        self._single_versions: Dict[int, int] = {}
        #: None where the model is computed in the engine's memory. Last: from here on the arena is pinned until ``release``.
        moved = max((size for size, stays in zip(self._bytes, self._resident) if not stays), default=0)
        self.on_device = DeviceMemory(device, moved, arena[:2]) if apart else None

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
        self._arena = (0, 0, None)

    def close(self) -> None:
        """The engine's memory is not read any more. The parameters stay without values, in host memory."""
        try:
            self.release()
        finally:
            self._views.clear()
            if self.on_device is not None or self.streams is not None:
                self._hide_on(torch.device("cpu"))
                self.hide_all()

    def memory_goes(self) -> None:
        """The engine is about to give up its memory between two passes. ``memory_came`` follows."""
        if self.on_device is not None:
            self.on_device.unpin_arena()
        self._tell_of_kept()
        self._arena = (0, 0, None)
        self._views.clear()
        self._spans.clear()

    def memory_came(self, arena: Arena) -> None:
        """arena: of the engine's memory from here on."""
        self._arena = arena
        if self.on_device is not None:
            self.on_device.pin_arena(arena[:2])

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
        known = None if self._resident[block] else self._views.get((block, address))
        if known is None:
            with torch.inference_mode(False):
                if memory is None and self.streams is not None and self._bytes[block]:
                    memory = view_of(address, self._bytes[block], self._device)
                views = self._cut(block, address, memory)
            memory = None  # the views alone share it when they are counted
            if not self._resident[block]:
                self._views[block, address] = _Views(views)
        else:
            views = known.views
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
        return span is not None and not is_lazy(tensor) and span[0] <= tensor.data_ptr() < span[1]

    def check_hidden(self, blocks: Sequence[Block]) -> None:
        """RuntimeError naming a parameter that was given a value where the engine does not see it."""
        with without_overrides():  # a call of Python's for each attribute of each parameter would be felt
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
        """The weights of a block may be others than in the pass before. No parameter has its value."""
        self._tell_of_kept()
        if self.on_device is not None:
            self.on_device.begin_pass()

    def graph_stays(self, blocks: Optional[Iterable[int]] = None) -> None:
        """A graph of these blocks (None: of all) may outlive its pass, and what autograd saved in it shares their weights. No script reads that."""
        self._in_graphs.update(range(len(self._parameters)) if blocks is None else blocks)

    # Once: a script that keeps one tensor of a weight keeps others.
    def _tell_of_kept(self) -> None:
        if self._told_of_kept or self.on_device is not None:  # where all blocks share one storage
            return
        for (block, _), views in self._views.items():
            number = None if block in self._in_graphs else views.kept()
            if number is not None:
                self._told_of_kept = True
                name = self._names[id(self._parameters[block][number])]
                warnings.warn(
                    f"a tensor that shares memory with {name} was kept after its block was computed: the memory is the next block's from then on, "
                    "and so are the values. Keep a copy of its own: .detach().clone()",
                    stacklevel=3,
                )
                return

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
        show_copies(parameter)
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
            here.arena = self._arena[2]  # type: ignore[attr-defined]
            views.append(torch.frombuffer(here, dtype=self._dtype, count=count).view(shape))
        return views
