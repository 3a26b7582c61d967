"""Backward through the blocks: each use is entered when a gradient comes to it, and left with its gradients when the next one is."""

from __future__ import annotations

import warnings
import weakref
from typing import Any, Callable, Dict, List, Optional, Set, Tuple

import torch

from ._accumulation import CREATES_GRAPH
from ._device import in_this_thread
from ._entering import Entering
from ._late_loss import LateLoss
from ._open_pass import ENDED, Driver, OpenPass, PassFailed, Root
from ._settings import DTYPE_NAMES
from ._stages import Stages
from ._weights import OUTSIDE, Weights

#: Whether the backward that this is called in keeps its graph. None: this torch does not say.
_keeps_graph: Optional[Callable[[], bool]] = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)


class BackwardPass:
    """Where backward of each micro-batch is, and which weights have had a gradient."""

    def __init__(self, stages: Stages, weights: Weights, open_pass: OpenPass, entering: Entering, device: torch.device, loss_factor: float) -> None:
        """loss_factor: as for Entering."""
        self._blocks, self._uses, self._trained = stages.blocks, stages.uses, stages.trained
        self._last, self._first_trained = stages.last, stages.first_trained
        self._weights = weights
        self._open = open_pass
        self._entering = entering
        self._device = device
        self._loss_factor = loss_factor
        #: By the parameter's id: gradients that the pass has from elsewhere, each part of what its block is left with first.
        self.more: Dict[int, torch.Tensor] = {}
        self._came: Set[Tuple[int, int]] = set()  # in this pass a gradient: to which weight of which block
        self._had: Set[Tuple[int, int]] = set()  # the same of all passes
        #: Whether a weight without a gradient is updated by zeros, and that changes it (moments, weight decay).
        self.zeros_change = False
        self._hooks: List[Any] = []

    def begin(self) -> None:
        """A pass begins, in which no gradient has come."""
        self._came.clear()
        self.more = {}

    def root_of(self, driver: Driver, loss: torch.Tensor) -> Root:
        """Where backward of a micro-batch begins, and what is known of its loss."""
        if loss.numel() != 1:
            raise ValueError(f"the loss has the shape {tuple(loss.shape)}: backward begins at one number")
        value = LateLoss(loss, self._loss_factor)
        driver.loss = value
        if driver.inside is None and driver.backward_at == self._last:
            self._entering.pass_by(driver, self._last)
            self._enter_now(driver, self._last)
        return [loss], [torch.full_like(loss, driver.loss_gradient)], value

    def run(self, driver: Driver, root: Root, retain_graph: bool = False) -> None:
        """The whole backward of a micro-batch."""
        tensors, gradients, driver.loss = root
        if tensors:
            with in_this_thread(self._device):
                torch.autograd.backward(tensors, gradients, retain_graph)
            self._weights.computed()  # the last block may be left on another stream, in step()
        if retain_graph:
            self._weights.graph_stays()
        self.end(driver)

    def gradient_at(self, driver: Driver, stage: int) -> None:
        """A gradient has come to what this use gave."""
        if torch.is_grad_enabled():
            raise PassFailed(CREATES_GRAPH)
        if _keeps_graph is not None and _keeps_graph():
            self._weights.graph_stays()
        self.enter(driver, stage)

    def enter(self, driver: Driver, stage: int) -> None:
        """Backward is at this use from here on; those before it, of forward and of backward, are left."""
        if driver.inside == stage:
            return
        if driver not in self._open.drivers:
            raise PassFailed(ENDED)
        self._entering.pass_by(driver, self._last)
        self.leave(driver)
        while driver.backward_at > stage:
            self._enter_now(driver, driver.backward_at)
            self.leave(driver)
        if driver.backward_at != stage:
            raise PassFailed(f"backward of {self._uses[stage].name} was over: a second backward needs a second forward")
        self._enter_now(driver, stage)

    def _enter_now(self, driver: Driver, stage: int) -> None:
        self._entering.enter(driver, True, stage)
        driver.inside = stage

    def leave(self, driver: Driver) -> None:
        """The use that is entered, if one is, is left with its gradients."""
        stage = driver.inside
        if stage is None:
            return
        block = self._uses[stage].block
        self._entering.refuse_changes(block)
        if stage == self._last and driver.loss is None and driver.loss_gradient != 1.0:
            raise PassFailed("backward was called on the loss itself: call engine.backward(loss), which scales it")
        loss = None
        if stage == self._first_trained:
            loss = float("nan") if driver.loss is None else float(driver.loss)
        driver.inside = None
        driver.backward_at = stage - 1
        if driver.together is not None and not driver.together.is_last():
            self._weights.hide(block)
            return
        gradients: Optional[List[Tuple[int, int, str]]] = None
        held = []
        if any(self._trained[block]):
            numbers = []
            for number, (_, parameter) in enumerate(self._blocks[block].parameters):
                gradient = self._gradient_of(parameter) if self._trained[block][number] else None
                if gradient is not None:
                    numbers.append(number)
                    held.append(gradient)
            if self._weights.on_device is not None:
                held = self._weights.on_device.take(held)
            gradients = [(number, gradient.data_ptr(), DTYPE_NAMES[gradient.dtype]) for number, gradient in zip(numbers, held)]
            driver.gradient_came |= bool(gradients)
            self._came.update((block, number) for number in numbers)
        for _, parameter in self._blocks[block].parameters:
            parameter.grad = None
        self._weights.hide(block)
        self._entering.forget_inputs(stage, driver.number)
        self._entering.leave(driver.number, block, gradients, loss, held)
        if driver.together is not None:
            driver.together.leave()
        del held

    def _gradient_of(self, parameter: torch.Tensor) -> Optional[torch.Tensor]:
        own = None if parameter.grad is None else _dense(parameter.grad.detach()).contiguous()
        more = self.more.pop(id(parameter), None) if self.more else None
        if more is None:
            return own
        more = more.to(parameter.device, parameter.dtype).contiguous()
        return more if own is None else own + more

    def end(self, driver: Driver) -> None:
        """To the last use, which stays entered until the pass is finished; another micro-batch may have to follow it there."""
        self._entering.pass_by(driver, self._last)
        first = self._first_trained
        while driver.backward_at > first or (driver.backward_at == first and driver.inside is None):
            self.leave(driver)
            if driver.backward_at >= first:
                self._enter_now(driver, driver.backward_at)
        if driver is not self._open.drivers[-1]:
            self.leave(driver)
        if self._open.baton is None:
            self.refuse_late_gradients()

    def refuse_late_gradients(self) -> None:
        """PassFailed: a gradient is there that came after its block was left, since all but the last were; it would be lost."""
        inside = {self._uses[driver.inside].block for driver in self._open.drivers if driver.inside is not None}
        for number, block in enumerate(self._blocks):
            if number in inside or block.resident:
                continue
            for name, parameter in block.parameters:
                if parameter.grad is not None:
                    raise PassFailed(
                        f"the gradient of {name} came after its block's backward was over: the model uses it outside of the forward "
                        "of its module. Give blocks=[...] with a module around all its uses"
                    )

    def tell_of_missing_gradients(self) -> None:
        """The pass is over: warns, once, where a weight had a gradient in some passes and in others none."""
        missing = self._had ^ self._came if self._had else set()
        self._had |= self._came
        if missing and self.zeros_change:
            self.zeros_change = False  # told once
            block, number = min(missing)
            warnings.warn(
                f"{self._blocks[block].parameters[number][0]} has a gradient in some steps and none in others (a layer that is dropped at "
                "random, an expert without tokens): without one it is updated as by a gradient of zeros, as with DeepSpeed, where torch.optim "
                "leaves it as it is, and so does \"penstock\": {\"missing_gradients\": \"skip\"} in the configuration",
                stacklevel=4,
            )

    # --- gradients that come at another time

    def computes(self, block: int) -> bool:
        """Whether backward of this block is being computed, by this thread where it is known."""
        known = self._open.here.driver
        drivers = self._open.drivers if known is None else [known]
        return any(driver.inside is not None and self._uses[driver.inside].block == block for driver in drivers)

    def refuse_outside(self) -> None:
        """From here on a gradient that comes to a weight while its block is not computed is refused, until ``close``."""
        self._hooks = [
            parameter.register_hook(_refuses_outside(weakref.ref(self), number, name))
            for number, block in enumerate(self._blocks)
            for name, parameter in block.parameters
            if parameter.requires_grad and not block.resident
        ]

    @property
    def is_open(self) -> bool:
        """Whether there is a pass that gradients may be of."""
        return self._open.is_open

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


# Of nn.Embedding(sparse=True): an update by whole tiles takes the zeros too.
def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient if gradient.layout == torch.strided else gradient.to_dense()


# A gradient that comes to a weight while its block is not computed would be of a value that is none, and lost.
def _refuses_outside(backward: "weakref.ref[BackwardPass]", block: int, name: str) -> Callable[[torch.Tensor], None]:
    def hook(_: torch.Tensor) -> None:
        known = backward()
        if known is not None and not known.computes(block):
            raise PassFailed(OUTSIDE.format(name) if known.is_open else ENDED)

    return hook
