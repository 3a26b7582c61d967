"""Entering and leaving the uses of blocks in the engine: its weights have arrived within, and are not read after it."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Iterator, List, Optional, Sequence, Tuple

import torch

from ._changing import Changing
from ._heap import Heap
from ._open_pass import Driver, OpenPass, PassFailed
from ._random import RandomState
from ._saved_inputs import Inputs, SavedInputs
from ._stages import Stages
from ._trace import CHANGED
from ._tree import map_tensors, tensors_of
from ._weights import Weights


class Entering:
    """The one way to a block's weights, in forward and in backward. Where micro-batches have threads, they change places here."""

    def __init__(
        self,
        core: Any,
        stages: Stages,
        weights: Weights,
        open_pass: OpenPass,
        changing: Changing,
        saved: SavedInputs,
        loss_factor: float,
        host_memory: int,
    ) -> None:
        """loss_factor: what the engine's share of a micro-batch in the loss is multiplied by. host_memory: the engine's budget in bytes; 0: no bound."""
        self._core = core
        self._blocks, self._uses, self._last = stages.blocks, stages.uses, stages.last
        self._weights = weights
        self._open = open_pass
        self._changing = changing
        self._saved = saved
        self._heap = Heap(host_memory)
        self._loss_factor = loss_factor
        #: Why the weights in memory are not the engine's any more; empty: they are.
        self.spoiled = ""

    def enter(self, driver: Driver, backward: bool, stage: int) -> int:
        """The block of this use, whose parameters have their values when this returns."""
        if self._open.trains is None:
            raise PassFailed("this pass is over: its forward was given up")
        self._heap.look()
        baton = self._open.baton
        if baton is not None:
            driver.random = RandomState.now()
            driver.attributes = self._changing.now()
            driver.came.set()
            baton.release()
        enter = functools.partial(self._core_enter, backward, stage, driver.number)
        try:
            weights, gradient = enter() if driver.together is None else driver.together.enter((backward, stage), enter)
        finally:
            if baton is not None:
                baton.acquire()
                driver.random.restore()  # type: ignore[union-attr]
                driver.attributes.restore()  # type: ignore[union-attr]
        if self._weights.streams is not None:
            self._weights.streams.entered((backward, stage, driver.number))
        if self._saved.move and driver.trains:
            self._saved.entered(backward, stage, driver.number)
        driver.loss_gradient = gradient * self._loss_factor
        for block, address in weights:
            self._weights.attach(block, address)
        return self._uses[stage].block

    def _core_enter(self, backward: bool, stage: int, number: int) -> Any:
        streams = self._weights.streams
        return self._core.enter(backward, stage, number) if streams is None else self._core.enter(backward, stage, number, streams.here())

    def leave(
        self,
        number: int,
        block: int,
        gradients: Optional[List[Tuple[int, int, str]]],
        loss: Optional[float],
        held: Sequence[torch.Tensor] = (),
        places: Sequence[Tuple[int, int]] = (),
    ) -> None:
        """The block, whose parameters are hidden again, is the engine's.

        number: of the micro-batch. held: the tensors that `gradients` lie in. places: address and bytes of what leaves memory until backward.
        """
        streams = self._weights.streams
        self._core.leave(number, block, gradients, loss, [] if streams is None else streams.left(held), list(places))

    def forget_inputs(self, stage: int, number: int) -> None:
        """This use of backward is about to be left: what it was given is not wanted any more."""
        self._saved.forget(stage, number)

    @contextlib.contextmanager
    def in_forward(self, driver: Driver, stage: int, inputs: Optional[Inputs] = None) -> Iterator[None]:
        """Within, this use of forward is entered; the uses before it are passed by. inputs: that its backward is computed from."""
        self.pass_by(driver, stage)
        block = self.enter(driver, False, stage)
        try:
            yield
            self.refuse_changes(block)
        finally:
            self._weights.hide(block)
        driver.forward_at = stage + 1
        if inputs is not None and self._saved.leaves(stage):
            self._saved.take(stage, driver.number, inputs)
        self._leave_forward(driver, stage, block)

    def _leave_forward(self, driver: Driver, stage: int, block: int) -> None:
        places = self._saved.places(stage, driver.number) if driver.trains else []
        if driver.together is None:
            self.leave(driver.number, block, None, None, places=places)
        elif driver.together.is_last():
            self.leave(driver.number, block, None, None, places=places)
            driver.together.leave()

    def pass_by(self, driver: Driver, stage: int) -> None:
        """Enters and leaves the uses of forward before `stage` that the pass did not come to."""
        while driver.forward_at < min(stage, len(self._uses) if not driver.trains else self._last):
            block = self.enter(driver, False, driver.forward_at)
            self._weights.hide(block)
            self._leave_forward(driver, driver.forward_at, block)
            driver.forward_at += 1

    def refuse_changes(self, block: int) -> None:
        """PassFailed: a parameter of the block was changed in place."""
        # What was changed in memory may be on its way to the drive just now: nothing of it is to be trusted any more.
        number = self._weights.changed(block)
        if number is not None:
            self.spoiled = CHANGED.format(self._blocks[block].parameters[number][0])
            raise PassFailed(self.spoiled)

    def apart(self, stage: int, out: Any) -> Any:
        """What this use gives, `out`, without the block's weights themselves, which would be other weights soon: copies in their place."""
        block = self._uses[stage].block
        if not any(self._weights.owned(block, tensor) for tensor in tensors_of(out)):
            return out
        return map_tensors(out, lambda tensor: tensor.clone() if self._weights.owned(block, tensor) else tensor)
