"""The texts of all requests between an event loop and the LLM: in order, bounded in number, cancelled where nobody waits for them."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Callable, Deque, Dict, List, Optional, Tuple, Union

from ..llm import LLM, TextStream, TokenLogprob, _logprobs
from .metrics import Metrics

_PATIENCE = 3600.0  # seconds: a text that ends, is cancelled or loses its model wakes the thread that waits for it


@dataclass(frozen=True)
class Ended:
    """The end of a text: all of it, why it ended, and how many tokens it has. ``error``: it is not whole. The rest: as a part has it."""

    text: str = ""
    finish: str = ""
    tokens: int = 0
    error: Optional[Exception] = None
    logprobs: List[TokenLogprob] = field(default_factory=list)
    raw: bytes = b""


@dataclass(frozen=True)
class Part:
    """What is new of a text. ``logprobs``: of its tokens, where they were asked for; of an end, of those that no part had. ``raw``: then, all of
    the text so far.
    """

    text: str
    logprobs: List[TokenLogprob]
    raw: bytes


Event = Tuple[int, Union[Part, Ended]]


def _logprobs_within(made: Any, first: int) -> List[TokenLogprob]:
    """Without those of the tokens of a stop string, which are no part of the text."""
    entries = _logprobs(made, first)
    end = len(made.text)
    return [each for each in entries if each.begins < end] if made.finish == "stop" else entries


class Full(Exception):
    """As many texts wait as may."""


@dataclass(eq=False)
class _Text:
    request: "Texts"
    index: int
    prompt: List[int]
    options: Dict[str, Any]
    stream: Optional[TextStream] = field(default=None, repr=False)


class Engine:
    """The LLM as an event loop sees it. Its methods are called on the loop's thread.

    Each text in the LLM has a thread that waits for its parts. There are twice as many as the LLM makes at once, so that the next
    one is at hand when a text ends; those beyond wait here, and no more of them than ``queue``.
    """

    def __init__(self, llm: LLM, queue: int, metrics: Metrics) -> None:
        self.llm = llm
        self.most = 2 * llm.batch + queue
        self.broken: Optional[Exception] = None
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._places = 2 * llm.batch
        self._threads = ThreadPoolExecutor(self._places, "penstock-text")
        self._waiting: Dict[_Text, None] = {}
        self._inside = 0
        self._admitted = 0
        self._requests: Dict["Texts", None] = {}

    @property
    def running(self) -> int:
        return min(self._inside, self.llm.batch)

    @property
    def waiting(self) -> int:
        return self._admitted - self.running

    def admit(self, count: int) -> "Texts":
        """Takes places for the texts of a request, until each has ended. Full: too few are free."""
        if self._admitted + count > self.most:
            raise Full()
        self._admitted += count
        request = Texts(self, count)
        self._requests[request] = None
        return request

    def cancel_all(self, why: str) -> None:
        for request in list(self._requests):
            request.cancel(why)

    def close(self) -> None:
        """Waits until the pass that computes is over."""
        self.llm.close()
        self._threads.shutdown()

    def _fill(self) -> None:
        while self._waiting and self._inside < self._places:
            text = next(iter(self._waiting))
            del self._waiting[text]
            self._inside += 1
            self._threads.submit(self._make, text)

    def _make(self, text: _Text) -> None:
        """On a thread: the text, from its prompt to its end."""
        request = text.request
        try:
            made = self.llm._core.submit(text.prompt, **text.options)
            text.stream = stream = TextStream(made, len(text.prompt), _PATIENCE)
            if request.cancelled:
                made.cancel()
            first = True
            given = 0  # log-probabilities
            asked = text.options["logprobs"] is not None
            for part in stream:
                if request.by_parts or first:
                    new = _logprobs_within(made, given) if asked and request.by_parts else []
                    given += len(new)
                    self._tell(request._part, text.index, Part(part, new, made.text if new else b""), time.monotonic() if first else None)
                first = False
            raw = made.text
            left = _logprobs_within(made, given) if asked else []
            ended = Ended(stream.text, stream.finish, len(made.tokens), None, left, raw if left else b"")
        except Exception as error:
            ended = Ended(error=error)
        self._tell(self._end, text, ended)

    def _tell(self, what: Callable[..., None], *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(what, *arguments)
        except RuntimeError:
            pass  # the loop has ended: nobody waits

    def _end(self, text: _Text, ended: Ended, inside: bool = True) -> None:
        self._inside -= inside
        self._admitted -= 1
        request = text.request
        if request.cancelled:
            self._metrics.cancelled += 1
        elif isinstance(ended.error, OSError):
            self.broken = ended.error  # the drive's: the LLM makes no text any more
        self._metrics.generated_tokens += ended.tokens
        request._end(text, ended)
        self._fill()


class Texts:
    """The texts of one request. ``cancelled``: "", or why they are not made any more. ``preparing``: what is cancelled with them."""

    def __init__(self, engine: Engine, count: int) -> None:
        self.cancelled = ""
        self.preparing: Optional["asyncio.Future[Any]"] = None
        self.by_parts = False
        self._engine = engine
        self._reserved = count  # places of texts that have not begun to wait
        self._left: Dict[_Text, None] = {}
        self._events: Deque[Event] = deque()
        self._news = asyncio.Event()
        self._since = time.monotonic()

    def start(self, prompts: List[List[int]], options: List[Dict[str, Any]], by_parts: bool) -> None:
        """A text for each prompt; they are as many as were admitted. by_parts: events have their parts too."""
        self.by_parts = by_parts
        if self.cancelled:
            return
        self._reserved = 0
        for index, (prompt, each) in enumerate(zip(prompts, options)):
            text = _Text(self, index, prompt, each)
            self._left[text] = None
            self._engine._waiting[text] = None
        self._engine._fill()

    async def events(self) -> List[Event]:
        """What is new: parts and ends by the text's number. Empty: all have ended, or they were cancelled."""
        while not self._events and self._left and not self.cancelled:
            self._news.clear()
            await self._news.wait()
        if self.cancelled:
            return []
        new = list(self._events)
        self._events.clear()
        return new

    def cancel(self, why: str) -> None:
        """Texts that wait give their places back at once, those under way with their next token."""
        if self.cancelled or (not self._left and not self._reserved):
            return
        self.cancelled = why
        if self.preparing is not None:
            self.preparing.cancel()
        self._release()
        for text in list(self._left):
            if text in self._engine._waiting:
                del self._engine._waiting[text]
                self._engine._end(text, Ended(), inside=False)
            elif text.stream is not None:
                text.stream._made.cancel()
        self._news.set()

    def close(self) -> None:
        """The request is over: what is left of it is cancelled."""
        self.cancel("closed")
        self._release()

    def _release(self) -> None:
        self._engine._admitted -= self._reserved
        self._reserved = 0
        if not self._left:
            self._engine._requests.pop(self, None)

    def _part(self, index: int, part: Part, first: Optional[float]) -> None:
        if first is not None:
            self._engine._metrics.first_token(first - self._since)
        if self.by_parts and not self.cancelled:
            self._events.append((index, part))
            self._news.set()

    def _end(self, text: _Text, ended: Ended) -> None:
        self._left.pop(text, None)
        self._events.append((text.index, ended))
        self._news.set()
        self._release()
