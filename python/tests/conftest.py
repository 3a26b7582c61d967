import os
import signal
import subprocess
import sys
import textwrap

import pytest


@pytest.fixture
def directory(tmp_path):
    """An empty directory on a real disk where there is one (TMPDIR decides)."""
    return tmp_path


@pytest.fixture
def in_child():
    """Runs a text of Python in a process of its own; returns (exit status, stdout, stderr)."""

    def run(text, *arguments, timeout=120, **keywords):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(text), *map(str, arguments)],
            capture_output=True, text=True, timeout=timeout, env=environment, **keywords,
        )
        return done.returncode, done.stdout, done.stderr

    return run


@pytest.fixture(autouse=True)
def ctrl_c():
    """Ctrl-C is an exception, also where the tests run in the background: there a shell has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
