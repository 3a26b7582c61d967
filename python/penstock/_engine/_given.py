"""What an engine is made of: the caller's module, optimizer and scheduler, and the settings."""

from __future__ import annotations

import json
import types
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch
from torch import nn

from .. import _core
from . import _base_weights
from ._blocks import Block, check_memory, find_blocks
from ._handed_over import check_types
from ._optimizer import ConfigScheduler, EngineOptimizer, describe
from ._pieces import Pieces
from ._settings import Settings

#: Of a module that has, or had, an engine: "open" or "closed".
MARK = "_penstock_engine"


def closed_forward(*_: Any, **__: Any) -> Any:
    """The forward of a module whose values went with its engine."""
    raise RuntimeError("this model's engine was closed: its weights are in the state directory; make an engine with resume=True")


class Given:
    """The caller's objects, checked, and what the engine says of them: blocks, types, the optimizer's description.

    Owns ``optimizer``, which has the groups of the caller's, and the functions that the caller's optimizer had before.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: Settings,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        blocks: Optional[Sequence[str]],
        optimizer_was_given: bool,
        step: Callable[[], Any],
        zero_grad: Callable[..., Any],
    ) -> None:
        """optimizer_was_given: by the caller, and not made of the configuration. step, zero_grad: what the optimizer's do from now on."""
        self.module = model
        self.settings = settings
        self.torch_optimizer = optimizer
        self.optimizer_was_given = optimizer_was_given
        self.described = describe(optimizer)
        state = getattr(model, MARK, "")
        if state == "open":
            raise ValueError("this model has an engine already: close that one first")
        #: With the model's engine that was closed.
        self.values_are_gone = state == "closed"
        if model.__dict__.get("forward") is closed_forward:
            model.__dict__.pop("forward")
        self._names_of_blocks = blocks
        self.look_at_parameters()
        #: By id, when the engine was made.
        self.required_grad = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
        #: Whether the module's zero_grad becomes the engine's.
        self.zero_grad_of_module = True
        self.optimizer = EngineOptimizer(optimizer, step, zero_grad)  # with its very groups, which schedulers may know
        self.scheduler = self._scheduler_of(scheduler)
        known = {id(parameter) for parameter in model.parameters()}
        for number, group in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                if id(parameter) not in known:
                    raise ValueError(f"parameter {index} of group {number} is none of the model's: give it an optimizer of its own")

    def _scheduler_of(self, scheduler: Any) -> Any:
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
        if scheduler is plateau or isinstance(scheduler, plateau):
            raise ValueError("ReduceLROnPlateau wants a metric for its steps: make them yourself, between engine.step() and the next forward")
        made = callable(scheduler) and (isinstance(scheduler, type) or not hasattr(scheduler, "step"))
        result = scheduler(self.optimizer) if made else scheduler
        if result is None and self.settings.schedule is not None:
            return ConfigScheduler(_core, json.dumps(self.settings.schedule), self.optimizer)
        if result is not None and not (hasattr(result, "step") and hasattr(result, "state_dict")):
            raise TypeError(f"lr_scheduler is a {type(scheduler).__name__}: a scheduler has step() and state_dict(), or is made by a function")
        return result

    def take_scheduler(self, scheduler: Any) -> None:
        """The steps of this scheduler are made from now on. None: of none. ValueError, TypeError: it cannot be, and the one before stays."""
        self.scheduler = None if scheduler is None else self._scheduler_of(scheduler)

    def look_at_parameters(self) -> None:
        """Finds blocks and types. Once more with the first forward: until then a script may tie, replace or cast parameters."""
        if self.settings.base_weights:
            _base_weights.take_from_meta(list(self.module.modules()), frozen_alone=True)
        if not self.values_are_gone:
            check_memory([each for each in self.module.named_parameters() if each[1].device.type == "cuda"])
            for parameter in self.module.parameters():
                if parameter.device.type == "cuda":
                    parameter.data = parameter.data.cpu()  # the engine takes them from there
        self.blocks: List[Block] = find_blocks(self.module, self._names_of_blocks, has_values=not self.values_are_gone)
        self.dtypes = {id(parameter): parameter.dtype for parameter in self.module.parameters()}
        check_types(self.module)
        #: Installed by the first forward.
        self.pieces = Pieces(self.module, self.settings)

    # Its own would change what lies in the engine's memory: the weights of the block that backward began with.
    def take_steps(self) -> None:
        """The optimizer that was given makes no steps of its own any more, until ``give_steps_back``."""

        def step(_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            raise RuntimeError("this optimizer was handed to penstock.initialize: engine.step() makes its steps, or step() of engine.optimizer")

        optimizer = self.torch_optimizer
        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # schedulers warn of others
        self._own = {name: optimizer.__dict__.get(name) for name in ("step", "zero_grad", "load_state_dict")}
        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
        optimizer.zero_grad = self.optimizer.zero_grad  # type: ignore[method-assign]
        optimizer.load_state_dict = self.optimizer.load_state_dict  # type: ignore[method-assign]

    def give_steps_back(self) -> None:
        for name, own in self._own.items():
            self.torch_optimizer.__dict__.pop(name, None)
            if own is not None:
                setattr(self.torch_optimizer, name, own)

    def groups(self) -> Dict[int, int]:
        """The number of the group that each parameter is in, by the parameter's id."""
        return {
            id(parameter): number
            for number, group in enumerate(self.optimizer.param_groups)
            for parameter in group["params"]
        }

    def parameters(self) -> List[Tuple[str, nn.Parameter]]:
        """Names and parameters, block by block."""
        return [each for block in self.blocks for each in block.parameters]
