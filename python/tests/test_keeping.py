"""What a start may take the place of: what it was told to replace, as it was then, and nothing that it could not look at."""

import os
import subprocess
import sys
import textwrap
import time

import pytest

torch = pytest.importorskip("torch")
penstock = pytest.importorskip("penstock")

from engine_models import batches, make, net, step  # noqa: E402

HERE = os.path.dirname(__file__)


def trained(directory, steps, **options):
    with make(net(), directory, **options) as engine:
        for batch in batches(steps):
            step(engine, batch)
        return engine.global_steps


def steps_in(directory):
    return penstock._core.committed_step_of([str(directory)])


def started(text, *arguments, **environment):
    """A Python in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(text), *map(str, arguments)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, HERE]), **environment},
    )  # fmt: skip


def wait_for(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


SECOND = """
    import os, sys, time
    ready, go, run, source = sys.argv[1:]
    open(ready, "w").close()
    while not os.path.exists(go):
        time.sleep(0.01)
    import penstock
    from engine_models import batches, make, net, step
    with make(net(), run, overwrite=True) as engine:
        if source:
            engine.load_checkpoint(source)
        step(engine, batches(1)[0])
"""


@pytest.mark.parametrize("source", ["", "kept", "deepspeeds"])
def test_what_another_process_trained_since_this_one_was_started_is_not_replaced(tmp_path, source):
    run, ready, go = tmp_path / "run", tmp_path / "ready", tmp_path / "go"
    with make(net(), run) as engine:
        step(engine, batches(1)[0])
        engine.save_checkpoint(tmp_path / "kept")
        engine.export_checkpoint(tmp_path / "deepspeeds")
    second = started(SECOND, ready, go, run, source and tmp_path / source)
    wait_for(ready.exists)
    time.sleep(0.05)  # past the kernel's tick
    assert trained(run, 3, overwrite=True) == 3  # what this process has left itself is no news to it
    go.touch()
    _, said = second.communicate(timeout=400)
    assert second.returncode == 1, said
    assert "another process has trained there since this one was started, and has come to step 3" in said.splitlines()[-1]
    assert steps_in(run) == 3
    later = started(SECOND, ready, go, run, source and tmp_path / source)
    _, said = later.communicate(timeout=400)
    assert later.returncode == 0, said
    assert steps_in(run) == (2 if source else 1)


def test_a_second_attempt_replaces_what_the_first_one_made_and_no_others_run(tmp_path, monkeypatch):
    from penstock._engine import _preparation

    class Broken:
        def __init__(self, *_):
            raise RuntimeError("this one fails")

    def fails(directory):
        engine = make(net(), directory)
        with monkeypatch.context() as within:
            within.setattr(_preparation, "Runtime", Broken)
            with pytest.raises(RuntimeError, match="this one fails"):
                step(engine, batches(1)[0])
        return engine

    with fails(tmp_path / "one") as engine:
        step(engine, batches(1)[0])
        assert engine.global_steps == 1
    with fails(tmp_path / "two") as engine:
        ready, go = tmp_path / "ready", tmp_path / "go"
        go.touch()
        other = started(SECOND, ready, go, tmp_path / "two", "")
        _, said = other.communicate(timeout=400)
        assert other.returncode == 0, said
        with pytest.raises(RuntimeError, match="another process has trained there"):
            step(engine, batches(1)[0])
        assert steps_in(tmp_path / "two") == 1
