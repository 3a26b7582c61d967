"""OpenAI's requests, read and checked, and its answers. Nothing here waits or knows of a connection."""

from __future__ import annotations

import codecs
import difflib
import json
import math
import secrets
import time
from dataclasses import dataclass, field
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

from .._buffers import shown
from .._small_files import parse_json
from ..llm import TokenLogprob, _options, _whole_bounds

Prompt = Union[str, List[int]]

_NUMBERS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens")
_SERVED = ("model", *_NUMBERS, "logit_bias", "logprobs", "max_tokens", "max_completion_tokens", "seed", "stop", "n", "stream", "stream_options")
_IGNORED = ("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options")
# What is not served, and the values that ask for nothing. None always asks for nothing.
_NEUTRAL_TEXT: Dict[str, Tuple[Any, ...]] = {"best_of": (1,), "suffix": ("",)}
_NEUTRAL_CHAT: Dict[str, Tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "verbosity": ("medium",),
    "audio": (),
    "moderation": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "web_search_options": (),
}
_MOST_SEED = (1 << 62) - 1
_MOST_VALUES = 1 << 18  # of a body: parsing takes time by their number, and everybody waits meanwhile


class Refused(Exception):
    """An answer that is an error, in OpenAI's form."""

    def __init__(self, status: int, message: str, param: Optional[str] = None, code: Optional[str] = None, kind: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": _printable(message), "type": kind, "param": param and _printable(param), "code": code}}


def _printable(text: str) -> str:
    """What quotes a request may have half of a surrogate pair in it."""
    return text.encode(errors="backslashreplace").decode()


@dataclass(frozen=True)
class Form:
    """A request for texts: ``n`` of each prompt, or of the conversation."""

    prompts: List[Prompt]
    messages: Optional[List[Dict[str, Any]]]
    max_tokens: Optional[int]
    options: Dict[str, Any]
    n: int
    stream: bool
    usage: bool
    echo: bool
    model: str
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def chat(self) -> bool:
        return self.messages is not None

    @property
    def count(self) -> int:
        return self.n * max(1, len(self.prompts))

    def options_of(self, index: int, length: int, context: int) -> Dict[str, Any]:
        """Of text ``index``, as the LLM takes them, which has its own seed. length: of the prompt, in tokens."""
        tokens = context - length if self.max_tokens is None else self.max_tokens
        return {**self.options, "tokens": tokens, "seed": (self.options["seed"] + index) & _MOST_SEED}


def read(body: bytes, chat: bool, served: str, context: int, most_texts: int, vocabulary: int, defaults: Mapping[str, Any]) -> Form:
    """The form in a request's body. context, vocabulary: the model's tokens; most_texts: at once; defaults: LLM's. Refused: what it asks for is malformed, unknown, more
    than the server takes, or not served.
    """
    most = max(_MOST_VALUES, 2 * context)
    if body.count(b",") > most:
        raise Refused(413, f"the body has more than {most} values or commas: send fewer texts at once")
    try:
        given = parse_json(body.decode(), "the body", 2 * most)  # of a mapping each comma has a name before it
    except ValueError as error:
        raise Refused(400, str(error)) from None
    if not isinstance(given, dict):
        raise Refused(400, "the body must be a JSON object")
    _check_names(given, chat)
    given = {name: value for name, value in given.items() if value is not None}
    model = given.get("model")
    if not isinstance(model, str):
        raise Refused(400, f"you must provide a model parameter: {served!r} is served", "model")
    check_model(model, served)
    for name in ("stream", "echo"):
        if not isinstance(given.get(name, False), bool):
            raise Refused(400, f"{name} must be true or false", name)
    stream_options = given.get("stream_options", {})
    if not isinstance(stream_options, dict) or not set(stream_options) <= {"include_usage", "include_obfuscation"}:
        raise Refused(400, "stream_options has include_usage and nothing else", "stream_options")
    if "stream_options" in given and not given.get("stream"):
        raise Refused(400, "stream_options is for stream: true alone", "stream_options")
    n = _whole(given.get("n", 1), "n", *_whole_bounds("n"))
    asked: Any = given.get("max_completion_tokens", given.get("max_tokens", defaults.get("max_tokens") if chat else 16))
    name = "max_completion_tokens" if "max_completion_tokens" in given else "max_tokens"
    prompts = [] if chat else _prompts(given.get("prompt", ""), most_texts)
    echo = given.get("echo", False)
    if echo and _top(given, chat) is not None:
        raise Refused(400, "logprobs are not served with echo: those of a prompt are not computed", "logprobs", "unsupported_parameter")
    if echo and not all(isinstance(each, str) for each in prompts):
        raise Refused(400, "echo is served for prompts that are texts", "echo")
    return Form(
        prompts=prompts,
        messages=_messages(given.get("messages"), context) if chat else None,
        max_tokens=None if asked is None else _whole(asked, name, 1, 1 << 62),
        options=_sampling(given, chat, vocabulary, defaults),
        n=n,
        stream=given.get("stream", False),
        usage=bool(stream_options.get("include_usage")),
        echo=echo,
        model=served,
    )


def check_model(model: str, served: str) -> None:
    if model != served:
        raise Refused(404, f"The model {model[:200]!r} does not exist: {served!r} is served", "model", "model_not_found")


def _check_names(given: Mapping[str, Any], chat: bool) -> None:
    neutral = _NEUTRAL_CHAT if chat else _NEUTRAL_TEXT
    known = (*_SERVED, *(("messages", "top_logprobs") if chat else ("prompt", "echo")), *_IGNORED)
    for name, value in given.items():
        if name in neutral:
            if value is not None and not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral[name]):
                raise Refused(400, f"{name} is not served: leave it out", name, "unsupported_parameter")
        elif name not in known:
            near = difflib.get_close_matches(name[:100], (*known, *neutral), 1)
            raise Refused(400, f"Unknown parameter: {name[:100]!r}." + (f" Did you mean {near[0]!r}?" if near else ""), name[:100], "unknown_parameter")


def _whole(value: Any, name: str, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise Refused(400, f"{name} must be a whole number from {least} on" + (f", and at most {most}" if most < 1 << 62 else ""), name)
    return value


def _sampling(given: Mapping[str, Any], chat: bool, vocabulary: int, defaults: Mapping[str, Any]) -> Dict[str, Any]:
    seed = given.get("seed", secrets.randbits(62))
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise Refused(400, "seed must be a whole number", "seed")
    for name in _NUMBERS:
        value = given.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or (isinstance(value, float) and not math.isfinite(value)):
            raise Refused(400, f"{name} must be a number", name)
    stop = given.get("stop", [])
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(each, str) and each and _encodes(each) for each in stops):
        raise Refused(400, "stop must be a text, or a list of texts, with at least one character each", "stop")
    asked = {name: given[name] for name in (*_NUMBERS, "logit_bias") if name in given}
    if "max_tokens" in given or "max_completion_tokens" in given:
        asked["max_tokens"] = given.get("max_completion_tokens", given.get("max_tokens"))
    try:
        return _options({"temperature": 1.0, **defaults}, vocabulary, **asked, seed=seed & _MOST_SEED, stop=stops or None, logprobs=_top(given, chat))
    except (TypeError, ValueError) as error:  # which begins with the name
        raise Refused(400, str(error), str(error).split(" ", 1)[0]) from None


def _top(given: Mapping[str, Any], chat: bool) -> Optional[int]:
    """Of how many of the likeliest tokens log-probabilities are asked for; None: of none, nor of those chosen."""
    logprobs = given.get("logprobs", False)
    if not chat:
        if logprobs is False:
            return None
        return _whole(logprobs, "logprobs", *_whole_bounds("logprobs"))
    if not isinstance(logprobs, bool):
        raise Refused(400, "logprobs must be true or false", "logprobs")
    top = _whole(given.get("top_logprobs", 0), "top_logprobs", *_whole_bounds("logprobs"))
    if top and not logprobs:
        raise Refused(400, "top_logprobs is for logprobs: true alone", "top_logprobs")
    return top if logprobs else None


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return True


def check_count(count: int, most: int, param: str) -> None:
    if count > most:
        raise Refused(400, f"{count} texts are asked for: this server takes {most} at most, those of others included", param)


def _prompts(given: Any, most: int) -> List[Prompt]:
    prompts = [given] if isinstance(given, str) or (isinstance(given, list) and given and not isinstance(given[0], (str, list))) else given
    if not isinstance(prompts, list) or not prompts or not all(isinstance(each, (str, list)) for each in prompts):
        raise Refused(400, "prompt must be a text, a list of texts, a list of tokens, or a list of lists of tokens", "prompt")
    check_count(len(prompts), most, "prompt")
    if any(isinstance(each, str) and not _encodes(each) for each in prompts):
        raise Refused(400, "prompt has half of a surrogate pair: it is no text", "prompt")
    return prompts


def _messages(given: Any, context: int) -> List[Dict[str, Any]]:
    """Messages as templates take them: contents are texts."""
    if not isinstance(given, list) or not given or not all(isinstance(each, dict) and isinstance(each.get("role"), str) for each in given):
        raise Refused(400, "messages must be a list of objects, each with a role and a content", "messages")
    if len(given) > context:  # each has a token
        raise Refused(400, f"This model's maximum context length is {context} tokens. However, you have {len(given)} messages.", "messages", "context_length_exceeded")
    messages = []
    for i, message in enumerate(given):
        for name, value in message.items():
            if name not in ("role", "content", "name") and value not in (None, [], ""):
                raise Refused(400, f"messages[{i}].{name[:100]} is not served", f"messages[{i}].{name[:100]}", "unsupported_parameter")
        content = message.get("content")
        if isinstance(content, list):
            if not all(isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in content):
                raise Refused(400, f"messages[{i}].content has a part that is no text: texts alone are served", f"messages[{i}].content")
            content = "".join(part["text"] for part in content)
        if not isinstance(content, str):
            raise Refused(400, f"messages[{i}].content must be a text, or a list of parts that are texts", f"messages[{i}].content")
        name = message.get("name")
        for key, text in (("role", message["role"]), ("content", content), ("name", name)):
            if isinstance(text, str) and not _encodes(text):
                raise Refused(400, f"messages[{i}].{key} has half of a surrogate pair: it is no text", f"messages[{i}].{key}")
        messages.append({"role": message["role"], "content": content, **({"name": name} if isinstance(name, str) else {})})
    return messages


def check_length(length: int, context: int) -> None:
    if length >= context:
        message = f"This model's maximum context length is {context} tokens, of prompt and text together. However, your prompt has {length} tokens."
        raise Refused(400, message, "prompt", "context_length_exceeded")


def check_ids(ids: Sequence[Any], vocabulary: int) -> None:
    if not ids:
        raise Refused(400, "prompt must have at least one token", "prompt")
    for each in ids:
        if isinstance(each, bool) or not isinstance(each, int) or not 0 <= each < vocabulary:
            written = shown(each) if isinstance(each, int) else str(each)[:100]
            raise Refused(400, f"prompt has {written}, which is no token of this model, which has {vocabulary}: whole numbers from 0 to {vocabulary - 1}", "prompt")


def finish_of(finish: str) -> str:
    """OpenAI's word: the model's own end is a stop."""
    return "length" if finish == "length" else "stop"


def usage_of(prompt_tokens: int, tokens: int) -> Dict[str, int]:
    return {"prompt_tokens": prompt_tokens, "completion_tokens": tokens, "total_tokens": prompt_tokens + tokens}


def _chat_logprob(each: TokenLogprob) -> Dict[str, Any]:
    return {"token": each.text, "logprob": each.logprob, "bytes": list(each.bytes)}


class Logprobs:
    """The log-probabilities of one text's tokens in OpenAI's form. ``of`` is given them in order, in parts or at once."""

    def __init__(self, form: Form, before: int) -> None:
        self._chat = form.chat
        self._top = form.options["logprobs"]
        self._offset = before  # in characters
        self._at = 0  # in bytes of the text
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def of(self, entries: Sequence[TokenLogprob], raw: bytes) -> Optional[Dict[str, Any]]:
        """raw: the text so far, in bytes. None: they are not asked for."""
        if self._top is None:
            return None
        if self._chat:
            return {"content": [{**_chat_logprob(each), "top_logprobs": [_chat_logprob(likely) for likely in each.top]} for each in entries], "refusal": None}
        offsets = []
        for each in entries:
            self._offset += len(self._decoder.decode(raw[self._at : each.begins]))
            self._at = max(self._at, min(each.begins, len(raw)))
            offsets.append(self._offset)
        tops = []
        for each in entries:
            top: Dict[str, float] = {}
            for likely in (*each.top, each):
                top.setdefault(likely.text, likely.logprob)
            tops.append(top)
        return {
            "tokens": [each.text for each in entries],
            "token_logprobs": [each.logprob for each in entries],
            "top_logprobs": tops if self._top else None,
            "text_offset": offsets,
        }


def whole(form: Form, texts: Sequence[str], finishes: Sequence[str], logprobs: Sequence[Optional[Mapping[str, Any]]], usage: Mapping[str, int]) -> Dict[str, Any]:
    """The answer without ``stream``."""
    choices: List[Dict[str, Any]] = []
    for i, (text, finish, each) in enumerate(zip(texts, finishes, logprobs)):
        if form.chat:
            choices.append({"index": i, "message": {"role": "assistant", "content": text, "refusal": None}, "logprobs": each, "finish_reason": finish_of(finish)})
        else:
            choices.append({"index": i, "text": text, "logprobs": each, "finish_reason": finish_of(finish)})
    kind, prefix = ("chat.completion", "chatcmpl-") if form.chat else ("text_completion", "cmpl-")
    return {"id": prefix + form.id, "object": kind, "created": form.created, "model": form.model, "choices": choices, "usage": usage}


class Chunks:
    """The server-sent events of an answer with ``stream``."""

    DONE = b"data: [DONE]\n\n"

    def __init__(self, form: Form) -> None:
        self._chat = form.chat
        kind, prefix = ("chat.completion.chunk", "chatcmpl-") if form.chat else ("text_completion", "cmpl-")
        head = {"id": prefix + form.id, "object": kind, "created": form.created, "model": form.model, "choices": []}
        self._head = "data: " + json.dumps(head)[: -len("]}")]
        self._tail = "]" + (', "usage": null' if form.usage else "") + "}\n\n"

    def _event(self, index: int, what: str, finish: str, logprobs: Optional[Mapping[str, Any]] = None) -> bytes:
        return f'{self._head}{{"index": {index}, {what}, "logprobs": {json.dumps(logprobs)}, "finish_reason": {finish}}}{self._tail}'.encode()

    def begin(self, index: int) -> bytes:
        return self._event(index, '"delta": {"role": "assistant", "content": ""}', "null") if self._chat else b""

    def part(self, index: int, text: str, logprobs: Optional[Mapping[str, Any]] = None) -> bytes:
        quoted = json.dumps(text)
        return self._event(index, f'"delta": {{"content": {quoted}}}' if self._chat else f'"text": {quoted}', "null", logprobs)

    def end(self, index: int, finish: str, logprobs: Optional[Mapping[str, Any]] = None) -> bytes:
        return self._event(index, '"delta": {}' if self._chat else '"text": ""', f'"{finish_of(finish)}"', logprobs)

    def usage(self, usage: Mapping[str, int]) -> bytes:
        return f'{self._head}], "usage": {json.dumps(usage)}}}\n\n'.encode()

    @staticmethod
    def error(refused: Refused) -> bytes:
        return b"data: " + json.dumps(refused.body).encode() + b"\n\n"
