"""Drives the engine from a model's own forward and backward.

Every block's module gets a forward that enters the block's use in the engine (its weights have arrived then), computes, and
leaves it. In training each block is computed under torch's checkpointing: forward keeps the block's inputs, and backward enters
the block once more and computes it again. Rules that this rests on:

- Backward of a block begins when a gradient reaches its outputs (a hook on them), or when its first saved tensor is asked for.
- autograd runs what it can of a block before it goes on to the one before it, so a block is left when the next is entered.
- The last use is entered once, as backward: it is computed with its graph, and nothing is computed again.
- Uses that a pass does not come to are entered and left without computing.
- Backward ends at the first use whose block trains, unless what goes into the model wants a gradient. What comes before it is computed
  without a graph.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import torch
import torch.utils.checkpoint
from torch import nn

from ._accumulation import Forward
from ._attributes import Attributes
from ._autograd_settings import AutogradSettings
from ._backward_pass import BackwardPass
from ._block_buffers import Held, held_by, put_back
from ._block_forwards import BlockForwards
from ._blocks import Block
from ._changing import Changing
from ._entering import Entering
from ._interrupts import deferred
from ._modules import replace_forward, restore_forward, switch_off_checkpointing, without_cache
from ._open_pass import Driver, ForwardsChange, OpenPass, PassFailed, Root, Work
from ._passes import Passes
from ._random import RandomState
from ._settings import DTYPES, Settings
from ._stages import Stages
from ._trace import Use
from ._tree import counted, map_tensors, tensors_of
from ._weights import Weights


class Runtime:
    """The model's modules, patched, and the pass that is open."""

    def __init__(
        self,
        core: Any,
        model: nn.Module,
        blocks: Sequence[Block],
        uses: Sequence[Use],
        weights: Weights,
        trains: Sequence[Sequence[bool]],
        input_gradients: bool,
        changing: Sequence[nn.Module],
        settings: Settings,
        world: int,
    ) -> None:
        """trains: of each parameter of each block, whether it is updated. input_gradients: what goes into the model may ask for them.

        changing: modules whose attributes a forward changes. world: ranks.
        """
        self._core = core
        self._model = model
        self._stages = Stages(blocks, uses, trains, input_gradients)
        self._changing = Changing(model, changing)
        self._weights = weights
        self._open = OpenPass()
        self._here = self._open.here
        self._loss_factor = settings.forwards / settings.micro_batches
        self._entering = Entering(core, self._stages, weights, self._open, self._changing, self._loss_factor, settings.host_memory)
        #: Modules whose forward is another, and the forward of their own instance before.
        self.replaced: List[Tuple[nn.Module, Optional[Callable[..., Any]]]] = []
        self._dtype, self._device = DTYPES[settings.dtype], settings.device
        self._backward = BackwardPass(self._stages, weights, self._open, self._entering, self._device, self._loss_factor)
        self._passes = passes = Passes(core, model, self._stages, weights, self._open, self._entering, self._backward)
        self.begin, self.finish, self.give_up, self.backward = passes.begin, passes.finish, passes.give_up, passes.backward
        self.check_trains, self.are_here, self.take_forward = passes.check_trains, passes.are_here, passes.take_forward
        self._random_after: Optional[RandomState] = None  # of the first micro-batch, at its end
        forwards = BlockForwards(model, self._stages, self._open, self._entering, self._backward, passes, self._changing, world > 1)
        self.fetched = forwards.fetched
        for block in blocks:
            for name, module in block.modules:
                self._replace(module, forwards.of(name, module))
        modules = {id(module) for block in blocks for _, module in block.modules}
        for part in model.modules():
            if part is not model and any(id(each) in modules for each in part.modules()) and id(part) not in modules:
                self._replace(part, self._part_forward(part.forward))
        self._original = model.forward
        self._replace(model, self._model_forward)
        self._backward.refuse_outside()

    def _replace(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self.replaced.append((module, replace_forward(module, forward)))

    def values_were_here(self) -> None:
        """Parameters had their values for a while (engine.gathered), and may have been changed in place then."""
        self._weights.note_hidden()

    def connect(
        self,
        before_pass: Callable[[], None],
        on_interrupted: Callable[[], Any],
        on_training_forward: Callable[[Tuple[Any, ...], Dict[str, Any]], Any],
        flops_of: Callable[[int, int], float],
        zeros_change: bool,
    ) -> None:
        """The engine's part, before the first pass.

        before_pass: called before a pass begins. on_interrupted: a pass is open, and another is to begin. on_training_forward: begins the
        pass, then calls train_forward. flops_of: what a step computes, from tokens and samples on all ranks; 0 where that is not known.
        zeros_change: whether an update by zeros changes a weight (moments, weight decay).
        """
        self._passes.before_pass, self._passes.on_interrupted, self._passes.flops_of = before_pass, on_interrupted, flops_of
        self.on_training_forward = on_training_forward
        self._backward.zeros_change = zeros_change

    @property
    def backward_came(self) -> bool:
        """Whether any gradient has come to the pass that is open."""
        return self._passes.backward_came

    @property
    def gradient_came(self) -> bool:
        """Whether backward has left a gradient at any weight that trains, in the pass that is open."""
        return self._passes.gradient_came

    @property
    def counts(self) -> Tuple[int, int]:
        """Tokens and samples of the pass that was finished last, on all ranks."""
        return self._passes.counts

    @property
    def spoiled(self) -> str:
        """Why the weights in memory are not the engine's any more; empty: they are."""
        return self._entering.spoiled

    @property
    def trains(self) -> bool:
        """Whether any parameter is updated; otherwise every forward is an evaluation."""
        return self._stages.trains

    @property
    def first_trained(self) -> int:
        """The use where backward ends."""
        return self._stages.first_trained

    @property
    def changing(self) -> List[nn.Module]:
        """Modules whose attributes a forward changes."""
        return self._changing.modules

    @property
    def changed_last(self) -> List[nn.Module]:
        """The same, of the last forward of ``forward_of_accumulation``."""
        return self._changing.last

    def settle_changing(self, changed: Sequence[nn.Module]) -> None:
        self._changing.settle(changed)

    # --- passes

    @property
    def is_open(self) -> bool:
        return self._open.is_open

    @property
    def is_inside(self) -> bool:
        """Whether this thread is in the model's forward."""
        return self._here.inside_model

    # --- the model's forward

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        driver = self._here.driver
        if driver is not None and self._here.inside_model:
            return self._original(*args, **kwargs)  # the model calls itself
        if driver is not None and driver.trains and driver.forward_at == 0 and self._here.awaited:
            self._here.awaited = False
            self._refuse_lost_gradients(args, kwargs)
            driver.counts = counted(args, kwargs)
            return self._inside(args, without_cache(self._original, kwargs))
        if torch.is_grad_enabled() and (self._model.training or self._stages.trains):
            self._refuse_lost_gradients(args, kwargs)
            if self._stages.trains:
                return self.on_training_forward(args, kwargs)
        return self.evaluate(args, kwargs)

    def _refuse_lost_gradients(self, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> None:
        goes_all_the_way = self._stages.trains and self._stages.first_trained == 0
        if goes_all_the_way or not any(tensor.requires_grad for tensor in tensors_of((args, kwargs))):
            return
        if not self._stages.trains:
            raise PassFailed(
                "what goes into the model requires a gradient, and an engine of which nothing trains makes none: give it to the model as a "
                "parameter, or detach it"
            )
        raise PassFailed(
            f"what goes into the model requires a gradient, and backward ends at {self._stages.uses[self._stages.first_trained].name}, the first block "
            "that trains, since nothing that went into the first forward required one. Detach it, or make a new engine whose first "
            "forward has it so"
        )

    # Set by the engine: begins the pass, then calls train_forward.
    on_training_forward: Callable[[Tuple[Any, ...], Dict[str, Any]], Any]

    def train_forward(self, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
        """The model's forward of the training pass that has begun."""
        driver = self._open.drivers[0]
        driver.counts = counted(args, kwargs)
        with self._passes.given_up_on_error():
            driver.remembers = self._forward_of(args, kwargs)
            out = self._inside(args, without_cache(self._original, kwargs))
            self._changing.note(driver.remembers)
            return driver.remembers.ended(out)

    def evaluate(self, args: Tuple[Any, ...], kwargs: Dict[str, Any], part: Optional[Callable[..., Any]] = None) -> Any:
        """A forward by itself, without gradients. part: instead of the model's."""
        with self._passes.evaluation():
            return self._inside(args, kwargs, part)

    # Of a module that has blocks below it and is called without the model: an encoder, or what peft's model generates with.
    def _part_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            trains = self._stages.trains and torch.is_grad_enabled() and self._model.training
            if trains or self._here.inside_model:
                return original(*args, **kwargs)
            return self.evaluate(args, kwargs, original)

        return forward

    def forward_of_accumulation(self, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Tuple[Forward, Any, float]:
        """A training forward whose backward is made by ``repeat``: (it, its outputs, the scale of gradients)."""
        forward = self._forward_of(args, without_cache(self._original, kwargs) if self._model.training else kwargs)
        switch_off_checkpointing(self._passes.checkpointing)
        with self._passes.evaluation() as driver, self._hooks_told():
            driver.forward = forward
            out = self._inside(forward.args, forward.kwargs)
            self._changing.last = self._changing.note(forward)
            outputs = forward.outputs(out)
            forward.keep_attributes()
        return forward, outputs, driver.loss_gradient

    def _forward_of(self, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Forward:
        return Forward(self._model, args, kwargs, AutogradSettings(), self._changing.of_all())

    # Within, a forward that is computed again knows what hooks of modules are given: a loss may be made of it.
    @contextlib.contextmanager
    def _hooks_told(self) -> Iterator[None]:
        handles = []
        for module in self._model.modules():
            if module is not self._model and (module._forward_hooks or module._forward_pre_hooks):
                handles.append(module.register_forward_pre_hook(lambda called, args: self._told("input", called, args)))
                module._forward_pre_hooks.move_to_end(handles[-1].id, last=False)
                handles.append(module.register_forward_hook(lambda called, _, out: self._told("result", called, out)))
                module._forward_hooks.move_to_end(handles[-1].id, last=False)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _told(self, what: str, module: nn.Module, value: Any) -> Any:
        driver = self._here.driver
        if driver is None or driver.forward is None or not self._here.inside_model:
            return value
        call = driver.hooked.get((what, id(module)), 0)
        driver.hooked[what, id(module)] = call + 1
        if not driver.trains:
            return driver.forward.told(value, (what, id(module), call))
        for number, tensor in enumerate(tensors_of(value)):
            key = (what, id(module), call, number)
            if driver.forward.wants(key):
                driver.forward.found[key] = tensor
                if tensor.requires_grad and driver.at is not None:
                    tensor.register_hook(lambda _, stage=driver.at: self._backward.enter(driver, stage))
        return value

    def _inside(self, args: Tuple[Any, ...], kwargs: Dict[str, Any], part: Optional[Callable[..., Any]] = None) -> Any:
        if self._stages.has_residents:
            self._entering.pass_by(self._here.driver, 1)  # type: ignore[arg-type]
        self._here.inside_model = True
        if self._dtype != torch.float32 or self._device.type != "cpu":
            args, kwargs = map_tensors((args, kwargs), self._taken_in)
        try:
            out = (part or self._original)(*args, **kwargs)
        finally:
            self._here.inside_model = False
        return self._entering.apart(0, out) if self._stages.has_residents else out

    # As DeepSpeed does with 16-bit weights: what comes in is of their type, and where they are.
    def _taken_in(self, tensor: torch.Tensor) -> torch.Tensor:
        cast = tensor.is_floating_point() and self._dtype != torch.float32
        return tensor.to(self._device, self._dtype if cast else tensor.dtype)

    # --- several micro-batches, block by block

    def random_states(self, count: int) -> List[RandomState]:
        """Of as many micro-batches: each has random numbers of its own, whatever the others draw; the first has those of one alone."""
        begun = RandomState.now()
        seeds = torch.randint(2**62, (max(1, count - 1),)).tolist()
        begun.restore()
        return [begun, *(begun.seeded(seed) for seed in seeds)]

    def train_batch(self, batches: Sequence[Callable[[], torch.Tensor]]) -> List[float]:
        """Each of `batches` computes a loss with the model. The pass has begun. ForwardsChange: it was given up, and nothing has changed."""
        settings = AutogradSettings()
        states = self.random_states(len(self._open.drivers))
        before = self._changing.of_all() if len(batches) > 1 else Attributes([])
        buffers = held_by(self._model.modules()) if len(batches) > 1 else []

        def work(driver: Driver, batch: Callable[[], torch.Tensor]) -> Root:
            with settings.applied():
                return self._backward.root_of(driver, batch())

        self._in_vertical_order([functools.partial(work, batch=batch) for batch in batches], states, idle=0.0)
        losses = [float("nan") if driver.loss is None else driver.loss / self._loss_factor for driver in self._open.drivers[: len(batches)]]
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

    def repeat(self, forwards: Sequence[Forward], loss: float) -> None:
        """Computes these forwards again and goes on from the gradients at their outputs. The pass has begun. loss: of the step."""
        now = RandomState.now()

        def again(driver: Driver, forward: Forward) -> Root:
            forward.check_inputs()
            driver.forward = forward
            with forward.settings.applied():
                tensors, gradients = forward.roots(self._model(*forward.args, **without_cache(self._original, forward.kwargs)))
            return tensors, gradients, loss

        work: List[Work] = [functools.partial(again, forward=forward) for forward in forwards]
        outside, attributes = self._outside_buffers(), Attributes(self._changing.modules)
        for driver, forward in zip(self._open.drivers, forwards):
            driver.attributes = forward.attributes
        try:
            with self._hooks_told():
                self._in_vertical_order(work, [forward.random for forward in forwards], idle=loss)
        finally:
            now.restore()
            attributes.restore()
            put_back(outside)

    # Buffers of no block, which each forward has changed once already.
    def _outside_buffers(self) -> List[Held]:
        inside = {id(part) for block in self._stages.blocks for _, module in block.modules for part in module.modules()}
        return held_by(module for module in self._model.modules() if id(module) not in inside)

    def _in_vertical_order(self, work: Sequence[Work], states: Sequence[RandomState], idle: float) -> None:
        """A thread for each micro-batch, of which one runs at a time.

        They change places where they enter a use, so every block is fetched once for all of them. states: random numbers of each.
        idle: what stands for the loss of micro-batches that the pass has and `work` has not.
        """
        drivers = list(self._open.drivers)
        missing = len(drivers) - len(work)
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
                    self._here.driver, self._here.awaited = driver, True
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

    def device_report(self) -> Optional[Dict[str, Any]]:
        """What a report says of the device beside the engine's own; None: nothing."""
        if self._weights.on_device is not None:
            return self._weights.on_device.report()
        if self._weights.streams is None or self._device.type != "cuda":
            return None
        return {"tensors_peak_bytes": torch.cuda.max_memory_reserved(self._device)}

    def let_go(self) -> None:
        """The engine's memory is not read any more; the parameters are in host memory, without values."""
        self._weights.close()

    def close(self) -> None:
        """The modules' forwards are their own again."""
        self._passes.give_up("the engine was closed")
        for module, previous in reversed(self.replaced):
            restore_forward(module, previous)
        self._backward.close()
