"""DeepSpeed's asynchronous file I/O (``deepspeed.ops.aio``) over Penstock's engine.

>>> from penstock.ops.aio import aio_handle
>>> handle = aio_handle(block_size=1 << 20, queue_depth=32)
>>> handle.sync_pwrite(tensor, "/nvme/weights.bin")            # 1
>>> handle.async_pread(other, "/nvme/weights.bin")             # 0
>>> handle.wait()                                              # 1
"""

from ._handle import AsyncIOBuilder, PinMemoryBuilder, aio_handle, aio_read, aio_write, deepspeed_memcpy, pin_handle

__all__ = ["AsyncIOBuilder", "PinMemoryBuilder", "aio_handle", "aio_read", "aio_write", "deepspeed_memcpy", "pin_handle"]
