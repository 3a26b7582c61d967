"""engine.save_checkpoint returns when the commit is retained: what is copied beside training is whole, or its error is raised."""

import fcntl
import json
import os
import threading
import time

import pytest

torch = pytest.importorskip("torch")

import penstock  # noqa: E402
from engine_models import batches, make, net, step  # noqa: E402

PLACES = {
    "two versions": {"config": {"train_micro_batch_size_per_gpu": 1, "penstock": {"versions": 2}}},
    "three versions": {"config": {"train_micro_batch_size_per_gpu": 1, "penstock": {"versions": 3}}},
    "one version": {"config": {"train_micro_batch_size_per_gpu": 1, "penstock": {"versions": 1}}},
    "checkpoints are commits": {"config": {"train_micro_batch_size_per_gpu": 1, "penstock": {"durability": "checkpoint"}}},
    "host memory": {"offload": "cpu"},
    "no offload": {"offload": "none"},
}


def engine_at(place, model, directory, **options):
    options = {**PLACES[place], **options}
    if "offload" not in options:
        return make(model, directory, **options)
    options.setdefault("optimizer", torch.optim.AdamW(model.parameters(), lr=1e-2))
    return penstock.initialize(model=model, gradient_clipping=1.0, **options)[0]


def names(directory):
    return sorted(each for each in os.listdir(directory) if not each.startswith("."))


@pytest.mark.parametrize("place", PLACES)
def test_a_checkpoint_is_of_the_moment_of_the_call_and_training_is_as_without_it(tmp_path, place):
    data = batches(7)

    def train(directory, saves):
        model = net(dropout=0.1)
        torch.manual_seed(7)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        engine = engine_at(place, model, directory, optimizer=optimizer, lr_scheduler=lambda of: torch.optim.lr_scheduler.StepLR(of, 2, 0.5))
        with engine:
            losses, state = [], {"seen": [1]}
            for number, batch in enumerate(data):
                losses.append(step(engine, batch))
                if saves and number in (1, 4):
                    engine.client_state = {"seen": number}
                    path = engine.save_checkpoint(tmp_path / "kept", f"after-{number}", state)
                    assert path == str(tmp_path / "kept" / f"step-{number + 1:08d}")
                    state["seen"].append(number)  # the caller goes on with what it gave
                    engine.client_state = {"not": "kept"}
            engine.wait_for_checkpoint()
            report = engine.report()["checkpoints"]
        return losses, report

    expected, nothing = train(tmp_path / "plain", False)
    assert nothing == {"written": 0, "seconds": 0, "waited_seconds": 0, "under_way": False}
    losses, report = train(tmp_path / "run", True)
    assert losses == expected
    assert report["written"] == 2 and not report["under_way"] and report["seconds"] > 0
    assert names(tmp_path / "kept") == ["after-1", "after-4", "latest", "step-00000002", "step-00000005"]
    for number in (1, 4):
        model = net(seed=9, dropout=0.1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with engine_at(
            place, model, tmp_path / f"again-{number}", optimizer=optimizer, lr_scheduler=lambda of: torch.optim.lr_scheduler.StepLR(of, 2, 0.5)
        ) as engine:
            seen = [1] if number == 1 else [1, 1]
            assert engine.load_checkpoint(tmp_path / "kept", f"after-{number}")[1] == {"seen": seen}
            assert [step(engine, batch) for batch in data[number + 1 :]] == expected[number + 1 :]


def test_a_copy_is_spread_over_the_steps_until_the_next_save(tmp_path):
    """With a third version of the state no step moves more than a part of it, or waits."""
    (batch,) = batches(1)
    config = PLACES["three versions"]["config"]
    with make(net(layers=6, width=64), tmp_path / "run", config=config, replan="off") as engine:  # another plan waits for the copy
        step(engine, batch)
        kept = engine.save_checkpoint(tmp_path / "kept")

        def steps_until_whole(most):
            for count in range(most):
                if not engine.report()["checkpoints"]["under_way"]:
                    return count
                step(engine, batch)
            raise AssertionError(f"not whole after {most} steps")

        assert steps_until_whole(200) >= 12 and os.path.isdir(kept)  # of the 24 it is spread over
        for _ in range(2):
            engine.save_checkpoint(tmp_path / "kept")
            step(engine, batch)
            step(engine, batch)
        # The last one had two steps. Its sync has a thread of its own.
        assert engine.report()["checkpoints"]["written"] >= 2
        engine.wait_for_checkpoint()
        assert engine.report()["checkpoints"]["written"] == 3


def test_the_loss_scale_of_a_checkpoint_is_that_of_the_call(tmp_path):
    try:
        torch.nn.functional.layer_norm(torch.ones(2, 2).half() @ torch.ones(2, 2).half(), (2,))
    except RuntimeError:
        pytest.skip("this torch computes no float16 on the processor")
    data, config = batches(6), {"train_micro_batch_size_per_gpu": 1, "fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}}

    def scaled(directory):
        return make(net(), directory, config=config)

    with scaled(tmp_path / "run") as engine:
        expected = []
        for number, batch in enumerate(data):
            loss = step(engine, batch)
            expected.append((loss, engine.last_step["loss_scale"]))
            if number == 1:
                engine.save_checkpoint(tmp_path / "kept")
    assert len({scale for _, scale in expected}) > 1
    with scaled(tmp_path / "again") as engine:
        engine.load_checkpoint(tmp_path / "kept")
        assert [(step(engine, batch), engine.last_step["loss_scale"]) for batch in data[2:]] == expected[2:]


def test_the_next_calls_wait_for_a_checkpoint(tmp_path):
    kept, data = tmp_path / "kept", batches(5)
    with make(net(layers=6, width=64), tmp_path / "run", overwrite=True) as engine:
        engine.wait_for_checkpoint()  # before the first forward there is none
        step(engine, data[0])
        first = engine.save_checkpoint(kept)
        engine.wait_for_checkpoint()
        assert os.path.isdir(first) and (kept / "latest").read_text() == "step-00000001"
        engine.wait_for_checkpoint()
        step(engine, data[1])
        second = engine.save_checkpoint(kept, save_latest=False)
        third_waits = engine.save_checkpoint(tmp_path / "other", wait=True)
        assert os.path.isdir(second) and os.path.isdir(third_waits) and (kept / "latest").read_text() == "step-00000001"
        assert not [each for each in os.listdir(kept) if each.endswith(".partial")]
        expected = step(engine, data[2])
        engine.save_checkpoint(kept, "mine")
        exported = engine.export_checkpoint(tmp_path / "universal")
        assert os.path.isdir(exported) and os.path.realpath(kept / "mine") == str(kept / "step-00000003")
        step(engine, data[3])
        last = engine.save_checkpoint(kept)
        assert engine.load_checkpoint(kept)[0] == last
        engine.load_checkpoint(kept, "step-00000002")
        assert step(engine, data[2]) == expected
        engine.save_checkpoint(tmp_path / "closed")
    assert names(tmp_path / "closed") == ["latest", "step-00000003"]


def test_others_of_the_process_that_read_a_checkpoint_wait_for_it(tmp_path):
    from penstock.deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with make(net(layers=6, width=64), tmp_path / "run") as engine:
        step(engine, batches(1)[0])
        path = engine.save_checkpoint(tmp_path / "kept", client_state={"a": 1})
        assert len(get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "kept"))) > 10
        step(engine, batches(2)[1])
        path = engine.save_checkpoint(tmp_path / "kept", client_state={"a": 2})
        with make(net(layers=6, width=64), tmp_path / "other") as other:
            assert other.load_checkpoint(tmp_path / "kept") == (path, {"a": 2})


def test_values_may_be_written_while_a_checkpoint_is_copied(tmp_path):
    with make(net(layers=6, width=64), tmp_path / "run") as engine:
        step(engine, batches(1)[0])
        before = {name: value.clone() for name, value in engine.state_dict().items()}
        engine.save_checkpoint(tmp_path / "kept")
        for number in range(3):
            for parameter in engine.module.parameters():
                engine.write_state(parameter, torch.full(parameter.shape, float(number)))
    with make(net(layers=6, width=64), tmp_path / "other") as other:
        other.load_checkpoint(tmp_path / "kept")
        with torch.no_grad():
            other(**batches(1)[0])
        state = other.state_dict()
        assert all(torch.equal(state[name], value) for name, value in before.items())


def test_a_checkpoint_has_the_buffers_of_the_moment_of_the_call(tmp_path):
    class Counts(type(net())):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x, targets=None):
            if self.training:
                self.calls += 1
            return super().forward(x, targets)

    torch.manual_seed(0)
    data = batches(4)
    with make(Counts(), tmp_path / "run") as engine:
        for batch in data[:2]:
            step(engine, batch)
        calls = engine.module.calls.item()
        path = engine.save_checkpoint(tmp_path / "kept")
        for batch in data[2:]:
            step(engine, batch)
        assert engine.module.calls.item() > calls
    described = json.loads(open(os.path.join(path, "parameters.json"), encoding="utf-8").read())
    assert "calls" in described["buffers"]
    from penstock.deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    assert get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "kept"))["calls"].item() == calls


# A file of a checkpoint may not become larger than so much: its copy fails as on a drive that is full.
FULL = """
    import resource, sys, warnings
    sys.path.insert(0, sys.argv[2])
    import penstock, torch
    from engine_models import batches, make, net, step

    def full(whether):
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16 if whether else resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    where, data = sys.argv[1], batches(40)
    engine = make(net(layers=6, width=64), where + "/run")
    step(engine, data[0])

    def refused(call):
        try:
            call()
        except OSError as error:
            assert "step-" in str(error) and "\\n" not in str(error), error
            return error
        raise AssertionError("no error")

    def fails(directory):
        engine.flush()  # the run itself has room
        full(True)
        try:
            engine.save_checkpoint(where + "/" + directory)
        finally:
            engine._run.core.settle_checkpoint()  # its files were made under the limit
            full(False)
"""


def test_an_error_of_the_copy_is_raised_once_by_the_call_that_comes_next(tmp_path, in_child):
    text = FULL + """
    # step: before it does anything, so that it may be called again
    fails("a")
    loss = engine(**data[1]); engine.backward(loss)
    refused(engine.step)
    assert engine.global_steps == 1
    engine.step()
    assert engine.global_steps == 2
    step(engine, data[2])
    # save
    fails("b")
    refused(lambda: engine.save_checkpoint(where + "/b"))
    engine.save_checkpoint(where + "/b", wait=True)
    # wait, train_batch, load_checkpoint, export
    fails("c")
    refused(engine.wait_for_checkpoint)
    engine.wait_for_checkpoint()
    fails("c")
    refused(lambda: engine.train_batch([data[3]]))
    engine.train_batch([data[3]])
    fails("c")
    refused(lambda: engine.export_checkpoint(where + "/u"))
    # nothing of it is left, and what stands is whole
    import os
    assert sorted(os.listdir(where + "/b")) == ["latest", "step-00000003"], os.listdir(where + "/b")
    assert not os.path.exists(where + "/c")
    # close: it closes, and raises
    fails("d")
    refused(engine.close)
    assert engine.closed
    engine.close()
    print("DONE")
    """
    status, out, error = in_child(text, tmp_path, os.path.dirname(__file__))
    assert status == 0 and "DONE" in out, error[-3000:]


def test_an_error_of_a_copy_that_ends_within_a_step_is_raised_by_the_next(tmp_path):
    kept, data, raised = tmp_path / "kept", batches(40), 0
    kept.mkdir()
    in_the_way = kept / ".step-00000001.partial"
    in_the_way.write_text("a file")
    with make(net(), tmp_path / "run") as engine:
        step(engine, data[0])
        engine.save_checkpoint(kept)
        for batch in data[1:]:
            loss = engine(**batch)
            engine.backward(loss)
            try:
                engine.step()
            except OSError as error:
                assert str(in_the_way) in str(error) and "\n" not in str(error)
                raised += 1
                engine.step()
        assert raised == 1 and engine.global_steps == len(data)
        in_the_way.unlink()
        engine.save_checkpoint(kept, wait=True)
    assert names(kept) == ["latest", "step-00000040"]


def test_a_program_that_ends_without_a_close_has_its_checkpoint_or_says_why_not(tmp_path, in_child):
    text = FULL + """
    engine.flush()
    full(True)
    engine.save_checkpoint(where + "/a")
    """
    status, _, error = in_child(text, tmp_path / "first", os.path.dirname(__file__))
    assert "could not be closed" in error and "step-00000001" in error, error
    assert status == 1
    text = FULL + """
    engine.save_checkpoint(where + "/b")
    """
    status, _, error = in_child(text, tmp_path / "second", os.path.dirname(__file__))
    assert status == 0 and error == "", error
    assert names(tmp_path / "second" / "b") == ["latest", "step-00000001"]


def test_damage_in_the_run_is_not_copied(tmp_path):
    with make(net(layers=6, width=64), tmp_path / "run") as engine:
        step(engine, batches(1)[0])
        engine.flush()
        store = tmp_path / "run" / "penstock.store"
        size = store.stat().st_size
        with open(store, "r+b") as file:
            for at in range(size // 2, size, 4096):
                file.seek(at)
                file.write(b"damage")
            file.flush()
            os.fsync(file.fileno())
        engine.save_checkpoint(tmp_path / "kept")
        with pytest.raises(OSError, match="checksum|damage"):
            engine.wait_for_checkpoint()
        assert not os.path.exists(tmp_path / "kept")


def test_latest_never_names_what_is_not_whole(tmp_path):
    kept, over = tmp_path / "kept", threading.Event()
    wrong = []

    def look():
        while not over.is_set():
            try:
                name = (kept / "latest").read_text()
            except FileNotFoundError:
                continue
            for part in ("penstock.store", "parameters.json"):
                if not (kept / name / part).is_file():
                    wrong.append((name, part))
            if (kept / "mine").exists() and not (kept / "mine" / "penstock.store").is_file():
                wrong.append("mine")
            time.sleep(0.0005)

    looks = threading.Thread(target=look)
    looks.start()
    try:
        with make(net(layers=6, width=64), tmp_path / "run") as engine:
            for batch in batches(12):
                step(engine, batch)
                engine.save_checkpoint(kept, "mine")
    finally:
        over.set()
        looks.join()
    assert wrong == []
    assert (kept / "latest").read_text() == "step-00000012" == os.path.basename(os.path.realpath(kept / "mine"))


RANKS = """
    import os, sys
    sys.path.insert(0, sys.argv[2])
    import penstock, torch
    from engine_models import batches, make, net, step

    torch.set_num_threads(1)
    where, rank = sys.argv[1], int(os.environ["RANK"])
    engine = make(net(), where + "/run", rank_timeout=10)
    data = batches(8, size=2)
    for number, batch in enumerate(data[rank::2]):
        step(engine, batch)
        if number == 1:
            path = engine.save_checkpoint(where + "/kept", "mine", {"rank": rank})
    engine.close()
    assert os.path.isdir(path) and os.readlink(where + "/kept/mine") == "step-00000002"
    with make(net(seed=4), where + "/again", rank_timeout=10) as other:
        other.load_checkpoint(where + "/kept")
        assert [step(other, batch) for batch in data[4 + rank :: 2]] and other.global_steps == 4
        assert other.client_state == {"rank": rank}
    print("DONE")
"""

RANKS_FAIL = """
    import os, sys
    sys.path.insert(0, sys.argv[2])
    import penstock, torch
    from engine_models import batches, make, net, step

    torch.set_num_threads(1)
    where, rank = sys.argv[1], int(os.environ["RANK"])
    config = {"train_micro_batch_size_per_gpu": 1, "penstock": {"versions": 2}}  # its copy ends within two steps
    engine = make(net(layers=6, width=64), where + "/run", rank_timeout=10, config=config)
    data, raised = batches(40, size=2), []
    step(engine, data[rank])
    engine.save_checkpoint(where + "/kept")
    for number, batch in enumerate(data[2 + rank :: 2]):
        loss = engine(**batch); engine.backward(loss)
        try:
            engine.step()
        except (OSError, RuntimeError) as error:
            raised.append((number, str(error)))
            engine.step()
    assert len(raised) == 1 and "rank-1" in raised[0][1], raised
    path = engine.save_checkpoint(where + "/kept")
    engine.close()
    assert os.path.isdir(path)
    print("RAISED", raised[0][0])
"""


def test_several_ranks_copy_their_parts_beside_training(tmp_path, on_ranks):
    told = on_ranks(RANKS, 2, tmp_path, os.path.dirname(__file__))
    for status, out, error in told:
        assert status == 0 and "DONE" in out, error[-3000:]


def test_an_error_of_one_ranks_copy_is_raised_by_all_at_one_step(tmp_path, on_ranks):
    (tmp_path / "kept" / ".step-00000001.partial").mkdir(parents=True)
    (tmp_path / "kept" / ".step-00000001.partial" / "rank-1").write_text("a file")
    told = on_ranks(RANKS_FAIL, 2, tmp_path, os.path.dirname(__file__))
    for status, _, error in told:
        assert status == 0, error[-3000:]
    assert len({out for _, out, _ in told}) == 1, told


@pytest.mark.parametrize("decoupled", [False, True])
def test_deepspeeds_name_waits_unless_its_writer_is_decoupled(tmp_path, decoupled, monkeypatch):
    import penstock.deepspeed as deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": str(tmp_path / "scratch")}},
        "checkpoint": {"writer": {"decoupled": decoupled}},
    }
    engine, *_ = deepspeed.initialize(model=net(), config=config)
    loss = engine(**batches(1)[0])
    engine.backward(loss)
    engine.step()
    asked, save = [], engine.engine.save_checkpoint
    monkeypatch.setattr(engine.engine, "save_checkpoint", lambda *args, **options: asked.append(options["wait"]) or save(*args, **options))
    engine.save_checkpoint(str(tmp_path / "kept"))
    assert asked == [not decoupled]
    if decoupled:
        engine.wait_for_checkpoint()
    assert os.path.isdir(tmp_path / "kept" / "global_step1") and (tmp_path / "kept" / "latest").read_text() == "step-00000001"
    engine.destroy()


def test_what_cannot_be_read_is_no_checkpoint_with_an_empty_client_state(tmp_path):
    with make(net(), tmp_path / "run", overwrite=True) as engine:
        step(engine, batches(1)[0])
        path = engine.save_checkpoint(tmp_path / "kept", client_state={"epoch": 7}, wait=True)
    store = next(each for each in (tmp_path / "kept").rglob("penstock.store"))
    whole = store.read_bytes()
    # Both copies of its one commit record: a run's state looks like this that was never committed.
    without_records = whole.replace(b"PNSTKCMT", bytes(8))
    assert whole.count(b"PNSTKCMT") == 2
    for damaged in (b"", whole[:4096], without_records, None):
        store.unlink()
        if damaged is not None:
            store.write_bytes(damaged)
        with make(net(), tmp_path / "run", overwrite=True) as engine, pytest.raises((OSError, ValueError, RuntimeError)) as told:
            engine.load_checkpoint(tmp_path / "kept")
        assert not isinstance(told.value, FileNotFoundError), "scripts take that for a first start"
        if damaged is None:
            store.write_bytes(whole)
    with make(net(), tmp_path / "run", overwrite=True) as engine:
        assert engine.load_checkpoint(tmp_path / "kept") == (path, {"epoch": 7})


def test_what_stands_in_for_a_checkpoint_of_another_run_is_not_removed(tmp_path):
    kept = tmp_path / "kept"
    with make(net(), tmp_path / "first") as engine:
        step(engine, batches(1)[0])
        engine.save_checkpoint(kept, wait=True)
    (kept / "step-00000001").rename(kept / ".step-00000001.replaced")  # as a kill between two renames leaves it
    with make(net(), tmp_path / "second") as engine:
        step(engine, batches(1)[0])
        with pytest.raises(FileExistsError, match="another run"):
            engine.save_checkpoint(kept)
        assert (kept / ".step-00000001.replaced").is_dir()
        with pytest.raises(TypeError):
            engine.save_checkpoint(kept, replaces_others="no")
        with pytest.raises(ValueError, match="tag"):
            engine.save_checkpoint(kept, "x" * 300)


@pytest.mark.parametrize("what", ["lock", "directory"])
def test_a_directory_that_another_process_writes_to_is_refused_before_anything_there_has_another_name(tmp_path, monkeypatch, what):
    """By one that copies a checkpoint, of Python or the command line, and by one that looks for those that it would replace."""
    kept, moved = tmp_path / "kept", []
    with make(net(), tmp_path / "run") as engine:
        step(engine, batches(1)[0])
        engine.save_checkpoint(kept, "mine", wait=True)
    before = names(kept)
    # As base/file_lock.h has it.
    held = os.open(kept / ".penstock.lock", os.O_RDWR | os.O_CREAT, 0o600) if what == "lock" else os.open(kept, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    rename = os.rename
    monkeypatch.setattr(os, "rename", lambda *names: (moved.append(names), rename(*names)))
    with make(net(), tmp_path / "other") as engine:
        engine.load_checkpoint(kept)
        with torch.no_grad():
            engine(**batches(1)[0])
        with pytest.raises(OSError, match="in use by another process") as refused:
            engine.save_checkpoint(kept, "mine", replaces_others=True)
        assert "\n" not in str(refused.value) and moved == []
        os.close(held)
        (kept / ".penstock.lock").unlink(missing_ok=True)
        assert names(kept) == before
        engine.save_checkpoint(kept, "mine", replaces_others=True)
    assert names(kept) == before and len(moved) == 1
