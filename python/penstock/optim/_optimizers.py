from __future__ import annotations

from typing import Any, Dict, List, Optional, Tuple, Union

from .._buffers import PathLike, truth
from .._tensors import check_betas, not_negative, number
from ._on_drive import OnDrive

_Size = Union[int, str, None]
_Path = Optional[PathLike]


class Adam(OnDrive):
    """torch.optim.Adam with its states on a drive; see penstock.optim for state_dir and host_memory.

    foreach and fused are taken: there is one implementation, which gives their results. amsgrad, capturable and
    differentiable are refused.
    """

    _kind = "adam"

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-3,
        betas: Tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: Optional[bool] = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: Optional[bool] = None,
        decoupled_weight_decay: bool = False,
        state_dir: _Path = None,
        host_memory: _Size = None,
        nvme_offload_dir: _Path = None,
        nvme_offload_fraction: Optional[float] = None,
        offload_gradients: bool = False,
    ) -> None:
        defaults = dict(
            lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad, maximize=maximize, foreach=foreach,
            capturable=capturable, differentiable=differentiable, fused=fused,
            decoupled_weight_decay=truth(decoupled_weight_decay, "decoupled_weight_decay"),
        )  # fmt: skip
        super().__init__(
            params, defaults, state_dir=state_dir, host_memory=host_memory, nvme_offload_dir=nvme_offload_dir,
            nvme_offload_fraction=nvme_offload_fraction, offload_gradients=offload_gradients,
        )  # fmt: skip

    def _numbers(self, group: Dict[str, Any]) -> List[float]:
        check_betas(group["betas"])
        not_negative(group["eps"], "epsilon value")
        not_negative(group["weight_decay"], "weight_decay value")
        beta1, beta2 = group["betas"]
        return [
            number(group["lr"], "lr"), float(beta1), float(beta2), float(group["eps"]), float(group["weight_decay"]),
            float(group.get("decoupled_weight_decay", False)), 1.0,
        ]  # fmt: skip

    def _keys(self, group: Dict[str, Any]) -> Tuple[Tuple[str, str], ...]:
        return (("exp_avg", "m"), ("exp_avg_sq", "v"))


class AdamW(Adam):
    """torch.optim.AdamW with its states on a drive; see penstock.optim for state_dir and host_memory.

    An element takes 8 bytes on the drive, 10 if it is bfloat16, 12 if float16. foreach and fused are taken: there is one
    implementation, which gives their results. amsgrad, capturable and differentiable are refused.
    """

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-3,
        betas: Tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: Optional[bool] = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: Optional[bool] = None,
        state_dir: _Path = None,
        host_memory: _Size = None,
        nvme_offload_dir: _Path = None,
        nvme_offload_fraction: Optional[float] = None,
        offload_gradients: bool = False,
    ) -> None:
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad, foreach=foreach, maximize=maximize, capturable=capturable,
            differentiable=differentiable, fused=fused, decoupled_weight_decay=True, state_dir=state_dir,
            host_memory=host_memory, nvme_offload_dir=nvme_offload_dir, nvme_offload_fraction=nvme_offload_fraction, offload_gradients=offload_gradients,
        )  # fmt: skip

    def __setstate__(self, state: Dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # a state of a torch that has no such key is AdamW's all the same
            group["decoupled_weight_decay"] = True


class Adagrad(OnDrive):
    """torch.optim.Adagrad with its sums on a drive; see penstock.optim for state_dir and host_memory.

    foreach and fused are taken, and change nothing; differentiable is refused.
    """

    _kind = "adagrad"
    _state_from_the_start = True

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-2,
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        foreach: Optional[bool] = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        fused: Optional[bool] = None,
        state_dir: _Path = None,
        host_memory: _Size = None,
        nvme_offload_dir: _Path = None,
        nvme_offload_fraction: Optional[float] = None,
        offload_gradients: bool = False,
    ) -> None:
        defaults = dict(
            lr=lr, lr_decay=lr_decay, eps=eps, weight_decay=weight_decay,
            initial_accumulator_value=initial_accumulator_value, foreach=foreach, maximize=maximize,
            differentiable=differentiable, fused=fused,
        )  # fmt: skip
        super().__init__(
            params, defaults, state_dir=state_dir, host_memory=host_memory, nvme_offload_dir=nvme_offload_dir,
            nvme_offload_fraction=nvme_offload_fraction, offload_gradients=offload_gradients,
        )  # fmt: skip

    def _numbers(self, group: Dict[str, Any]) -> List[float]:
        not_negative(group["lr_decay"], "lr_decay value")
        not_negative(group["initial_accumulator_value"], "initial_accumulator_value value")
        not_negative(group["eps"], "epsilon value")
        not_negative(group["weight_decay"], "weight_decay value")
        return [number(group["lr"], "lr"), float(group["lr_decay"]), float(group["eps"]), float(group["weight_decay"])]

    def _keys(self, group: Dict[str, Any]) -> Tuple[Tuple[str, str], ...]:
        return (("sum", "v"),)

    def _initial(self, group: Dict[str, Any]) -> float:
        return float(group["initial_accumulator_value"])


class Lion(OnDrive):
    """Lion (Chen et al. 2023, algorithm 2) with its moment on a drive; see penstock.optim for state_dir and host_memory."""

    _kind = "lion"

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-4,
        betas: Tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        state_dir: _Path = None,
        host_memory: _Size = None,
        nvme_offload_dir: _Path = None,
        nvme_offload_fraction: Optional[float] = None,
        offload_gradients: bool = False,
    ) -> None:
        super().__init__(
            params, dict(lr=lr, betas=betas, weight_decay=weight_decay, maximize=maximize), state_dir=state_dir,
            host_memory=host_memory, nvme_offload_dir=nvme_offload_dir, nvme_offload_fraction=nvme_offload_fraction, offload_gradients=offload_gradients,
        )  # fmt: skip

    def _numbers(self, group: Dict[str, Any]) -> List[float]:
        check_betas(group["betas"])
        not_negative(group["weight_decay"], "weight_decay value")
        beta1, beta2 = group["betas"]
        return [number(group["lr"], "lr"), float(beta1), float(beta2), float(group["weight_decay"])]

    def _keys(self, group: Dict[str, Any]) -> Tuple[Tuple[str, str], ...]:
        return (("exp_avg", "m"),)


class SGD(OnDrive):
    """torch.optim.SGD with its momentum on a drive; see penstock.optim for state_dir and host_memory.

    A group that begins without momentum has no state, and cannot be given momentum later (ValueError). foreach and fused are taken, and
    change nothing; differentiable is refused.
    """

    _kind = "sgd"
    _counts_steps = False

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: Optional[bool] = None,
        differentiable: bool = False,
        fused: Optional[bool] = None,
        state_dir: _Path = None,
        host_memory: _Size = None,
        nvme_offload_dir: _Path = None,
        nvme_offload_fraction: Optional[float] = None,
        offload_gradients: bool = False,
    ) -> None:
        defaults = dict(
            lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay, nesterov=nesterov, maximize=maximize,
            foreach=foreach, differentiable=differentiable, fused=fused,
        )  # fmt: skip
        super().__init__(
            params, defaults, state_dir=state_dir, host_memory=host_memory, nvme_offload_dir=nvme_offload_dir,
            nvme_offload_fraction=nvme_offload_fraction, offload_gradients=offload_gradients,
        )  # fmt: skip

    def _numbers(self, group: Dict[str, Any]) -> List[float]:
        not_negative(group["momentum"], "momentum value")
        not_negative(group["weight_decay"], "weight_decay value")
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise ValueError("Nesterov momentum requires a momentum and zero dampening")
        return [
            number(group["lr"], "lr"), float(group["momentum"]), float(group["dampening"]), float(group["weight_decay"]),
            float(bool(group["nesterov"])),
        ]  # fmt: skip

    def _keys(self, group: Dict[str, Any]) -> Tuple[Tuple[str, str], ...]:
        return (("momentum_buffer", "m"),) if group["momentum"] != 0 else ()


class LAMB(OnDrive):
    """LAMB (You et al. 2019, algorithm 2) with its moments on a drive; see penstock.optim for state_dir and host_memory.

    max_coeff, min_coeff: bounds of the trust ratio, DeepSpeed's names. bias_correction: False leaves the moments as they
    are. A parameter that is larger than a buffer is gone through twice, since its norms are wanted first.
    """

    _kind = "lamb"

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-3,
        betas: Tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        *,
        bias_correction: bool = True,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        maximize: bool = False,
        state_dir: _Path = None,
        host_memory: _Size = None,
        nvme_offload_dir: _Path = None,
        nvme_offload_fraction: Optional[float] = None,
        offload_gradients: bool = False,
    ) -> None:
        defaults = dict(
            lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, bias_correction=truth(bias_correction, "bias_correction"),
            max_coeff=max_coeff, min_coeff=min_coeff, maximize=maximize,
        )  # fmt: skip
        super().__init__(
            params, defaults, state_dir=state_dir, host_memory=host_memory, nvme_offload_dir=nvme_offload_dir,
            nvme_offload_fraction=nvme_offload_fraction, offload_gradients=offload_gradients,
        )  # fmt: skip

    def _numbers(self, group: Dict[str, Any]) -> List[float]:
        check_betas(group["betas"])
        not_negative(group["eps"], "epsilon value")
        not_negative(group["weight_decay"], "weight_decay value")
        not_negative(group["min_coeff"], "min_coeff")
        if not number(group["max_coeff"], "max_coeff") >= group["min_coeff"]:
            raise ValueError(f"max_coeff {group['max_coeff']} is below min_coeff {group['min_coeff']}")
        beta1, beta2 = group["betas"]
        return [
            number(group["lr"], "lr"), float(beta1), float(beta2), float(group["eps"]), float(group["weight_decay"]),
            float(group["bias_correction"]), float(group["min_coeff"]), float(group["max_coeff"]),
        ]  # fmt: skip

    def _keys(self, group: Dict[str, Any]) -> Tuple[Tuple[str, str], ...]:
        return (("exp_avg", "m"), ("exp_avg_sq", "v"))
