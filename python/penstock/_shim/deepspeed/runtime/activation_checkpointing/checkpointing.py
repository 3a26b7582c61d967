"""Nothing to do: every block is computed again in backward, whatever its forward calls."""

from typing import Any, Callable


def configure(*_: Any, **__: Any) -> None:
    """Taken, and of no effect."""


def is_configured() -> bool:
    return True


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)
