"""Ctrl-C at a moment when nothing is half done."""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import Any, Iterator, List, Tuple


_deferring: List[Tuple[Any, List[Any]]] = []  # handlers before, and what they have to hear, from outside inwards


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

    def hear(*arguments: Any) -> None:
        heard.append(arguments)

    signal.signal(signal.SIGINT, hear)
    _deferring.append((before, heard))
    try:
        yield
    finally:
        _deferring.pop()
        if signal.getsignal(signal.SIGINT) is hear:  # else what was computed within has set its own
            signal.signal(signal.SIGINT, before)
        if heard:
            before(*heard[0])


@contextlib.contextmanager
def not_deferred() -> Iterator[None]:
    """Within a deferred block: here KeyboardInterrupt comes at once, also one that has waited."""
    if threading.current_thread() is not threading.main_thread() or not _deferring:
        yield
        return
    defers = signal.getsignal(signal.SIGINT)
    before, heard = _deferring[-1]
    signal.signal(signal.SIGINT, before)
    try:
        if heard:
            before(*heard.pop(0))
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is before:
            signal.signal(signal.SIGINT, defers)
