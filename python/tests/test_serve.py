"""penstock serve: OpenAI's own client, the texts of LLM.generate, and clients that leave, lie or come by the hundred."""

import asyncio
import contextlib
import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

import penstock

for package in ("openai", "starlette", "uvicorn", "jinja2", "tokenizers"):
    pytest.importorskip(package)
import openai  # noqa: E402
from test_llm import LLAMA, TEMPLATE, byte_tokenizer  # noqa: E402

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

PROGRAM = "import sys; from penstock._programs import penstock; sys.argv[0] = 'penstock'; penstock()"
ENDLESS = 8000  # tokens: far more than any test waits for
SOAK = int(os.environ.get("PENSTOCK_SERVE_SOAK", "300"))  # requests


def write_model(directory, template=TEMPLATE):
    torch.manual_seed(3)
    config = transformers.LlamaConfig(**{**LLAMA, "max_position_embeddings": 8192, "num_hidden_layers": 2}, bos_token_id=None, eos_token_id=None)
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
    model.generation_config.eos_token_id = None
    model.save_pretrained(directory, safe_serialization=True)
    byte_tokenizer(directory, template)
    # In place of the tokenizer's </s>: no text ends by itself.
    (directory / "generation_config.json").write_text('{"eos_token_id": [1000000]}')


def command(*arguments):
    return [sys.executable, "-c", PROGRAM, "serve", *map(str, arguments)]


def environment(**more):
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **more}


def refused(*arguments, **more):
    """A server that does not start: (exit status, the one line that it says)."""
    done = subprocess.run(command(*arguments), capture_output=True, text=True, timeout=300, env=environment(**more))
    assert not done.stdout
    (line,) = done.stderr.strip().splitlines()
    return done.returncode, line


class Server:
    def __init__(self, directory, *flags, files=None, **more):
        self.name = directory.name
        few_files = ["prlimit", f"--nofile={files}:{files}"] if files else []
        self.process = subprocess.Popen(
            few_files + command(directory, "--port", 0, "--host-memory", "512MiB", *flags),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(**more),
        )  # fmt: skip
        self.line = self.process.stdout.readline()
        found = re.search(r"http://(\S+):(\d+)/v1", self.line)
        if found is None:
            self.process.kill()
            raise AssertionError(self.line + self.process.communicate()[1])
        self.port = int(found[2])
        self.url = f"http://127.0.0.1:{self.port}/v1"

    def client(self, key="none"):
        return openai.OpenAI(base_url=self.url, api_key=key, max_retries=0, timeout=300)

    def ask(self, path, body=None, **headers):
        """(status, answer) of a request, which is a POST where it has a body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        with contextlib.closing(connection):
            if body is None:
                connection.request("GET", path, headers=headers)
            else:
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                connection.request("POST", path, data, {"Content-Type": "application/json", **headers})
            answer = connection.getresponse()
            text = answer.read().decode()
        return answer.status, json.loads(text) if "json" in answer.headers["content-type"] else text

    def metric(self, name):
        status, text = self.ask("/metrics")
        assert status == 200
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if re.match(rf"penstock_serve_{name}(\{{.*\}})? ", line))

    def raw(self, body, path="/v1/completions", receive_buffer=None):
        """A connection on which a request was sent, and nothing read."""
        connection = socket.socket()
        connection.settimeout(300)
        if receive_buffer:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.connect(("127.0.0.1", self.port))
        data = json.dumps(body).encode()
        connection.sendall(f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        return connection

    def settles(self, reads=lambda server: (server.metric("texts_running"), server.metric("texts_waiting")), expected=(0, 0)):
        until = time.monotonic() + 300
        while reads(self) != expected:
            assert time.monotonic() < until, (reads(self), expected)
            time.sleep(0.05)

    def of_process(self):
        """(threads, files, bytes of memory)."""
        with open(f"/proc/{self.process.pid}/status") as file:
            status = dict(line.split(":", 1) for line in file)
        return int(status["Threads"]), len(os.listdir(f"/proc/{self.process.pid}/fd")), int(status["VmRSS"].split()[0]) << 10

    def stop(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=300)
        return self.process.returncode, err

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models") / "tiny-llama"
    directory.mkdir()
    write_model(directory)
    return directory


@pytest.fixture(scope="module")
def llm(model):
    with penstock.LLM(model, host_memory="256MiB", batch=4) as made:
        yield made


@pytest.fixture(scope="module")
def server(model):
    with Server(model, "--batch", 8) as started:
        yield started
        assert started.stop() == (0, "")


def stream_of(stream):
    """(texts by choice, reasons by choice, usage) of the chunks of a stream."""
    texts, reasons, usage = {}, {}, None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            part = choice.delta.content if hasattr(choice, "delta") else choice.text
            texts[choice.index] = texts.get(choice.index, "") + (part or "")
            if choice.finish_reason:
                assert choice.index not in reasons
                reasons[choice.index] = choice.finish_reason
    return texts, reasons, usage


SAMPLED = dict(temperature=0.9, top_p=0.95, seed=11)


def test_completions_are_the_texts_of_generate(server, llm):
    client = server.client()
    prompts = ["The sea", "A hill"]
    expected = llm.generate(prompts, max_tokens=24, **SAMPLED)
    made = client.completions.create(model=server.name, prompt=prompts, max_tokens=24, **SAMPLED)
    assert [choice.text for choice in made.choices] == [text.text for text in expected]
    assert [(choice.index, choice.finish_reason) for choice in made.choices] == [(0, "length"), (1, "length")]
    assert (made.object, made.model) == ("text_completion", server.name) and made.id.startswith("cmpl-")
    assert (made.usage.prompt_tokens, made.usage.completion_tokens, made.usage.total_tokens) == (13, 48, 61)
    tokens = client.completions.create(model=server.name, prompt=[1, 2, 3], max_tokens=9, temperature=0, extra_body={"top_k": 5, "repetition_penalty": 1.3})
    assert tokens.choices[0].text == llm.generate([[1, 2, 3]], max_tokens=9, top_k=5, repetition_penalty=1.3)[0].text
    lists = client.completions.create(model=server.name, prompt=[[1, 2, 3], [7]], max_tokens=9, temperature=0)
    assert [choice.text for choice in lists.choices] == [text.text for text in llm.generate([[1, 2, 3], [7]], max_tokens=9)]
    several = client.completions.create(model=server.name, prompt="The sea", n=3, max_tokens=9, echo=True, **SAMPLED)
    assert [choice.text for choice in several.choices] == ["The sea" + llm.generate("The sea", max_tokens=9, **{**SAMPLED, "seed": 11 + i})[0].text for i in range(3)]
    assert several.usage.prompt_tokens == 7
    assert len(client.completions.create(model=server.name, prompt="x").choices[0].text) > 0
    a, b = (client.completions.create(model=server.name, prompt="x", max_tokens=32).choices[0].text for _ in range(2))
    assert a != b  # seeds of their own


def test_a_stop_string_ends_a_text_before_it(server, llm):
    whole = llm.generate("The sea", max_tokens=40)[0].text
    stop = whole[10:12]
    made = server.client().completions.create(model=server.name, prompt="The sea", max_tokens=40, temperature=0, stop=[stop, "no such text"])
    assert (made.choices[0].text, made.choices[0].finish_reason) == (whole[: whole.index(stop)], "stop")


def test_a_chat_is_that_of_the_llm(server, llm):
    messages = [{"role": "user", "content": "Drei Flüsse?"}]
    expected = llm.chat(messages, max_tokens=20, **SAMPLED)
    parts = [{"role": "user", "content": [{"type": "text", "text": "Drei "}, {"type": "text", "text": "Flüsse?"}]}]
    for each, limit in ((messages, {"max_tokens": 20}), (parts, {"max_completion_tokens": 20})):
        made = server.client().chat.completions.create(model=server.name, messages=each, **limit, **SAMPLED)
        assert (made.choices[0].message.content, made.choices[0].message.role) == (expected.text, "assistant")
        assert made.choices[0].finish_reason == "length" and made.object == "chat.completion" and made.id.startswith("chatcmpl-")
        assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (expected.prompt_tokens, 20)
    neutral = dict(tools=[], logprobs=False, frequency_penalty=0, presence_penalty=0.0, logit_bias={}, response_format={"type": "text"}, user="me", store=False)
    assert server.client().chat.completions.create(model=server.name, messages=messages, max_tokens=20, **neutral, **SAMPLED).choices[0].message.content == expected.text


def test_a_stream_is_the_text_without_stream(server):
    client = server.client()
    options = dict(model=server.name, max_tokens=60, n=2, **SAMPLED)
    whole = client.completions.create(prompt=["The sea", "A hill"], **options)
    with client.completions.create(prompt=["The sea", "A hill"], stream=True, stream_options={"include_usage": True}, **options) as stream:
        texts, reasons, usage = stream_of(stream)
    assert texts == {choice.index: choice.text for choice in whole.choices} and len(texts) == 4
    assert set(reasons.values()) == {"length"} and len(reasons) == 4
    assert usage == whole.usage
    messages = [{"role": "user", "content": "Name three rivers."}]
    whole = client.chat.completions.create(messages=messages, **options)
    with client.chat.completions.create(messages=messages, stream=True, **options) as stream:
        texts, reasons, usage = stream_of(stream)
    assert texts == {choice.index: choice.message.content for choice in whole.choices}
    assert set(reasons.values()) == {"length"} and usage is None


def test_every_option_means_what_it_means_to_generate(server, llm):
    options = dict(temperature=3.0, seed=5, presence_penalty=1.5, frequency_penalty=-0.5, min_tokens=3, top_k=60, min_p=0.01, repetition_penalty=1.2)
    beyond = ("min_tokens", "top_k", "min_p", "repetition_penalty")
    openais = {name: value for name, value in options.items() if name not in beyond}
    extra = {name: options[name] for name in beyond}
    bias = {65: 12.0, 66: -100.0}
    expected = llm.generate("The sea", max_tokens=12, n=2, logit_bias=bias, **options)
    made = server.client().completions.create(model=server.name, prompt="The sea", max_tokens=12, n=2, logit_bias={str(key): value for key, value in bias.items()}, extra_body=extra, **openais)
    assert [choice.text for choice in made.choices] == [text.text for text in expected]
    assert made.choices[0].text != llm.generate("The sea", max_tokens=12, temperature=3.0, seed=5)[0].text


def test_logprobs_come_in_openais_forms(server, llm):
    client = server.client()
    options = dict(max_tokens=30, temperature=3.0, seed=5)
    whole = llm.generate("The sea", logprobs=3, **options)[0]
    stop = whole.text[20:22]
    cut = llm.generate("The sea", logprobs=3, stop=stop, **options)[0]
    for text, more in ((whole, {}), (cut, {"stop": stop})):
        entries = [each for each in text.logprobs if each.begins < len(text.text.encode())]
        made = client.completions.create(model=server.name, prompt="The sea", logprobs=3, **options, **more).choices[0]
        assert made.text == text.text and made.logprobs.tokens == [each.text for each in entries]
        assert made.logprobs.token_logprobs == [each.logprob for each in entries]
        for top, each in zip(made.logprobs.top_logprobs, entries):
            assert {likely.text for likely in each.top} <= set(top) <= {likely.text for likely in each.top} | {each.text}
        assert made.logprobs.text_offset == [len(text.text.encode()[: each.begins].decode("utf-8", "ignore")) for each in entries]
        parts = []
        for chunk in client.completions.create(model=server.name, prompt="The sea", logprobs=3, stream=True, **options, **more):
            parts += [choice.logprobs for choice in chunk.choices if choice.logprobs]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert sum((getattr(part, name) for part in parts), []) == getattr(made.logprobs, name), name
    assert client.completions.create(model=server.name, prompt="The sea", logprobs=0, **options).choices[0].logprobs.top_logprobs is None
    assert client.completions.create(model=server.name, prompt="The sea", **options).choices[0].logprobs is None

    messages = [{"role": "user", "content": "Drei Flüsse?"}]
    text = llm.chat(messages, logprobs=2, **options)
    made = client.chat.completions.create(model=server.name, messages=messages, logprobs=True, top_logprobs=2, **options).choices[0]
    assert made.message.content == text.text
    assert [(each.token, each.bytes, each.logprob) for each in made.logprobs.content] == [(each.text, list(each.bytes), each.logprob) for each in text.logprobs]
    assert [[(top.token, top.bytes, top.logprob) for top in each.top_logprobs] for each in made.logprobs.content] == [
        [(top.text, list(top.bytes), top.logprob) for top in each.top] for each in text.logprobs
    ]
    streamed = []
    for chunk in client.chat.completions.create(model=server.name, messages=messages, logprobs=True, top_logprobs=2, stream=True, **options):
        streamed += [each for choice in chunk.choices if choice.logprobs for each in choice.logprobs.content]
    assert streamed == made.logprobs.content
    chosen = client.chat.completions.create(model=server.name, messages=messages, logprobs=True, **options).choices[0]
    assert [each.logprob for each in chosen.logprobs.content] == [each.logprob for each in text.logprobs] and not any(each.top_logprobs for each in chosen.logprobs.content)


def test_what_generation_config_says_holds_where_a_request_says_nothing(tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    write_model(directory)
    (directory / "generation_config.json").write_text('{"eos_token_id": [1000000], "do_sample": true, "temperature": 3.0, "top_k": 9, "max_new_tokens": 21}')
    with penstock.LLM(directory, host_memory="256MiB") as llm, Server(directory) as server:
        expected = llm.generate("The sea", seed=4)[0]
        made = server.client().completions.create(model=server.name, prompt="The sea", seed=4, max_tokens=21)
        assert (made.choices[0].text, len(expected.tokens)) == (expected.text, 21)
        greedy = server.client().completions.create(model=server.name, prompt="The sea", seed=4, max_tokens=21, temperature=0)
        assert greedy.choices[0].text == llm.generate("The sea", temperature=0)[0].text != expected.text
        chat = server.client().chat.completions.create(model=server.name, messages=[{"role": "user", "content": "x"}], seed=4)
        assert chat.choices[0].message.content == llm.chat([{"role": "user", "content": "x"}], seed=4).text and chat.usage.completion_tokens == 21
        returncode, said = server.stop()
        assert returncode == 0 and "top_k 9, max_tokens 21 where nothing else is asked for" in said


def test_models_health_and_metrics(server):
    client = server.client()
    (model,) = client.models.list().data
    assert (model.id, model.object, client.models.retrieve(model.id).id) == (server.name, "model", server.name)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")
    assert server.ask("/health") == (200, {"status": "ok"})
    before = {name: server.metric(name) for name in ("prompt_tokens_total", "generated_tokens_total", "first_token_seconds_count")}
    client.completions.create(model=server.name, prompt=["ab", "cde"], max_tokens=4)
    after = {name: server.metric(name) for name in before}
    assert [after[name] - before[name] for name in before] == [5, 8, 2]
    text = server.ask("/metrics")[1]
    assert re.search(r'^penstock_serve_requests_total\{route="/v1/completions",status="200"\} [1-9]', text, re.M)
    assert re.search(r'^penstock_serve_first_token_seconds_bucket\{le="\+Inf"\} [1-9]', text, re.M)
    for line in text.splitlines():
        assert re.fullmatch(r'# (HELP|TYPE) \S+ .+|[a-z_]+(\{[^{}]*\})? \S+', line), line
    assert server.line.startswith("penstock serve: http://127.0.0.1:") and "8192" not in server.line and "4096 tokens" in server.line


def test_a_hundred_clients_at_once_have_each_its_own_text(server, llm):
    prompts = [f"client {i}" for i in range(100)]
    expected = [text.text for text in llm.generate(prompts, max_tokens=16, temperature=0.8, seed=0)]

    async def client(api, i):
        made = await api.completions.create(model=server.name, prompt=prompts[i], max_tokens=16, temperature=0.8, seed=i, stream=i % 2 == 0)
        if i % 2:
            return made.choices[0].text
        return "".join([choice.text async for chunk in made for choice in chunk.choices])

    async def all_of_them():
        async with openai.AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=300) as api:
            return await asyncio.gather(*(client(api, i) for i in range(len(prompts))))

    assert asyncio.run(all_of_them()) == expected
    server.settles()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_has_its_texts_cancelled(server, stream):
    server.settles()
    before = server.metric("texts_cancelled_total")
    body = dict(model=server.name, prompt=["a", "b"], max_tokens=ENDLESS // 2, stream=stream, temperature=0)
    connections = [server.raw(body) for _ in range(3)]
    server.settles(lambda server: server.metric("texts_running"), 6)
    if stream:
        assert connections[0].recv(100)
    for connection in connections:
        connection.close()
    server.settles()
    assert server.metric("texts_cancelled_total") == before + 6


def test_who_waits_and_leaves_gives_its_place_back(model):
    with Server(model, "--batch", 1, "--queue", 4) as server:
        long = dict(model=server.name, prompt="a", max_tokens=3000, temperature=0)
        connections = [server.raw(long) for _ in range(6)]
        server.settles(lambda server: (server.metric("texts_running"), server.metric("texts_waiting")), (1, 5))
        with pytest.raises(openai.RateLimitError) as full:
            server.client().completions.create(model=server.name, prompt="a", max_tokens=1)
        assert full.value.code == "rate_limit_exceeded"
        with pytest.raises(openai.BadRequestError, match="6 at most"):
            server.client().completions.create(model=server.name, prompt="a", n=7)
        for connection in connections[::-1]:
            connection.close()
        server.settles()
        assert server.metric("texts_cancelled_total") == 6
        assert server.client().completions.create(model=server.name, prompt="a", max_tokens=1).usage.completion_tokens == 1


def test_a_slow_reader_holds_nobody_up_and_has_all_of_its_text(server, llm):
    body = dict(model=server.name, prompt=["slow"] * 8, max_tokens=250, temperature=0.9, seed=1, stream=True)
    with server.raw(body, receive_buffer=4096) as connection:
        data = connection.recv(100)
        assert server.client().completions.create(model=server.name, prompt="a", max_tokens=8).usage.completion_tokens == 8
        server.settles()
        while b"[DONE]" not in data:
            piece = connection.recv(4096)
            assert piece
            data += piece
    texts = [""] * 8
    for line in data.decode().splitlines():  # HTTP's own chunks lie between events
        if line.startswith("data: {"):
            (choice,) = json.loads(line[6:])["choices"]
            texts[choice["index"]] += choice["text"]
    assert texts == [text.text for text in llm.generate(["slow"] * 8, max_tokens=250, temperature=0.9, seed=1)]


REFUSED = [
    (b"{", 400, None, "no JSON"),
    (b"[1]", 400, None, "JSON object"),
    (b"\xff\xfe", 400, None, "utf-8"),
    (b"[" * 100000, 400, None, "nested"),
    ({"prompt": "a"}, 400, "model", "must provide a model"),
    ({"model": "gpt-9", "prompt": "a"}, 404, "model", "'gpt-9' does not exist"),
    ({"max_token": 3}, 400, "max_token", "'max_tokens'"),
    ({"zzzzzz": 3}, 400, "zzzzzz", "Unknown parameter"),
    ({"best_of": 4}, 400, "best_of", "not served"),
    ({"logprobs": 21}, 400, "logprobs", "at most 20"),
    ({"logprobs": True}, 400, "logprobs", "whole number"),
    ({"logprobs": 2, "echo": True}, 400, "logprobs", "echo"),
    ({"top_logprobs": 2}, 400, "top_logprobs", "'logprobs'"),
    ({"logit_bias": {"3": 101}}, 400, "logit_bias", "from -100 to 100"),
    ({"logit_bias": {"3": "1"}}, 400, "logit_bias", "number"),
    ({"logit_bias": {"300": 1}}, 400, "logit_bias", "the model has 300"),
    ({"logit_bias": {"x": 1}}, 400, "logit_bias", "no token id"),
    ({"logit_bias": [3]}, 400, "logit_bias", "by token id"),
    ({"presence_penalty": 2.5}, 400, "presence_penalty", "from -2 to 2"),
    ({"frequency_penalty": -3}, 400, "frequency_penalty", "from -2 to 2"),
    ({"frequency_penalty": "much"}, 400, "frequency_penalty", "number"),
    ({"min_p": 1.5}, 400, "min_p", "from 0 to 1"),
    ({"repetition_penalty": 0}, 400, "repetition_penalty", "above 0"),
    ({"min_tokens": -1}, 400, "min_tokens", "from 0"),
    ({"min_tokens": 9, "max_tokens": 4}, 400, "min_tokens", "max_tokens, which is 4"),
    ({"suffix": "x"}, 400, "suffix", "not served"),
    ({"max_tokens": 0}, 400, "max_tokens", "from 1"),
    ({"max_tokens": True}, 400, "max_tokens", "whole number"),
    ({"max_tokens": 1.5}, 400, "max_tokens", "whole number"),
    ({"temperature": -1}, 400, "temperature", "from 0"),
    ({"temperature": "hot"}, 400, "temperature", "number"),
    ({"temperature": float("nan")}, 400, "temperature", "number"),
    ({"temperature": 10**400}, 400, "temperature", "from 0"),
    ({"top_k": 10**400}, 400, "top_k", "from 0"),
    ({"\ud800": 1}, 400, "\\ud800", "Unknown parameter"),
    ({"top_p": 0}, 400, "top_p", "above 0"),
    ({"top_k": -1}, 400, "top_k", "from 0"),
    ({"seed": 1.5}, 400, "seed", "whole number"),
    ({"stop": [""]}, 400, "stop", "one character"),
    ({"stop": [1]}, 400, "stop", "text"),
    ({"n": 0}, 400, "n", "from 1"),
    ({"n": 10**9}, 400, "n", "128"),
    ({"stream": "yes"}, 400, "stream", "true or false"),
    ({"stream_options": {"include_usage": True}}, 400, "stream_options", "stream: true"),
    ({"prompt": []}, 400, "prompt", "list of tokens"),
    ({"prompt": {"a": 1}}, 400, "prompt", "list of tokens"),
    ({"prompt": ""}, 400, "prompt", "at least one token"),
    ({"prompt": [[]]}, 400, "prompt", "at least one token"),
    ({"prompt": [1, 300]}, 400, "prompt", "300, which is no token"),
    ({"prompt": [1, -1]}, 400, "prompt", "-1, which is no token"),
    ({"prompt": [1, 2**70]}, 400, "prompt", f"{2**70}, which is no token of this model, which has "),
    ({"prompt": [True]}, 400, "prompt", "True, which is no token"),
    ({"prompt": "\ud800"}, 400, "prompt", "surrogate"),
    ({"prompt": [1, "\ud800"]}, 400, "prompt", "\\ud800, which is no token"),
    ({"prompt": "x" * 5000}, 400, "prompt", "4096 tokens, of prompt and text together. However, your prompt has 5000 tokens"),
    ({"prompt": [1] * 4096}, 400, "prompt", "4096"),
]
REFUSED_CHAT = [
    ({"messages": []}, 400, "messages", "list of objects"),
    ({"messages": "hello"}, 400, "messages", "list of objects"),
    ({"messages": [{"role": "captain", "content": "x"}]}, 400, "messages", "no such role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, 400, "messages[0].content", "no text"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, 400, "messages[0].tool_calls", "not served"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, 400, "messages[0].content", "surrogate"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "\ud800"}]}]}, 400, "messages[0].content", "surrogate"),
    ({"messages": [{"role": "user", "content": "x", "name": "\ud800"}]}, 400, "messages[0].name", "surrogate"),
    ({"messages": [{"role": "user", "content": "x", "\ud800": "x"}]}, 400, "messages[0].\\ud800", "not served"),
    ({"messages": [{"role": "user", "content": "x" * 5000}]}, 400, "prompt", "4096"),
    ({"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]}, 400, "tools", "not served"),
    ({"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_object"}}, 400, "response_format", "not served"),
    ({"messages": [{"role": "user", "content": "x"}], "logprobs": 3}, 400, "logprobs", "true or false"),
    ({"messages": [{"role": "user", "content": "x"}], "top_logprobs": 3}, 400, "top_logprobs", "logprobs: true"),
    ({"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", "at most 20"),
    ({"messages": [{"role": "user", "content": "x"}], "prompt": "x"}, 400, "prompt", "Unknown parameter"),
]


def test_what_cannot_be_served_is_refused_by_name(server):
    for path, rows, more in (("/v1/completions", REFUSED, {"prompt": "a"}), ("/v1/chat/completions", REFUSED_CHAT, {})):
        for given, status, param, words in rows:
            whole = given if isinstance(given, bytes) or "prompt" in given and "model" not in given and len(given) == 1 and param == "model" else None
            body = whole if whole is not None else {"model": server.name, **more, **given}
            got, answer = server.ask(path, body)
            assert (got, answer["error"]["param"]) == (status, param), (given, answer)
            assert words in answer["error"]["message"] and answer["error"]["type"] == "invalid_request_error", (given, answer)
            assert len(answer["error"]["message"]) < 1000 and "\n" not in answer["error"]["message"], answer
    server.settles()
    with pytest.raises(openai.NotFoundError) as wrong:
        server.client().completions.create(model="gpt-9", prompt="a")
    assert wrong.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        server.client().completions.create(model=server.name, prompt="x" * 5000)
    assert wrong.value.code == "context_length_exceeded"
    assert server.ask("/v1/embeddings", {})[0] == 404
    status, answer = server.ask("/v1/completions")
    assert status == 405 and "GET" in answer["error"]["message"]
    assert server.ask("/v1/completions", {"model": server.name}, **{"Content-Type": "text/plain"})[0] == 415


def test_a_body_that_is_too_long_is_refused(model):
    with Server(model, "--max-body", "64KiB") as server:
        body = json.dumps({"model": server.name, "prompt": "x" * (1 << 20)}).encode()
        status, answer = server.ask("/v1/completions", body)
        assert status == 413 and "65536" in answer["error"]["message"]
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
        connection.request("POST", "/v1/completions", iter([body[:40000], body[40000:]]), {"Content-Type": "application/json"}, encode_chunked=True)
        assert connection.getresponse().status == 413
        assert server.ask("/health")[0] == 200


def test_a_body_of_many_small_values_is_refused_without_being_parsed(server):
    for values in (b"1", b'""', b'["a"]', b"[1]"):
        body = b'{"model": "x", "prompt": [' + b",".join([values] * 1_000_000) + b"]}"
        status, answer = server.ask("/v1/completions", body)
        assert status == 413 and "values" in answer["error"]["message"]
    form = dict(model=server.name, max_tokens=2)
    status, answer = server.ask("/v1/completions", {**form, "prompt": ["a"] * 100_000})
    assert (status, answer["error"]["param"]) == (400, "prompt")
    status, answer = server.ask("/v1/chat/completions", {**form, "messages": [{"role": "user", "content": "a"}] * 50_000})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


def test_who_connects_and_asks_nothing_keeps_nobody_out(model):
    with Server(model, files=256) as server, contextlib.ExitStack() as held:
        for number in range(600):
            connection = held.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=300))
            if number % 2:
                connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: loc")
        for _ in range(3):
            assert server.ask("/health")[0] == 200
        assert server.client().completions.create(model=server.name, prompt="x", max_tokens=2).usage.completion_tokens == 2
        assert server.stop() == (0, "")


def test_a_request_under_way_keeps_its_connection(model, llm):
    tokens = 3000  # long enough to be seen on its way
    expected = llm.generate("The sea", max_tokens=tokens)[0].text
    with Server(model, files=256) as server, contextlib.ExitStack() as held:
        body = dict(model=server.name, prompt="The sea", max_tokens=tokens, temperature=0)
        with server.raw(body) as connection:
            server.settles(lambda server: server.metric("texts_running"), 1)
            for _ in range(600):
                held.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=300))
            answer = http.client.HTTPResponse(connection)
            answer.begin()
            assert json.loads(answer.read())["choices"][0]["text"] == expected


def test_long_bodies_share_a_bound_and_short_ones_are_answered(model):
    with Server(model, "--max-body", "1MiB") as server, contextlib.ExitStack() as held:
        for _ in range(17):  # each lacks its last byte
            connection = held.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=300))
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 1048576\r\n\r\n")
            connection.sendall(b"x" * 1048575)
        server.settles(lambda server: 'status="429"' in server.ask("/metrics")[1], True)
        assert server.client().completions.create(model=server.name, prompt="x", max_tokens=2).usage.completion_tokens == 2


def test_an_error_of_the_drive_is_told_and_health_says_so(directory):
    write_model(directory)
    status, line = refused(directory, "--host-memory", "1MiB", "--max-length", 256, "--batch", 1)
    least = int(line.rsplit("(", 1)[1].split()[0])
    with Server(directory, "--host-memory", least, "--max-length", 256, "--batch", 1) as server:
        client = server.client()
        assert client.completions.create(model=server.name, prompt="x", max_tokens=2).usage.completion_tokens == 2
        os.truncate(directory / "model.safetensors", 4096)
        with pytest.raises(openai.APIError), client.completions.create(model=server.name, prompt="x", max_tokens=200, stream=True) as stream:
            stream_of(stream)
        for _ in range(2):
            with pytest.raises(openai.InternalServerError) as told:
                client.completions.create(model=server.name, prompt="x", max_tokens=200)
            assert told.value.status_code == 503 and "model.safetensors" in str(told.value)
        status, health = server.ask("/health")
        assert (status, health["status"]) == (503, "broken") and "model.safetensors" in health["error"]
        assert server.stop() == (0, "")


def test_a_client_that_does_not_read_does_not_hold_up_the_end(model):
    with Server(model, "--drain", 0) as server:
        body = dict(model=server.name, prompt=["slow"] * 32, max_tokens=300, stream=True)
        with server.raw(body, receive_buffer=4096) as connection:
            connection.recv(100)
            server.settles()
            server.process.send_signal(signal.SIGTERM)
            server.process.communicate(timeout=300)
            assert server.process.returncode == 0


def test_a_key_is_asked_for_where_there_is_one(model, directory):
    (directory / "key").write_text("secret-of-file\n")
    for flags, more, key in ((("--api-key-file", directory / "key"), {}, "secret-of-file"), ((), {"PENSTOCK_API_KEY": "of-environment"}, "of-environment")):
        with Server(model, *flags, "--host", "0.0.0.0", **more) as server:
            for wrong in ("", "x", key + "x", key[:-1], "ü"):
                for path in ("/v1/models", "/metrics", "/v1/completions", "/nowhere"):
                    status, answer = server.ask(path, Authorization=f"Bearer {wrong}")
                    assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
            assert server.ask("/v1/models")[0] == 401
            assert server.ask("/health")[0] == 200
            assert server.client(key).models.list().data[0].id == server.name
            with pytest.raises(openai.AuthenticationError):
                server.client("wrong").models.list()
            assert server.stop() == (0, "")
    for empty in ("", "  "):  # of a script whose secret was never set
        status, line = refused(model, "--port", 0, "--host-memory", "512MiB", PENSTOCK_API_KEY=empty)
        assert status == 2 and "PENSTOCK_API_KEY is empty" in line
    with Server(model, "--host", "0.0.0.0") as server:
        assert server.ask("/v1/models")[0] == 200
        status, err = server.stop()
        assert status == 0 and len(err.splitlines()) == 1 and "without a key" in err


def test_a_page_in_the_browser_cannot_ask_by_a_name_of_its_own(server):
    for host, status in (("evil.example", 403), ("127.0.0.1.evil.example:8000", 403), ("localhost:9", 200), ("127.0.0.1", 200), ("[::1]:8000", 200)):
        assert server.ask("/v1/models", Host=host)[0] == status, host


def test_hostile_bytes_end_their_own_connection_alone(server):
    hostile = [
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * (1 << 20) + b"\r\n\r\n",
        b"\0" * 5000,
        b"GET /health HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 50\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99999999999999999999\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /v1/models/%ff%00%0d%0a HTTP/1.1\r\nHost: \xff\xfe\r\nAuthorization: \xff\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 500\r\n\r\n{",
        b"GET /nowhere/ HTTP/1.1\r\nHost: [\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\n" + b"".join(b"h%d: x\r\n" % i for i in range(2000)),
    ]
    random.seed(5)
    hostile += [random.randbytes(200) + b"\r\n\r\n" for _ in range(20)]
    for data in hostile:
        with socket.create_connection(("127.0.0.1", server.port), timeout=300) as connection:
            with contextlib.suppress(OSError):
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
                answer = connection.recv(1 << 16)
                assert not answer or re.match(rb"HTTP/1.1 (4\d\d|200) ", answer), (data[:100], answer)
    server.settles()
    assert server.ask("/health") == (200, {"status": "ok"})
    assert server.process.poll() is None


def test_time_is_bounded_where_it_is_asked_for(model):
    with Server(model, "--timeout", 1, "--batch", 1) as server:
        long = dict(model=server.name, prompt="a", max_tokens=ENDLESS, temperature=0)
        long_enough = [server.raw(long) for _ in range(8)]  # of which the last waits until it is over
        status, answer = server.ask("/v1/completions", long)
        assert (status, answer["error"]["code"]) == (504, "timeout")
        long_enough += [server.raw(long) for _ in range(8)]
        with server.client().completions.create(stream=True, **long) as stream, pytest.raises(openai.APIError, match="--timeout"):
            stream_of(stream)
        for connection in long_enough:
            connection.close()
        server.settles()


def test_sigterm_finishes_the_texts_under_way(model, llm):
    expected = llm.generate("The sea", max_tokens=400)[0].text
    for number in (signal.SIGTERM, signal.SIGINT):
        with Server(model, "--drain", 300) as server:
            client = server.client()
            stream = iter(client.completions.create(model=server.name, prompt="The sea", max_tokens=400, temperature=0, stream=True))
            text = next(stream).choices[0].text
            server.process.send_signal(number)
            text += "".join(chunk.choices[0].text for chunk in stream)
            assert text == expected
            _, err = server.process.communicate(timeout=300)
            assert (server.process.returncode, err) == (0, "")
            with pytest.raises(openai.APIConnectionError):
                client.models.list()


def test_what_is_not_over_when_the_drain_ends_is_cancelled(model):
    with Server(model, "--drain", 0, "--batch", 1) as server:
        long = dict(model=server.name, prompt="a", max_tokens=ENDLESS, temperature=0)
        streams = [iter(server.client().completions.create(stream=True, **long)) for _ in range(2)]
        next(streams[0])
        with server.raw(long) as connection:
            server.settles(lambda server: server.metric("texts_waiting"), 2)
            server.process.send_signal(signal.SIGTERM)
            for stream in streams:
                with pytest.raises(openai.APIError, match="stops"):
                    list(stream)
            assert b" 503 " in connection.recv(1 << 16)
        _, err = server.process.communicate(timeout=300)
        assert (server.process.returncode, err) == (0, "")


def test_a_body_that_never_ends_does_not_outlast_the_drain(model):
    with Server(model, "--drain", 1) as server:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
        with socket.create_connection(("127.0.0.1", server.port), timeout=300) as connection:
            connection.sendall(head)
            assert server.ask("/health")[0] == 200
            server.process.send_signal(signal.SIGTERM)
            assert b" 503 " in connection.recv(1 << 16)
        _, err = server.process.communicate(timeout=300)
        assert (server.process.returncode, err) == (0, "")


def test_one_port_has_one_server(model, server):
    status, line = refused(model, "--port", server.port, "--host-memory", "256MiB")
    assert status == 1 and line == f"penstock serve: --host 127.0.0.1 --port {server.port}: another program listens there"


def test_wrong_flags_and_models_are_one_line(model, directory):
    for flags, status, words in [
        (("--prt", "1"), 2, 'unknown flag --prt (did you mean "--port"?)'),
        (("--host-memry=1GiB",), 2, '"--host-memory"'),
        (("--port", "70000"), 2, "--port"),
        (("--port", "x"), 2, "--port"),
        (("--kv", "disk"), 2, "--kv"),
        (("--queue", "-1"), 2, "-1"),
        (("--host-memory", "lots"), 2, "--host-memory"),
        (("--host-memory", "1MiB"), 2, "the least that works here is"),
        (("--max-length", "100000"), 2, "max_length"),
        (("--api-key-file", directory / "none"), 2, "--api-key-file"),
        (("--host", "256.1.1.1"), 1, "256.1.1.1"),
    ]:
        got, line = refused(model, "--port", 0, *flags)
        assert got == status and line.startswith("penstock serve: ") and words in line, (flags, line)
    assert refused() == (2, "penstock serve: the following arguments are required: DIR")
    status, line = refused(directory / "nowhere")
    assert status == 1 and "nowhere" in line
    (directory / "config.json").write_text("{}")
    status, line = refused(directory)
    assert status in (1, 2) and line.startswith("penstock serve: ")
    done = subprocess.run(command("--help"), capture_output=True, text=True, env=environment())
    assert done.returncode == 0 and "--drain" in done.stdout
    shown = subprocess.run([sys.executable, "-c", PROGRAM, "--help"], capture_output=True, text=True, env=environment())
    assert shown.returncode == 0 and re.search(r"^  serve  ", shown.stdout, re.M)


WITHOUT = """
    import importlib.abc, sys

    class Missing(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path, target=None):
            if name.split(".")[0] in ("starlette", "uvicorn", "jinja2"):
                raise ImportError(name + " is not here")

    sys.meta_path.insert(0, Missing())
    from penstock import _programs
    sys.argv = ["penstock", "serve", sys.argv[1]]
    _programs.penstock()
"""


def test_without_the_extra_it_says_what_to_install(model, in_child):
    status, out, err = in_child(WITHOUT, model)
    assert (status, out) == (2, "") and len(err.splitlines()) == 1 and "pip install 'penstock[serve]'" in err


def test_other_verbs_import_nothing_of_it(in_child):
    status, out, err = in_child("import sys, penstock._programs; print([name for name in sys.modules if 'serve' in name or name in ('asyncio', 'uvicorn', 'starlette')])")
    assert (status, out.strip()) == (0, "[]"), err


HOSTILE = """{% if messages[0].content == "endless" %}{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}{% endif %}
{% if messages[0].content == "memory" %}{{ (messages[0].content * 400000000) | length }}{% endif %}
{% if messages[0].content == "long" %}{{ messages[0].content * 75000000 }}{% endif %}
{% if messages[0].content == "zero" %}{{ 1 // 0 }}{% endif %}
{% if messages[0].content == "files" %}{{ ().__class__.__base__.__subclasses__() }}{% endif %}
{{ messages[0].content }}"""


def test_a_hostile_template_ends_its_own_request_alone(directory):
    write_model(directory, HOSTILE)
    with Server(directory) as server:
        chat = server.client().chat.completions

        def ask(content):
            return chat.create(model=server.name, messages=[{"role": "user", "content": content}], max_tokens=2)

        for content in ("memory", "long", "zero", "files"):
            with pytest.raises(openai.BadRequestError):
                ask(content)
            assert ask("hello").usage.completion_tokens == 2
        body = dict(model=server.name, messages=[{"role": "user", "content": "endless"}])
        with server.raw(body, "/v1/chat/completions") as waits:
            server.settles(lambda server: server.metric("texts_waiting"), 1)
            # Beside it the server goes on.
            assert server.client().completions.create(model=server.name, prompt="x", max_tokens=2).usage.completion_tokens == 2
            answer = b""
            while not answer.endswith(b"}"):  # head and body may come apart
                piece = waits.recv(1 << 16)
                assert piece, answer
                answer += piece
            assert b" 400 " in answer and b"takes more than" in answer
        with server.raw(body, "/v1/chat/completions"):
            server.settles(lambda server: server.metric("texts_waiting"), 1)
        # Who asked has left: nobody waits for the template.
        assert ask("hello").usage.completion_tokens == 2
        server.settles()
        assert server.stop() == (0, "")


def test_a_model_without_a_template_completes_and_does_not_chat(directory):
    write_model(directory)
    (directory / "tokenizer_config.json").unlink()
    with Server(directory, "--model-name", "org/plain") as server:
        client = server.client()
        with pytest.raises(openai.BadRequestError, match="no chat template"):
            client.chat.completions.create(model="org/plain", messages=[{"role": "user", "content": "x"}])
        assert client.completions.create(model="org/plain", prompt="x", max_tokens=2).usage.completion_tokens == 2
        assert client.models.retrieve("org/plain").id == "org/plain"


def soak(server, requests, seed):
    """Requests of all kinds, 32 at a time, a third of which leave before their end."""
    draw = random.Random(seed)
    kinds = [(draw.choice(["text", "chat", "wrong"]), draw.random() < 0.5, draw.random() < 0.3, draw.randint(1, 30)) for _ in range(requests)]

    async def one(api, gate, kind, stream, leaves, tokens):
        async with gate:
            options = dict(model=server.name, max_tokens=2000 if leaves else tokens, stream=stream)
            if kind == "chat":
                made = api.chat.completions.create(messages=[{"role": "user", "content": "x"}], **options)
            else:
                made = api.completions.create(prompt="x" if kind == "text" else [400], **options)
            with contextlib.suppress(openai.BadRequestError, asyncio.TimeoutError):
                answer = await asyncio.wait_for(made, 0.02 if leaves and not stream else None)
                if stream:
                    async for _ in answer:
                        if leaves:
                            break
                    await answer.close()

    async def all_of_them():
        gate = asyncio.Semaphore(32)
        async with openai.AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=600) as api:
            await asyncio.gather(*(one(api, gate, *kind) for kind in kinds))

    asyncio.run(all_of_them())
    server.settles()


def test_nothing_grows_with_the_number_of_requests(model):
    with Server(model, "--batch", 8) as server:
        soak(server, 100, 1)
        server.settles(lambda server: server.of_process()[1] < 40, True)  # connections that were kept alive
        threads, files, memory = server.of_process()
        soak(server, SOAK, 2)
        server.settles(lambda server: server.of_process()[1] <= files + 2, True)
        after = server.of_process()
        assert after[0] <= threads + 16, (threads, after)  # the pool is filled as it is needed
        assert after[2] <= memory + (48 << 20), (memory, after)
        assert server.ask("/health")[0] == 200
        assert server.stop() == (0, "")
