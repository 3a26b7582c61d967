"""What the optimizers ask of parameters and gradients, and how they are called in errors. Imports torch."""

from __future__ import annotations

from typing import Any, Dict, Optional

import torch

# The element types of parameters, gradients and states, as the extension calls them.
DTYPES: Dict[torch.dtype, str] = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def name_of(groups: Any, group_index: int, index: int) -> str:
    """How a parameter is called in errors: by its name where the group has names, else by its place."""
    group = groups[group_index]
    names = group.get("param_names")
    tensor = group["params"][index]
    what = f"parameter {names[index]!r}" if names else f"parameter {index} of group {group_index}"
    return f"{what} (shape {tuple(tensor.shape)})"


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill one run of memory, in whatever order of dimensions: no gaps, no element twice."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((st, si) for si, st in zip(tensor.shape, tensor.stride()) if si != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def in_layout_of(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of it, with its elements in memory in the order of `like`, which is dense."""
    if tensor.stride() == like.stride() or (tensor.is_contiguous() and like.is_contiguous()):
        return tensor
    return torch.empty_like(like, dtype=tensor.dtype, device=tensor.device, memory_format=torch.preserve_format).copy_(tensor)


def check_parameter(parameter: torch.Tensor, name: str, who: str, of_devices: bool = False) -> None:
    """TypeError or ValueError, with the way out, unless the kernels can update this parameter in its place.

    of_devices: parameters on a CUDA device are served.
    """
    if parameter.layout != torch.strided:
        raise ValueError(f"{name} has the layout {parameter.layout}: {who} updates dense parameters only")
    if parameter.dtype not in DTYPES:
        raise TypeError(
            f"{name} is {parameter.dtype}: {who} updates float32, bfloat16 and float16; give others to torch.optim, in an "
            "optimizer of their own"
        )
    if parameter.device.type == "meta":
        raise ValueError(f"{name} is on the meta device, where it has no values; load or initialise the model first")
    if parameter.device.type not in (("cpu", "cuda") if of_devices else ("cpu",)):
        places = "in host memory or on a CUDA device" if of_devices else "in host memory"
        raise ValueError(
            f"{name} is on {parameter.device}: {who} updates parameters {places}; keep them on 'cpu' (copies for the "
            "device can be made of them), or give these to torch.optim"
        )
    if not is_dense(parameter):
        raise ValueError(
            f"{name} has gaps or shares elements (strides {tuple(parameter.stride())}): it cannot be updated in its place; "
            "give the optimizer the tensor that it is a view of"
        )
    if parameter.numel() != 0 and parameter.data_ptr() == 0:
        raise ValueError(f"{name} has no memory (a fake tensor, or one whose storage was freed)")


def check_gradient(gradient: torch.Tensor, parameter: torch.Tensor, name: str, who: str) -> None:
    """TypeError or ValueError, with the way out, unless this is a gradient that the kernels read."""
    if gradient.layout != torch.strided:
        raise ValueError(
            f"the gradient of {name} has the layout {gradient.layout}: {who} wants dense gradients; use sparse=False in the "
            "embedding, or give this parameter to torch.optim.SparseAdam"
        )
    if gradient.device != parameter.device:
        raise ValueError(f"the gradient of {name} is on {gradient.device}, the parameter on {parameter.device}")
    if gradient.dtype not in DTYPES:
        raise TypeError(f"the gradient of {name} is {gradient.dtype}: {who} reads float32, bfloat16 and float16")
    if gradient.shape != parameter.shape:
        raise ValueError(f"the gradient of {name} has the shape {tuple(gradient.shape)}")


def mark_changed(parameter: torch.Tensor) -> None:
    """Tells autograd that the values were changed in place, so that a stale graph is an error and not a wrong number."""
    increment = getattr(torch.autograd.graph, "increment_version", None)
    if increment is not None:
        increment(parameter)
    else:
        parameter.mul_(1)


def number(value: Any, name: str) -> float:
    """The value of a hyperparameter, which may be a tensor of one element."""
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name} must be a number, not {value!r}") from None


def not_negative(value: Any, name: str) -> None:
    """ValueError unless the number is 0 or more (a NaN is not)."""
    if not number(value, name) >= 0.0:
        raise ValueError(f"Invalid {name}: {value}")


def check_betas(betas: Any) -> None:
    """ValueError unless these are two numbers of [0, 1)."""
    try:
        beta1, beta2 = betas
    except (TypeError, ValueError):
        raise ValueError(f"betas must be two numbers, not {betas!r}") from None
    for index, beta in enumerate((beta1, beta2)):
        if not 0.0 <= number(beta, f"betas[{index}]") < 1.0:
            raise ValueError(f"Invalid beta parameter at index {index}: {beta}")


def threads(given: Optional[int] = None) -> int:
    """Threads for the kernels: torch's, unless told otherwise."""
    return torch.get_num_threads() if given is None else given
