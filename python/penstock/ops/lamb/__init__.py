"""DeepSpeed's LAMB (``deepspeed.ops.lamb``) over torch's tensors, on whatever device they are.

>>> from penstock.ops.lamb import FusedLamb
>>> engine, *_ = penstock.initialize(model=model, optimizer=FusedLamb(model.parameters(), lr=1e-3), state_dir="/nvme/run")
"""

from __future__ import annotations

import math
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch

from ..._buffers import truth
from ..._deepspeed_answers import CLIPPING
from ..._tensors import check_betas, not_negative

__all__ = ["FusedLamb"]


class FusedLamb(torch.optim.Optimizer):
    """LAMB by DeepSpeed's formulas.

    params: parameters or groups of them. bias_correction: the factor ``sqrt(1 - beta2**t) / (1 - beta1**t)`` of the learning rate;
    False is 1. max_coeff, min_coeff: bounds of the trust ratio ``|p| / |u|`` of each parameter, which is 1 where either norm is 0.
    max_grad_norm, amsgrad, eps_inside_sqrt: refused.

    ``u = m / (sqrt(v) + eps) + weight_decay * p`` of the moments as they are, and ``p -= lr * ratio * u``. The state has ``step``,
    ``exp_avg`` and ``exp_avg_sq``, float32. Handed to ``penstock.initialize``, the engine makes its steps by the same formulas, with the
    state on a drive or in host memory. Raises ValueError for what cannot be served, before anything is changed.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: Tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        if amsgrad:
            raise ValueError("FusedLamb with amsgrad=True is not served")
        if eps_inside_sqrt:
            raise ValueError("FusedLamb with eps_inside_sqrt=True is not served: eps is added to the root")
        if max_grad_norm:
            raise ValueError(f"FusedLamb with a max_grad_norm is not served: {CLIPPING}, or torch.nn.utils.clip_grad_norm_")
        not_negative(lr, "learning rate")
        not_negative(eps, "epsilon value")
        not_negative(weight_decay, "weight_decay value")
        not_negative(min_coeff, "min_coeff")
        check_betas(betas)
        if not max_coeff >= min_coeff:
            raise ValueError(f"max_coeff {max_coeff} is below min_coeff {min_coeff}")
        super().__init__(
            params,
            dict(
                lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, bias_correction=truth(bias_correction, "bias_correction"),
                max_coeff=max_coeff, min_coeff=min_coeff,
            ),
        )  # fmt: skip
        self._coefficients: List[float] = []

    def get_lamb_coeffs(self) -> List[float]:
        """The trust ratios of the last step, parameter by parameter."""
        return list(self._coefficients)

    @torch.no_grad()
    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        """Updates all parameters that have gradients. closure: computes the loss anew and returns it; its loss is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._coefficients = [self._update(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        return loss

    def _update(self, group: Dict[str, Any], p: torch.Tensor) -> float:
        if p.grad.is_sparse:
            raise ValueError("FusedLamb does not support sparse gradients")
        state = self.state[p]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(p, dtype=torch.float32)
            state["exp_avg_sq"] = torch.zeros_like(p, dtype=torch.float32)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        gradient, value = p.grad.float(), p.float()
        m = state["exp_avg"].mul_(beta1).add_(gradient, alpha=1 - beta1)
        v = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        update = m / (v.sqrt() + group["eps"]) + group["weight_decay"] * value
        of_value, of_update = float(value.norm()), float(update.norm())
        ratio = min(max(of_value / of_update, group["min_coeff"]), group["max_coeff"]) if of_value != 0 and of_update != 0 else 1.0
        rate = group["lr"]
        if group["bias_correction"]:
            rate *= math.sqrt(1 - beta2 ** state["step"]) / (1 - beta1 ** state["step"])
        p.copy_(value - update * (rate * ratio))
        return ratio
