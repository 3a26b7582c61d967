"""What a buffer is: an address, its bytes, and an object that keeps both valid.

A tensor never passes into the extension. torch is not imported here: who hands over a tensor has imported it.
"""

from __future__ import annotations

import ctypes
import math
import operator
import os
import sys
from dataclasses import dataclass
from typing import Any, Union

from . import _core

PathLike = Union[str, bytes, "os.PathLike[str]", "os.PathLike[bytes]"]

MAX_OFFSET = 2**63 - 1


@dataclass(frozen=True)
class Memory:
    """``nbytes`` bytes of host memory at ``address``, valid as long as ``owner`` is referenced."""

    address: int
    nbytes: int
    owner: Any

    def view(self) -> memoryview:
        """The bytes themselves."""
        if self.nbytes == 0:
            return memoryview(b"")
        return memoryview((ctypes.c_char * self.nbytes).from_address(self.address)).cast("B")


def is_tensor(value: Any) -> bool:
    """Whether this is a torch.Tensor; False where torch was never imported."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def check_tensor(tensor: Any, what: str) -> None:
    """ValueError, with the way out, unless the tensor is dense, contiguous and in host memory."""
    torch = sys.modules["torch"]
    if tensor.layout != torch.strided:
        raise ValueError(f"{what} has the layout {tensor.layout}: only dense tensors have bytes; use {what}.to_dense()")
    if tensor.device.type == "meta":
        raise ValueError(f"{what} is on the meta device, where a tensor has no memory; use torch.empty_like(..., device='cpu')")
    if tensor.device.type != "cpu":
        raise ValueError(
            f"{what} is on {tensor.device}: only host memory is served; use {what}.cpu(), or copy_() between it and a "
            "tensor from new_cpu_locked_tensor()"
        )
    if not tensor.is_contiguous():
        raise ValueError(
            f"{what} is not contiguous (shape {tuple(tensor.shape)}, strides {tuple(tensor.stride())}): a copy would lose "
            f"what is read into it; use {what}.contiguous() and copy back"
        )


def memory_of(buffer: Any, what: str = "buffer", writable: bool = False) -> Memory:
    """Address and bytes of a torch tensor (any dtype) or a numpy array.

    buffer: contiguous, in host memory, of any shape.
    writable: data will be read into it.
    Raises ValueError (not contiguous, not in host memory, read-only) and TypeError (no tensor, no array, objects).
    """
    if is_tensor(buffer):
        check_tensor(buffer, what)
        # With its storage: the tensor may be given another one (set_(), .data = ...) while bytes are on their way.
        storage = buffer.untyped_storage() if hasattr(buffer, "untyped_storage") else buffer.storage()
        return Memory(buffer.data_ptr(), buffer.numel() * buffer.element_size(), (buffer, storage))
    interface = getattr(buffer, "__array_interface__", None)
    if not isinstance(interface, dict):
        raise TypeError(f"{what} must be a torch tensor or a numpy array, not {type(buffer).__name__}")
    if buffer.dtype.hasobject:
        raise TypeError(f"{what} is an array of Python objects (dtype {buffer.dtype}), which are no bytes")
    if not buffer.flags.c_contiguous:
        raise ValueError(f"{what} is not contiguous; use numpy.ascontiguousarray() and copy back")
    address, read_only = interface["data"]
    if writable and read_only:
        raise ValueError(f"{what} is a read-only array: nothing can be read into it")
    return Memory(address, buffer.nbytes, buffer)


def whole_number(value: Any, name: str, least: int, most: int = MAX_OFFSET) -> int:
    """The value as an int of [least, most]; TypeError for what is no whole number, ValueError outside."""
    if isinstance(value, (str, bytes, float, bool)):
        raise TypeError(f"{name} must be a whole number, not {value!r}")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, not {type(value).__name__}") from None
    if not least <= number <= most:
        raise ValueError(f"{name} is {shown(number)}, must be from {least} to {most}")
    return number


def shown(number: int) -> str:
    """A whole number for an error's line; Python spells none of thousands of digits."""
    return str(number) if number.bit_length() <= 128 else f"a number of {number.bit_length()} bits"


def truth(value: Any, name: str) -> bool:
    """The value as a bool; TypeError for anything but True and False (the text "false" is true in Python)."""
    if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool"):
        return bool(value)
    raise TypeError(f"{name} must be True or False, not {value!r}")


def byte_size(value: Any, name: str, least: int = 0) -> int:
    """Bytes from a number, or from a text as the command line takes it: "512MiB", "4GB" (4 * 10^9), "1e9". ValueError: it is none, or less than
    least.
    """
    if isinstance(value, str):
        try:
            size = int(_core.parse_size(value))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    else:
        if isinstance(value, float):
            if not math.isfinite(value) or value != int(value):
                raise TypeError(f"{name} is {value!r}: bytes are whole")
            value = int(value)
        size = whole_number(value, name, 0 if least == 0 else -MAX_OFFSET)
    if size < least:
        bound = "above 0" if least == 1 else f"of {least} bytes or more"
        raise ValueError(f"{name} is {value}: must be a size {bound}, as '512MiB' or '4GiB'")
    return size
