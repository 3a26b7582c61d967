"""``penstock serve DIR``: its flags, its start and its end."""

from __future__ import annotations

import argparse
import asyncio
import difflib
import errno
import os
import resource
import signal
import socket
import sys
from typing import Any, List, NoReturn, Optional, Sequence

from .._buffers import byte_size
from .._small_files import read_text
from ..llm import LLM

_NAME = "penstock serve"
_BACKLOG = 2048


class _Wrong(Exception):
    """Flags that cannot be obeyed: one line."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _Wrong(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(_NAME, description="Serves OpenAI's API over HTTP with a model that is larger than memory, on the processor.", allow_abbrev=False)
    add = parser.add_argument
    add("directory", metavar="DIR", nargs="+", help="Hugging Face directory, packed or not, state directory or checkpoint; all directories of a striped run")
    add("--host", default="127.0.0.1", help="address to listen on [%(default)s]")
    add("--port", type=_whole(0, 65535), default=8000, help="and its port; 0 takes a free one [%(default)s]")
    add("--host-memory", metavar="SIZE", help="hard host memory budget, such as 512MiB or 4GiB [half of the free memory]")
    add("--max-length", type=_whole(2), metavar="N", help="tokens of prompt and text together [the model's, at most 4096]")
    add("--batch", type=_whole(1, 256), default=32, metavar="N", help="texts at once, at most: as many as gain tokens a second in this memory [%(default)s]")
    add("--kv", choices=("auto", "host", "nvme"), default="auto", help="where keys and values live [%(default)s]")
    add("--kv-dir", metavar="DIR", help="directory for those on the drive [the current one]")
    add("--prompt-lookup", type=_whole(0, 64), default=0, metavar="N", help="guess up to N tokens from what a text repeats, and verify them in one pass [%(default)s]")
    add("--threads", type=_whole(1, 1024), metavar="N", help="threads that compute [one for each core]")
    add("--tokenizer", metavar="FILE", help="a tokenizer.json or its directory [the model's own]")
    add("--model", metavar="DIR", help="directory of the frozen weights of a run with adapters, if it has moved [where the run last read them]")
    add("--model-name", metavar="NAME", help="what requests call the model [the name of DIR]")
    add("--queue", type=_whole(0, 1 << 20), default=256, metavar="N", help="texts that wait beside those at hand, at most; more are answered with 429 [%(default)s]")
    add("--max-body", default="16MiB", metavar="SIZE", help="the longest body of a request; longer ones are answered with 413 [%(default)s]")
    add("--timeout", type=_whole(0), default=600, metavar="SECONDS", help="time of a request, from its body to its last token; 0 is no bound [%(default)s]")
    add("--drain", type=_whole(0), default=30, metavar="SECONDS", help="time that texts under way have at SIGTERM before they are cancelled [%(default)s]")
    add("--api-key-file", metavar="FILE", help="a file whose first line is the key that requests need [the environment's PENSTOCK_API_KEY, or none]")
    return parser


def _whole(least: int, most: int = 1 << 31) -> Any:
    def number(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text}: must be a whole number from {least} to {most}")
        return int(text)

    return number


def _flags(arguments: Sequence[str]) -> argparse.Namespace:
    parser = _parser()
    known = [name for action in parser._actions for name in action.option_strings]
    for word in arguments:
        name = word.partition("=")[0]
        if word == "--":
            break
        if name.startswith("-") and name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise _Wrong(f"unknown flag {name}" + (f' (did you mean "{near[0]}"?)' if near else "") + f"; see {_NAME} --help")
    return parser.parse_args(list(arguments))


def _key(path: Optional[str]) -> str:
    """The key that requests need, or "". The environment loses it: children need none."""
    key = os.environ.pop("PENSTOCK_API_KEY", None)
    if path is not None:
        try:
            key = next(iter(read_text(path, 1 << 16).splitlines()), "").strip()
        except (OSError, ValueError) as error:
            raise _Wrong(f"--api-key-file: {error}") from None
        if not key:
            raise _Wrong(f"--api-key-file: {path} has no key in its first line")
    elif key is not None and not key.strip():  # a variable of a script that was never set
        raise _Wrong("PENSTOCK_API_KEY is empty: give it the key that requests need, or unset it to answer without one")
    return key or ""


def _bound(host: str, port: int, timeout: float) -> socket.socket:
    """A socket that is bound and does not listen yet."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Those of clients have it from here: one that has gone without a word, or does not read any more, is found.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if timeout:
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, min(int(timeout * 1000), 1 << 30))
        listener.bind(address)
    except BaseException:
        listener.close()
        raise
    return listener


def _size(count: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB")):
        if count >= unit:
            return f"{count / unit:.2f} {name}"
    return f"{count / 1024:.2f} KiB"


def _run(given: argparse.Namespace) -> int:
    try:
        import uvicorn
        from jinja2 import sandbox  # noqa: F401

        from .application import Application, Settings, _is_loopback
        from .connections import ACCEPTED_AT_ONCE, protocol
    except ImportError as error:
        raise _Wrong(f"{error}: pip install 'penstock[serve]'") from None
    try:
        max_body = byte_size(given.max_body, "--max-body", 1)
        host_memory = None if given.host_memory is None else byte_size(given.host_memory, "--host-memory", 1)
        key = _key(given.api_key_file)
        listener = _bound(given.host, given.port, given.timeout)
    except ValueError as error:
        raise _Wrong(str(error)) from None
    except OSError as error:
        return _fail(f"--host {given.host} --port {given.port}: {_address_error(error)}", 1)
    with listener:
        llm = LLM(
            given.directory, host_memory, max_length=given.max_length, batch=given.batch, kv=given.kv, kv_dir=given.kv_dir,
            prompt_lookup=given.prompt_lookup, threads=given.threads, tokenizer=given.tokenizer, base_weights=given.model,
        )  # fmt: skip
        with llm:
            for note in llm.notes:
                print(f"{_NAME}: {note}", file=sys.stderr)
            try:
                listener.listen(_BACKLOG)
            except OSError as error:
                return _fail(f"--host {given.host} --port {given.port}: {_address_error(error)}", 1)
            host, port = listener.getsockname()[:2]
            name = given.model_name or os.path.basename(os.path.abspath(given.directory[0]))
            if not key and not _is_loopback(host):
                print(f"{_NAME}: {host} is open to others without a key: anyone who reaches it may use it (--api-key-file FILE)", file=sys.stderr)
            where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            print(
                f"{_NAME}: http://{where}/v1 serves {name}: {llm.max_length} tokens of context, {llm.batch} at once; host memory {_size(llm.planned_bytes)}",
                flush=True,
            )
            application = Application(llm, Settings(name, host, key, given.queue, max_body, given.timeout))
            _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))  # a file for each client
            config = uvicorn.Config(
                application, http=protocol(files), log_config=None, log_level="error", access_log=False, server_header=False, proxy_headers=False, ws="none", lifespan="on",
                backlog=ACCEPTED_AT_ONCE, timeout_graceful_shutdown=given.drain + 5,
            )  # fmt: skip

            class Server(uvicorn.Server):
                async def startup(self, sockets: Optional[List[socket.socket]] = None) -> None:
                    await super().startup(sockets)
                    listener.listen(_BACKLOG)  # those that wait to be accepted are more

                async def shutdown(self, sockets: Optional[List[socket.socket]] = None) -> None:
                    asyncio.get_running_loop().call_later(given.drain, application.stop)
                    await super().shutdown(sockets)

            server = Server(config)
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: None)  # uvicorn puts its own there, and raises the signal again at its end
            server.run([listener])
            return 0 if server.started else 1


def _address_error(error: OSError) -> str:
    return "another program listens there" if error.errno == errno.EADDRINUSE else error.strerror or str(error)


def _fail(message: str, status: int) -> int:
    print(f"{_NAME}: " + " ".join(message.split()), file=sys.stderr)
    return status


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Serves until SIGTERM or SIGINT. Returns the exit status: 2 for flags that are wrong, 1 for what failed."""
    try:
        return _run(_flags(sys.argv[1:] if arguments is None else arguments))
    except (_Wrong, MemoryError, TypeError, ValueError) as error:
        return _fail(str(error), 2)
    except OSError as error:
        return _fail(error.strerror or str(error), 2 if error.errno in (errno.EINVAL, errno.EEXIST) else 1)
