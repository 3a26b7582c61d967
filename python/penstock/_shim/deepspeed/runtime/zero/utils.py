from typing import Any


def is_zero_param(parameter: Any) -> bool:
    """Whether an engine has it."""
    return hasattr(parameter, "ds_id")
