"""DeepSpeed's Adam and AdamW on the CPU (``deepspeed.ops.adam``) over Penstock's kernels.

>>> from penstock.ops.adam import DeepSpeedCPUAdam
>>> optimizer = DeepSpeedCPUAdam(model.parameters(), lr=1e-4, weight_decay=0.01)
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Tuple

import torch

from ..._buffers import truth
from ..._tensors import check_betas, check_gradient, check_parameter, in_layout_of, mark_changed, not_negative, number
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

    @torch.no_grad()
    def step_subgroup(self, subgroup_id: int, closure: Optional[Callable[[], Any]] = None) -> Any:
        """DeepSpeed's: updates the parameters that have gradients, with the states kept under ``subgroup_id``.

        One parameter has a gradient then, as in SuperOffload, which hands over a subgroup at a time.
        """
        loss = _computed(closure)
        for group, p in self._of_subgroup(subgroup_id):
            state = self.state[subgroup_id]
            self._make_state(state, p)
            state["step"] += 1
            self._update(group, state, p, in_layout_of(p.grad, p), state)
            mark_changed(p)
        return loss

    @torch.no_grad()
    def rollback_subgroup(self, sub_group_id: int, closure: Optional[Callable[[], Any]] = None) -> Any:
        """DeepSpeed's: takes the last ``step_subgroup`` back, by the gradients that it was made with; of float32 AdamW, within rounding.

        RuntimeError where no step was made. As DeepSpeed's it divides by what the weight decay multiplied by, and makes 0 of what is
        no number then.
        """
        loss = _computed(closure)
        state = self.state[sub_group_id] if sub_group_id in self.state else {}
        if not state:
            raise RuntimeError(f"Cannot rollback optimizer state for sub_group_id {sub_group_id} as it has not been initialized.")
        if state.get("step", 0) <= 0:
            raise RuntimeError(f"Cannot rollback sub_group_id {sub_group_id}: step count is {state.get('step', 0)}")
        for group, p in self._of_subgroup(sub_group_id):
            kinds = {p.dtype, p.grad.dtype, state["exp_avg"].dtype, state["exp_avg_sq"].dtype}
            if kinds != {torch.float32} or not self.adam_w_mode or not group.get("bias_correction", True):
                raise ValueError("rollback_subgroup takes back steps of AdamW (adamw_mode and bias_correction) over float32 alone")
            m, v, gradient, step = state["exp_avg"], state["exp_avg_sq"], p.grad, state["step"]
            beta1, beta2 = group["betas"]
            denominator = (v / (1 - beta2**step)).sqrt_().add_(group["eps"])
            p.addcdiv_(m, denominator, value=group["lr"] / (1 - beta1**step))
            p.div_(1 - group["lr"] * group["weight_decay"])
            p.copy_(torch.where(torch.isfinite(p), p, torch.zeros_like(p)))
            m.sub_(gradient, alpha=1 - beta1).div_(beta1)
            v.addcmul_(gradient, gradient, value=beta2 - 1).div_(beta2).clamp_(min=0)
            state["step"] -= 1
        return loss

    def _of_subgroup(self, number: int) -> List[Tuple[Dict[str, Any], torch.Tensor]]:
        found = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        if len(found) > 1:
            raise ValueError(f"subgroup {number}: {len(found)} parameters have gradients, and a subgroup is one")
        for _, p in found:
            check_parameter(p, f"the parameter of subgroup {number}", type(self).__name__)
            check_gradient(p.grad, p, f"the parameter of subgroup {number}", type(self).__name__)
        return found

    def _numbers(self, group: Dict[str, Any]) -> List[float]:
        refuse_amsgrad(group.get("amsgrad"), "DeepSpeedCPUAdam")
        beta1, beta2 = group["betas"]
        return [
            number(group["lr"], "lr"), number(beta1, "beta1"), number(beta2, "beta2"), number(group["eps"], "eps"),
            number(group["weight_decay"], "weight_decay"), float(self.adam_w_mode), float(group.get("bias_correction", True)),
        ]  # fmt: skip


def _computed(closure: Optional[Callable[[], Any]]) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class CPUAdamBuilder:
    """DeepSpeed's builder of this operator: there is nothing to build."""

    NAME = "cpu_adam"

    def is_compatible(self, verbose: bool = False) -> bool:
        """True, verbose or not: that changes nothing."""
        return True

    def load(self, verbose: bool = False) -> Any:
        raise NotImplementedError("CPUAdamBuilder.load is not served: DeepSpeedCPUAdam has the operator's updates, step_subgroup among them")
