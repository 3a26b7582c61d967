"""What a start may take the place of: what it was told to replace, as it was then, and nothing that it could not look at."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import warnings

import pytest

torch = pytest.importorskip("torch")
penstock = pytest.importorskip("penstock")

from engine_models import batches, make, net, step  # noqa: E402

HERE = os.path.dirname(__file__)
FAILING_CALLS = os.path.join(HERE, "..", "..", "tests", "tools", "failing_calls.cc")


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


@pytest.fixture(scope="module")
def failing_calls(tmp_path_factory):
    """The library that lets one call of one function fail (tests/tools/failing_calls.cc)."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None or not os.path.exists(FAILING_CALLS):
        pytest.skip("no C++ compiler is here, or no source of the library that lets calls fail")
    library = tmp_path_factory.mktemp("calls") / "failing_calls.so"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, FAILING_CALLS, "-ldl"], check=True)
    return library


GOES_ON = """
    import sys
    import penstock
    from engine_models import batches, make, net, step
    with make(net(), sys.argv[1], resume="auto", overwrite=True) as engine:
        step(engine, batches(1)[0])
"""


def test_one_error_of_the_drive_replaces_no_run(tmp_path, failing_calls):
    run, note = tmp_path / "run", tmp_path / "note"
    reached = trained(run, 3)
    refused = 0
    for call, path, error in [("open", run / "penstock.store", error) for error in (errno.EIO, errno.EMFILE)] + [("readdir", run, errno.EIO)]:
        for when in range(1, 4):
            note.unlink(missing_ok=True)
            given = {"FAIL_CALL": call, "FAIL_PATH": path, "FAIL_WHEN": when, "FAIL_NOTE": note, "FAIL_ERROR": error, "LD_PRELOAD": failing_calls}
            child = started(GOES_ON, run, **{name: str(value) for name, value in given.items()})
            _, said = child.communicate(timeout=400)
            if not note.exists():
                assert child.returncode == 0, said
                reached += 1
                break
            if child.returncode == 0:
                reached += 1  # it was of no consequence
            else:
                refused += 1
                assert str(run) in said.splitlines()[-1], said
            assert steps_in(run) == reached, (call, when, said)
    assert refused > 0


def test_what_is_damaged_is_started_over_where_that_is_said_alone(tmp_path):
    store = tmp_path / "penstock.store"
    trained(tmp_path, 2)
    size = store.stat().st_size
    os.truncate(store, size // 2)
    for options in ({"resume": "auto"}, {"resume": "auto", "overwrite": True}, {"resume": True, "overwrite": True}):
        with make(net(), tmp_path, **options) as engine, pytest.raises((OSError, RuntimeError), match="cut off"):
            step(engine, batches(1)[0])
        assert store.stat().st_size == size // 2
    assert trained(tmp_path, 1, overwrite=True) == 1


def test_a_checkpoint_replaces_what_is_damaged_where_that_is_said_alone(tmp_path):
    with make(net(), tmp_path / "run") as engine:
        step(engine, batches(1)[0])
        engine.save_checkpoint(tmp_path / "kept")
    store = tmp_path / "run" / "penstock.store"
    size = store.stat().st_size
    os.truncate(store, size // 2)
    with make(net(), tmp_path / "run") as engine:
        engine.load_checkpoint(tmp_path / "kept")
        with pytest.raises(OSError, match="cut off.*overwrite=True"):
            step(engine, batches(1)[0])
    assert store.stat().st_size == size // 2
    with make(net(), tmp_path / "run", resume="auto", overwrite=True) as engine:
        engine.load_checkpoint(tmp_path / "kept")
        step(engine, batches(1)[0])
        assert engine.global_steps == 2


def test_auto_starts_over_what_was_never_committed_and_begins_beside_other_files(tmp_path):
    for name in ("never", "beside"):
        (tmp_path / name).mkdir()
    (tmp_path / "never" / "penstock.store").write_bytes(b"")
    (tmp_path / "beside" / "notes.txt").write_text("mine")
    for name in ("never", "beside"):
        assert trained(tmp_path / name, 1, resume="auto") == 1
        assert trained(tmp_path / name, 1, resume="auto") == 2
    assert (tmp_path / "beside" / "notes.txt").read_text() == "mine"


def test_a_run_whose_name_cannot_be_read_is_not_renamed(tmp_path, monkeypatch):
    trained(tmp_path, 1)

    def fails(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(penstock._core, "record_of", fails)
    with make(net(), tmp_path, resume=True) as engine, pytest.raises(OSError, match="Input/output error"):
        step(engine, batches(1)[0])


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


WEARS = """
    import sys
    import penstock
    from engine_models import batches, make, net, step
    data = batches(8)
    config = {"penstock": {"wear_budget_tb": float(sys.argv[2]), "durability": "checkpoint"}}
    with make(net(width=64), sys.argv[1], config=config, resume="auto") as engine:
        while True:
            for batch in data:
                step(engine, batch)
"""


def test_the_budget_of_wear_counts_what_a_killed_run_wrote_before_its_first_commit(tmp_path):
    file = tmp_path / ".penstock.written"

    def counted():
        return json.loads(file.read_text())["written_bytes"] if file.exists() else 0

    before = 0
    for _ in range(3):
        process = started(WEARS, tmp_path, 1)
        wait_for(lambda: counted() > before + (1 << 20) or process.poll() is not None)  # noqa: B023
        process.send_signal(signal.SIGKILL)
        _, said = process.communicate()
        assert counted() > before, said
        before = counted()
    of_the_killed = json.loads(file.read_text())["run_id"]
    store = tmp_path / "penstock.store"
    looked = store.stat().st_mtime_ns
    config = {"penstock": {"wear_budget_tb": before * 1e-12 / 2, "durability": "checkpoint"}}
    for _ in range(2):
        with make(net(width=64), tmp_path, config=config, resume="auto") as engine:
            with pytest.raises(RuntimeError, match="penstock.wear_budget_tb: the run has written"):
                step(engine, batches(1)[0])
        assert (counted(), store.stat().st_mtime_ns) == (before, looked)
    file.write_text("{}")
    with make(net(width=64), tmp_path, config=config, resume="auto") as engine:
        with pytest.raises(OSError, match="penstock.written.*remove it"):
            step(engine, batches(1)[0])
    # Another run has a count of its own, with what closing it writes.
    child = started(WEARS.replace('resume="auto"', "overwrite=True").replace("while True:", "for _ in range(1):").replace("batches(8)", "batches(1)"), tmp_path, 1)
    _, said = child.communicate(timeout=400)
    assert child.returncode == 0, said
    assert json.loads(file.read_text())["run_id"] != of_the_killed
    assert counted() > store.stat().st_size / 3


def test_the_budget_of_wear_counts_a_checkpoint_that_is_restored_and_no_refused_start(tmp_path):
    def limited(**options):
        return make(net(), tmp_path / "run", config={"penstock": {"wear_budget_tb": 1}}, **options)

    def counted():
        return json.loads((tmp_path / "run" / ".penstock.written").read_text())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with limited() as engine:
            step(engine, batches(1)[0])
            engine.save_checkpoint(tmp_path / "kept", wait=True)
            of_the_checkpoint = counted()["written_bytes"]
        left = counted()
        with limited() as engine, pytest.raises(FileExistsError):
            step(engine, batches(1)[0])
        assert counted() == left
        with limited(overwrite=True) as engine:
            engine.load_checkpoint(tmp_path / "kept")
            step(engine, batches(1)[0])
            assert counted()["written_bytes"] >= of_the_checkpoint + engine.plan()["state_bytes"]


def test_without_latest_a_checkpoint_is_named_and_the_run_does_not_begin_anew(tmp_path):
    with make(net(), tmp_path / "run") as engine:
        for batch in batches(2):
            step(engine, batch)
            engine.save_checkpoint(tmp_path / "kept")
    (tmp_path / "kept" / "latest").unlink()
    with make(net(seed=5), tmp_path / "other") as engine:
        with pytest.raises(FileNotFoundError, match="latest.*tag='step-00000002'"):
            engine.load_checkpoint(tmp_path / "kept")
        engine.load_checkpoint(tmp_path / "kept", "step-00000002")
        step(engine, batches(1)[0])
        assert engine.global_steps == 3
