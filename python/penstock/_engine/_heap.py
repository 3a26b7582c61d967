"""Memory that was freed and that the C library keeps: given back before the process grows by too much of it.

torch's tensors come from malloc, and what lies between freed ones keeps glibc from giving these back: beside an engine a heap grows to
several times what is in use. A process that was given a budget may not.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import Any

# What may be kept beyond the most that was in use: giving it back means to fault it in again, so it is some of what torch takes anyhow.
# With 2 for 8 a step took a fifth longer than with nothing given back, with 8 a twelfth. Of a small budget it is at most the half, but
# what a block's tensors take in any case.
_SLACK, _LEAST_SLACK = 64 << 20, 16 << 20  # bytes
_SLACK_OF_USED = 8  # and of what torch has taken since the engine was made, so many times


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    ]


class Heap:
    """Looked at where a block begins: a look costs some microseconds, and giving back some milliseconds.

    budget: bytes of host memory that the engine was given; 0: no bound.
    """

    def __init__(self, budget: int) -> None:
        libc: Any = None
        with contextlib.suppress(OSError):
            libc = ctypes.CDLL(None)
        self._trim = getattr(libc, "malloc_trim", None)  # glibc's; another allocator has its own ways
        self._mallinfo = getattr(libc, "mallinfo2", None)  # since glibc 2.33
        if self._mallinfo is not None:
            self._mallinfo.restype = _Mallinfo2
        self._page = os.sysconf("SC_PAGE_SIZE")
        self._base = self._used()
        self._most = 0  # of the process's own memory, without what was kept
        self._least = max(_LEAST_SLACK, min(_SLACK, budget // 2)) if budget else _SLACK
        self._slack = self._least

    def look(self) -> bool:
        """Gives back what is kept, where that is much. Whether it was."""
        if self._trim is None or self._own() <= self._most + self._slack:
            return False
        self._trim(0)
        self._most = max(self._most, self._own())
        self._slack = max(self._slack, self._least + _SLACK_OF_USED * (self._used() - self._base))
        return True

    # Bytes that malloc has given to anybody.
    def _used(self) -> int:
        if self._mallinfo is None:
            return 0
        info = self._mallinfo()
        return int(info.uordblks + info.hblkhd)

    # Bytes in memory, without what the process shares with files, which the kernel takes back itself.
    def _own(self) -> int:
        with open("/proc/self/statm", "rb", buffering=0) as file:
            words = file.read(256).split()
        return (int(words[1]) - int(words[2])) * self._page
