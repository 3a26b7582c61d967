"""Penstock: files on NVMe drives, for PyTorch.

``penstock.initialize``  an engine for any torch module whose weights and states are larger than memory
``penstock.plan``  where every byte of such a training would live, and what a step would take, before anything is made
``penstock.init_on_disk``  builds such a model where it does not fit into memory
``penstock.init_without_values``  builds one whose weights are read where they lie, for adapters beside them
``penstock.LLM``  text from language models larger than memory
``penstock.ops.aio``  DeepSpeed's ``aio_handle`` over Penstock's I/O engine
``penstock.optim``  torch optimizers whose states live on a drive
``penstock.save``, ``penstock.load``  torch's files through the I/O engine, whole after any crash
``penstock.ops.adam``, ``.adagrad``, ``.lion``  DeepSpeed's CPU optimizers over Penstock's kernels

``penstock``, ``penstock.LLM`` and ``penstock.ops.aio`` import no torch: who hands over a tensor has imported it.
"""

from typing import TYPE_CHECKING, Any

from . import _core as _core
from ._core import ShortFileError, __version__

__all__ = ["ShortFileError", "__version__"]

if TYPE_CHECKING:  # what __getattr__ gives, for who reads types alone
    from . import optim as optim
    from ._engine._base_weights import init_without_values as init_without_values
    from ._engine._engine import Engine as Engine
    from ._engine._initialize import initialize as initialize
    from ._engine._on_disk import init_on_disk as init_on_disk
    from ._engine._plan import Plan as Plan, plan as plan
    from ._files import load as load, save as save
    from .llm import LLM as LLM


def __getattr__(name: str) -> Any:
    # Most of these import torch, so only who asks for one of them does.
    import importlib

    if name == "LLM":
        return importlib.import_module(".llm", __name__).LLM
    if name == "optim":
        return importlib.import_module(".optim", __name__)
    if name in ("Engine", "initialize"):
        return getattr(importlib.import_module("._engine._initialize" if name == "initialize" else "._engine._engine", __name__), name)
    if name in ("Plan", "plan"):
        return getattr(importlib.import_module("._engine._plan", __name__), name)
    if name == "init_on_disk":
        return getattr(importlib.import_module("._engine._on_disk", __name__), name)
    if name == "init_without_values":
        return getattr(importlib.import_module("._engine._base_weights", __name__), name)
    if name in ("load", "save"):
        return getattr(importlib.import_module("._files", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
