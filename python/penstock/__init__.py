"""Penstock: files on NVMe drives, for PyTorch.

``penstock.ops.aio``  DeepSpeed's ``aio_handle`` over Penstock's I/O engine

Nothing here imports torch: who hands over a tensor has imported it.
"""

from ._core import ShortFileError, __version__

__all__ = ["ShortFileError", "__version__"]
