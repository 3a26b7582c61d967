"""DeepSpeed's Lion on the CPU (``deepspeed.ops.lion``) over Penstock's kernels."""

from __future__ import annotations

from typing import Any, Dict, List, Tuple

from ..._tensors import check_betas, not_negative, number
from .._cpu_optimizer import CPUOptimizer

__all__ = ["DeepSpeedCPULion"]


class DeepSpeedCPULion(CPUOptimizer):
    """Lion over parameters in host memory: float32, bfloat16 or float16.

    fp32_optimizer_states: False keeps the moment in the parameter's type. The state holds ``step`` (a number) and
    ``exp_avg``, as DeepSpeed's. Raises ValueError, TypeError before anything is changed.
    """

    optimizer_id = 0
    _kind = "lion"
    _states = (("exp_avg", "m"),)

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        betas: Tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        not_negative(lr, "learning rate")
        not_negative(weight_decay, "weight_decay value")
        check_betas(betas)
        super().__init__(model_params, dict(lr=lr, betas=betas, weight_decay=weight_decay), fp32_optimizer_states)
        self.opt_id = DeepSpeedCPULion.optimizer_id
        DeepSpeedCPULion.optimizer_id += 1

    def _numbers(self, group: Dict[str, Any]) -> List[float]:
        beta1, beta2 = group["betas"]
        return [
            number(group["lr"], "lr"), number(beta1, "beta1"), number(beta2, "beta2"),
            number(group["weight_decay"], "weight_decay"),
        ]  # fmt: skip
