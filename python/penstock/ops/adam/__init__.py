"""DeepSpeed's Adam and AdamW on the CPU (``deepspeed.ops.adam``) over Penstock's kernels.

>>> from penstock.ops.adam import DeepSpeedCPUAdam
>>> optimizer = DeepSpeedCPUAdam(model.parameters(), lr=1e-4, weight_decay=0.01)
"""

from __future__ import annotations

from typing import Any, Dict, List, Tuple

from ..._buffers import truth
from ..._tensors import check_betas, not_negative, number
from .._cpu_optimizer import CPUOptimizer, refuse_amsgrad

__all__ = ["CPUAdamBuilder", "DeepSpeedCPUAdam"]


class DeepSpeedCPUAdam(CPUOptimizer):
    """AdamW, or Adam, over parameters in host memory.

    model_params: parameters or groups of them, float32, bfloat16 or float16; gradients of any of the three types.
    adamw_mode: weight decay apart from the gradient (AdamW); False adds it to the gradient (Adam, L2).
    bias_correction: False leaves the moments as they are.
    fp32_optimizer_states: False keeps the moments in the parameter's type, half the memory where that has 16 bits.
    amsgrad: refused.

    The arithmetic is fp32 throughout; 16-bit parameters are rounded at each step. bfloat16 moments are rounded
    stochastically where to nearest would never let them decay. The state holds ``step`` (a number), ``exp_avg`` and
    ``exp_avg_sq``, as DeepSpeed's. Raises ValueError, TypeError for what cannot be served, before anything is changed.
    """

    optimizer_id = 0
    _kind = "adam"
    _states = (("exp_avg", "m"), ("exp_avg_sq", "v"))

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: Tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        refuse_amsgrad(amsgrad, "DeepSpeedCPUAdam")
        not_negative(lr, "learning rate")
        not_negative(eps, "epsilon value")
        not_negative(weight_decay, "weight_decay value")
        check_betas(betas)
        self.adam_w_mode = truth(adamw_mode, "adamw_mode")
        defaults = dict(
            lr=lr, betas=betas, eps=eps, weight_decay=weight_decay,
            bias_correction=truth(bias_correction, "bias_correction"), amsgrad=False,
        )  # fmt: skip
        super().__init__(model_params, defaults, fp32_optimizer_states)
        self.opt_id = DeepSpeedCPUAdam.optimizer_id
        DeepSpeedCPUAdam.optimizer_id += 1

    def __setstate__(self, state: Dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("amsgrad", False)
            group.setdefault("bias_correction", True)

    def _numbers(self, group: Dict[str, Any]) -> List[float]:
        refuse_amsgrad(group.get("amsgrad"), "DeepSpeedCPUAdam")
        beta1, beta2 = group["betas"]
        return [
            number(group["lr"], "lr"), number(beta1, "beta1"), number(beta2, "beta2"), number(group["eps"], "eps"),
            number(group["weight_decay"], "weight_decay"), float(self.adam_w_mode), float(group.get("bias_correction", True)),
        ]  # fmt: skip


class CPUAdamBuilder:
    """DeepSpeed's builder of this operator: there is nothing to build."""

    NAME = "cpu_adam"

    def is_compatible(self, verbose: bool = False) -> bool:
        """True."""
        return True
