import gc
import resource
from typing import Any, Iterable, Union

import torch

from penstock._deepspeed import logger

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
    raise NotImplementedError("the gradients are the engine's, which clips them: gradient_clipping in the configuration, engine.get_global_grad_norm()")
