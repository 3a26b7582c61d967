import gc
import random
import resource
from typing import Any, Callable, Iterable, Optional, Union

import torch

from penstock._deepspeed import logger

from .._refused import GRADIENTS, attributes_of
from ..accelerator import get_accelerator
from ..comm import get_rank


def see_memory_usage(message: str, force: bool = False) -> None:
    """A line of the log, of the first rank: what the process has, and had at the most."""
    if not force or get_rank() != 0:
        return
    gc.collect()
    with open("/proc/self/statm", encoding="ascii") as file:
        resident = int(file.read().split()[1]) * resource.getpagesize()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    device = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    logger.info("%s: %.2f GB in memory, %.2f GB at the most; %.2f GB on the device", message, resident / 1e9, peak / 1e9, device / 1e9)


def clip_grad_norm_(parameters: Union[torch.Tensor, Iterable[torch.Tensor]], max_norm: float, *_: Any, **__: Any) -> float:
    raise NotImplementedError(GRADIENTS)


def _placed(item: Any, place: Callable[[torch.Tensor], Any], criterion: Optional[Callable[[Any], bool]]) -> Any:
    if criterion is not None and criterion(item):
        return place(item)
    if isinstance(item, (list, tuple)):
        return type(item)(_placed(each, place, criterion) for each in item)
    if isinstance(item, dict):
        return {key: _placed(each, place, criterion) for key, each in item.items()}
    return place(item) if criterion is None else item


def copy_to_device(item: Any, device: Any, criterion_func: Optional[Callable[[Any], bool]] = None) -> Any:
    """A copy on the device of a tensor, or of those in lists, tuples and dictionaries. criterion_func: which of them; None: all."""
    return _placed(item, lambda each: each.to(device), criterion_func)


def move_to_device(item: Any, device: Any, criterion_func: Optional[Callable[[Any], bool]] = None) -> Any:
    """As ``copy_to_device``; a tensor that criterion_func chooses stays the same object, with its values on the device."""

    def place(each: torch.Tensor) -> torch.Tensor:
        if criterion_func is None:
            return each.to(device)
        each.data = each.data.to(device)
        return each

    return _placed(item, place, criterion_func)


def set_random_seed(seed: int) -> None:
    """Of Python, numpy, torch and its devices."""
    import numpy

    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def empty_cache() -> None:
    get_accelerator().empty_cache()


def noop_decorator(function: Any) -> Any:
    """The function itself."""
    return function


__getattr__ = attributes_of(__name__)
