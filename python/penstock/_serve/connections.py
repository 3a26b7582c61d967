"""Connections as they are accepted: how many there are, which one goes when there is one too many, and how much of one is taken in at once."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, Dict, Optional, Type

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

_MOST = 10_000
#: Accepted at once, at most. Those that are one too many are closed a few turns of the event loop later, so that the process never lacks a file
#: for the next one: asyncio then tells of each failed accept and goes on without a pause.
ACCEPTED_AT_ONCE = 16
_RESERVED = 128  # of the files that a process may have: for those, and for all that is no connection
_AT_ONCE = 1 << 14  # bytes of one connection before it is another's turn: the least chunks take 60 us each


def protocol(files: int) -> Type[H11Protocol]:
    """The protocol of one server's connections. files: as many as its process may have open.

    Where a connection comes that is one too many, the one that has waited longest for a whole request ends: neither those that ask nothing nor those
    that never finish asking keep anyone out. Those with a request under way stay; where all have one, the new connection ends.
    """
    most = max(1, min(_MOST, files - _RESERVED))
    waiting: Dict[Any, None] = {}  # for their next request, from the longest
    connected = 0

    class Connection(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            nonlocal connected
            connected += 1
            with contextlib.suppress(AttributeError):  # an event loop of another make
                transport.max_size = _AT_ONCE  # type: ignore[attr-defined]
            super().connection_made(transport)
            self._note()
            if connected > most:
                next(iter(waiting)).end()

        def connection_lost(self, exc: Optional[Exception]) -> None:
            nonlocal connected
            connected -= 1
            waiting.pop(self, None)
            super().connection_lost(exc)

        def handle_events(self) -> None:
            super().handle_events()
            self._note()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._note()

        def end(self) -> None:
            waiting.pop(self, None)
            self.transport.abort()

        def _note(self) -> None:
            if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
                waiting.setdefault(self)
            else:
                waiting.pop(self, None)

    return Connection
