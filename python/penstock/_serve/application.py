"""The routes: who may ask, what is asked, and the answer that follows the texts as they are made."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, AsyncIterator, Callable, Dict, Iterator, List, MutableMapping, Optional, Set

import h11
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from ..llm import LLM
from . import forms
from .forms import Form, Refused
from .metrics import Metrics
from .template import Template
from .texts import Ended, Engine, Full, Texts

_ROUTES = ("/health", "/metrics", "/v1/chat/completions", "/v1/completions", "/v1/models")
_LEFT = 499  # a client that left; nobody reads it but /metrics
_BODIES = 16  # of the longest bodies, so many are in memory at once
_SHORT = 1 << 16  # bytes of a body that is not counted among the long ones, and characters that are made tokens without a thread


@dataclass(frozen=True)
class Settings:
    """The settings of a server: the name of its model, its key, and its bounds. ``host``: where it listens; seconds of 0 are no bound."""

    name: str
    host: str
    key: str
    queue: int
    max_body: int
    timeout: float


class Application:
    """An ASGI application over one LLM, which it closes at the end of its lifespan."""

    def __init__(self, llm: LLM, settings: Settings) -> None:
        self.metrics = Metrics()
        self._llm = llm
        self._settings = settings
        self._created = int(time.time())
        self._context = llm.max_length
        self._vocabulary = int(llm._core.vocabulary)
        self._defaults = llm._defaults
        self._encoder = ThreadPoolExecutor(1, "penstock-encode")
        self._engine: Optional[Engine] = None
        self._held = 0  # bytes of bodies that are read and become prompts
        self._reading: Set["asyncio.Future[bytes]"] = set()  # bodies
        self._stopping = False
        self._template = Template(llm._directory if llm._tokenizer is None else llm._tokenizer)
        self._routes = Starlette(
            routes=[
                Route("/health", self._health),
                Route("/metrics", self._tell_metrics),
                Route("/v1/models", self._models),
                Route("/v1/models/{model:path}", self._model),
                Route("/v1/completions", self._completions, methods=["POST"]),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
            ],
            exception_handlers={Refused: _answer_refused, HTTPException: _answer_http, Exception: _answer_error},
            lifespan=self._lifespan,
        )
        self._routes.router.redirect_slashes = False

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "the lifespan has not begun"
        return self._engine

    def stop(self) -> None:
        """Ends what is under way: their answer is that the server stops."""
        self._stopping = True
        for reading in list(self._reading):
            reading.cancel()
        self.engine.cancel_all("stopping")

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self._engine = Engine(self._llm, self._settings.queue, self.metrics)
        yield
        await self._template.close()
        self._engine.close()
        self._encoder.shutdown()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._routes(scope, receive, send)
            return
        status = _LEFT

        async def counted(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            try:
                await send(message)
            except h11.LocalProtocolError:  # bytes that are no HTTP have ended the connection
                await _left(Request(scope, receive))

        try:
            refused = self._who(Request(scope))
            if refused is None:
                await self._routes(scope, receive, counted)
            else:
                await _error(refused)(scope, receive, counted)
        finally:
            path = "/v1/models" if scope["path"].startswith("/v1/models/") else scope["path"]
            self.metrics.requests[path if path in _ROUTES else "other", status] += 1

    def _who(self, request: Request) -> Optional[Refused]:
        """Why this client gets no answer."""
        if self._settings.key:
            scheme, _, key = request.headers.get("authorization", "").partition(" ")
            given = key.strip().encode("latin-1", "replace")
            if request.scope["path"] == "/health" or (scheme.lower() == "bearer" and hmac.compare_digest(given, self._settings.key.encode())):
                return None
            return Refused(401, "Incorrect API key provided: this server wants its own, as 'Authorization: Bearer KEY'", None, "invalid_api_key")
        # Without a key it is this machine that may ask, and not a page in its browser that gives its own name our address.
        if _is_loopback(self._settings.host):
            name = request.headers.get("host", "localhost")
            name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
            if not (name.lower() in ("localhost", self._settings.host.lower()) or _is_address(name)):
                return Refused(403, f"the Host {name[:100]!r} is not this machine: a server with a name wants a key (--api-key-file)")
        return None

    async def _health(self, _: Request) -> Response:
        broken = self.engine.broken
        return JSONResponse({"status": "ok"}) if broken is None else JSONResponse({"status": "broken", "error": str(broken)}, 503)

    async def _tell_metrics(self, _: Request) -> Response:
        return PlainTextResponse(self.metrics.text(self.engine.running, self.engine.waiting, self._llm.report()), media_type="text/plain; version=0.0.4")

    def _description(self) -> Dict[str, Any]:
        return {"id": self._settings.name, "object": "model", "created": self._created, "owned_by": "penstock", "max_model_len": self._context}

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._description()]})

    async def _model(self, request: Request) -> Response:
        forms.check_model(request.path_params["model"], self._settings.name)
        return JSONResponse(self._description())

    async def _completions(self, request: Request) -> Any:
        return await self._texts(request, chat=False)

    async def _chat(self, request: Request) -> Any:
        return await self._texts(request, chat=True)

    async def _texts(self, request: Request, chat: bool) -> Any:
        """The answer of one of the two routes that make texts: a response, or with ``stream`` what sends itself."""
        with self._holding() as hold:
            form = forms.read(await self._body(request, hold), chat, self._settings.name, self._context, self.engine.most, self._vocabulary, self._defaults)
            answer = await self._begin(request, form)
        with contextlib.ExitStack() as begun:
            begun.enter_context(answer.at_end)
            if not form.stream:
                return JSONResponse(await answer.whole())
            begun.pop_all()
            return answer

    async def _begin(self, request: Request, form: Form) -> "_Answer":
        """The request's texts, which wait or are made from here on."""
        loop = asyncio.get_running_loop()
        forms.check_count(form.count, self.engine.most, "n")
        try:
            texts = self.engine.admit(form.count)
        except Full:
            raise Refused(429, "The queue is full: try again later", None, "rate_limit_exceeded", "rate_limit_error") from None
        answer = _Answer(form, texts, self._settings.timeout)
        texts.preparing = loop.create_task(self._prepare(form))
        watcher = loop.create_task(_left(request))
        watcher.add_done_callback(lambda _: texts.cancel("left"))
        answer.at_end.callback(watcher.cancel)
        if self._settings.timeout:
            answer.at_end.callback(loop.call_later(self._settings.timeout, texts.cancel, "timeout").cancel)
        with contextlib.ExitStack() as begun:
            begun.enter_context(answer.at_end)
            try:
                prompts = await texts.preparing
            except asyncio.CancelledError:
                if texts.cancelled:
                    raise answer.why() from None
                raise
            answer.prompt_tokens = sum(map(len, prompts))
            self.metrics.prompt_tokens += answer.prompt_tokens
            each = [prompts[i // form.n] for i in range(form.count)]
            texts.start(each, [form.options_of(i, len(prompt), self._context) for i, prompt in enumerate(each)], form.stream)
            begun.pop_all()
            return answer

    @contextlib.contextmanager
    def _holding(self) -> Iterator[Callable[[int], None]]:
        """Counts bytes of one body among those of all, while it lasts."""
        held = 0

        def hold(count: int) -> None:
            nonlocal held
            if self._held + count > _BODIES * self._settings.max_body:
                raise Refused(429, "Too many long bodies at once: try again later", None, "rate_limit_exceeded", "rate_limit_error")
            self._held += count
            held += count

        try:
            yield hold
        finally:
            self._held -= held

    async def _body(self, request: Request, hold: Callable[[int], None]) -> bytes:
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise Refused(415, "the body must be JSON, and say so: Content-Type: application/json")
        most = self._settings.max_body
        too_long = Refused(413, f"the body is longer than the {most} bytes that this server takes (--max-body)")
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > most:
            raise too_long

        async def read() -> bytes:
            body = bytearray()
            counted = 0
            async for piece in request.stream():
                if len(body) + len(piece) > most:
                    raise too_long
                body += piece
                if len(body) > _SHORT:
                    hold(len(body) - counted)
                    counted = len(body)
            return bytes(body)

        reading = asyncio.ensure_future(read())
        self._reading.add(reading)
        reading.add_done_callback(self._reading.discard)
        try:
            return await asyncio.wait_for(reading, self._settings.timeout or None)
        except asyncio.CancelledError:
            if not self._stopping:
                raise
            raise Refused(503, "the server stops", None, "server_stops", "server_error") from None
        except ClientDisconnect:
            raise Refused(_LEFT, "the client left") from None
        except asyncio.TimeoutError:
            raise Refused(408, f"the body did not come within {self._settings.timeout:g} s") from None

    async def _prepare(self, form: Form) -> List[List[int]]:
        """The tokens of each prompt."""
        if form.messages is not None:
            try:
                texts: List[forms.Prompt] = [await self._template.render(form.messages)]
            except ValueError as error:
                raise Refused(400, str(error), "messages") from None
        else:
            texts = form.prompts
        prompts = []
        for text in texts:
            if isinstance(text, str):
                try:
                    if len(text) <= _SHORT:
                        text = list(self._llm._core.encode(text, form.chat))
                    else:
                        text = list(await asyncio.get_running_loop().run_in_executor(self._encoder, self._llm._core.encode, text, form.chat))
                except (TypeError, ValueError) as error:
                    raise Refused(400, str(error), "messages" if form.chat else "prompt") from None
            forms.check_length(len(text), self._context)
            forms.check_ids(text, self._vocabulary)
            prompts.append(text)
        return prompts


class _Answer:
    """An answer on its way: whole, or as an ASGI application that streams. ``at_end`` runs when it is over."""

    def __init__(self, form: Form, texts: Texts, timeout: float) -> None:
        self.prompt_tokens = 0
        self.at_end = contextlib.ExitStack()
        self.at_end.callback(texts.close)
        self._form = form
        self._texts = texts
        self._timeout = timeout
        self._tokens = 0

    def why(self) -> Refused:
        """The answer to a cancelled request."""
        if self._texts.cancelled == "timeout":
            return Refused(504, f"the texts were not whole within {self._timeout:g} s (--timeout)", None, "timeout", "server_error")
        if self._texts.cancelled == "stopping":
            return Refused(503, "the server stops", None, "server_stops", "server_error")
        return Refused(_LEFT, "the client left")

    def _take(self, ended: Ended) -> None:
        self._tokens += ended.tokens
        if isinstance(ended.error, (TypeError, ValueError)):
            raise Refused(400, str(ended.error))
        if ended.error is not None:
            raise Refused(503, str(ended.error), kind="server_error")

    def _echo(self, index: int) -> str:
        prompt = self._form.prompts[index // self._form.n] if self._form.echo else ""
        return prompt if isinstance(prompt, str) else ""

    def _logprobs(self, index: int) -> forms.Logprobs:
        return forms.Logprobs(self._form, len(self._echo(index)))

    async def whole(self) -> Dict[str, Any]:
        ends: Dict[int, Ended] = {}
        while events := await self._texts.events():
            for index, ended in events:
                if isinstance(ended, Ended):
                    self._take(ended)
                    ends[index] = ended
        if self._texts.cancelled:
            raise self.why()
        in_order = [ends[i] for i in range(self._form.count)]
        texts = [self._echo(i) + ended.text for i, ended in enumerate(in_order)]
        logprobs = [self._logprobs(i).of(ended.logprobs, ended.raw) for i, ended in enumerate(in_order)]
        return forms.whole(self._form, texts, [ended.finish for ended in in_order], logprobs, forms.usage_of(self.prompt_tokens, self._tokens))

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        async def body(data: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        chunks = forms.Chunks(self._form)
        logprobs = [self._logprobs(i) for i in range(self._form.count)]
        with self.at_end:
            headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            for i in range(self._form.count):
                await body(chunks.begin(i) + (chunks.part(i, self._echo(i)) if self._form.echo else b""))
            try:
                while events := await self._texts.events():
                    data = []
                    for index, what in events:
                        if isinstance(what, Ended):
                            self._take(what)
                            left = logprobs[index].of(what.logprobs, what.raw) if what.logprobs else None
                            data.append(chunks.end(index, what.finish, left))
                        else:
                            data.append(chunks.part(index, what.text, logprobs[index].of(what.logprobs, what.raw)))
                    await body(b"".join(data))
                if self._texts.cancelled:
                    raise self.why()
                last = chunks.usage(forms.usage_of(self.prompt_tokens, self._tokens)) if self._form.usage else b""
                await body(last + chunks.DONE, more=False)
            except Refused as refused:  # the status has been sent
                await body(chunks.error(refused), more=False)


async def _left(request: Request) -> None:
    """Waits until the client has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _error(refused: Refused) -> Response:
    return JSONResponse(refused.body, refused.status, {"www-authenticate": "Bearer"} if refused.status == 401 else None)


async def _answer_refused(_: Request, error: Any) -> Response:
    return _error(error)


async def _answer_http(request: Request, error: Any) -> Response:
    what = {404: f"Unknown request URL: {request.method} {request.scope['path'][:200]}", 405: f"{request.method} is not allowed here"}
    answer = _error(Refused(error.status_code, what.get(error.status_code, str(error.detail))))
    answer.headers.update(error.headers or {})
    return answer


async def _answer_error(_: Request, error: Any) -> Response:
    return _error(Refused(500, f"the server has a bug: {type(error).__name__}", kind="server_error"))
