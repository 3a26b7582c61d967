"""Models that are built larger than memory: parameters in files of a drive from the moment they are made."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import tempfile
import weakref
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from .._small_files import make_directory
from ._settings import PathLike

_LEAST = 4096  # bytes; smaller ones stay in memory
_CHUNK = 1 << 30  # of a file that has several
_RESIDENT = 64 << 20  # that may be written before pages are given back
_PAGEOUT = 21  # MADV_PAGEOUT: keeps the contents, whatever memory it is

_libc = ctypes.CDLL(None, use_errno=True)


class _Map(mmap.mmap):
    """A shared mapping of a file, which lives as long as any tensor in it."""

    begin: int
    used: int

    def holds(self, tensor: torch.Tensor) -> bool:
        return self.begin <= tensor.data_ptr() < self.begin + len(self)


_maps: "weakref.WeakSet[_Map]" = weakref.WeakSet()


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _map_of(tensor: torch.Tensor) -> Optional[_Map]:
    return next((each for each in _maps if each.holds(tensor)), None)


def is_on_disk(tensor: torch.Tensor) -> bool:
    """Whether its memory is a file's, just now."""
    return _map_of(tensor) is not None


def give_back(tensor: torch.Tensor) -> None:
    """The memory of a tensor that is on a drive, until somebody looks at it again."""
    within = _map_of(tensor)
    if within is not None:
        first = (tensor.data_ptr() - within.begin) // mmap.PAGESIZE * mmap.PAGESIZE
        within.madvise(mmap.MADV_DONTNEED, first, tensor.data_ptr() - within.begin - first + _bytes(tensor))


# A safetensors file's, which is mapped and was read.
def _page_out(tensor: torch.Tensor) -> None:
    begin = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    _libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(tensor.data_ptr() - begin + _bytes(tensor)), _PAGEOUT)


class _Files:
    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._last: Optional[_Map] = None
        self._handle = -1  # of the last one's file
        self._written: List[torch.Tensor] = []  # and not given back yet
        self._bytes = 0

    def take(self, parameter: Optional[nn.Parameter]) -> None:
        """Moves a parameter's values into a file, where they are of the kind that can be."""
        if parameter is None or type(parameter) is not nn.Parameter or is_on_disk(parameter):
            return
        data = parameter.data
        if type(data) is not torch.Tensor or data.device.type != "cpu" or data.layout != torch.strided or not data.is_contiguous():
            return
        if _bytes(data) < _LEAST:
            return
        place = self._place(_bytes(data)).view(data.dtype).view(data.shape)
        place.copy_(data)
        _page_out(data)
        parameter.data = place
        self._wrote(place)

    def wrote(self, tensor: torch.Tensor) -> None:
        """Counts the tensor's pages as in memory, if it is one of this class."""
        if is_on_disk(tensor):
            self._wrote(tensor)

    def _wrote(self, tensor: torch.Tensor) -> None:
        self._written.append(tensor.detach())
        self._bytes += _bytes(tensor)
        if self._bytes >= _RESIDENT:
            self.trim()

    def trim(self) -> None:
        for each in self._written:
            give_back(each)
        self._written, self._bytes = [], 0

    def _place(self, size: int) -> torch.Tensor:
        begin = 0 if self._last is None else (self._last.used + 63) // 64 * 64
        if self._last is None or begin + size > len(self._last):
            self._last, begin = self._map(max(size, _CHUNK)), 0
        os.posix_fallocate(self._handle, begin, size)  # or a full drive would be a signal later on
        self._last.used = begin + size
        return torch.frombuffer(self._last, dtype=torch.uint8, count=size, offset=begin)

    # Without a name: it goes with the last tensor that lies there.
    def _map(self, size: int) -> _Map:
        self.close()
        with tempfile.TemporaryFile(prefix=".penstock-init-", dir=self._directory) as file:
            self._handle = os.dup(file.fileno())
        os.ftruncate(self._handle, size)
        made = _Map(self._handle, size)
        made.begin, made.used = torch.frombuffer(made, dtype=torch.uint8, count=1).data_ptr(), 0
        _maps.add(made)
        return made

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
        self._handle, self._last = -1, None


@contextlib.contextmanager
def tensors_on_disk(directory: PathLike) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """A function from a tensor to one like it in a file of the directory, as init_on_disk's; to itself where that stays in memory."""
    files = _Files(os.fspath(directory))

    def place(tensor: torch.Tensor) -> torch.Tensor:
        held = nn.Parameter(tensor, requires_grad=False)
        files.take(held)
        return held.data

    try:
        yield place
    finally:
        files.trim()
        files.close()


class _Watch(TorchFunctionMode):
    """Sees what initialisation writes: functions that end in _, as torch's that change a tensor do."""

    def __init__(self, files: _Files) -> None:
        super().__init__()
        self._files = files

    def __torch_function__(self, func: Any, types: Any, args: Tuple[Any, ...] = (), kwargs: Optional[Dict[str, Any]] = None) -> Any:
        result = func(*args, **(kwargs or {}))
        first = next(iter(args or (kwargs or {}).values()), None)  # torch.nn.init's hand theirs over by name
        name = getattr(func, "__name__", "")
        if isinstance(first, torch.Tensor) and name.endswith("_") and not name.endswith("__"):
            with torch._C.DisableTorchFunction():
                if first.device.type == "cpu" and first.layout == torch.strided and _bytes(first) >= _LEAST:
                    self._files.wrote(first)
        return result


@contextlib.contextmanager
def init_on_disk(directory: PathLike) -> Iterator[None]:
    """Models that are built within have their parameters in ``directory`` instead of memory, and may be larger than it.

    For a constructor, transformers' ``from_config`` and ``from_pretrained``. Values are those of a plain build with the same seed,
    bit for bit. ``penstock.initialize(model=...)`` then takes them over tile by tile, and the files go; they have no names, so a kill
    leaves nothing.

    directory: on a drive with room for the parameters in the type that they are made in; made where it is missing. What the process
    holds of them at a time is about 64 MiB, besides the largest parameter, which is made in memory before it moves.

    Limits. Parameters of less than 4 KiB, buffers, and tensor subclasses stay in memory. Two parameters that are views of one tensor
    part: tie them by making them one. Give the type when the model is made (``dtype=``, ``torch.set_default_dtype``) or call
    ``.to(dtype)`` within: outside of this context it makes tensors in memory. Only this thread's models are watched.
    OSError: the drive is full.
    """
    make_directory(directory, "directory")
    files = _Files(os.fspath(directory))
    register, apply = nn.Module.register_parameter, nn.Module._apply
    # transformers would read parameters ahead, into memory.
    sequential = os.environ.get("HF_DEACTIVATE_ASYNC_LOAD")

    def register_parameter(module: nn.Module, name: str, param: Optional[nn.Parameter]) -> None:
        register(module, name, param)
        files.take(param)

    def _apply(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        result = apply(module, *args, **kwargs)
        for parameter in module._parameters.values():
            files.take(parameter)
        return result

    nn.Module.register_parameter, nn.Module._apply = register_parameter, _apply  # type: ignore[method-assign]
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"
    try:
        with _Watch(files):
            yield
    finally:
        nn.Module.register_parameter, nn.Module._apply = register, apply  # type: ignore[method-assign]
        if sequential is None:
            os.environ.pop("HF_DEACTIVATE_ASYNC_LOAD", None)
        else:
            os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = sequential
        files.trim()
        files.close()
