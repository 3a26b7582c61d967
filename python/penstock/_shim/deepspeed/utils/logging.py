from typing import Any, Optional, Sequence

from penstock._deepspeed import logger as logger

from .._refused import attributes_of
from ..comm import get_rank
from . import log_dist as log_dist
from . import log_dist_once as log_dist_once
from . import log_levels as log_levels
from . import set_log_level_from_string as set_log_level_from_string


def warning_once(message: str, *args: Any) -> None:
    """A warning of the log, once for each text. args: what % puts into it."""
    log_dist_once(message % args if args else message, level=log_levels["warning"])


def print_dist(message: str, ranks: Optional[Sequence[int]] = None) -> None:
    """A line on the standard output, from these ranks (-1, or none named: all)."""
    if not ranks or -1 in ranks or get_rank() in ranks:
        print(f"[Rank {get_rank()}] {message}")


def get_current_level() -> int:
    return logger.getEffectiveLevel()


def should_log_le(max_log_level_str: str) -> bool:
    """Whether the log's level is this one, or below it."""
    return get_current_level() <= log_levels[max_log_level_str.lower()]


__getattr__ = attributes_of(__name__)
