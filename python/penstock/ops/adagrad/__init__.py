"""DeepSpeed's Adagrad on the CPU (``deepspeed.ops.adagrad``) over Penstock's kernels."""

from __future__ import annotations

from typing import Any, Dict, List

import torch

from ..._tensors import not_negative, number
from .._cpu_optimizer import CPUOptimizer, refuse_amsgrad

__all__ = ["DeepSpeedCPUAdagrad"]


class DeepSpeedCPUAdagrad(CPUOptimizer):
    """Adagrad over parameters in host memory: float32, bfloat16 or float16.

    Sparse gradients (of an embedding) update their rows alone; with weight decay they are refused, as torch does.
    fp32_optimizer_states: False keeps the sum in the parameter's type. amsgrad: refused. The state holds ``step`` (a
    number) and ``exp_avg_sq``, the sum, as DeepSpeed's. Raises ValueError, TypeError before anything is changed.
    """

    optimizer_id = 0
    _kind = "adagrad"
    _states = (("exp_avg_sq", "v"),)

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        refuse_amsgrad(amsgrad, "DeepSpeedCPUAdagrad")
        not_negative(lr, "learning rate")
        not_negative(eps, "epsilon value")
        not_negative(weight_decay, "weight_decay value")
        super().__init__(
            model_params, dict(lr=lr, eps=eps, weight_decay=weight_decay, amsgrad=False), fp32_optimizer_states
        )
        self.opt_id = DeepSpeedCPUAdagrad.optimizer_id
        DeepSpeedCPUAdagrad.optimizer_id += 1

    def __setstate__(self, state: Dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("amsgrad", False)

    def _numbers(self, group: Dict[str, Any]) -> List[float]:
        return [number(group["lr"], "lr"), 0.0, number(group["eps"], "eps"), number(group["weight_decay"], "weight_decay")]

    def _sparse_ok(self, p: torch.Tensor, group: Dict[str, Any]) -> bool:
        if p.grad is None or p.grad.layout != torch.sparse_coo or p.grad.device != p.device:
            return False
        if group["weight_decay"] != 0:
            raise ValueError("weight_decay with a sparse gradient would touch every row: set it to 0 for this group")
        return True

    def _update_sparse(self, group: Dict[str, Any], state: Dict[str, Any], p: torch.Tensor) -> None:
        gradient = p.grad.coalesce()  # type: ignore[union-attr]
        places = tuple(gradient.indices())
        values = p[places].contiguous()
        sums = state["exp_avg_sq"][places].contiguous()
        if values.numel() == 0:
            return
        self._update(group, state, values, gradient.values().contiguous(), {"exp_avg_sq": sums})
        p[places] = values
        state["exp_avg_sq"][places] = sums
