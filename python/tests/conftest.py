import os
import signal
import socket
import subprocess
import sys
import textwrap

import pytest


@pytest.fixture(autouse=True)
def on_the_processor(request, monkeypatch):
    """Tests compare with what the processor computes, also where there is a GPU; those of test_device.py choose."""
    if request.path.name == "test_device.py":
        return
    try:
        import torch
        from penstock._engine import _device
    except ImportError:  # the test says so
        return
    if torch.cuda.is_available():
        torch.cuda.init()  # before the next line, which is for children
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(_device, "choose_device", lambda wanted: torch.device("cpu"))


@pytest.fixture
def directory(tmp_path):
    """An empty directory on a real disk where there is one (TMPDIR decides)."""
    return tmp_path


@pytest.fixture
def in_child():
    """Runs a text of Python in a process of its own; returns (exit status, stdout, stderr)."""

    def run(text, *arguments, timeout=400, **keywords):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(text), *map(str, arguments)],
            capture_output=True, text=True, timeout=timeout, env=environment, **keywords,
        )
        return done.returncode, done.stdout, done.stderr

    return run


@pytest.fixture
def on_ranks():
    """Runs a text of Python in as many processes as `world`, as torchrun starts them; returns [(exit status, stdout, stderr)]."""

    def run(text, world, *arguments, timeout=400):
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        common = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", textwrap.dedent(text), *map(str, arguments)],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                env={**common, "WORLD_SIZE": str(world), "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            )
            for rank in range(world)
        ]
        try:
            told = [process.communicate(timeout=timeout) for process in processes]
        finally:
            for process in processes:
                process.kill()
        return [(process.returncode, *of) for process, of in zip(processes, told)]

    return run


@pytest.fixture(autouse=True)
def ctrl_c():
    """Ctrl-C is an exception, also where the tests run in the background: there a shell has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def never_waits():
    """A call that waits for another process, as for the other end of a pipe, is a TimeoutError in the place of a test that never ends."""

    def ring(*_):
        raise TimeoutError("waits for another process")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
