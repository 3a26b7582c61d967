"""What torch's tensors take in a step, found out in the first forward: the engine's memory on a device is what they leave of it."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from typing import Any, ContextManager, Dict, Iterator, List, Optional, Sequence, Set, Tuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ._device import in_this_thread
from ._given_tensors import bytes_alone
from ._given_tensors import ends_are_told as _ends_are_told
from ._given_tensors import storage_of as _storage
from ._lazy_logits import is_lazy
from ._tree import map_tensors, tensors_of


class Live(TorchDispatchMode):
    """Counts the bytes of tensors that operations within make, as long as they live; on any device."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        #: The most at one time. Where torch does not tell when memory goes: of all that was made.
        self.peak = 0
        self._known: Set[int] = set()
        self._told = _ends_are_told()
        #: What is made is not counted.
        self.is_paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Tuple[Any, ...] = (), kwargs: Optional[Dict[str, Any]] = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.is_paused:
            given = {_storage(each)._cdata for each in tensors_of((args, kwargs or {}))}
            for tensor in tensors_of(result):
                storage = _storage(tensor)
                if storage._cdata not in given and storage._cdata not in self._known:  # no view
                    self._begin(storage)
        return result

    def _begin(self, storage: Any) -> None:
        size, key = int(storage.nbytes()), int(storage._cdata)
        self.bytes += size
        self.peak = max(self.peak, self.bytes)
        if self._told:
            self._known.add(key)
            weakref.finalize(storage, self._end, key, size)

    def _end(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.bytes -= size

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What is made within is not counted."""
        was, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = was


class StepTensors:
    """Of the forward that is traced: what a step's tensors take at the most.

    Of each kind of block (its class, its parameters' shapes, and what it is given) forward and backward are computed once, with the memory of
    their tensors counted: what backward computes at one time. What blocks are given is kept from forward to backward. What is computed outside
    of blocks, a loss of logits for one, is counted as it is computed, and doubled for its backward.
    """

    def __init__(self, device: torch.device, is_exact: bool = False) -> None:
        """is_exact: what blocks make is not counted once more where what is outside of them is: what is reserved goes by more."""
        self._device = device
        self._is_exact = is_exact
        self._kinds: Dict[Any, int] = {}  # bytes of backward of one
        self._given = 0  # bytes of what blocks were given
        self._seen: Set[int] = set()  # of it, what is alive
        self._told = _ends_are_told()
        self._outside = Live()
        #: Blocks whose backward could not be computed by itself, with why.
        self.notes: List[str] = []

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Within, the model's forward is computed."""
        before, self._given = self._given, 0
        peak, self._outside = self._outside.peak, Live()
        self._seen = set()
        try:
            with self._outside:
                yield
        finally:  # of several forwards, in other modes, and of one that failed
            self._given = max(before, self._given)
            self._outside.peak = max(peak, self._outside.peak)

    def inside(self, computes: bool) -> None:
        """A block begins to compute, or has. What it makes is no part of what is computed outside, where that is to be exact."""
        if self._is_exact:
            self._outside.is_paused = computes

    def block(self, name: str, module: nn.Module, args: Sequence[Any], kwargs: Dict[str, Any]) -> None:
        """The block's module has computed this; its weights are where it computes. It is computed once more, with its backward."""
        tensors = tensors_of((args, kwargs))
        for each in tensors:
            self._note_given(_storage(each))
        kind = (
            type(module),
            tuple((tuple(each.shape), each.requires_grad) for each in module.parameters()),
            tuple((tuple(each.shape), each.dtype) for each in tensors),
        )
        if kind in self._kinds:
            return
        with self._outside.paused():  # after `inside`, too
            live = Live()
            try:
                with torch.enable_grad(), in_this_thread(self._device), live:
                    _forward_and_backward(module, args, kwargs)
                self._kinds[kind] = live.peak
            except Exception as error:  # noqa: B902 - whatever a module's own code raises
                self._kinds[kind] = 3 * live.peak
                self.notes.append(
                    f"memory of backward of {name} is taken to be three times that of its forward: computed by itself it raises {type(error).__name__}: {error}"
                )

    def paused(self) -> ContextManager[None]:
        """What is made within is not counted: weights, which are the engine's."""
        return self._outside.paused()

    def _note_given(self, storage: Any) -> None:
        key = int(storage._cdata)
        if key in self._seen:
            return
        self._given += int(storage.nbytes())
        if self._told:
            self._seen.add(key)
            weakref.finalize(storage, self._seen.discard, key)

    def bytes(self, forwards: int, uses: Sequence[Any] = ()) -> int:
        """Of a step whose `forwards` forwards are under way at once, but for what single uses are given, which may leave meanwhile."""
        return forwards * max(0, self._given - bytes_alone(uses)) + max(self._kinds.values(), default=0) + 2 * self._outside.peak


def _forward_and_backward(module: nn.Module, args: Sequence[Any], kwargs: Dict[str, Any]) -> None:
    def leaf(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().requires_grad_(tensor.is_floating_point())

    args, kwargs = map_tensors((tuple(args), dict(kwargs)), leaf)
    given = [each for each in tensors_of(module.forward(*args, **kwargs)) if each.requires_grad]
    outputs = [each.logsumexp(-1) if is_lazy(each) else each for each in given]  # a loss of them
    del given
    wanted: List[torch.Tensor] = [each for each in module.parameters() if each.requires_grad]
    wanted += [each for each in tensors_of((args, kwargs)) if each.requires_grad]
    if outputs and wanted:
        torch.autograd.grad(outputs, wanted, [torch.ones_like(each) for each in outputs], allow_unused=True)


def with_kwargs_hook(module: nn.Module, hook: Any) -> Any:
    """A forward hook that is given keyword arguments too, where this torch has them (2.0 and newer)."""
    if "with_kwargs" in inspect.signature(nn.Module.register_forward_hook).parameters:
        return module.register_forward_hook(hook, with_kwargs=True)
    return module.register_forward_hook(lambda called, args, returned: hook(called, args, {}, returned))
