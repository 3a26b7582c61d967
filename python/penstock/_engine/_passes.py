"""Passes over the model: how one begins, what an open one knows, and how it ends or is given up."""

from __future__ import annotations

import contextlib
import json
from typing import Any, Callable, Dict, Iterator, Optional, Sequence, Tuple

import torch
from torch import nn

from ._accumulation import Forward
from ._backward_pass import BackwardPass
from ._entering import Entering
from ._interrupts import deferred
from ._modules import Structure, switch_off_checkpointing
from ._open_pass import COMPARED, COMPARED_AGAIN, Driver, OpenPass, PassFailed, Together
from ._saved_inputs import SavedInputs
from ._stages import Stages
from ._tree import tensors_of
from ._weights import Weights


class Passes:
    """Opens and closes the ``OpenPass``, and the pass of the core with it."""

    # Set by the engine: called before a pass begins.
    before_pass: Callable[[], None]
    # Set by the engine: a pass is open, and another is to begin.
    on_interrupted: Callable[[], Any]
    # Set by the engine: what a step computes, from its tokens and samples on all ranks; 0 where that is not known.
    flops_of: Callable[[int, int], float]

    def __init__(
        self,
        core: Any,
        model: nn.Module,
        stages: Stages,
        weights: Weights,
        open_pass: OpenPass,
        entering: Entering,
        backward: BackwardPass,
        saved: SavedInputs,
    ) -> None:
        self._core = core
        self._saved = saved
        self._stages = stages
        self._blocks, self._uses, self._last = stages.blocks, stages.uses, stages.last
        self._weights = weights
        self._open = open_pass
        self._entering = entering
        self._backward = backward
        self._requires_grad = [[parameter.requires_grad for _, parameter in block.parameters] for block in stages.blocks]
        self._structure = Structure(model)
        #: Modules with transformers' switch for computing blocks again, which the engine does already.
        self.checkpointing = [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]
        #: Tokens and samples of the pass that was finished last, on all ranks.
        self.counts = (0, 0)
        self._trained = 0  # passes

    def begin(
        self, trains: bool, rates: Sequence[Any] = (), micro_batches: int = 1, reads_ahead: bool = True, forwards: int = 1
    ) -> None:
        """A pass begins. One that is open (a forward whose backward is to come, or never does) is given up, after on_interrupted.

        reads_ahead: for a training pass that follows this one. forwards: those above `micro_batches` are computed with the last one's.
        """
        if self._open.is_open:
            self.on_interrupted()
            self.give_up("another forward began before its backward was over")
        self.before_pass()
        other = self._structure.changed()
        if other is not None:
            raise RuntimeError(
                f"{other} is not what it was in the first forward, when the engine took the model's parameters: change a model (tie, replace, "
                "remove) before that, or make a new engine"
            )
        self._weights.check_hidden(self._blocks)
        if trains:
            self._check_requires_grad()
            for block in self._blocks:
                for _, parameter in block.parameters:
                    parameter.grad = None  # of a graph whose pass was given up
            switch_off_checkpointing(self.checkpointing)
        with deferred():
            if trains and self._core.plans_again_now:
                self._plan_again()
            if trains:
                self._core.begin(reads_ahead, list(rates))
            else:
                self._core.begin_evaluation()
            self._open.trains = trains
            self._weights.begin_pass()
            if trains:
                self._trained += 1
                self._backward.begin()
                self._open.compares = self._trained <= COMPARED or self._trained % COMPARED_AGAIN == 0
            self._open.drivers = [Driver(min(number, micro_batches - 1), len(self._uses), trains) for number in range(max(micro_batches, forwards))]
            if forwards > micro_batches:
                together = Together(1 + forwards - micro_batches)
                for driver in self._open.drivers[micro_batches - 1 :]:
                    driver.together = together
            self._open.here.driver = self._open.drivers[0]

    # The engine's memory goes, and comes back elsewhere: no parameter has a value, and no pass is open.
    def _plan_again(self) -> None:
        self._weights.memory_goes()
        self._core.plan_again()
        self._weights.memory_came(self._core.arena())
        self._saved.planned(json.loads(self._core.info())["saved_activations"])

    def check_trains(self) -> None:
        """RuntimeError where every forward is an evaluation."""
        if not self._stages.trains:
            raise RuntimeError(
                "this engine only evaluates: no parameter required a gradient in its first forward. Close it, call requires_grad_() on what is "
                "to be trained, and make another, with a state_dir of its own"
            )

    def _check_requires_grad(self) -> None:
        for block, flags in zip(self._blocks, self._requires_grad):
            for (name, parameter), flag in zip(block.parameters, flags):
                if parameter.requires_grad != flag:
                    raise RuntimeError(
                        f"requires_grad of {name} has changed since the first forward, when it was decided what has states. Set it "
                        "before penstock.initialize, and make a new engine for another choice"
                    )

    # --- what an open pass knows

    def are_here(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether these parameters have their values in the pass that is open: as long as it lasts, or as their own block is computed."""
        return self._open.is_open and not any(self._weights.is_hidden(parameter) for parameter in parameters)

    @property
    def backward_came(self) -> bool:
        """Whether any gradient has come to the pass that is open."""
        for driver in self._open.drivers:
            if driver.loss is not None or driver.backward_at != self._last:
                return True
            if any(parameter.grad is not None for _, parameter in self._blocks[self._uses[self._last].block].parameters):
                return True
        return False

    @property
    def gradient_came(self) -> bool:
        """Whether backward has left a gradient at any weight that trains, in the pass that is open."""
        inside = [self._uses[driver.inside].block for driver in self._open.drivers if driver.inside is not None]
        inside += [number for number, block in enumerate(self._blocks) if block.resident]
        return any(driver.gradient_came for driver in self._open.drivers) or any(
            parameter.grad is not None for block in inside for _, parameter in self._blocks[block].parameters
        )

    def take_forward(self, with_gradients: bool) -> Optional[Tuple[Forward, float]]:
        """Gives up the training pass that is open. Its forward, to be computed again, and the scale of gradients.

        None, and the pass is as it was, where it cannot be: with_gradients says whether those that have come are wanted.
        """
        driver = self._open.drivers[0] if self._open.trains else None
        forward = None if driver is None else driver.remembers
        if driver is None or forward is None or not forward.can_be_taken:
            return None
        came = self.gradient_came
        if came and not with_gradients:
            return None
        if not came:
            forward.forget_gradients()
        elif any(tensor.requires_grad for tensor in tensors_of((forward.args, forward.kwargs))):
            forward.detach_inputs()
        forward.outlive_weights()
        self.give_up("another forward began before its backward was over")
        return forward, driver.loss_gradient

    def open_ends(self) -> Dict[Any, Any]:
        """Of the forward whose pass is open: where the caller's graph leaves it, by node."""
        known = self.open_forward()
        return {} if known is None else {edge.node: edge for edge in known[0].ends.values()}

    def open_forward(self) -> Optional[Tuple[Forward, float]]:
        """That whose pass is open, and the scale of gradients; None: there is none, or it is computed with others."""
        driver = self._open.drivers[0] if self._open.drivers else None
        return None if driver is None or driver.remembers is None else (driver.remembers, driver.loss_gradient)

    # --- backward, and the end

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """Backward of the pass that is open, from the loss of its (only) micro-batch."""
        if not self._open.trains:
            raise RuntimeError(
                "no training forward is open: the loss is of no forward of the model in this step, of an evaluation, or of one that was given up"
            )
        driver = self._open.drivers[0]
        with self.given_up_on_error():
            self._backward.run(driver, self._backward.root_of(driver, loss), retain_graph)

    def finish(self) -> Dict[str, Any]:
        """The pass is over: what it has not come to is passed by. Returns the engine's result."""
        if not self._open.is_open:
            raise RuntimeError("no forward of a training step is open: call the engine on a batch first")
        for driver in self._open.drivers:
            if driver.trains:
                self._backward.end(driver)
            else:
                self._entering.pass_by(driver, len(self._uses))
        if self._open.trains and not self.gradient_came and self._stages.trains:
            raise PassFailed(
                "step() without a gradient: backward has come to no weight that trains. Gradients of torch.autograd.grad are the caller's "
                "alone: call engine.backward(loss)"
            )
        # The last use of a training pass is left here and not before: what was not finished is never applied.
        for driver in self._open.drivers:
            self._backward.leave(driver)
        self._end_residents()
        self._backward.tell_of_missing_gradients()
        self.counts = (sum(driver.counts[0] for driver in self._open.drivers), sum(driver.counts[1] for driver in self._open.drivers))
        self._open.end()
        result = self._core.finish(*self.counts, self.flops_of(*self.counts))
        self.counts = (result["tokens"], result["samples"])
        self._saved.end()
        return result

    def _end_residents(self) -> None:
        if self._stages.has_residents:
            self._entering.refuse_changes(self._uses[0].block)
            self._weights.end_pass()

    def give_up(self, why: str) -> Optional[BaseException]:
        """The pass that is open fails; the engine is as it was before it. Returns what the engine says of it."""
        if not self._open.is_open:
            return None
        with deferred():
            return self._give_up(why)

    # Returns what the engine says of it: its own error, where that came first.
    def _give_up(self, why: str) -> Optional[BaseException]:
        if self._open.trains:
            self._weights.graph_stays([self._uses[self._last].block])  # the one block that is computed with its graph at once
        self._open.end()
        self._core.fail(why)
        try:
            self._weights.hide_all()
        finally:  # also where the device has failed
            for block in self._blocks:
                for _, parameter in block.parameters:
                    parameter.grad = None
            try:
                self._core.finish()
                cause: Optional[BaseException] = None
            except (OSError, RuntimeError, ValueError, MemoryError) as error:
                cause = error  # the next pass says whether the engine can go on
            finally:
                self._saved.give_up()
        return cause

    @contextlib.contextmanager
    def given_up_on_error(self) -> Iterator[None]:
        """An exception within gives up the pass."""
        try:
            yield
        except BaseException as error:
            cause = self.give_up(f"{type(error).__name__}: {error}")
            # Where the engine had failed, a block may have seen weights that were not whole: that is the cause.
            if isinstance(error, PassFailed) and isinstance(cause, OSError):
                raise cause from error
            raise

    def evaluate_on(self) -> Driver:
        """The evaluation that is open goes on in another pass: it calls a block again, or in another order than the first forward."""
        self._open.drivers[0].end_held()
        self.finish()
        self.begin(trains=False)
        driver = self._open.drivers[0]
        driver.goes_on = True
        if self._stages.has_residents:
            self._entering.pass_by(driver, 1)
        return driver

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[Driver]:
        """A pass by itself, without gradients."""
        self.begin(trains=False)
        with self.given_up_on_error():
            with torch.no_grad():
                yield self._open.drivers[0]
            self.finish()
