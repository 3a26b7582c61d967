"""Penstock: files on NVMe drives, for PyTorch.

``penstock.ops.aio``  DeepSpeed's ``aio_handle`` over Penstock's I/O engine
``penstock.ops.adam``, ``.adagrad``, ``.lion``  DeepSpeed's CPU optimizers over Penstock's kernels

``penstock`` and ``penstock.ops.aio`` import no torch: who hands over a tensor has imported it.
"""

from ._core import ShortFileError, __version__

__all__ = ["ShortFileError", "__version__"]
