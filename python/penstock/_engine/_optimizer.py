"""The optimizer of an engine, as schedulers and trainers see it: its groups, and what their values are just now.

The states are the engine's. What a group says when a forward begins is what that step's update goes by.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Tuple

import torch

from .. import _tensors

# Which values a group may have of its own, step by step; the others are the same for all.
_BY_GROUP = ("lr", "betas", "weight_decay")
_FIXED = ("eps", "momentum", "dampening", "nesterov", "lr_decay", "amsgrad", "maximize", "decoupled_weight_decay", "max_coeff", "min_coeff", "bias_correction", "corrects_rate")
_IGNORED = ("params", "param_names", "foreach", "fused", "capturable", "differentiable", "initial_lr", "maximize", "amsgrad")
# Options that one type has alone.
_ALONE = {"momentum": "SGD", "dampening": "SGD", "nesterov": "SGD", "lr_decay": "Adagrad"}


def describe(optimizer: torch.optim.Optimizer) -> Dict[str, Any]:
    """The engine's description of a torch optimizer: {"type": "AdamW", "lr": ..., ...} of its first group.

    Raises TypeError for one that the engine does not have, ValueError for what it would do otherwise.
    """
    kind = type(optimizer).__name__
    names = {
        "AdamW": "AdamW",
        "Adam": "Adam",
        "SGD": "SGD",
        "Adagrad": "Adagrad",
        "Lion": "Lion",
        "DeepSpeedCPUAdam": "AdamW",
        "FusedAdam": "AdamW",
        "DeepSpeedCPUAdagrad": "Adagrad",
        "DeepSpeedCPULion": "Lion",
        "FusedLion": "Lion",
        "LAMB": "Lamb",
        "FusedLamb": "Lamb",
    }
    if kind not in names:
        raise TypeError(f"the engine has no {kind}: it updates by AdamW, Adam, Adagrad, Lion, SGD and LAMB")
    if any(float(state.get("step", 1)) != 0 for state in optimizer.state.values()):
        raise ValueError(f"this {kind} has made steps already: its states would be lost. Hand over a new one")
    # What one without parameters says is the program's own affair: Trainer makes a group for weight decay and one without.
    numbered = [(index, group) for index, group in enumerate(optimizer.param_groups) if group["params"]]
    groups = [group for _, group in numbered]
    if not groups:
        raise ValueError(f"this {kind} has no parameters")
    for option in ("amsgrad", "maximize"):
        if any(group.get(option) for group in groups):
            raise ValueError(f"{kind} with {option}=True is not served")
    first = groups[0]
    for option in ("bias_correction", "correct_bias"):  # of DeepSpeed's and apex's, and of transformers' old one
        if names[kind] != "Lamb" and any(group.get(option, True) is False for group in groups):
            raise ValueError(f"{kind} with {option}=False is not served: Adam's bias is always corrected")
    result: Dict[str, Any] = {"type": names[kind], "lr": _tensors.number(first["lr"], "lr")}
    if "adam_w_mode" in first or hasattr(optimizer, "adam_w_mode"):
        decoupled = bool(first.get("adam_w_mode", getattr(optimizer, "adam_w_mode", True)))
        result["type"] = "AdamW" if decoupled else "Adam"
    if kind == "Adam" and first.get("decoupled_weight_decay"):
        result["type"] = "AdamW"
    if "betas" in first:
        result["beta1"], result["beta2"] = (float(beta) for beta in first["betas"])
    if names[kind] == "Lamb":
        # penstock.optim.LAMB goes by the paper, DeepSpeed's by a factor of the rate.
        result["corrects_rate"] = kind == "FusedLamb" and bool(first.get("corrects_rate", True))
        result["bias_correction"] = bool(first.get("bias_correction", True))
        result.update((option, _number(first[option], option, kind)) for option in ("min_coeff", "max_coeff") if option in first)
    for option in ("eps", "weight_decay", "momentum", "dampening", "nesterov", "lr_decay"):
        if option in first:
            if result["type"] != _ALONE.get(option, result["type"]):
                raise ValueError(
                    f"a group of this {kind} has {option}, which is another optimizer's: with offload_optimizer accelerate, and so Trainer, puts a "
                    "DeepSpeedCPUAdam in the place of any optimizer that DeepSpeed has none of its own for. \"zero_force_ds_cpu_optimizer\": false in the "
                    "configuration leaves it as it is"
                )
            result[option] = first[option] if option == "nesterov" else _number(first[option], option, kind)
    if result["type"] == "Adagrad" and float(first.get("initial_accumulator_value", 0)) != 0:
        raise ValueError("Adagrad with an initial_accumulator_value is not served: its sums begin at 0")
    if result["type"] == "Lion":
        result.pop("eps", None)
    for index, group in numbered:
        for option, value in group.items():
            if option in _BY_GROUP or option in _IGNORED or value == first.get(option):
                continue
            raise ValueError(f"group {index} has another {option} than group {numbered[0][0]}: groups differ in lr, betas and weight_decay")
    return result


def optimizer_of(described: Optional[Dict[str, Any]], parameters: List[Any]) -> torch.optim.Optimizer:
    """The torch optimizer that a configuration describes, by ``describe``'s names; None: AdamW with torch's defaults."""
    if described is None:
        return torch.optim.AdamW(parameters)
    options = {name: value for name, value in described.items() if name != "type"}
    if "beta1" in options:
        options["betas"] = (options.pop("beta1"), options.pop("beta2"))
    if described["type"] == "Lion":
        return _Groups("Lion", parameters, {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0, **options})
    if described["type"] == "Lamb":
        return _lamb_of(parameters, options)
    return getattr(torch.optim, described["type"])(parameters, **options)  # type: ignore[no-any-return]


class _Groups(torch.optim.Optimizer):
    """Groups and values of an optimizer that torch has not."""

    def __init__(self, kind: str, parameters: List[Any], defaults: Dict[str, Any]) -> None:
        super().__init__(parameters, defaults)
        self.__class__ = type(kind, (_Groups,), {})


def _lamb_of(parameters: List[Any], options: Dict[str, Any]) -> torch.optim.Optimizer:
    """The groups of a configuration's Lamb: DeepSpeed's, or with ``"corrects_rate": false`` the paper's."""
    from ..ops.lamb import FusedLamb

    corrects_rate = options.pop("corrects_rate", True)
    made = FusedLamb(parameters, **options)
    for group in made.param_groups:
        group["corrects_rate"] = corrects_rate
    return made


def zeros_change(described: Dict[str, Any], groups: List[Dict[str, Any]]) -> bool:
    """Whether an update by a gradient of zeros may change a weight, or what later updates do."""
    counts = described["type"] not in ("SGD", "Adagrad") or any(described.get(option) for option in ("momentum", "lr_decay"))
    return counts or any(group.get("weight_decay") for group in groups)


def _number(value: Any, option: str, kind: str) -> float:
    try:
        return _tensors.number(value, option)
    except TypeError:
        raise TypeError(
            f"{option} of this {kind} is {value!r}, and must be a number: its groups are another optimizer's (accelerate hands those of Adafactor, or "
            "of whatever else optim= names, to DeepSpeedCPUAdam). The engine has AdamW, Adam, Adagrad, Lion, SGD and LAMB: optim='adamw_torch'"
        ) from None


class EngineOptimizer(torch.optim.Optimizer):
    """The groups of an engine's optimizer: what a scheduler sets here, the next step goes by.

    ``step()`` and ``zero_grad()`` are the engine's, which has the gradients. ``state_dict()`` is of the groups; the states are saved
    with ``engine.save_checkpoint``.
    """

    param_groups: List[Dict[str, Any]]

    def __init__(self, given: torch.optim.Optimizer, step: Callable[[], Any], zero_grad: Callable[[], Any]) -> None:
        self._engine_step = step
        self._engine_zero_grad = zero_grad
        self._fixed: Optional[List[Dict[str, Any]]] = None
        super().__init__(given.param_groups, dict(given.defaults))  # OneCycleLR looks for betas in the latter
        self._fixed = [{name: group.get(name) for name in _FIXED} for group in self.param_groups]

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        if self._fixed is not None:
            raise ValueError("groups are settled when the engine is made: give initialize an optimizer that has them all")
        super().add_param_group(param_group)

    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._engine_step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._engine_zero_grad()

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        if state_dict.get("state"):
            raise ValueError("states of a torch optimizer are not taken: the engine's go with engine.save_checkpoint and load_checkpoint")
        groups = self.param_groups
        super().load_state_dict(state_dict)
        # Into the very groups: schedulers, and the optimizer that was given, know these.
        for group, loaded in zip(groups, self.param_groups):
            group.update(loaded)
        self.param_groups = groups

    def rates(self) -> List[Tuple[float, Optional[float], Optional[float], Optional[float]]]:
        """Of each group: lr, beta1, beta2, weight decay."""
        result = []
        for number, (group, fixed) in enumerate(zip(self.param_groups, self._fixed or [])):
            for name, value in fixed.items():
                if group.get(name) != value:
                    raise RuntimeError(f"{name} of group {number} is {group.get(name)} and was {value}: lr, betas and weight_decay may change")
            if "betas" in group:
                _tensors.check_betas(group["betas"])
            beta1, beta2 = group.get("betas", (None, None))
            decay = group.get("weight_decay")
            result.append(
                (
                    _tensors.number(group["lr"], "lr"),
                    None if beta1 is None else float(beta1),
                    None if beta2 is None else float(beta2),
                    None if decay is None else float(decay),
                )
            )
        return result


class ConfigScheduler:
    """The scheduler of a DeepSpeed configuration: the learning rate (and betas) of each update."""

    def __init__(self, core: Any, schedule: str, optimizer: torch.optim.Optimizer) -> None:
        self._core = core
        self._schedule = schedule
        self._optimizer = optimizer
        self.last_update = 0
        self._apply()

    def _apply(self) -> None:
        lr, beta1, beta2 = self._core.scheduled_rates(self._schedule, self.last_update + 1)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
            if beta1 is not None and "betas" in group:
                group["betas"] = (beta1, group["betas"][1] if beta2 is None else beta2)

    def step(self) -> None:
        self.last_update += 1
        self._apply()

    def get_last_lr(self) -> List[float]:
        return [group["lr"] for group in self._optimizer.param_groups]

    get_lr = get_last_lr

    def state_dict(self) -> Dict[str, Any]:
        return {"last_update": self.last_update}

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        self.last_update = int(state["last_update"])
        self._apply()
