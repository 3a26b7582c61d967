"""Penstock: files on NVMe drives, for PyTorch.

``penstock.ops.aio``  DeepSpeed's ``aio_handle`` over Penstock's I/O engine
``penstock.optim``  torch optimizers whose states live on a drive
``penstock.ops.adam``, ``.adagrad``, ``.lion``  DeepSpeed's CPU optimizers over Penstock's kernels

``penstock`` and ``penstock.ops.aio`` import no torch: who hands over a tensor has imported it.
"""

from typing import Any

from ._core import ShortFileError, __version__

__all__ = ["ShortFileError", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "optim":  # imports torch, so only who asks for it does
        import importlib

        return importlib.import_module(".optim", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
