"""``import penstock.deepspeed as deepspeed``: DeepSpeed's calls, answered by Penstock.

From here on ``import deepspeed`` finds the same, for transformers and accelerate as well. Import it before them: they look once.
"""

from __future__ import annotations

import os
import sys
from typing import Any

_SHIM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_shim")


def install() -> None:
    """Puts the shim before everything else on sys.path. Raises RuntimeError where DeepSpeed itself was imported already."""
    known = sys.modules.get("deepspeed")
    if known is not None and not str(getattr(known, "__file__", "")).startswith(_SHIM):
        raise RuntimeError("deepspeed was imported already: import penstock.deepspeed before it")
    if _SHIM not in sys.path:
        sys.path.insert(0, _SHIM)


install()
import deepspeed as _shim  # noqa: E402


def __getattr__(name: str) -> Any:
    return getattr(_shim, name)
