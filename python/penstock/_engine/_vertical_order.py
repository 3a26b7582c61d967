"""Several micro-batches in one pass, block by block: each block is fetched once for all of them."""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import Any, Callable, List, Mapping, Optional, Sequence

import torch
from torch import nn

from ._accumulation import Forward
from ._attributes import Attributes
from ._autograd_settings import AutogradSettings
from ._backward_pass import BackwardPass
from ._block_buffers import Held, held_by, put_back
from ._changing import Changing
from ._interrupts import deferred
from ._model_forward import ModelForward
from .._lightning import unlogged
from ._open_pass import Driver, OpenPass, PassFailed, Root, Work
from ._passes import Passes
from ._random import RandomState
from ._stages import Stages


class ForwardsChange(Exception):
    """Several forwards that change attributes were computed side by side, where each may have seen those of another."""


def random_states(count: int) -> List[RandomState]:
    """Of as many micro-batches: each has random numbers of its own, whatever the others draw; the first has those of one alone."""
    begun = RandomState.now()
    seeds = torch.randint(2**62, (max(1, count - 1),)).tolist()
    begun.restore()
    return [begun, *(begun.seeded(seed) for seed in seeds)]


class VerticalOrder:
    """Computes the micro-batches of the pass that is open, each in a thread."""

    def __init__(
        self,
        core: Any,
        model: nn.Module,
        stages: Stages,
        open_pass: OpenPass,
        backward: BackwardPass,
        passes: Passes,
        forward: ModelForward,
        changing: Changing,
        device: torch.device,
        loss_factor: float,
    ) -> None:
        """loss_factor: as for Entering."""
        self._core = core
        self._model = model
        self._blocks = stages.blocks
        self._open = open_pass
        self._backward = backward
        self._passes = passes
        self._forward = forward
        self._changing = changing
        self._device = device
        self._loss_factor = loss_factor
        self._random_after: Optional[RandomState] = None  # of the first micro-batch, at its end

    def train_batch(self, batches: Sequence[Callable[[], torch.Tensor]]) -> List[float]:
        """Each of `batches` computes a loss with the model. The pass has begun. ForwardsChange: it was given up, and nothing has changed."""
        settings = AutogradSettings()
        states = random_states(len(self._open.drivers))
        before = self._changing.of_all() if len(batches) > 1 else Attributes([])
        buffers = held_by(self._model.modules()) if len(batches) > 1 else []

        def work(driver: Driver, batch: Callable[[], torch.Tensor]) -> Root:
            with settings.applied():
                return self._backward.root_of(driver, batch())

        self._run([functools.partial(work, batch=batch) for batch in batches], states, idle=0.0)
        losses = [float("nan") if driver.loss is None else float(driver.loss) / self._loss_factor for driver in self._open.drivers[: len(batches)]]
        changed = before.changed()
        if changed:
            self._changing.add(changed)
            self._passes.give_up("a forward changes attributes of modules")
            states[0].restore()
            put_back(buffers)
            before.restore()
            raise ForwardsChange
        self._random_after.restore()  # type: ignore[union-attr]
        return losses

    def repeat(self, forwards: Sequence[Forward], loss: float, more: Mapping[int, torch.Tensor]) -> None:
        """Computes these forwards again and goes on from the gradients at their outputs. The pass has begun.

        loss: of the step. more: by the parameter's id, gradients that are part of it beside those of the forwards.
        """
        now = RandomState.now()
        self._backward.more = dict(more)

        def again(driver: Driver, forward: Forward) -> Root:
            forward.check_inputs()
            driver.forward = forward
            with forward.settings.applied():
                tensors, gradients = forward.roots(self._forward.again(forward))
            return tensors, gradients, loss

        work: List[Work] = [functools.partial(again, forward=forward) for forward in forwards]
        outside, attributes = self._outside_buffers(), Attributes(self._changing.modules)
        for driver, forward in zip(self._open.drivers, forwards):
            driver.attributes = forward.attributes
        try:
            with self._forward.hooks_told(), self._forward.in_its_place(), unlogged():
                self._run(work, [forward.random for forward in forwards], idle=loss)
        finally:
            now.restore()
            attributes.restore()
            put_back(outside)

    # Buffers of no block, which each forward has changed once already.
    def _outside_buffers(self) -> List[Held]:
        inside = {id(part) for block in self._blocks for _, module in block.modules for part in module.modules()}
        return held_by(module for module in self._model.modules() if id(module) not in inside)

    def _run(self, work: Sequence[Work], states: Sequence[RandomState], idle: float) -> None:
        """A thread for each micro-batch, of which one runs at a time.

        They change places where they enter a use, so every block is fetched once for all of them. states: random numbers of each.
        idle: what stands for the loss of micro-batches that the pass has and `work` has not.
        """
        drivers = list(self._open.drivers)
        missing = len(drivers) - len(work)
        states = states or [RandomState.now()]  # a step without a forward, of losses of parameters
        work = [*work, *[lambda _: ([], [], idle)] * missing]
        for driver, state in zip(drivers, [*states, *list(states[:1]) * missing]):
            driver.random = state
            driver.attributes = self._changing.now() if driver.attributes is None else driver.attributes
        baton = threading.Lock()
        errors: List[BaseException] = []

        def end_waits() -> None:
            for driver in drivers:
                if driver.together is not None:
                    driver.together.end()

        here = contextlib.nullcontext if self._device.type == "cpu" else functools.partial(torch.cuda.stream, torch.cuda.current_stream(self._device))

        def run(before: Optional[Driver], driver: Driver, begin: Work) -> None:
            if before is not None:
                before.came.wait()
            with baton, here():  # a thread of its own would begin with the first device's default stream
                try:
                    driver.random.restore()  # type: ignore[union-attr]
                    driver.attributes.restore()  # type: ignore[union-attr]
                    self._open.here.driver, self._open.here.awaited = driver, True
                    self._backward.run(driver, begin(driver))
                except BaseException as error:  # noqa: B902
                    errors.append(error)
                    if len(errors) == 1:
                        self._core.fail(f"{type(error).__name__}: {error}")
                        end_waits()
                finally:
                    driver.came.set()  # who waits for it has the baton after this
                    driver.random = RandomState.now()

        self._open.baton = baton
        threads = [threading.Thread(target=run, args=of, daemon=True) for of in zip([None, *drivers], drivers, work)]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.1)  # in slices, so that Ctrl-C is seen
        except BaseException as error:
            with deferred():
                self._core.fail(f"{type(error).__name__}: {error}")
                end_waits()
                for thread in threads:
                    if thread.ident is not None:
                        thread.join()
                self._open.baton = None
            self._passes.give_up(f"{type(error).__name__}: {error}")
            raise
        self._open.baton = None
        self._random_after = drivers[0].random or states[0]
        if not errors:
            try:
                self._backward.refuse_late_gradients()
            except PassFailed as error:
                errors.append(error)
        if errors:
            self._passes.give_up(f"{type(errors[0]).__name__}: {errors[0]}")
            raise errors[0]
