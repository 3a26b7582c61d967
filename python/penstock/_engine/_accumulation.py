"""Forwards whose backward the engine makes later, all in one pass: micro-batches that a script gives one by one.

A forward that comes alone would have every block fetched for it alone, twice, and its gradients kept until the others are there.
So it is only a forward: the outputs are leaves, and the caller's graph begins at them. Backward of the caller's losses leaves
gradients at these leaves. When the step is due, all of its forwards are computed again in one pass, which fetches each block once
for all of them, and backward goes on from the gradients that were left.

What a forward computes again is what it computed before: it has the same inputs, random numbers, autocast settings and buffers.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any, Dict, Iterator, List, Sequence, Tuple

import torch
from torch import nn

from ._random import RandomState
from ._tree import map_tensors, tensors_of

_ON_THE_LOSS = "backward was called on the loss itself: call engine.backward(loss), which scales it"
_FED_BACK = (
    "an output of one forward is an input of another one of the same step, and its gradient comes too late: detach it, or make one "
    "model of both"
)
_OVER = "the step that this forward was made for is over, and the weights are others: backward comes before step()"

_SAMPLE = 4096  # elements of an output that are compared when it is computed again
_COPIED = 1 << 18  # elements; larger outputs are views of the leaves, which cannot be changed in place


class Forward:
    """One forward, as it was called, and the gradients at its outputs that have come so far."""

    def __init__(self, model: nn.Module, args: Tuple[Any, ...], kwargs: Dict[str, Any], settings: Any) -> None:
        """settings: torch's of the calling thread (_runtime.AutogradSettings)."""
        # Containers of our own: the caller's may be filled with the next batch.
        self.args, self.kwargs = map_tensors((args, kwargs), lambda tensor: tensor)
        self._versions = [(tensor, tensor._version) for tensor in tensors_of((self.args, self.kwargs))]
        self.random = RandomState.now()
        self.settings = settings
        self.modes = [module.training for module in model.modules()]
        #: Why no gradient may come to it (any more); empty: it may.
        self.closed = ""
        #: By use: the buffers that it changes, as they were before it.
        self.buffers: Dict[int, Any] = {}
        self._leaves: List["weakref.ref[torch.Tensor]"] = []
        self._gradients: Dict[int, torch.Tensor] = {}
        self._samples: Dict[int, Tuple[torch.Size, torch.Tensor]] = {}

    def outputs(self, out: Any) -> Any:
        """What the caller gets for `out`: the same, with floating tensors that tell of their gradients."""
        return map_tensors(out, self._leaf)

    def _leaf(self, tensor: torch.Tensor) -> torch.Tensor:
        number = len(self._leaves)
        if not tensor.is_floating_point():
            self._leaves.append(weakref.ref(tensor))
            return tensor
        leaf = tensor.detach().requires_grad_()
        self._leaves.append(weakref.ref(leaf))
        shape, sample = leaf.shape, sample_of(leaf)
        leaf.register_hook(lambda gradient: self._collect(number, gradient, shape, sample))
        return leaf.clone() if leaf.numel() <= _COPIED else leaf.view_as(leaf)

    def _collect(self, number: int, gradient: torch.Tensor, shape: torch.Size, sample: torch.Tensor) -> None:
        if self.closed:
            raise RuntimeError(self.closed)
        known = self._gradients.get(number)
        self._gradients[number] = gradient.detach().clone() if known is None else known + gradient.detach()
        self._samples[number] = (shape, sample)

    @property
    def has_gradients(self) -> bool:
        return bool(self._gradients)

    @property
    def may_get_gradients(self) -> bool:
        """Whether anybody holds an output still."""
        return any(leaf() is not None for leaf in self._leaves)

    def forget_gradients(self) -> None:
        self._gradients.clear()
        self._samples.clear()

    def check_inputs(self) -> None:
        if any(tensor._version != version for tensor, version in self._versions):
            raise RuntimeError(
                "an input of a forward was changed in place before step(): the forwards of an accumulation are computed again there, and "
                "this one would be given the changed input. Give each forward tensors of its own"
            )

    def roots(self, again: Any) -> Tuple[List[torch.Tensor], List[torch.Tensor]]:
        """Where backward begins: the outputs of the repeated forward, and the gradients that were left at them.

        RuntimeError where they are not the outputs that they were.
        """
        found = tensors_of(again)
        tensors, gradients = [], []
        for number, gradient in self._gradients.items():
            shape, sample = self._samples[number]
            tensor = found[number] if number < len(found) else None
            if tensor is None or tensor.shape != shape or not alike(sample_of(tensor.detach()), sample):
                raise RuntimeError(
                    "the model's forward gave something else when it was computed again for backward: it keeps something between "
                    "calls, or draws random numbers that are not torch's, Python's or numpy's. Use engine.train_batch([...]), which "
                    "computes each forward once"
                )
            if tensor.requires_grad:
                tensors.append(tensor)
                gradients.append(gradient)
        return tensors, gradients


def sample_of(tensor: torch.Tensor) -> torch.Tensor:
    """Some of its elements, by which it is known again."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLE)].clone()


def alike(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two samples are of one tensor. The same arithmetic with a graph and without it may end in other last bits."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    if torch.equal(first, second):
        return True
    tolerance = 1e-4 if first.dtype == torch.float32 else 2e-2
    return torch.allclose(first.float(), second.float(), rtol=tolerance, atol=tolerance, equal_nan=True)


class Accumulation:
    """The forwards of the step that is being made."""

    def __init__(self, model: nn.Module, most: int) -> None:
        """most: forwards that a step's losses may come from."""
        self._model = model
        self._most = most
        self._scale = 1.0
        self._begin_with([])

    def add(self, forward: Forward, scale: float) -> None:
        """scale: of gradients, so that 16 bits hold them."""
        self._scale = scale
        if scale != 1.0:
            forward.closed = _ON_THE_LOSS
        self._forwards = [each for each in self._forwards if each.has_gradients or each.may_get_gradients]
        self._forwards.append(forward)

    def backward(self, loss: torch.Tensor, share: float, retain_graph: bool) -> None:
        """share: of this loss in the step's."""
        if loss.numel() != 1:
            raise ValueError(f"the loss has the shape {tuple(loss.shape)}: backward begins at one number")
        if not loss.requires_grad:
            raise RuntimeError("this loss depends on no output of a training forward: backward has nothing to begin with")
        scaled = [forward for forward in self._forwards if forward.closed == _ON_THE_LOSS]
        for forward in scaled:
            forward.closed = ""
        try:
            loss.backward(gradient=torch.full_like(loss, self._scale * share), retain_graph=retain_graph)
        finally:
            for forward in scaled:
                forward.closed = _ON_THE_LOSS
        self._loss += float(loss.detach()) * share
        self.backwards += 1
        self.check_count()

    def check_count(self) -> None:
        taking_part = len(self.forwards())
        if taking_part > self._most:
            raise RuntimeError(
                f"{taking_part} forwards take part in this step, and the engine was made for {self._most}: call step() earlier, or give "
                f"initialize forwards_per_step={taking_part} (or gradient_accumulation_steps)"
            )

    @property
    def loss(self) -> float:
        """Of the step; NaN where backward was called on losses themselves."""
        return self._loss if self.backwards else float("nan")

    def repeats(self) -> None:
        """Forwards are computed again: what comes to an output now came from the input of another one."""
        for forward in self._forwards:
            forward.closed = _FED_BACK

    @property
    def under_way(self) -> bool:
        """Whether a forward of the next step has come."""
        return bool(self._forwards)

    def forwards(self) -> List[Forward]:
        """Those that a backward has come to."""
        return [each for each in self._forwards if each.has_gradients]

    def drop_gradients(self) -> None:
        """As zero_grad: what backward left counts for nothing; a forward whose backward comes later stays."""
        for forward in self.forwards():
            forward.forget_gradients()
        self._begin_with([each for each in self._forwards if each.may_get_gradients])

    def end(self) -> None:
        """The step was made, and the weights are others: a forward that was left over has no backward any more."""
        for forward in self._forwards:
            forward.closed = _OVER
        self._begin_with([])

    def _begin_with(self, forwards: List[Forward]) -> None:
        self._forwards = forwards
        self.backwards = 0
        self._loss = 0.0

    @contextlib.contextmanager
    def modes_of(self, forwards: Sequence[Forward]) -> Iterator[None]:
        """The modules are in training or evaluation mode as they were in these forwards."""
        modules = list(self._model.modules())
        wanted = forwards[0].modes
        if any(forward.modes != wanted for forward in forwards) or len(modules) != len(wanted):
            raise RuntimeError("modules were switched between train() and eval() within the forwards of one step: that is not served")
        now = [module.training for module in modules]
        set_modes(modules, wanted)
        try:
            yield
        finally:
            set_modes(modules, now)


def set_modes(modules: Sequence[nn.Module], modes: Sequence[bool]) -> None:
    """Training or evaluation mode, of each."""
    for module, training in zip(modules, modes):
        module.training = training
