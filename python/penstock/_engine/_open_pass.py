"""What the parts of a pass share: its micro-batches on their way through the model, and why it may fail."""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import Any, Callable, Dict, List, Optional, SupportsFloat, Tuple

import torch

from ._accumulation import Forward
from ._attributes import Attributes
from ._lazy_logits import Source
from ._random import RandomState

#: Tensors that backward of a micro-batch begins at, the gradients there, and its loss.
Root = Tuple[List[torch.Tensor], List[torch.Tensor], SupportsFloat]
#: Computes a micro-batch's forward.
Work = Callable[["Driver"], Root]

ENDED = (
    "the pass of this forward ended when another forward began before its backward. engine.backward(loss) computes it again (torch 2.1 and "
    'newer), loss.backward() does not; or give penstock.initialize forwards_per_step= ("penstock": {"forwards_per_step": ...} in a '
    "configuration), the number of forwards that a step's losses are made of"
)

# Passes in which a block is computed again to its end, which is compared: the first ones, and then one of each such number. In the others torch stops
# when it has what backward wants.
COMPARED = 3
COMPARED_AGAIN = 64


class PassFailed(RuntimeError):
    """The pass was given up; nothing of it counts, and the next one may begin."""


class Driver:
    """One micro-batch on its way through the model."""

    def __init__(self, number: int, stages: int, trains: bool) -> None:
        self.number = number
        self.trains = trains
        self.calls: Dict[int, int] = {}  # of each module so far
        self.forward_at = 0  # the next use of forward
        self.backward_at = stages - 1  # the next use of backward
        self.inside: Optional[int] = None  # the use of backward that is entered
        self.loss: Optional[SupportsFloat] = None
        self.loss_gradient = 1.0
        self.gradient_came = False  # to a weight of a block that was left
        self.came = threading.Event()  # to its first use, or to its end
        self.random: Optional[RandomState] = None  # while another driver computes
        self.counts = (0, 0)  # tokens and samples
        self.made: Dict[int, weakref.ref[torch.Tensor]] = {}  # by uses that backward does not come to
        self.forward: Optional[Forward] = None  # computed now, to be computed again where its pass ends before its backward, or that again
        self.remembers: Optional[Forward] = None  # computed with its graph, and to be computed again where its pass ends early
        self.together: Optional[Together] = None  # with others of the same micro-batch
        self.attributes: Optional[Attributes] = None  # while another driver computes
        self.hooked: Dict[Any, int] = {}  # calls of modules with hooks so far
        self.at: Optional[int] = None  # the use that is computed with a graph
        self.in_last = False  # the last use is computed
        self.held = contextlib.ExitStack()  # of an evaluation: until the model's forward is over, the last use is not left
        self.lazy: List[weakref.ref[Source]] = []  # of an evaluation: logits that are computed later, while the weights of the last use are here
        self.goes_on = False  # with an evaluation whose pass was another, where logits are whole

    def note_lazy(self, source: Source) -> None:
        self.lazy.append(weakref.ref(source))

    def end_held(self) -> None:
        """The last use of this evaluation is left, before the model's forward is over: logits that are still to be computed keep a copy of its weights."""
        for source in [each() for each in self.lazy]:
            if source is not None:
                source.outlive()
        self.held.close()


class Together:
    """Drivers of one micro-batch of the engine's, in threads of their own: each use is entered, and left, once for all of them."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._changed = threading.Condition()
        self._use: Any = None  # that is entered, or being entered
        self._answer: Any = None
        self._left = 0
        self._over = False

    def enter(self, use: Any, call: Callable[[], Any]) -> Any:
        """call: enters it; made by the first. The others wait until the use before is left by all."""
        with self._changed:
            while not self._over and self._use is not None and self._use != use:
                self._changed.wait()
            first = self._use is None
            if first:
                self._use = use
            while not self._over and not first and self._answer is None:
                self._changed.wait()
            if self._over:
                raise PassFailed("another forward of this step has failed")
        if first:
            answer = call()
            with self._changed:
                self._answer = answer
                self._changed.notify_all()
        return self._answer

    def is_last(self) -> bool:
        """One of them has done with the use: whether all have."""
        self._left += 1
        return self._left == self._count

    def leave(self) -> None:
        with self._changed:
            self._use, self._answer, self._left = None, None, 0
            self._changed.notify_all()

    def end(self) -> None:
        """Nobody waits any more."""
        with self._changed:
            self._over = True
            self._changed.notify_all()


class _Here(threading.local):
    """What each thread has for itself."""

    driver: Optional[Driver] = None  # that it computes
    inside_model = False  # it is in the model's forward
    awaited = False  # the next forward of the model is the driver's


class OpenPass:
    """The pass that is open, if one is."""

    def __init__(self) -> None:
        self.trains: Optional[bool] = None  # None: no pass is open
        self.drivers: List[Driver] = []
        self.baton: Optional[threading.Lock] = None  # of the driver that computes, where each has a thread
        self.compares = False  # what blocks give when they are computed again with what they gave
        self.here = _Here()

    @property
    def is_open(self) -> bool:
        return self.trains is not None

    def end(self) -> None:
        """No pass is open from here on."""
        self.trains = None
        self.drivers = []
        self.here.driver = None
