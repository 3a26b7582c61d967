"""Forwards whose backward the engine makes later, all in one pass: micro-batches that a script gives one by one.

A forward that comes alone would have every block fetched for it alone, twice, and its gradients kept until the others are there.
So it is only a forward: the outputs are leaves, and the caller's graph begins at them. Backward of the caller's losses leaves
gradients at these leaves. When the step is due, all of its forwards are computed again in one pass, which fetches each block once
for all of them, and backward goes on from the gradients that were left.

What a forward computes again is what it computed before: it has the same inputs, random numbers, autocast settings, buffers and
attributes. A loss may be made of what it returns, of what it leaves in attributes, and of what hooks of modules are given.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Set, Tuple

import torch
from torch import nn

from ._attributes import Attributes, version_of
from ._hidden import OUTSIDE
from ._lazy_logits import LazyLogits, Tell, is_lazy
from ._random import RandomState
from ._tree import map_tensors, tensors_of

_ON_THE_LOSS = "backward was called on the loss itself: call engine.backward(loss), which scales it"
_FED_BACK = (
    "an output of one forward is an input of another one of the same step, and its gradient comes too late: detach it, or make one "
    "model of both"
)
CREATES_GRAPH = (
    "a gradient of gradients (create_graph=True) needs the weights of all blocks at once, and they come one by one here: give blocks=[\"\"] (or "
    "\"penstock\": {\"blocks\": [\"\"]}), which makes the whole model one block"
)
_NOT_RETURNED = (
    "this loss is made of a tensor that {} keeps and its forward does not return, and another forward came before its backward: give "
    "forwards_per_step=, their number (or \"penstock\": {{\"forwards_per_step\": ...}})"
)
_OVER = "the step that this forward was made for is over, and the weights are others: backward comes before step()"

_OF_BEFORE = "a loss is made of a value of {} that was read before the last step(): the parameter has another one since. Read it again in this step"

_SAMPLE = 4096  # elements of an output that are compared when it is computed again
_COPIED = 1 << 18  # elements; larger outputs are views of the leaves, which cannot be changed in place


@dataclass(frozen=True)
class Part:
    """What was called in the place of the model's forward: a module, and its forward."""

    module: nn.Module
    forward: Callable[..., Any]


#: Which tensor of a forward: ("output", n), ("attribute", n), ("input" or "result" of a module with hooks, its id, the call, n).
Key = Tuple[Any, ...]


class Forward:
    """One forward, as it was called, and the gradients at its outputs that have come so far."""

    def __init__(
        self, model: nn.Module, args: Tuple[Any, ...], kwargs: Dict[str, Any], settings: Any, attributes: Attributes, part: Optional["Part"] = None
    ) -> None:
        """settings: torch's of the calling thread (AutogradSettings). attributes: before it. part: as for ModelForward."""
        self.part = part
        # Containers of our own: the caller's may be filled with the next batch.
        self.args, self.kwargs = map_tensors((args, kwargs), lambda tensor: tensor)
        self._versions = [(tensor, version_of(tensor)) for tensor in tensors_of((self.args, self.kwargs))]
        self.random = RandomState.now()
        self.settings = settings
        self.attributes = attributes
        self.modes = [module.training for module in model.modules()]
        #: Why no gradient may come to it (any more); empty: it may.
        self.closed = ""
        #: By use: the buffers that it changes, as they were before it.
        self.buffers: Dict[int, Any] = {}
        #: Its tensors once it is computed again.
        self.found: Dict[Key, torch.Tensor] = {}
        #: Where the caller's graph ends, of outputs with a graph of their own (``ended``): an edge of autograd, by output.
        self.ends: Dict[Key, Any] = {}
        self._leaves: List["weakref.ref[torch.Tensor]"] = []
        self._gradients: Dict[Key, torch.Tensor] = {}
        self._samples: Dict[Key, Tuple[torch.Size, torch.Tensor]] = {}
        self._repeated = False
        #: Of what the caller made of lazy logits: these, and how to make it of them once more.
        self._again: Dict[Key, Tuple[Key, Callable[[torch.Tensor], torch.Tensor]]] = {}
        self._lazy: List[Tuple["weakref.ref[Any]", Key]] = []  # calls of heads whose logits the caller has
        self._constant: Set[Key] = set()  # attributes that no weight leads to

    def outputs(self, out: Any) -> Any:
        """What the caller gets for `out`: the same, with floating tensors that tell of their gradients."""
        return self.told(out, ("output",))

    def ended(self, out: Any) -> Any:
        """What the caller gets for `out`, which has its own graph: gradients may be asked for where the caller's begins, and those that come
        are kept. Without effect before torch 2.1."""
        numbers = itertools.count()
        return map_tensors(out, lambda tensor: self._end(tensor, ("output", next(numbers))))

    def _end(self, tensor: torch.Tensor, key: Key) -> torch.Tensor:
        if is_lazy(tensor):
            return self._handed(tensor, key, has_graph=True)
        if not tensor.requires_grad or _edge_of is None:
            return tensor
        small = tensor.numel() <= _COPIED
        end = tensor.clone() if small else tensor.view_as(tensor)
        shape, sample = end.shape, sample_of(end)
        self.ends[key] = _edge_of(end)
        own = weakref.ref(self)  # the graph would keep this, and this the graph

        def note(gradient: torch.Tensor) -> None:
            forward = own()
            if forward is not None and torch.is_grad_enabled():
                forward.ends = {}  # a gradient of gradients, which is of this graph alone
            elif forward is not None and forward.ends:
                # A large one is kept and not copied: autograd changes no gradient in place that somebody else has.
                forward.collect(key, gradient, shape, sample, copies=small)

        end.register_hook(note)
        return end

    def keep_attributes(self) -> None:
        """What it has left in attributes tells of its gradients too."""
        numbers = itertools.count()
        self.attributes.new_tensors(lambda tensor: self._leaf(tensor, ("attribute", next(numbers))))

    def told(self, value: Any, of: Key) -> Any:
        """The same, with floating tensors that tell of their gradients, by `of` and their number within."""
        numbers = itertools.count()
        return map_tensors(value, lambda tensor: self._leaf(tensor, (*of, next(numbers))))

    def _leaf(self, tensor: torch.Tensor, key: Key) -> torch.Tensor:
        if is_lazy(tensor):
            return self._handed(tensor, key, has_graph=False)
        if not tensor.is_floating_point():
            self._leaves.append(weakref.ref(tensor))
            return tensor
        with torch.enable_grad():
            leaf = tensor.detach().requires_grad_()
            leaf._penstock_end = True  # type: ignore[attr-defined]
            self._leaves.append(weakref.ref(leaf))
            shape, sample = leaf.shape, sample_of(leaf)
            leaf.register_hook(lambda gradient: self.collect(key, gradient, shape, sample))
            return leaf.clone() if leaf.numel() <= _COPIED else leaf.view_as(leaf)

    def _handed(self, logits: torch.Tensor, key: Key, has_graph: bool) -> torch.Tensor:
        assert isinstance(logits, LazyLogits)
        made = logits.handed(self._tells(key, self._end if has_graph else self._leaf), has_graph)
        if is_lazy(made):
            self._lazy.append((weakref.ref(made.source), key))  # type: ignore[attr-defined]
        return made

    # What is made of these logits is an output too.
    def _tells(self, key: Key, hand_out: Callable[[torch.Tensor, Key], torch.Tensor]) -> Tell:
        def tell(made: torch.Tensor, again: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
            own = (*key, "made", len(self._again))
            self._again[own] = (key, again)
            return hand_out(made, own)

        return tell

    def outlive_weights(self) -> None:
        """The pass that it was computed in ends, and its weights are still here: logits that the caller has can be computed after it."""
        for known, key in self._lazy:
            source = known()
            if source is None:
                continue
            try:
                source.outlive()
            except RuntimeError:
                continue  # backward has left the head: what is asked of these logits later says so
            source.has_graph, source.tell = False, self._tells(key, self._leaf)

    def collect(self, key: Key, gradient: torch.Tensor, shape: torch.Size, sample: torch.Tensor, copies: bool = True) -> None:
        """A gradient has come to this tensor. copies: it may be changed in place later on. RuntimeError: none may."""
        if torch.is_grad_enabled():
            raise RuntimeError(CREATES_GRAPH)
        if self.closed:
            if key in self._constant or (key[0] == "attribute" and not self._repeated):
                return  # a cache, which a later forward has used
            raise RuntimeError(self.closed)
        known = self._gradients.get(key)
        gradient = gradient.detach()
        self._gradients[key] = known + gradient if known is not None else gradient.clone() if copies else gradient
        self._samples[key] = (shape, sample)

    def wants(self, key: Key) -> bool:
        """Whether a gradient has come to this tensor."""
        return key in self._gradients

    def detach_inputs(self) -> None:
        """Backward has come to its inputs already."""
        self.args, self.kwargs = map_tensors((self.args, self.kwargs), lambda tensor: tensor.detach())

    @property
    def has_gradients(self) -> bool:
        return bool(self._gradients)

    @property
    def may_get_gradients(self) -> bool:
        """Whether an output is still held."""
        return bool(self.ends) or any(leaf() is not None for leaf in self._leaves) or any(known() is not None for known, _ in self._lazy)

    @property
    def can_be_taken(self) -> bool:
        """Whether gradients of it may come to where the caller's graph begins, when its own graph is gone."""
        return bool(self.ends) or (_edge_of is not None and any(known() is not None for known, _ in self._lazy))

    def leaves(self) -> List[torch.Tensor]:
        """Those of the caller's graph that tell of their gradients, as far as they are held."""
        return [leaf for leaf in (each() for each in self._leaves) if leaf is not None]

    def forget_gradients(self) -> None:
        self._gradients.clear()
        self._samples.clear()

    def check_inputs(self) -> None:
        if any(version_of(tensor) != version for tensor, version in self._versions):
            raise RuntimeError(
                "an input of a forward was changed in place before step(): the forwards of an accumulation are computed again there, and "
                "this one would be given the changed input. Give each forward tensors of its own"
            )

    def roots(self, again: Any) -> Tuple[List[torch.Tensor], List[torch.Tensor]]:
        """Where backward begins: the tensors of the repeated forward, and the gradients that were left at them.

        RuntimeError where they are not what they were.
        """
        self._repeated = True
        self.found.update((("output", number), tensor) for number, tensor in enumerate(tensors_of(again)))
        for number, tensor in enumerate(self.attributes.new_tensors()):
            self.found["attribute", number] = tensor
            if all(hasattr(leaf, "_penstock_end") for leaf in reached([tensor], {})[1]):
                self._constant.add(("attribute", number))
        tensors, gradients = [], []
        for key, gradient in self._gradients.items():
            shape, sample = self._samples[key]
            tensor = self._found_again(key)
            if tensor is None or tensor.shape != shape or not alike(sample_of(tensor.detach()), sample):
                raise RuntimeError(
                    "the model's forward gave something else when it was computed again for backward: it keeps something outside of its "
                    "modules' attributes, or draws random numbers that are not torch's, Python's or numpy's. Use engine.train_batch([...]), "
                    "which computes each forward once"
                )
            if tensor.requires_grad:
                tensors.append(tensor)
                gradients.append(gradient)
        self.found = {}
        return tensors, gradients

    def _found_again(self, key: Key) -> Optional[torch.Tensor]:
        own, again = self._again.get(key, (key, None))
        tensor = self.found.get(own)
        if tensor is not None and again is not None:
            tensor = again(tensor)
        return tensor.whole() if isinstance(tensor, LazyLogits) else tensor

    def let_go(self) -> None:
        """Its inputs are not wanted any more."""
        self.args, self.kwargs, self._versions, self.found, self.ends, self._again = (), {}, [], {}, {}, {}


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


_edge_of = getattr(torch.autograd.graph, "get_gradient_edge", None)  # since torch 2.1


def reached(tensors: Sequence[torch.Tensor], ends: Mapping[Any, Any]) -> Tuple[List[Any], List[torch.Tensor]]:
    """(Those of `ends` that backward from these tensors comes to, the leaves that it comes to without passing one.)"""
    nodes, seen = [tensor.grad_fn for tensor in tensors], set()
    passed, leaves = [], []
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node in ends:
            passed.append(node)
            continue
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        nodes.extend(each for each, _ in node.next_functions)
    return passed, leaves


# Gradients come to these edges, whose hooks have them then, and to these leaves.
def _as_far_as(root: torch.Tensor, gradient: torch.Tensor, edges: Sequence[Any], leaves: Sequence[torch.Tensor], retain_graph: bool) -> None:
    found = torch.autograd.grad(root, [*edges, *leaves], gradient, retain_graph, allow_unused=True)
    for leaf, each in zip(leaves, found[len(edges) :]):
        if each is not None and not hasattr(leaf, "_penstock_end"):  # whose hook has run
            leaf.grad = each if leaf.grad is None else leaf.grad + each


def cut_off(given: Any, ends: Mapping[Any, Any]) -> Any:
    """The same, with tensors of their own where a graph leads to these ends: what comes to them goes as far as the ends."""

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        passed, leaves = reached([tensor], ends) if tensor.requires_grad else ([], [])
        if not passed:
            return tensor
        with torch.enable_grad():
            leaf = tensor.detach().requires_grad_()
            edges = [ends[node] for node in passed]
            leaf.register_hook(lambda gradient: _as_far_as(tensor, gradient.detach(), edges, leaves, True))
            leaf._penstock_end = True  # type: ignore[attr-defined]
            leaf._penstock_before = tensor  # type: ignore[attr-defined]
            return leaf.clone() if leaf.numel() <= _COPIED else leaf.view_as(leaf)

    return map_tensors(given, cut)


def forwards_of(loss: torch.Tensor, forwards: Sequence[Forward]) -> List[Forward]:
    """Those of these that the gradient of a loss comes to, through others that it is an input of and that are computed again later too."""
    by_node = {edge.node: forward for forward in forwards for edge in forward.ends.values()}
    by_leaf = {id(leaf): forward for forward in forwards for leaf in forward.leaves()}
    found: List[Forward] = []
    tensors = [loss]
    while tensors:
        passed, leaves = reached(tensors, by_node)
        tensors = [leaf._penstock_before for leaf in leaves if hasattr(leaf, "_penstock_before")]
        for forward in [by_node[node] for node in passed] + [by_leaf[id(leaf)] for leaf in leaves if id(leaf) in by_leaf]:
            if not any(forward is each for each in found):
                found.append(forward)
                tensors += [tensor for tensor in tensors_of((forward.args, forward.kwargs)) if tensor.requires_grad]
    return found


class Accumulation:
    """The forwards of the step that is being made."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._scale = 1.0
        self._forwards: List[Forward] = []
        self._in_backward = False
        self._steps = 0
        self._read: List["weakref.ref[torch.Tensor]"] = []  # values of parameters that a loss may be made of
        self._begin_with([])

    def add(self, forward: Forward, scale: float) -> None:
        """scale: of gradients, so that 16 bits hold them."""
        self._scale = scale
        if scale != 1.0:
            forward.closed = _ON_THE_LOSS
        self._forwards = [each for each in self._forwards if each.has_gradients or each.may_get_gradients]
        self._forwards.append(forward)

    def backward(self, loss: torch.Tensor, share: float, retain_graph: bool, others: Mapping[Any, Any]) -> None:
        """share: of this loss in the step's. others: ``ends()`` of other models' forwards."""
        if loss.numel() != 1:
            raise ValueError(f"the loss has the shape {tuple(loss.shape)}: backward begins at one number")
        if not loss.requires_grad:
            raise RuntimeError("this loss depends on no output of a training forward: backward has nothing to begin with")
        scaled = [forward for forward in self._forwards if forward.closed == _ON_THE_LOSS]
        for forward in scaled:
            forward.closed = ""
        self._in_backward = True
        try:
            self._backward(loss, torch.full_like(loss, self._scale * share), retain_graph, others)
        finally:
            self._in_backward = False
            for forward in scaled:
                forward.closed = _ON_THE_LOSS
        self._loss += float(loss.detach()) * share
        self.backwards += 1

    def ends(self) -> Dict[Any, Any]:
        """By node, the edges where the caller's graph leaves forwards whose own graph ended with their pass; their hooks collect what comes."""
        return {edge.node: edge for forward in self._forwards for edge in forward.ends.values()}

    def read(self, parameter: nn.Parameter, name: str, value: torch.Tensor) -> torch.Tensor:
        """The value, read for a loss that is made of it: what ``backward`` brings to it before the step is over is part of the parameter's gradient.

        RuntimeError naming the parameter, in any other backward.
        """
        if not value.is_floating_point():
            return value
        step = self._steps

        def collect(gradient: torch.Tensor) -> None:
            if torch.is_grad_enabled():
                raise RuntimeError(CREATES_GRAPH)
            if not self._in_backward:
                raise RuntimeError(OUTSIDE.format(name))
            if step != self._steps:
                raise RuntimeError(_OF_BEFORE.format(name))
            known = self.outside.get(id(parameter))
            self.outside[id(parameter)] = gradient.detach().clone() if known is None else known + gradient.detach()

        with torch.enable_grad():
            leaf = value.detach().requires_grad_()
            leaf._penstock_end = True  # type: ignore[attr-defined]
            leaf.register_hook(collect)
            self._read = [each for each in self._read if each() is not None]
            self._read.append(weakref.ref(leaf))
            return leaf.view_as(leaf)

    def is_made_of_parameters(self, loss: torch.Tensor) -> bool:
        """Whether backward of this loss comes to what ``read`` gave."""
        read = [leaf for leaf in (each() for each in self._read) if leaf is not None]
        return bool(read) and any(leaf is each for leaf in reached([loss], {})[1] for each in read)

    # Of forwards that ended, this model's and others', gradients are asked for at their ends, and nothing beyond.
    def _backward(self, loss: torch.Tensor, gradient: torch.Tensor, retain_graph: bool, others: Mapping[Any, Any]) -> None:
        ends = {**self.ends(), **others}
        passed, leaves = reached([loss], ends) if ends else ([], [])
        if not passed:
            loss.backward(gradient=gradient, retain_graph=retain_graph)
            return
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        for leaf in leaves:
            if id(leaf) in names:
                raise RuntimeError(_NOT_RETURNED.format(type(self._model).__name__))
        _as_far_as(loss, gradient, [ends[node] for node in passed], leaves, retain_graph)

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

    @property
    def scale(self) -> float:
        """Of gradients, so that 16 bits hold them."""
        return self._scale

    def all_forwards(self) -> List[Forward]:
        """Those that a backward has come to, or may come to."""
        return list(self._forwards)

    def forwards(self) -> List[Forward]:
        """Those that a backward has come to."""
        return [each for each in self._forwards if each.has_gradients]

    @property
    def has_gradients(self) -> bool:
        """Whether a backward has come to a forward of the next step, or to values that a loss is made of."""
        return bool(self.forwards() or self.outside)

    def drop_gradients(self) -> None:
        """As zero_grad: what backward left counts for nothing; a forward whose backward comes later stays."""
        for forward in self.forwards():
            forward.forget_gradients()
        self._begin_with([each for each in self._forwards if each.may_get_gradients])

    def end(self) -> None:
        """The step was made, and the weights are others: a forward that was left over has no backward any more."""
        for forward in self._forwards:
            forward.closed = _OVER
            forward.let_go()
        self._steps += 1
        self._begin_with([])

    def _begin_with(self, forwards: List[Forward]) -> None:
        self._forwards = forwards
        #: By the parameter's id, gradients of what losses are made of beside forwards.
        self.outside: Dict[int, torch.Tensor] = {}
        self.backwards = 0
        self._loss = 0.0

    @contextlib.contextmanager
    def modes_of(self, forwards: Sequence[Forward]) -> Iterator[None]:
        """The modules are in training or evaluation mode as they were in these forwards."""
        if not forwards:  # a step of losses of parameters alone
            yield
            return
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
