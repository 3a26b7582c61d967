"""The forwards of blocks, patched: each enters its use in the engine, computes, and leaves it.

In training a block is computed under torch's checkpointing, which keeps its inputs: backward enters it once more and computes it again.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref
from typing import Any, Callable, Dict, Iterator, List, Sequence, Tuple

import torch
import torch.utils.checkpoint
from torch import nn

from ._accumulation import reached
from ._autograd_settings import AutogradSettings, computed
from ._backward_pass import BackwardPass
from ._before import Before
from ._block_buffers import BlockBuffers
from ._changing import Changing
from ._entering import Entering
from ._hidden import CALLED_ALONE, without_gradient
from ._interrupts import deferred, not_deferred
from ._open_pass import Driver, OpenPass, PassFailed
from ._passes import Passes
from ._saved_inputs import Inputs, SavedInputs
from ._stages import Stages
from ._tree import map_tensors, objects_of, tensors_of


class BlockForwards:
    """Makes these forwards, and fetches a block's parameters where a model's forward asks for them. Knows which buffers each use changes."""

    def __init__(
        self,
        model: nn.Module,
        stages: Stages,
        open_pass: OpenPass,
        entering: Entering,
        backward: BackwardPass,
        passes: Passes,
        changing: Changing,
        saved: SavedInputs,
        several_ranks: bool,
    ) -> None:
        self._model = model
        self._stages = stages
        self._blocks, self._uses, self._last, self._first_trained = stages.blocks, stages.uses, stages.last, stages.first_trained
        self._open, self._here = open_pass, open_pass.here
        self._entering = entering
        self._backward = backward
        self._passes = passes
        self._changing = changing
        self._saved = saved
        self._several_ranks = several_ranks
        self._volatile: Dict[int, List[Tuple[nn.Module, str]]] = {}  # by use: buffers that its forward changes
        self._told_of_lost_gradients = False

    def of(self, name: str, module: nn.Module) -> Callable[..., Any]:
        """What takes the place of the present forward of this module, which belongs to the block of this name."""
        original, key = module.forward, id(module)
        if getattr(module, "_compiled_call_impl", None) is not None:  # it would compile the engine's forward
            warnings.warn(
                f"{name} was compiled in place (Module.compile()), and the engine's forward takes the place of its own: it is computed as it is. "
                "torch.compile() of it, in its place, stays compiled",
                stacklevel=2,
            )
            module._compiled_call_impl = None

        def forward(*args: Any, **kwargs: Any) -> Any:
            driver = self._here.driver
            if driver is None:
                return self._by_itself(original, key, name, args, kwargs)
            if not driver.trains and driver.forward is None and self._stages.next(driver, key) is None:
                driver = self._passes.evaluate_on()
            stage = self._stages.of(driver, key, name)
            settings = AutogradSettings()
            if not driver.trains:
                with contextlib.ExitStack() as entered:
                    entered.enter_context(self._entering.in_forward(driver, stage))
                    with self._buffers_noted(driver, stage), torch.no_grad(), self._in_last(driver, stage):
                        out = self._entering.apart(stage, computed(original, settings, args, kwargs))
                    if driver.lazy and stage == self._last:  # the weights stay as long as the model's forward may ask for these logits
                        driver.held.push(entered.pop_all())
                return out
            if stage != self._last and (stage < self._first_trained or not torch.is_grad_enabled()):
                self._tell_of_lost_gradients(driver, stage, tensors_of((args, kwargs)))
                with self._entering.in_forward(driver, stage), self._buffers_noted(driver, stage), self._as_before(driver, stage), torch.no_grad():
                    out = self._entering.apart(stage, computed(original, settings, args, kwargs))
                driver.made.update((id(tensor), weakref.ref(tensor)) for tensor in tensors_of(out))
                return out
            if stage == self._last:
                self._backward.enter(driver, stage)
                with self._buffers_noted(driver, stage), self._as_before(driver, stage), self._computing(driver, stage), self._in_last(driver, stage):
                    out = self._entering.apart(stage, computed(original, settings, args, kwargs))
                return out
            return self._checkpointed(driver, stage, original, args, kwargs)

        return forward

    # Of a use that backward does not come to. What such uses give may be said to require a gradient, as transformers does for
    # checkpointing (enable_input_require_grads): nobody reads that one.
    def _tell_of_lost_gradients(self, driver: Driver, stage: int, given: Sequence[torch.Tensor]) -> None:
        if self._told_of_lost_gradients or not torch.is_grad_enabled():
            return
        if all(leaf is driver.made.get(id(leaf), lambda: None)() for leaf in _leaves_of(given)):
            return
        self._told_of_lost_gradients = True
        warnings.warn(
            f"{self._uses[stage].name} is given a tensor that requires a gradient, which the model's forward brings in: backward ends at "
            f"{self._uses[self._first_trained].name}, the first block that trains, and makes none of it. Where it is wanted, make it a parameter "
            "of the model, or give it to the model",
            stacklevel=4,
        )

    @contextlib.contextmanager
    def _computing(self, driver: Driver, stage: int) -> Iterator[None]:
        driver.at = stage
        try:
            yield
        finally:
            driver.at = None

    # Logits that are computed in it may be computed later, while its weights are here.
    @contextlib.contextmanager
    def _in_last(self, driver: Driver, stage: int) -> Iterator[None]:
        driver.in_last = stage == self._last
        try:
            yield
        finally:
            driver.in_last = False

    # A forward that will be computed again: its buffers as they are before it.
    @contextlib.contextmanager
    def _buffers_noted(self, driver: Driver, stage: int) -> Iterator[None]:
        forward = driver.remembers if driver.trains else driver.forward
        if forward is None:
            yield
            return
        buffers = forward.buffers[stage] = BlockBuffers(self._uses[stage].module, self._volatile.get(stage))
        yield
        self._volatile[stage] = buffers.keep_changed()

    # And as they were, when it is.
    def _as_before(self, driver: Driver, stage: int) -> Any:
        if driver.forward is None or stage not in driver.forward.buffers:
            return contextlib.nullcontext()
        return driver.forward.buffers[stage].as_in_forward()

    # A block that is called without the model (an encoder, in generate): an evaluation of its own.
    def _by_itself(self, original: Callable[..., Any], key: int, name: str, args: Any, kwargs: Any) -> Any:
        with self._passes.evaluation() as driver:
            stage = self._stages.of(driver, key, name)
            with self._entering.in_forward(driver, stage):
                out = self._entering.apart(stage, computed(original, AutogradSettings(), args, kwargs))
        wants_graph = self._stages.trains and torch.is_grad_enabled() and self._model.training
        return map_tensors(out, functools.partial(without_gradient, CALLED_ALONE.format(name))) if wants_graph else out

    def _checkpointed(self, driver: Driver, stage: int, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        inputs = Inputs(self._uses[stage].name, args, kwargs)
        passed = set(map(id, inputs.tensors))  # an input that is handed on belongs to the block that made it
        first = [True]
        settings = AutogradSettings()
        # Noted when the use is entered: until then other micro-batches change them.
        buffers: List[BlockBuffers] = []
        before: List[Before] = []
        compares = self._open.compares
        if driver.forward is not None and stage in driver.forward.buffers:
            buffers.append(driver.forward.buffers[stage])

        def forward() -> Any:
            with self._entering.in_forward(driver, stage, inputs), self._computing(driver, stage):
                a, kwargs = inputs.now()
                before.append(Before(self._uses[stage].module, None if compares else self._changing.modules, objects_of((a, kwargs))))
                if buffers:
                    with buffers[0].as_in_forward():
                        out = self._entering.apart(stage, computed(original, settings, a, kwargs))
                else:
                    buffers.append(BlockBuffers(self._uses[stage].module, self._volatile.get(stage)))
                    out = self._entering.apart(stage, computed(original, settings, a, kwargs))
                    self._volatile[stage] = buffers[0].keep_changed()
                    if driver.remembers is not None:
                        driver.remembers.buffers[stage] = buffers[0]
            if compares:
                before[0].gave(out)
                del a, kwargs
            self._changing.add(before[0].changed())
            inputs.check()
            return out

        # An error, or an interrupt, would leave torch's checkpoint (2.11's) in the middle, whose hooks then keep what later forwards
        # save: it comes to its end first.
        errors: List[BaseException] = []

        def compute(*_: Any) -> Any:
            if first[0]:
                first[0] = False
                try:
                    with not_deferred():
                        return forward()
                except BaseException as error:  # noqa: B902
                    errors.append(error)
                    return ()
            self._backward.enter(driver, stage)
            inputs.check()
            a, kwargs = inputs.now()
            with buffers[0].as_in_forward(), before[0].again():
                out = self._entering.apart(stage, computed(original, settings, a, kwargs))
            if compares and not before[0].same(out):
                raise PassFailed(
                    f"{self._uses[stage].name} gave something else when it was computed again for backward: it keeps something between calls, "
                    "something in it was switched between forward and backward, or it draws random numbers that are not torch's, Python's or numpy's"
                    + (", or a rank has made another call meanwhile (state_dict() alone), and its weights were not whole" if self._several_ranks else "")
                )
            return out

        with _to_its_end(compares), deferred():
            # What may leave memory is not given to torch, which would keep it.
            kept = () if self._saved.leaves(stage) else inputs.now()[0]
            out = torch.utils.checkpoint.checkpoint(compute, *kept, use_reentrant=False)
        if errors:
            raise errors.pop()
        for tensor in tensors_of(out):
            # A hook and no autograd.Function: what a Function returns may not be changed in place, and models do that.
            if tensor.requires_grad and id(tensor) not in passed:
                tensor.register_hook(lambda gradient: self._backward.gradient_at(driver, stage))
        return out

    @contextlib.contextmanager
    def fetched(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Within the model's forward these parameters, of one block, have their values, as if a module of the block were called.

        RuntimeError: they are of several blocks, the pass has been there, or backward would have to compute again what is made of them.
        """
        driver: Driver = self._here.driver  # type: ignore[assignment]
        wanted = {id(parameter) for parameter in parameters}
        blocks = [number for number, block in enumerate(self._blocks) if any(id(each) in wanted for _, each in block.parameters)]
        at = max(driver.forward_at, 0 if driver.inside is None else driver.inside)
        stage = next((number for number, use in enumerate(self._uses) if number >= at and [use.block] == blocks), None)
        if stage is not None and stage == self._last and driver.trains:
            self._backward.enter(driver, stage)  # and it stays, until backward of the block is over
            yield
        elif stage is not None and not (driver.trains and torch.is_grad_enabled()):
            with self._entering.in_forward(driver, stage):
                yield
        else:
            raise RuntimeError(
                "weights are gathered within a forward, and the first forward did not gather them (generate() comes first, say), so that they are "
                "fetched with their module: name the others as blocks=[...] (or \"penstock\": {\"blocks\": [...]}); parameters of no block are in "
                "memory for a whole pass"
            )


def _to_its_end(wanted: bool) -> Any:
    early_stop = getattr(torch.utils.checkpoint, "set_checkpoint_early_stop", None)  # since torch 2.1, which stops early
    return contextlib.nullcontext() if early_stop is None or not wanted else early_stop(False)


# Tensors without a history that gradients of these lead to.
def _leaves_of(tensors: Sequence[torch.Tensor]) -> List[torch.Tensor]:
    own = [tensor for tensor in tensors if tensor.requires_grad and tensor.grad_fn is None]
    return own + reached(tensors, {})[1]
