"""``import penstock.deepspeed as deepspeed``: DeepSpeed's calls, answered by Penstock.

From here on ``import deepspeed`` finds the same, for transformers and accelerate as well. Import it before them: they look once.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from typing import Any, Iterator, Optional

from ._lightning import watch_imports

_SHIM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_shim")


VERSION = "0.18.9+penstock"


class _Distribution(importlib.metadata.Distribution):
    """The answer to libraries that look for an installed package named deepspeed."""

    def read_text(self, filename: str) -> Optional[str]:
        if filename not in ("METADATA", "PKG-INFO"):
            return None
        return f"Metadata-Version: 2.1\nName: deepspeed\nVersion: {VERSION}\nSummary: Penstock under DeepSpeed's name\n"

    def locate_file(self, path: Any) -> Any:
        return os.path.join(_SHIM, path)


class _Finder:
    @staticmethod
    def find_spec(*_: Any) -> None:
        return None

    @staticmethod
    def find_distributions(context: Any = None) -> Iterator[_Distribution]:
        if context is None or getattr(context, "name", None) in (None, "deepspeed"):
            yield _Distribution()


def install() -> None:
    """Puts the shim before everything else on sys.path. Raises RuntimeError where DeepSpeed itself was imported already."""
    known = sys.modules.get("deepspeed")
    if known is not None and not str(getattr(known, "__file__", "")).startswith(_SHIM):
        raise RuntimeError("deepspeed was imported already: import penstock.deepspeed before it")
    if _SHIM not in sys.path:
        sys.path.insert(0, _SHIM)
    # By itself: a spawned worker has its parent's path already.
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)  # type: ignore[arg-type]
    watch_imports()


install()
import deepspeed as _shim  # noqa: E402


def __getattr__(name: str) -> Any:
    return getattr(_shim, name)
