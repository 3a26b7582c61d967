from typing import Any, Optional, Sequence, Set

from penstock._data_loader import RepeatingLoader as RepeatingLoader
from penstock._deepspeed import absent
from penstock._deepspeed import logger as logger
from penstock._deepspeed import safe_get_full_fp32_param as safe_get_full_fp32_param
from penstock._deepspeed import safe_get_full_grad as safe_get_full_grad
from penstock._deepspeed import safe_get_full_optimizer_state as safe_get_full_optimizer_state
from penstock._deepspeed import safe_set_full_fp32_param as safe_set_full_fp32_param
from penstock._deepspeed import safe_set_full_optimizer_state as safe_set_full_optimizer_state
from penstock._deepspeed_answers import CLIPPING

from .._refused import attributes_of
from ..comm import get_rank
from . import groups as groups
from .z3_leaf_module import get_z3_leaf_modules as get_z3_leaf_modules
from .z3_leaf_module import set_z3_leaf_module as set_z3_leaf_module
from .z3_leaf_module import set_z3_leaf_modules as set_z3_leaf_modules
from .z3_leaf_module import set_z3_leaf_modules_by_name as set_z3_leaf_modules_by_name
from .z3_leaf_module import set_z3_leaf_modules_by_suffix as set_z3_leaf_modules_by_suffix
from .z3_leaf_module import unset_z3_leaf_modules as unset_z3_leaf_modules
from .z3_leaf_module import z3_leaf_module as z3_leaf_module
from .z3_leaf_module import z3_leaf_parameter as z3_leaf_parameter

OnDevice = absent("deepspeed.utils.OnDevice", "penstock.init_on_disk builds a model that does not fit into memory")
safe_set_full_grad = absent("deepspeed.utils.safe_set_full_grad", f"gradients are the engine's: clip them by {CLIPPING}, scale the loss")
_FULL = "each process reads and writes whole values: the safe_get_full_ and safe_set_full_ of the same name"
safe_get_local_fp32_param = absent("deepspeed.utils.safe_get_local_fp32_param", _FULL)
safe_get_local_grad = absent("deepspeed.utils.safe_get_local_grad", _FULL)
safe_get_local_optimizer_state = absent("deepspeed.utils.safe_get_local_optimizer_state", _FULL)
safe_set_local_fp32_param = absent("deepspeed.utils.safe_set_local_fp32_param", _FULL)
safe_set_local_grad = absent("deepspeed.utils.safe_set_local_grad", _FULL)
safe_set_local_optimizer_state = absent("deepspeed.utils.safe_set_local_optimizer_state", _FULL)


def instrument_w_nvtx(function: Any) -> Any:
    """The function itself."""
    return function


def is_initialized() -> bool:
    return True


def log_dist(message: str, ranks: Optional[Sequence[int]] = None, level: int = 20) -> None:
    """A line of the log, from these ranks (-1, or none named: all)."""
    if not ranks or -1 in ranks or get_rank() in ranks:
        logger.log(level, message)


log_levels = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}
_told: Set[Any] = set()


def log_dist_once(message: str, ranks: Optional[Sequence[int]] = None, level: int = 20) -> None:
    """As log_dist, once for each message."""
    key = (message, None if ranks is None else tuple(ranks), level)
    if key not in _told:
        _told.add(key)
        log_dist(message, ranks, level)


def set_log_level_from_string(log_level_str: str, custom_logger: Any = None) -> None:
    """debug, info, warning, error or critical, of this log or another. ValueError: it is none of them."""
    if log_level_str.lower() not in log_levels:
        raise ValueError(f"{log_level_str} is no level of a log: {', '.join(log_levels)}")
    (custom_logger or logger).setLevel(log_levels[log_level_str.lower()])


__getattr__ = attributes_of(__name__)
