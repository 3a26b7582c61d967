"""Text from language models that are larger than memory: ``penstock.LLM``.

>>> import penstock
>>> with penstock.LLM("Llama-3.2-1B-Instruct", host_memory="1GiB") as llm:
...     for text in llm.generate(["The sea", "A hill"], max_tokens=32):
...         print(text.text, text.finish)
...     for part in llm.stream("Once upon a time", temperature=0.8, seed=7):
...         print(part, end="", flush=True)
...     print(llm.chat([{"role": "user", "content": "Name three rivers."}]).text)

Weights stream from the drive, each once for all texts that are under way; what the budget has left keeps some of them. It needs no
torch. Several threads may call one object: their texts are made together, and each depends on its own prompt, seed and options alone,
to the bit, whatever the budget and the company.
"""

from __future__ import annotations

import codecs
import contextlib
import difflib
import errno
import json
import operator
import os
import threading
from dataclasses import dataclass, field
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

from . import _core
from ._buffers import byte_size, shown, whole_number
from ._small_files import is_directory, read_json, read_text

Prompt = Union[str, Sequence[int]]

_PATIENCE = 0.1  # seconds after which signals are looked at


@dataclass(frozen=True)
class TokenLogprob:
    """A token, and the natural logarithm of its probability before any option changes that."""

    token: int
    logprob: float
    """At least -9999."""
    bytes: bytes
    """That it adds to a text; they may be a part of a character."""
    top: List["TokenLogprob"] = field(default_factory=list, repr=False)
    """The likeliest tokens at its place, as many as were asked for."""
    begins: int = field(default=0, repr=False)
    """Where in the text, in bytes of UTF-8."""

    @property
    def text(self) -> str:
        return self.bytes.decode("utf-8", "replace")


def _logprobs(made: Any, first: int = 0) -> List[TokenLogprob]:
    def of(token: int, data: bytes, logprob: float, begins: int, top: List[TokenLogprob]) -> TokenLogprob:
        return TokenLogprob(token, logprob, data, top, begins)

    return [
        of(token, data, logprob, begins, [of(other, its_data, its_logprob, begins, []) for other, its_data, its_logprob in top])
        for token, data, logprob, begins, top in made.logprobs(first)
    ]


@dataclass(frozen=True)
class Text:
    """A text that was made."""

    text: str
    """Without the prompt, and without the stop string that ended it."""
    tokens: List[int] = field(repr=False)
    """Of the text; one that ended it is the last."""
    finish: str
    """"length": as many tokens as asked for, or as the model takes; "stop": a stop string; "end": a token that ends a text. Of a stream also
    "cancelled": it, or its LLM, was closed before; "error": what its next part would have raised."""
    prompt_tokens: int = 0
    logprobs: Optional[List[TokenLogprob]] = field(default=None, repr=False)
    """Of ``tokens``, but for one that ends a text, where they were asked for."""


def _refuse(what: str, unknown: Mapping[str, Any], known: Sequence[str]) -> None:
    if not unknown:
        return
    name = sorted(unknown)[0]
    near = difflib.get_close_matches(name, known, 1)
    raise TypeError(f"{what} has no argument {name!r}" + (f": did you mean {near[0]!r}?" if near else f": it has {', '.join(known)}"))


def _number(value: Any, name: str, least: float, most: float, above: bool = False) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, not {type(value).__name__}")
    if not (least <= value <= most) or (above and value == least):
        raise ValueError(f"{name} is {value}: must be {'above' if above else 'from'} {least:g} {'and at most' if above else 'to'} {most:g}")
    return float(value)


_OPTIONS = (
    "max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "repetition_penalty", "min_p", "min_tokens", "presence_penalty",
    "frequency_penalty", "logit_bias", "logprobs",
)  # fmt: skip
_BOUNDS = _core.sampling_bounds()


class TextStream(Iterator[str]):
    """A text as it comes: an iterator over its parts. ``close()`` cancels it, and so does the end of a ``with``.

    ``text``, ``tokens`` and ``finish`` are what there is of it so far; ``finish`` is "" while it is under way, and then as a ``Text`` has it.
    """

    def __init__(self, made: Any, prompt_tokens: int, patience: float = _PATIENCE) -> None:
        self._made = made
        self._patience = patience
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._closed = False
        self._cancelled = False
        self._ended = False
        self.prompt_tokens = prompt_tokens

    def __iter__(self) -> "TextStream":
        return self

    def __next__(self) -> str:
        while not self._closed and not self._ended:
            part = self._decoder.decode(self._made.next(self._patience))
            if not part and self._made.over:
                self._made.check()
                self._ended = True
                part = self._decoder.decode(b"", True)
            if part:
                return part
        raise StopIteration

    def close(self) -> None:
        """Cancels the text, if it is not whole; nothing waits."""
        if not self._closed:
            with contextlib.suppress(RuntimeError):  # it is of the parent process, which makes it still
                self._cancelled = not self._made.finish
        self._closed = True
        self._made.cancel()

    def __enter__(self) -> "TextStream":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __del__(self) -> None:
        made = getattr(self, "_made", None)
        if made is not None:
            made.cancel()

    @property
    def text(self) -> str:
        return self._made.text.decode("utf-8", "replace")

    @property
    def tokens(self) -> List[int]:
        return list(self._made.tokens)

    @property
    def logprobs(self) -> List[TokenLogprob]:
        """Of the tokens whose text was given out, where they were asked for."""
        return _logprobs(self._made)

    @property
    def finish(self) -> str:
        if self._cancelled:
            return "cancelled"
        finish = str(self._made.finish)
        if not finish and self._made.over:
            try:
                self._made.check()
            except Exception as error:  # noqa: B902 - whatever ended it
                return "cancelled" if getattr(error, "errno", 0) == errno.ECANCELED else "error"
        return finish


class LLM:
    """A language model, opened where it lies.

    model: a Hugging Face directory (GPT-2, Llama, Mistral, Mixtral, Qwen 2 and 3 with and without experts, DeepSeek V2 and V3, Phi 3 and 4, Gemma 2 and 3, ...), packed by ``penstock pack`` or not; or a state directory or
        checkpoint of ``penstock train`` (all directories of a striped run, as a list).
    host_memory: bytes, or "4GiB": a hard budget for weights in flight and kept, keys and values, and what a pass computes. Default:
        half of what is free. One that is too small is a MemoryError that says the least.
    device_memory: not served here: this package computes on the processor. The program ``penstock``, built from source with LibTorch,
        generates on a GPU.
    max_length: tokens of prompt and text together, for which memory is planned. Default: the model's, at most 4096.
    batch: texts that are made at once, at most: as many of them as gain tokens a second in this memory. More wait for their turn.
    kv: where keys and values live: "host", "nvme", or "auto": as the budget has it.
    kv_dir: the directory of a file without a name for them. Default: where the program runs.
    prompt_lookup: guesses up to this many tokens from what a text repeats and verifies them in one pass; the texts stay the same.
    threads: that compute. Default: one for each core.
    tokenizer: a tokenizer.json or its directory. Default: the model's own.
    base_weights: of a run that trains adapters beside weights which it reads in place: the directory of these, if it has moved. Default: where
        the run last read them.

    ``notes`` are lines about what the model's files say: what texts are made with where nothing else is asked for, what is not followed.
    """

    _ARGUMENTS = ("host_memory", "device_memory", "max_length", "batch", "kv", "kv_dir", "prompt_lookup", "threads", "tokenizer", "base_weights")

    def __init__(
        self,
        model: Union[str, "os.PathLike[str]", Sequence[Union[str, "os.PathLike[str]"]]],
        host_memory: Union[int, str, None] = None,
        device_memory: Union[int, str, None] = None,
        *,
        max_length: Optional[int] = None,
        batch: int = 8,
        kv: str = "auto",
        kv_dir: Union[str, "os.PathLike[str]", None] = None,
        prompt_lookup: int = 0,
        threads: Optional[int] = None,
        tokenizer: Union[str, "os.PathLike[str]", None] = None,
        base_weights: Union[str, "os.PathLike[str]", None] = None,
        **unknown: Any,
    ) -> None:
        _refuse("LLM", unknown, self._ARGUMENTS)
        if device_memory is not None:
            raise ValueError("device_memory is not served: the Python package generates on the processor; `penstock generate --device cuda` is built from source")
        directories = [os.fspath(model)] if isinstance(model, (str, os.PathLike)) else [os.fspath(each) for each in model]
        budget = 0 if host_memory is None else byte_size(host_memory, "host_memory", 1)
        if kv not in ("auto", "host", "nvme"):
            raise ValueError(f"kv is {kv!r}: must be 'auto', 'host' or 'nvme'")
        self._directory = directories[0]
        self._tokenizer = None if tokenizer is None else os.fspath(tokenizer)
        self._lock = threading.Lock()
        self._template: Any = None
        self._core = _core.Llm(
            directories,
            self._tokenizer,
            "" if base_weights is None else os.fspath(base_weights),
            budget,
            0 if max_length is None else whole_number(max_length, "max_length", 2),
            whole_number(batch, "batch", 1, 256),
            kv,
            os.getcwd() if kv_dir is None else os.fspath(kv_dir),
            whole_number(prompt_lookup, "prompt_lookup", 0, 64),
            0 if threads is None else whole_number(threads, "threads", 1, 1024),
        )
        self.notes: List[str] = list(self._core.notes)

    @property
    def max_length(self) -> int:
        return int(self._core.max_length)

    @property
    def batch(self) -> int:
        """Texts that are made at once, as planned."""
        return int(self._core.texts)

    @property
    def planned_bytes(self) -> int:
        """Of the budget."""
        return int(self._core.planned_bytes)

    def report(self) -> Dict[str, Any]:
        """What was planned, and what has been done up to the last pass that ended: bytes, counts and seconds, under the keys of
        ``penstock generate --report``. Of a mixture of experts, ``["experts"]`` has how many are in memory, and hits, misses, guesses, bytes and waits."""
        return dict(json.loads(self._core.report()))

    def generate(
        self,
        prompts: Union[Prompt, Sequence[Prompt]],
        max_tokens: Optional[int] = None,
        temperature: Optional[float] = None,
        top_p: Optional[float] = None,
        top_k: Optional[int] = None,
        seed: int = 1,
        stop: Union[str, Sequence[str], None] = None,
        repetition_penalty: Optional[float] = None,
        min_p: Optional[float] = None,
        min_tokens: Optional[int] = None,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: Optional[Mapping[int, float]] = None,
        logprobs: Optional[int] = None,
        n: int = 1,
        **unknown: Any,
    ) -> List[Text]:
        """A text for each prompt, in their order, or ``n`` of each.

        prompts: texts, or lists of token ids; one of them alone is a list of one.
        max_tokens: of each text, at most (128); fewer where prompt and text reach ``max_length``.
        temperature: 0 (default) takes the likeliest token each time.
        top_k, top_p, min_p: choose among this many likeliest tokens (0: all), of those among the likeliest that together have this much (1:
            all), and of those among the ones that have this part of the likeliest's probability (0: all).
        seed: of the choices; text i of all has seed + i.
        stop: strings before the first of which a text ends.
        min_tokens: before which no token that ends a text is chosen (0); a stop string ends it whenever.
        repetition_penalty: above 1 makes tokens of prompt and text less likely: transformers' formula.
        presence_penalty, frequency_penalty: subtracted from the logits of tokens that the text has, and for each time that it has them: OpenAI's
            formula, from -2 to 2.
        logit_bias: by token id, added to its logit, from -100 to 100.
        logprobs: a number, up to 20, gives each ``Text`` the log-probabilities of its tokens, and of as many of the likeliest at each place.
        n: texts of each prompt, next to each other in the list. Those that are made together compute the prompt once.

        Where one is None, the model's generation_config.json says it (temperature only with do_sample), or else the default holds; ``notes``
        tell what it says.

        ValueError: a prompt that is empty, too long, or not of this model's tokens. OSError: the drive.
        """
        _refuse("generate", unknown, (*_OPTIONS, "n"))
        several = whole_number(n, "n", *_whole_bounds("n"))
        given = self._prompts(prompts)
        options = self._options(locals())
        made = []
        try:
            for i in range(len(given) * several):
                made.append(self._submit(given[i // several], options, i))
            return [self._whole(text, len(given[i // several]), options) for i, text in enumerate(made)]
        except BaseException:
            for text in made:
                text.cancel()
            raise

    def stream(
        self,
        prompt: Prompt,
        max_tokens: Optional[int] = None,
        temperature: Optional[float] = None,
        top_p: Optional[float] = None,
        top_k: Optional[int] = None,
        seed: int = 1,
        stop: Union[str, Sequence[str], None] = None,
        repetition_penalty: Optional[float] = None,
        min_p: Optional[float] = None,
        min_tokens: Optional[int] = None,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: Optional[Mapping[int, float]] = None,
        logprobs: Optional[int] = None,
        **unknown: Any,
    ) -> TextStream:
        """One text, as it comes: an iterator over parts of it. Its arguments are those of ``generate``, and so is the text."""
        _refuse("stream", unknown, _OPTIONS)
        tokens = self._tokens(prompt)
        options = self._options(locals())
        return TextStream(self._submit(tokens, options, 0), len(tokens))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        max_tokens: Optional[int] = None,
        temperature: Optional[float] = None,
        top_p: Optional[float] = None,
        top_k: Optional[int] = None,
        seed: int = 1,
        stop: Union[str, Sequence[str], None] = None,
        repetition_penalty: Optional[float] = None,
        min_p: Optional[float] = None,
        min_tokens: Optional[int] = None,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: Optional[Mapping[int, float]] = None,
        logprobs: Optional[int] = None,
        stream: bool = False,
        **unknown: Any,
    ) -> Union[Text, TextStream]:
        """The answer to a conversation, written as the model's own chat template has it.

        messages: of a role and a content each: ``[{"role": "user", "content": "Name three rivers."}]``.
        stream: a TextStream instead of the whole text.

        The other arguments are those of ``generate``. The template is the model's chat_template.jinja, or that of its
        tokenizer_config.json, run by jinja2 in its sandbox: ImportError without it. ValueError: the model has no template, or it refuses
        the conversation.
        """
        _refuse("chat", unknown, (*_OPTIONS, "stream"))
        tokens = list(self._core.encode(self.chat_prompt(messages), True))
        options = self._options(locals())
        made = self._submit(tokens, options, 0)
        if stream:
            return TextStream(made, len(tokens))
        try:
            return self._whole(made, len(tokens), options)
        except BaseException:
            made.cancel()
            raise

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt that ``chat`` makes of a conversation."""
        if not isinstance(messages, (str, bytes, Mapping)):
            messages = list(messages)  # an iterator can be read once
        if not isinstance(messages, list) or not all(isinstance(each, Mapping) and "role" in each for each in messages):
            raise TypeError("messages are a list of dictionaries, each with a role and a content")
        with self._lock:
            if self._template is None:
                self._template = _ChatTemplate(self._directory if self._tokenizer is None else self._tokenizer)
        return str(self._template.render(messages))

    def close(self) -> None:
        """Gives memory and threads back. Texts under way are cancelled."""
        self._core.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"LLM({self._directory!r})"

    def _prompts(self, prompts: Any) -> List[List[int]]:
        if isinstance(prompts, str) or (not isinstance(prompts, (bytes, str)) and len(prompts) > 0 and _is_id(prompts[0])):
            prompts = [prompts]
        return [self._tokens(each) for each in prompts]

    def _tokens(self, prompt: Any) -> List[int]:
        if isinstance(prompt, str):
            return list(self._core.encode(prompt, False))
        if isinstance(prompt, bytes) or not all(_is_id(each) for each in prompt):
            raise TypeError("a prompt is a text, or a list of token ids")
        tokens, vocabulary = [operator.index(each) for each in prompt], self._core.vocabulary
        for token in tokens:
            if not 0 <= token < vocabulary:
                raise ValueError(f"a prompt has token {shown(token)}, and the model has {vocabulary}, from 0 to {vocabulary - 1}")
        return tokens

    def _submit(self, tokens: List[int], options: Dict[str, Any], number: int) -> Any:
        return self._core.submit(tokens, **{**options, "seed": options["seed"] + number})

    def _whole(self, made: Any, prompt_tokens: int, options: Mapping[str, Any]) -> Text:
        while not made.over:
            made.next(_PATIENCE)
        made.check()
        logprobs = None if options["logprobs"] is None else _logprobs(made)
        return Text(made.text.decode("utf-8", "replace"), list(made.tokens), str(made.finish), prompt_tokens, logprobs)

    @property
    def _defaults(self) -> Dict[str, Any]:
        """What the model says texts are made with, by the names of ``generate``."""
        core = self._core
        more = {"max_tokens": core.default_max_tokens, "stop": core.default_stop}
        given = {name: int(value) if _BOUNDS[name][3] else value for name, value in core.defaults.items()}
        return {**given, **{name: value for name, value in more.items() if value}}

    # arguments: of a call of `generate` or its like, by name.
    def _options(self, arguments: Mapping[str, Any]) -> Dict[str, Any]:
        return _options(self._defaults, self._core.vocabulary, **{name: arguments[name] for name in _OPTIONS})


def _is_id(value: Any) -> bool:
    return not isinstance(value, (bool, str, bytes)) and hasattr(value, "__index__")


def _whole_bounds(name: str) -> Tuple[int, int]:
    least, most, _, _ = _BOUNDS[name]
    return int(least), int(most)


def _bounded(name: str, value: Any) -> Any:
    least, most, above, whole = _BOUNDS[name]
    return whole_number(value, name, int(least), int(most)) if whole else _number(value, name, least, most, above)


def _options(defaults: Mapping[str, Any], vocabulary: int, **given: Any) -> Dict[str, Any]:
    """What _core takes of the options of ``generate``; None, or a name that is not given, is the model's default, or else Penstock's.

    TypeError, ValueError: their messages begin with the option's name.
    """

    def value(name: str, otherwise: Any) -> Any:
        asked = given.get(name)
        return defaults.get(name, otherwise) if asked is None else asked

    stop = value("stop", [])
    stops = [stop] if isinstance(stop, str) else list(stop) if hasattr(stop, "__iter__") else [stop]
    if not all(isinstance(each, str) for each in stops):
        raise TypeError("stop is a text, or a list of texts")
    if not all(stops):
        raise ValueError("stop has an empty text: must have at least one character")
    tokens = whole_number(value("max_tokens", 128), "max_tokens", 1)
    least = _bounded("min_tokens", value("min_tokens", 0))
    if given.get("max_tokens") is not None and given.get("min_tokens") is not None and least > tokens:
        raise ValueError(f"min_tokens is {least}: must be at most max_tokens, which is {tokens}")
    logprobs = given.get("logprobs")
    return {
        "tokens": tokens,
        "temperature": _bounded("temperature", value("temperature", 0.0)),
        "top_p": _bounded("top_p", value("top_p", 1.0)),
        "top_k": _bounded("top_k", value("top_k", 0)),
        "min_p": _bounded("min_p", value("min_p", 0.0)),
        "repetition_penalty": _bounded("repetition_penalty", value("repetition_penalty", 1.0)),
        "presence_penalty": _bounded("presence_penalty", value("presence_penalty", 0.0)),
        "frequency_penalty": _bounded("frequency_penalty", value("frequency_penalty", 0.0)),
        "logit_bias": _biases(value("logit_bias", {}), vocabulary),
        "min_tokens": least,
        "seed": whole_number(value("seed", 1), "seed", 0, 1 << 62),
        "stops": stops,
        "logprobs": None if logprobs is None else _bounded("logprobs", logprobs),
    }


def _biases(given: Any, vocabulary: int) -> Dict[int, float]:
    if not isinstance(given, Mapping):
        raise TypeError(f"logit_bias must be numbers by token id, not {type(given).__name__}")
    biases = {}
    for key, bias in given.items():
        if isinstance(key, str) and len(key) < 20 and key.isascii() and key.isdecimal():  # as JSON has it
            key = int(key)
        if not _is_id(key):
            raise TypeError(f"logit_bias has {str(key)[:100]!r}, which is no token id")
        token = operator.index(key)
        if not 0 <= token < vocabulary:
            raise ValueError(f"logit_bias has token {shown(token)}, and the model has {vocabulary}, from 0 to {vocabulary - 1}")
        biases[token] = _bounded("logit_bias", bias)
    return biases


class _ChatTemplate:
    """A model's chat template, compiled as transformers compiles it."""

    def __init__(self, directory: str) -> None:
        if not is_directory(directory):
            directory = os.path.dirname(directory) or "."
        # Of both files, as transformers: what tokenizer_config.json says wins.
        config = {**_json_of(os.path.join(directory, "special_tokens_map.json")), **_json_of(os.path.join(directory, "tokenizer_config.json"))}
        source = config.get("chat_template")
        if isinstance(source, list):  # several, by name
            source = {each.get("name"): each.get("template") for each in source if isinstance(each, dict)}.get("default")
        try:
            source = read_text(os.path.join(directory, "chat_template.jinja"))
        except FileNotFoundError:
            pass
        if not isinstance(source, str):
            raise ValueError(f"{directory}: no chat template: neither chat_template.jinja nor chat_template in tokenizer_config.json; generate() takes a prompt as it is")
        try:
            import jinja2
            import jinja2.ext
            import jinja2.sandbox
        except ImportError:
            raise ImportError("chat needs jinja2, which runs the model's chat template: pip install 'penstock[chat]', or jinja2") from None

        class Generation(jinja2.ext.Extension):
            """{% generation %}: marks what an assistant says, for training; here it is what stands in it."""

            tags = {"generation"}

            def parse(self, parser: Any) -> Any:
                next(parser.stream)
                return parser.parse_statements(("name:endgeneration",), drop_needle=True)

        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._error = jinja2.TemplateError
        self._directory = directory
        self._special = {name: _spelling(config[name]) for name in config if name.endswith("_token") and _spelling(config[name]) is not None}
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"{directory}: its chat template: {error}") from None

    def render(self, messages: List[Mapping[str, Any]]) -> str:
        try:
            return str(self._template.render(messages=messages, tools=None, documents=None, add_generation_prompt=True, **self._special))
        except self._error as error:
            raise ValueError(f"{self._directory}: its chat template refuses these messages: {error}") from None


def _json_of(path: str) -> Dict[str, Any]:
    try:
        value = read_json(path)
    except FileNotFoundError:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{path} is no object of JSON: bring the model's own file back, or remove it")
    return value


def _spelling(token: Any) -> Optional[str]:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _to_json(value: Any, ensure_ascii: bool = False, indent: Optional[int] = None, separators: Any = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    import datetime

    return datetime.datetime.now().strftime(form)
