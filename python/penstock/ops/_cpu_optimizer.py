"""What DeepSpeed's CPU optimizers have in common: states in host memory, updates by the kernels, by address."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch

from .. import _core
from .._buffers import truth
from .._tensors import DTYPES, check_gradient, check_parameter, in_layout_of, is_dense, mark_changed, name_of, threads


class CPUOptimizer(torch.optim.Optimizer):
    """A torch.optim.Optimizer over parameters in host memory: float32, bfloat16 or float16."""

    _kind = ""
    _kept = ("fp32_optimizer_states", "adam_w_mode", "opt_id")  # what torch's pickle would forget
    _states: Tuple[Tuple[str, str], ...] = ()  # (key of the state, which of the kernels' it is: "m" or "v")

    def __init__(self, params: Any, defaults: Dict[str, Any], fp32_optimizer_states: bool) -> None:
        self.fp32_optimizer_states = truth(fp32_optimizer_states, "fp32_optimizer_states")
        super().__init__(params, defaults)

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        """Adds a group; ValueError or TypeError for a parameter that cannot be served, with nothing added."""
        super().add_param_group(param_group)
        try:
            group = len(self.param_groups) - 1
            for index, p in enumerate(self.param_groups[group]["params"]):
                check_parameter(p, name_of(self.param_groups, group, index), type(self).__name__)
        except Exception:
            del self.param_groups[-1]
            raise

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Loads a state_dict() of this optimizer, of DeepSpeed's or of torch.optim's; states keep their precision."""
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        given = [(p, state_dict["state"][index]) for index, p in zip(saved, parameters) if index in state_dict["state"]]
        for p, state in given:
            for key, _ in self._states:
                if key not in state:
                    raise ValueError(f"the state that was given has no {key!r}: it is not of {type(self).__name__}")
                if state[key].shape != p.shape:
                    raise ValueError(f"{key!r} has the shape {tuple(state[key].shape)}, its parameter {tuple(p.shape)}")
        super().load_state_dict(state_dict)
        # torch has cast the states to the type of their parameter: the moments of bfloat16 would have lost bits.
        for p, state in given:
            for key, _ in self._states:
                kept = torch.empty_like(p, dtype=self._state_dtype(p), memory_format=torch.preserve_format)
                self.state[p][key] = kept.copy_(state[key])
            self.state[p]["step"] = int(state.get("step", 0))

    def __getstate__(self) -> Dict[str, Any]:
        return {**super().__getstate__(), **{key: self.__dict__[key] for key in self._kept if key in self.__dict__}}

    def _numbers(self, group: Dict[str, Any]) -> List[float]:
        """The group's hyperparameters in the extension's order."""
        raise NotImplementedError

    def _state_dtype(self, p: torch.Tensor) -> torch.dtype:
        return torch.float32 if self.fp32_optimizer_states else p.dtype

    def _make_state(self, state: Dict[str, Any], p: torch.Tensor) -> None:
        if len(state) == 0:
            state["step"] = 0
            for key, _ in self._states:
                state[key] = torch.zeros_like(p, dtype=self._state_dtype(p), memory_format=torch.preserve_format)

    def _update(
        self,
        group: Dict[str, Any],
        state: Dict[str, Any],
        p: torch.Tensor,
        gradient: torch.Tensor,
        states: Dict[str, torch.Tensor],
        copy: Optional[torch.Tensor] = None,
    ) -> None:
        addresses = {which: states[key].data_ptr() for key, which in self._states}
        state_type = DTYPES[states[self._states[0][0]].dtype]
        extra = {} if copy is None else {"copy_out": copy.data_ptr(), "copy_type": DTYPES[copy.dtype]}
        _core.update(
            self._kind, self._numbers(group), state["step"], 1.0, p.numel(), p.data_ptr(), DTYPES[p.dtype],
            gradient.data_ptr(), DTYPES[gradient.dtype], addresses.get("m", 0), addresses.get("v", 0), state_type,
            threads=threads(), **extra,
        )  # fmt: skip

    @torch.no_grad()
    def step(self, closure: Optional[Callable[[], Any]] = None, fp16_param_groups: Optional[Sequence[Any]] = None) -> Any:
        """Updates all parameters that have gradients.

        closure: computes the loss anew and returns it; its loss is returned.
        fp16_param_groups: for each group a list of tensors in bfloat16 or float16, which take the new values of the
        float32 parameters, on whatever device they are.
        Raises ValueError, TypeError for what cannot be updated; parameters before it in order were updated then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        copies: Any = fp16_param_groups
        if copies is not None and copies and isinstance(copies[0], torch.Tensor):
            copies = [copies]  # DeepSpeed takes the only group's list as well
        # All is looked at before anything is changed.
        work = []
        for group_index, group in enumerate(self.param_groups):
            if copies is not None and len(copies[group_index]) != len(group["params"]):
                raise ValueError(f"fp16_param_groups[{group_index}] has {len(copies[group_index])} tensors for {len(group['params'])}")
            for index, p in enumerate(group["params"]):
                if p.grad is None:
                    continue
                name = name_of(self.param_groups, group_index, index)
                check_parameter(p, name, type(self).__name__)
                if p.grad.layout == torch.strided or not self._sparse_ok(p, group):
                    check_gradient(p.grad, p, name, type(self).__name__)
                copy = None if copies is None else copies[group_index][index]
                if copy is not None and (copy.shape != p.shape or copy.dtype not in DTYPES):
                    raise ValueError(f"the copy of {name} is {copy.dtype} with shape {tuple(copy.shape)}")
                work.append((group, p, name, copy))
        for group, p, name, copy in work:
            if p.numel() == 0:
                continue
            state = self.state[p]
            self._make_state(state, p)
            for key, _ in self._states:  # a caller that put a state there may have put any tensor
                if not is_dense(state[key]) or state[key].dtype not in DTYPES:
                    raise ValueError(f"the state {key!r} of {name} is {state[key].dtype} with strides {state[key].stride()}")
                state[key] = in_layout_of(state[key], p)
            state["step"] = int(state["step"]) + 1
            if p.grad.layout != torch.strided:
                self._update_sparse(group, state, p)
            else:
                # The kernel itself can round the new values to 16 bits, beside the parameter in host memory.
                beside = (
                    copy is not None and p.dtype == torch.float32 and copy.dtype != torch.float32
                    and copy.device.type == "cpu" and copy.stride() == p.stride()
                )  # fmt: skip
                gradient = in_layout_of(p.grad, p)
                self._update(group, state, p, gradient, state, copy if beside else None)
                if beside:
                    copy = None
            mark_changed(p)
            if copy is not None:
                copy.copy_(p)
        return loss

    def _sparse_ok(self, p: torch.Tensor, group: Dict[str, Any]) -> bool:
        return False

    def _update_sparse(self, group: Dict[str, Any], state: Dict[str, Any], p: torch.Tensor) -> None:
        raise NotImplementedError


def refuse_amsgrad(amsgrad: Any, who: str) -> None:
    """ValueError where amsgrad is asked for, which DeepSpeed takes and ignores."""
    if amsgrad:
        raise ValueError(f"{who} has no amsgrad, nor has DeepSpeed's; use torch.optim.AdamW(amsgrad=True)")

