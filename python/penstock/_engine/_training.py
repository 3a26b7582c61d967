"""Forward, backward and step: when a pass of the engine begins and ends, and which forwards it is of."""

from __future__ import annotations

import functools
import math
import warnings
import weakref
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

import torch
from torch import nn

from ._accumulation import Accumulation, Forward, Part, cut_off, forwards_of, reached
from ._attributes import merged
from ._checkpoint_copy import CheckpointCopy
from ._given import Given
from ._interrupts import deferred
from ._random import RandomState
from ._record import Record
from ._run import Run
from ._runtime import Runtime
from ._tree import tensors_of
from ._vertical_order import ForwardsChange, random_states
from ._wear import WearBudget


# Of engines that are alive: a loss may be made of several.
_trainings: "weakref.WeakSet[Training]" = weakref.WeakSet()


class Training:
    """Owns the step that is being made, its forwards that will be computed again, and what the last one gave.

    look: what the first forward does, where ``train_batch`` makes it.
    """

    def __init__(
        self,
        given: Given,
        run: Run,
        record: Record,
        wear: WearBudget,
        copy: CheckpointCopy,
        accumulation: Accumulation,
        look: Callable[[Tuple[Any, ...], Dict[str, Any], Callable[[], Any]], None],
    ) -> None:
        self._given = given
        self._settings = given.settings
        self._run = run
        self._record = record
        self._wear = wear
        self._copy = copy
        self._accumulation = accumulation  # of forwards that are computed again when the step is due
        self._look = look
        self.micro_steps = 0
        self._accumulates = self._settings.forwards > 1
        self._several = False  # a step was of several forwards, though nothing said so
        self._boundary: Optional[bool] = None  # as the caller has said it
        self._made_early = False  # the step, since its gradients were read; engine.step() is to come
        self._begun_rates: List[Any] = []
        self._result: Dict[str, Any] = {}
        _trainings.add(self)

    def forward(self, args: Tuple[Any, ...], kwargs: Dict[str, Any], part: Optional[Part] = None) -> Any:
        """The module's forward with gradients, or that of `part`, which belongs to a step."""
        runtime = self._run.ready()
        self._refuse_early()
        if runtime.is_open:
            self._interrupted_by_training()
        goes_on = self._several and any(tensor.requires_grad for tensor in tensors_of((args, kwargs)))  # backward, to what made its inputs
        if self._given.module.training and (goes_on or not (self._accumulates or self._several)):
            ended = _ended()
            if ended and any(tensor.requires_grad for tensor in tensors_of((args, kwargs))):
                args, kwargs = cut_off((args, kwargs), ended)
            self._begin()
            return runtime.train_forward(args, kwargs, part)
        forward, outputs, gradient = runtime.forward_of_accumulation(args, kwargs, part)
        self._add(forward, gradient)
        return outputs

    def _add(self, forward: Forward, gradient: float) -> None:
        self._accumulation.add(forward, self._scale_of(gradient))

    # gradient: at a micro-batch's loss.
    def _scale_of(self, gradient: float) -> float:
        scale = gradient * self._settings.micro_batches
        return round(scale) if abs(scale - round(scale)) < 1e-9 * scale else scale

    # Forwards that gradients may come to, those of the pass that is open among them, and what their gradients are scaled by.
    def _forwards_now(self) -> Tuple[List[Forward], float]:
        forwards, runtime = self._accumulation.all_forwards(), self._run.runtime
        known = None if runtime is None or not runtime.is_open else runtime.open_forward()
        return (forwards, self._accumulation.scale) if known is None else (forwards + [known[0]], self._scale_of(known[1]))

    # Backward of this engine begins with its scale, and gradients of another one's weights would be taken for ones of that one's.
    def _refuse_other_scales(self, loss: torch.Tensor) -> None:
        mine, scale = self._forwards_now()
        others = [(each, *each._forwards_now()) for each in list(_trainings) if each is not self]
        others = [each for each in others if each[1] and not math.isclose(each[2], scale, rel_tol=1e-6)]
        if not others:
            return
        came = forwards_of(loss, mine + [forward for _, forwards, _ in others for forward in forwards])
        for other, forwards, theirs in others:
            if any(forward is each for forward in forwards for each in came):
                raise RuntimeError(
                    f"this loss is of {self._described()}, which scales gradients by {scale:g}, and of {other._described()}, which scales them by "
                    f"{theirs:g}: the latter would get wrong ones. Give both engines bf16, or fp32; detach() what one of them is not to learn from"
                )

    def _described(self) -> str:
        return f"{type(self._given.module).__name__} in {self._settings.dtype}"

    def interrupted(self, with_gradients: bool = True) -> bool:
        """Gives up the open pass before another forward. Returns whether its forward will be computed again for the step."""
        taken = self._run.ready().take_forward(with_gradients)
        if taken is not None:
            self._add(*taken)
            self._several = True
        return taken is not None

    # Gradients that wait for their step are part of it where the script is known to add them up. Later on they may be what an exception
    # has left.
    def _interrupted_by_training(self) -> None:
        runtime = self._run.ready()
        came = runtime.gradient_came
        if self.interrupted(with_gradients=self._several or not self._result) or not came:
            return
        runtime.give_up("no step")
        self._accumulation.drop_gradients()
        lost = "the backward before this forward had no engine.step(), and its gradients"
        if not self._result:
            raise RuntimeError(
                f"{lost} would be lost: give initialize gradient_accumulation_steps= for several backwards a step; engine.zero_grad() "
                "says that they are not wanted"
            )
        warnings.warn(f"{lost} count for nothing (engine.zero_grad() says so, without this line)", stacklevel=5)

    def end_pass_for_loss(self) -> None:
        """A loss is about to be made of a parameter's value: the forward that is open, if it can be, is computed again in the step."""
        runtime = self._run.ready()
        if runtime.is_open and not runtime.is_inside and not self._made_early:
            self.interrupted()

    def reader_of(self, parameter: nn.Parameter, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
        """What gives a value of the parameter the graph by which losses that are made of it reach the parameter."""
        return functools.partial(self._accumulation.read, parameter, name)

    def _begin(self, reads_ahead: bool = True, forwards: int = 1) -> None:
        runtime = self._run.ready()
        if runtime.is_open:
            self._interrupted_by_training()
        else:
            self._wear.check()
        self._begun_rates = self._given.optimizer.rates()
        runtime.begin(True, self._begun_rates, self._settings.forwards, reads_ahead, forwards)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Backward from a loss of the forwards before: a tensor of one element. Scales it where fp16 asks for that.

        scale_wrt_gas: it is divided by ``gradient_accumulation_steps``. False: the caller has done so.
        """
        runtime = self._run.ready()
        runtime.check_trains()
        self._refuse_other_scales(loss)
        of_parameters = self._accumulation.is_made_of_parameters(loss)
        if of_parameters and runtime.is_open:
            self.interrupted()
        if of_parameters and self._settings.dtype == "fp16" and not self._accumulation.under_way:
            raise RuntimeError(
                "a step's only loss is of parameters, and with fp16 gradients are scaled as the forward of a step says: add it to the loss of one"
            )
        ended = _ended()
        of_ended = bool(ended) and bool(reached([loss], ended)[0])
        if of_ended:
            _end_open_passes(loss)
            ended = _ended()
        if runtime.is_open or not (self._accumulates or self._accumulation.under_way or of_ended or of_parameters):
            runtime.backward(loss, retain_graph)
        else:
            share = 1 / self._settings.micro_batches if scale_wrt_gas else 1.0
            self._accumulation.backward(loss, share, retain_graph, ended)
        return loss

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next ``step()`` updates: the last micro-batch of a step is under way, or was."""
        if self._boundary is not None or not self._accumulates or not self._settings.managed:
            return self._boundary is not False
        all_came = len(self._accumulation.forwards()) >= self._settings.forwards
        return all_came or self.micro_steps + 1 >= self._settings.micro_batches

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Whether the next ``step()`` updates, in the place of counting micro-batches."""
        if not self._settings.managed:
            raise RuntimeError("managed_gradient_accumulation is false: each step() updates, and there is no boundary to set")
        if not is_boundary and not self._accumulates:
            raise RuntimeError("each step is of one forward: give gradient_accumulation_steps (or forwards_per_step) to initialize")
        self._boundary = is_boundary

    def step(self) -> None:
        """Clips and updates by the gradients of the backwards before; the scheduler makes its step too.

        Where ``gradient_accumulation_steps`` is above 1 it does so for the last of as many micro-batches, counted by calls of
        ``step()`` or by forwards that a backward has come to, or when ``set_gradient_accumulation_boundary`` says so; else it only counts.
        With ``"managed_gradient_accumulation": false`` in the configuration each call updates.
        The update is applied while the next step runs, and committed then: ``flush()`` commits it now.
        """
        if self._run.runtime is not None:
            self._run.runtime.check_trains()
        self._copy.raise_error()
        if not self._made_early and not self.is_gradient_accumulation_boundary():
            self.micro_steps += 1
            return
        self._update()

    def _update(self) -> None:
        self._given.optimizer.step()
        if self._given.scheduler is not None and not self._result["skipped"]:
            self._given.scheduler.step()
        self._record.describe()
        if self._run.watch is not None:
            self._run.watch.complain()
        if self._run.runtime is not None:
            self._run.runtime.complain()
        self._wear.check()

    def make_step(self) -> None:
        """Updates by the gradients that have come: the optimizer's part of ``step``."""
        runtime = self._run.ready()
        runtime.check_trains()
        if self._made_early:
            self._made_early = False
            return
        if runtime.is_open and self._accumulation.has_gradients:
            if not self.interrupted():
                raise RuntimeError("forwards of this step had their backward in two ways: engine.backward(loss) for all of them is served")
        if not runtime.is_open and (self._accumulates or self._accumulation.under_way or self._accumulation.outside):
            self._repeat(self._accumulation)
        if not runtime.is_open:
            raise RuntimeError("no step is open: forward and backward come first")
        if not runtime.backward_came:
            runtime.give_up("no backward")
            raise RuntimeError("step() without a backward: engine.backward(loss) comes first; the forward is given up")
        if self._given.optimizer.rates() != self._begun_rates:
            runtime.give_up("rates changed")
            raise RuntimeError(
                "a learning rate (or betas, or weight decay) was changed between the forward and step(): part of the update may "
                "have been made in backward. Change it after step()"
            )
        self._record.text()  # or it would fail once the step was made
        with deferred():
            try:
                self._result = runtime.finish()
            except BaseException:
                runtime.give_up("the step failed")
                self._accumulation.end()
                raise
            self._record.stepped(self._result)
            self.micro_steps = 0
            self._several = len(self._accumulation.forwards()) > 1
            self._accumulation.end()
            try:
                self._record.share_buffers()
            except RuntimeError as error:  # the step is made, and its ranks are not alike any more
                self._run.ranks.abort(str(error))
                raise
            # What a scheduler of the optimizer that was given looks at, and warns without.
            given = self._given.torch_optimizer
            given._opt_called = True  # type: ignore[attr-defined]
            if hasattr(given, "_step_count"):
                given._step_count += 1
            if self._run.watch is not None:
                self._record.watched = self._run.watch.stepped(self._result, *runtime.counts)
            self._record.describe()

    def make_early(self) -> None:
        """Makes the step whose backwards have been called, so that its gradients can be read. ``step`` must follow."""
        runtime = self._run.ready()
        if self._made_early or not (runtime.gradient_came if runtime.is_open else self._accumulation.has_gradients):
            return
        if not self.is_gradient_accumulation_boundary():
            raise RuntimeError("gradients are read after backward of the last micro-batch of a step, when they are whole, or after step()")
        self.make_step()
        self._made_early = True

    def _refuse_early(self) -> None:
        if self._made_early:
            raise RuntimeError("gradients of this step were read, which has made it: engine.step() comes next")

    def check_between_steps(self, name: str) -> None:
        """RuntimeError: a step has begun, whose gradients are of the weights as they are. name: of the one that is to be changed."""
        self._refuse_early()
        if self.is_under_way:
            raise RuntimeError(f"{name} is changed between a backward and its step(), which computes the forward again: change it after step(), or zero_grad()")

    # The pass over all forwards of the step. Whatever goes wrong in it, they are given up with it.
    def _repeat(self, accumulation: Accumulation) -> None:
        runtime = self._run.ready()
        forwards = accumulation.forwards()
        if not accumulation.has_gradients:
            accumulation.end()
            raise RuntimeError("step() without a backward: engine.backward(loss) comes first; the forwards are given up")
        try:
            with accumulation.modes_of(forwards):
                self._begin(reads_ahead=False, forwards=len(forwards))
                accumulation.repeats()
                runtime.repeat(forwards, accumulation.loss, accumulation.outside)
        except BaseException:
            runtime.give_up("the step failed")
            accumulation.end()
            self.micro_steps = 0
            raise

    def train_batch(
        self,
        batches: Union[Sequence[Any], Iterator[Any], None] = None,
        loss: Optional[Callable[[nn.Module, Any], torch.Tensor]] = None,
        data_iter: Optional[Iterator[Any]] = None,
    ) -> torch.Tensor:
        """A whole step over ``gradient_accumulation_steps`` micro-batches. Returns the mean of their losses, over all ranks.

        batches: a list of them, or an iterator. A mapping is passed to the model by name, a tuple or list in order, anything else
        as it is. loss: from the module and a micro-batch to its loss; by default the model's own (``.loss``, ``["loss"]``, the
        first of a tuple, or what it returns).
        """
        source = data_iter if batches is None else batches
        if source is None:
            raise TypeError("train_batch needs its micro-batches")
        self._copy.raise_error()
        count = self._settings.micro_batches
        if isinstance(source, (list, tuple)):
            given = list(source)
        else:
            given = [next(source) for _ in range(count)]  # type: ignore[call-overload,arg-type]
        if len(given) != count:
            raise ValueError(f"{len(given)} micro-batches given, gradient_accumulation_steps is {count}")
        of = loss or _loss_of
        if not self._run.begun and self._settings.nothing_trains:
            raise RuntimeError("no parameter of the model requires a gradient: there is nothing to train")
        if not self._run.begun:
            self._look((), {}, lambda: of(self._given.module, given[0]))
        runtime = self._run.ready()
        runtime.check_trains()
        if not self._given.module.training:
            raise RuntimeError("the module is in evaluation mode: call engine.train() first")
        if self._accumulation.backwards:
            raise RuntimeError("a step of forwards one by one is under way: step() ends it, zero_grad() gives it up")
        losses = None if count > 1 and runtime.changing else self._all_at_once(runtime, of, given)
        if losses is None:
            losses = self._one_by_one(runtime, of, given)
        self._update()
        return torch.tensor(sum(losses) / len(losses) if self._run.ranks.world == 1 else self._result["loss"])

    # The losses of the micro-batches, block by block. None: their forwards change attributes, and nothing has come of it.
    def _all_at_once(self, runtime: Runtime, of: Callable[[nn.Module, Any], torch.Tensor], given: Sequence[Any]) -> Optional[List[float]]:
        self._begin()
        try:
            return runtime.train_batch([functools.partial(of, self._given.module, batch) for batch in given])
        except ForwardsChange:
            return None
        except BaseException:
            runtime.give_up("the step failed")
            raise

    # The same, each forward after the other: they are computed again in the step.
    def _one_by_one(self, runtime: Runtime, of: Callable[[nn.Module, Any], torch.Tensor], given: Sequence[Any]) -> List[float]:
        losses, after = [], RandomState.now()
        changed: List[nn.Module] = []
        try:
            for number, (batch, state) in enumerate(zip(given, random_states(len(given)))):
                state.restore()
                loss = of(self._given.module, batch)
                changed = merged(changed, runtime.changed_last)
                self.backward(loss)
                losses.append(float(loss.detach()))
                after = RandomState.now() if number == 0 else after
        except BaseException:
            self.zero_grad()
            raise
        after.restore()
        runtime.settle_changing(changed)
        return losses

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Backwards since the last step count for nothing. After a step there is nothing to do: its gradients end with it.

        set_to_none changes nothing: gradients are the engine's.
        """
        self._refuse_early()
        self._accumulation.drop_gradients()
        self.micro_steps = 0
        if self._run.runtime is not None and self._run.runtime.is_open and self._run.runtime.gradient_came:
            self._run.runtime.give_up("zero_grad")

    def start_over(self) -> None:
        """Another run takes the place of this one: nothing of a step is under way."""
        self._result, self.micro_steps, self._made_early = {}, 0, False
        self._accumulation.end()

    @property
    def is_under_way(self) -> bool:
        """Whether a step has had a backward of a forward that will be computed again, another engine's too."""
        return bool(self._accumulation.backwards or self._accumulation.forwards())

    @property
    def last_step(self) -> Dict[str, Any]:
        return dict(self._result)


def _arguments_of(batch: Any) -> Tuple[Tuple[Any, ...], Dict[str, Any]]:
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, (tuple, list)):
        return tuple(batch), {}
    return (batch,), {}


def _loss_of(module: nn.Module, batch: Any) -> torch.Tensor:
    args, kwargs = _arguments_of(batch)
    out = module(*args, **kwargs)
    if isinstance(out, torch.Tensor):
        return out
    if isinstance(out, Mapping) and "loss" in out:
        return out["loss"]  # type: ignore[no-any-return]
    if getattr(out, "loss", None) is not None:
        return out.loss  # type: ignore[no-any-return]
    if isinstance(out, (tuple, list)) and out:
        return out[0]  # type: ignore[no-any-return]
    raise TypeError("the model returned no loss: give it labels, or train_batch a loss= that computes one")


# Where callers' graphs leave forwards that will be computed again, of all engines.
def _ended() -> Dict[Any, Any]:
    return {node: edge for training in list(_trainings) for node, edge in training._accumulation.ends().items()}


# Of a loss that such forwards have a part in, those whose passes are open will be computed again too.
def _end_open_passes(loss: torch.Tensor) -> None:
    for training in list(_trainings):
        runtime = training._run.runtime
        ends = {} if runtime is None or not runtime.is_open else runtime.open_ends()
        if ends and reached([loss], ends)[0]:
            training.interrupted()
