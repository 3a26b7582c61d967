from typing import Any, List, Optional, Sequence

from penstock._deepspeed import logger as logger
from penstock._deepspeed import safe_get_full_fp32_param as safe_get_full_fp32_param
from penstock._deepspeed import safe_get_full_grad as safe_get_full_grad
from penstock._deepspeed import safe_get_full_optimizer_state as safe_get_full_optimizer_state
from penstock._deepspeed import safe_set_full_fp32_param as safe_set_full_fp32_param
from penstock._deepspeed import safe_set_full_optimizer_state as safe_set_full_optimizer_state

from ..comm import get_rank
from . import groups as groups


def is_initialized() -> bool:
    return True


def log_dist(message: str, ranks: Optional[Sequence[int]] = None, level: int = 20) -> None:
    """A line of the log, from these ranks (-1, or none named: all)."""
    if not ranks or -1 in ranks or get_rank() in ranks:
        logger.log(level, message)


def set_z3_leaf_modules(model: Any, leaf_module_classes: Any) -> List[Any]:
    """Nothing to do: blocks are fetched whole, with the experts in them."""
    return []
