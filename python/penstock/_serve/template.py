"""A model's chat template in a process of its own, which can be ended: templates are programs of strangers.

jinja2's sandbox keeps them from files and attributes, not from loops without end and memory without bound. The child has both bounded.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any, Dict, List, Optional

from .._small_files import parse_json

SECONDS = 10
MEMORY = 1 << 30
_LONGEST = 256 << 20  # of an answer
_CHILD = "import sys; sys.path[:] = sys.argv[2:]; from penstock._serve.template import work; work(sys.argv[1])"


class Template:
    """Writes prompts of conversations, one after the other."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._lock = asyncio.Lock()
        self._child: Optional[asyncio.subprocess.Process] = None

    async def render(self, messages: List[Dict[str, Any]]) -> str:
        """ValueError: there is no template, it refuses the messages, or it takes more time or memory than it may."""
        async with self._lock:
            if self._child is None:
                self._child = await asyncio.create_subprocess_exec(
                    sys.executable, "-c", _CHILD, self._directory, *sys.path,
                    stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True, limit=_LONGEST,
                )  # fmt: skip
            child = self._child
            assert child.stdin is not None and child.stdout is not None
            answer = b""
            try:
                child.stdin.write(json.dumps(messages).encode() + b"\n")
                await child.stdin.drain()
                answer = await child.stdout.readline()
            except (OSError, ValueError):
                pass  # it has ended, or its answer is too long
            finally:
                if not answer.endswith(b"\n"):  # also where the request was given up in between
                    self._child = None
                    if not child.stdout.at_eof():
                        child.kill()
            if not answer.endswith(b"\n"):
                raise ValueError(f"{self._directory}: its chat template takes more than {SECONDS} s or {MEMORY >> 20} MiB for these messages")
        value = parse_json(answer.decode(), "an answer")
        if "error" in value:
            raise ValueError(value["error"])
        return str(value["prompt"])

    async def close(self) -> None:
        child, self._child = self._child, None
        if child is not None and child.stdin is not None:
            child.stdin.close()  # which ends it
            await child.wait()


def work(directory: str) -> None:
    """The child: a conversation a line, and a prompt or an error a line, until there is no more. It ends itself where one takes too long."""
    import resource
    import signal

    from .. import llm

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    template: Optional[llm._ChatTemplate] = None
    for line in sys.stdin:
        signal.alarm(SECONDS)  # whose default ends the process, whatever it computes
        try:
            if template is None:
                template = llm._ChatTemplate(directory)
            answer = json.dumps({"prompt": template.render(parse_json(line, "messages"))})
        except MemoryError:
            answer = json.dumps({"error": f"{directory}: its chat template takes more than {MEMORY >> 20} MiB for these messages"})
        except Exception as error:  # whatever a template raises
            answer = json.dumps({"error": str(error) or type(error).__name__})
        signal.alarm(0)
        answers.write(answer + "\n")
        answers.flush()
