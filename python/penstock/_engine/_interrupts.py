"""Ctrl-C at a moment when nothing is half done."""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import Any, Iterator, List


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """KeyboardInterrupt waits until the end of this block. Python hears signals in the main thread only: elsewhere nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    if not callable(before):
        yield
        return
    heard: List[Any] = []
    signal.signal(signal.SIGINT, lambda *arguments: heard.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if heard:
            before(*heard[0])
