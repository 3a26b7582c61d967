"""A client_state under DeepSpeed's name: what can be pickled comes back, and nothing in a file is executed unasked."""

import argparse
import collections
import contextlib
import json
import os
import pathlib
import resource
import types
import zipfile

import pytest

torch = pytest.importorskip("torch")
numpy = pytest.importorskip("numpy")

import penstock.deepspeed as deepspeed  # noqa: E402
from engine_models import batches, make, net, step  # noqa: E402

pytestmark = pytest.mark.skipif(not hasattr(torch.serialization, "safe_globals"), reason="torch before 2.5 allows no classes: all of it is to be trusted")


class Progress:
    """As scripts keep their own state."""

    executed = 0

    def __init__(self, epoch):
        self.epoch = epoch

    def __reduce__(self):
        return _made, (self.epoch,)


def _made(epoch):
    Progress.executed += 1
    return Progress(epoch)


def engine_in(tmp_path, **more):
    config = {
        "train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, **more,
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path / "nvme")}},
    }  # fmt: skip
    return deepspeed.initialize(model=net(), config=config)[0]


def files(directory):
    """Beside checkpoints, and within them, each once."""
    return sorted(os.path.relpath(os.path.join(place, name), directory) for place, _, names in os.walk(directory) for name in names if "client_state-" in name)


def test_what_is_no_json_or_too_long_comes_back_by_itself(tmp_path):
    given = {
        "epoch": 3,
        "args": argparse.Namespace(lr=0.1, path="x", more=argparse.Namespace(a=[1, (2,)])),
        "simple": types.SimpleNamespace(best=0.5),
        "array": numpy.arange(6, dtype=numpy.int16).reshape(2, 3),
        "scalar": numpy.int64(7),
        "float": numpy.float32(0.25),
        "history": [[number, number / 7] for number in range(20000)],
        "order": collections.OrderedDict(a=1, b={"c"} and [2]),
        "weights": torch.arange(50000.0),
    }
    engine = engine_in(tmp_path)
    step(engine, batches(1)[0])
    engine.save_checkpoint(tmp_path / "kept", client_state=given)
    assert len(files(tmp_path / "kept")) == 1
    engine.destroy()
    engine = engine_in(tmp_path)
    path, found = engine.load_checkpoint(tmp_path / "kept")
    assert os.path.basename(path) == "step-00000001" and set(found) == set(given)
    assert found["args"] == given["args"] and found["simple"] == given["simple"] and found["order"] == given["order"]
    assert found["epoch"] == 3 and found["history"] == given["history"] and found["scalar"] == 7 and found["float"] == numpy.float32(0.25)
    assert (found["array"] == given["array"]).all() and found["array"].dtype == numpy.int16 and torch.equal(found["weights"], given["weights"])
    # One of the same step takes its place, and so do later ones without such values.
    step(engine, batches(1)[0])
    engine.save_checkpoint(tmp_path / "kept", client_state={"args": given["args"]})
    engine.save_checkpoint(tmp_path / "kept", client_state={"args": given["args"]})
    assert len(files(tmp_path / "kept")) == 2  # of steps 1 and 2
    engine.save_checkpoint(tmp_path / "kept", client_state={"epoch": 4})
    assert len(files(tmp_path / "kept")) == 1
    assert engine.load_checkpoint(tmp_path / "kept")[1] == {"epoch": 4}
    assert engine.load_checkpoint(tmp_path / "kept", tag="global_step1")[1]["history"] == given["history"]
    engine.destroy()


def test_a_class_of_the_scripts_own_is_read_where_it_is_trusted(tmp_path):
    engine = engine_in(tmp_path)
    step(engine, batches(1)[0])
    engine.save_checkpoint(tmp_path / "kept", client_state={"progress": Progress(2), "epoch": 1})
    before = Progress.executed
    with pytest.raises(RuntimeError, match=r"client_state holds .*_made.*load_checkpoint\(trust_client_state=True\)"):
        engine.load_checkpoint(tmp_path / "kept")
    assert Progress.executed == before
    found = engine.load_checkpoint(tmp_path / "kept", trust_client_state=True)[1]
    assert found["progress"].epoch == 2 and found["epoch"] == 1
    step(engine, batches(1)[0])
    (name,) = files(tmp_path / "kept")
    os.unlink(tmp_path / "kept" / name)
    with pytest.raises(FileNotFoundError, match=r"is missing, which has progress of client_state: copy it with the checkpoint"):
        engine.load_checkpoint(tmp_path / "kept")
    engine.destroy()


@pytest.mark.parametrize("wrong", ["missing", "untrusted", "damaged", "other values"])
@pytest.mark.parametrize("begun", [True, False])
def test_a_file_that_cannot_be_read_costs_no_run(tmp_path, wrong, begun):
    engine = engine_in(tmp_path)
    step(engine, batches(1)[0])
    given = {"progress": Progress(2) if wrong == "untrusted" else argparse.Namespace(a=1), "epoch": 1}
    engine.save_checkpoint(tmp_path / "kept", client_state=given)
    saved = engine.module.state_dict()["norm.weight"].clone()
    (name,) = files(tmp_path / "kept")
    if wrong == "missing":
        os.unlink(tmp_path / "kept" / name)
    elif wrong == "damaged":
        (tmp_path / "kept" / name).write_bytes(b"no pickle")
    elif wrong == "other values":
        torch.save({"others": 1}, tmp_path / "kept" / name)
    if begun:
        step(engine, batches(1)[0])
    else:
        engine.destroy()
        engine = engine_in(tmp_path)
    before, steps = {name: value.clone() for name, value in engine.module.state_dict().items()}, engine.global_steps
    with pytest.raises((RuntimeError, FileNotFoundError), match=name):
        engine.load_checkpoint(tmp_path / "kept")
    assert engine.global_steps == steps
    for key, value in engine.module.state_dict().items():
        assert torch.equal(value, before[key])
    with pytest.warns(UserWarning, match="client_state without progress: .*" + name):
        assert engine.load_checkpoint(tmp_path / "kept", load_module_only=True)[1] == {"epoch": 1}
    assert torch.equal(engine.module.state_dict()["norm.weight"], saved)
    step(engine, batches(1)[0])
    assert engine.global_steps == steps + 1
    engine.destroy()


def test_what_cannot_be_pickled_is_named_and_nothing_is_left(tmp_path):
    engine = engine_in(tmp_path)
    step(engine, batches(1)[0])
    with pytest.raises(TypeError, match="client_state: what cannot be pickled"):
        engine.save_checkpoint(tmp_path / "kept", client_state={"what": lambda: 0})
    assert os.listdir(tmp_path / "kept") == []
    engine.save_checkpoint(tmp_path / "kept", client_state={"what": 1})
    assert engine.load_checkpoint(tmp_path / "kept")[1] == {"what": 1}
    engine.destroy()


def plain_json(size, keys=8):
    return {f"key {number}": [round(number / 7 + each, 6) for each in range(size // keys // 10)] for number in range(keys)}


def test_json_that_a_record_has_room_for_stays_in_it(tmp_path):
    engine = engine_in(tmp_path)
    step(engine, batches(1)[0])
    given = {**plain_json(42 << 10), "text": "x" * 2000}
    assert 40 << 10 < len(json.dumps(given)) < 52 << 10
    engine.save_checkpoint(tmp_path / "kept", client_state=given)
    assert files(tmp_path / "kept") == [] and engine.engine.client_state == given
    # What does not fit is the longest alone.
    more = {**given, "long": "y" * 9000}
    engine.save_checkpoint(tmp_path / "kept", client_state=more)
    assert len(files(tmp_path / "kept")) == 1 and engine.engine.client_state == given
    assert engine.load_checkpoint(tmp_path / "kept")[1] == more and engine.engine.client_state == given
    step(engine, batches(1)[0])
    engine.destroy()


def test_a_large_tensor_is_not_encoded_to_learn_that_it_is_large(monkeypatch):
    from penstock import _client_state

    given = {"large": [{"a": torch.zeros(1 << 20)}], "small": 1}
    monkeypatch.setattr(_client_state, "encode", lambda value: pytest.fail("encoded") if isinstance(value, list) and value[1] is given["large"] else value)
    assert _client_state.split(given, 50 << 10) == ({"small": 1}, {"large": given["large"]})


def test_values_apart_come_back_to_penstocks_own_engine_and_are_named_by_an_export(tmp_path):
    engine = engine_in(tmp_path)
    step(engine, batches(1)[0])
    given = {"args": argparse.Namespace(a=1), "epoch": 3}
    engine.save_checkpoint(tmp_path / "kept", client_state=given)

    def check_export(engine, tag):
        with pytest.warns(UserWarning, match="client_state: args is more than") as told:
            path = engine.export_checkpoint(tmp_path / "out", tag)
        assert not any("penstock_client_state" in str(each.message) for each in told)
        assert b"penstock_client_state" not in b"".join(each.read_bytes() for each in pathlib.Path(path).rglob("*") if each.is_file())

    check_export(engine, "first")
    engine.destroy()
    model = net()
    with make(model, tmp_path / "run", gradient_clipping=0.0) as own:
        assert own.load_checkpoint(tmp_path / "kept")[1] == given
        step(own, batches(1)[0])
        assert own.client_state == {"epoch": 3}
        check_export(own, "second")
        own.save_checkpoint(tmp_path / "own")
    with make(net(), tmp_path / "run", gradient_clipping=0.0, resume=True) as own:
        own.eval()(**batches(1)[0])
        assert own.client_state == {"epoch": 3} and own.load_checkpoint(tmp_path / "own", load_module_only=True)[1] == {"epoch": 3}


def test_an_interrupt_while_a_checkpoint_is_waited_for_leaves_what_it_names(tmp_path):
    args = argparse.Namespace(lr=0.1)
    engine = engine_in(tmp_path)
    step(engine, batches(1)[0])
    copying = engine.engine._copy
    own, waits = copying.wait_for_checkpoint, []

    def interrupted():
        own()
        waits.append(True)
        if len(waits) == 2:  # of what was begun
            raise KeyboardInterrupt

    copying.wait_for_checkpoint = interrupted
    with pytest.raises(KeyboardInterrupt):
        engine.save_checkpoint(tmp_path / "kept", client_state={"args": args})
    copying.wait_for_checkpoint = own
    assert len(files(tmp_path / "kept")) == 1
    assert engine.load_checkpoint(tmp_path / "kept")[1] == {"args": args}
    step(engine, batches(1)[0])
    engine.save_checkpoint(tmp_path / "kept", client_state={"args": args})
    # One that was never begun leaves nothing.
    step(engine, batches(1)[0])
    (tmp_path / "kept" / "mine").mkdir()
    with pytest.raises(FileExistsError):
        engine.save_checkpoint(tmp_path / "kept", "mine", client_state={"args": args})
    assert len(files(tmp_path / "kept")) == 2
    assert engine.load_checkpoint(tmp_path / "kept")[1] == {"args": args}
    engine.destroy()


def test_over_ranks_each_writes_its_own(tmp_path, on_ranks):
    program = """
        import argparse, sys
        sys.path[:0] = [{tests!r}]
        import penstock.deepspeed as deepspeed
        from engine_models import batches, net, step

        place = {place!r}
        offload = {{"device": "nvme", "nvme_path": place + "/nvme"}}
        config = {{"train_micro_batch_size_per_gpu": 4, "optimizer": {{"type": "AdamW"}}, "zero_optimization": {{"stage": 3, "offload_optimizer": offload}}}}
        for again in (False, True):
            engine = deepspeed.initialize(model=net(), config=config)[0]
            if again:
                found = engine.load_checkpoint(place + "/kept")[1]["args"].epoch
            step(engine, batches(1)[0])
            assert not again or found == 3
            engine.save_checkpoint(place + "/kept", client_state={{"args": argparse.Namespace(epoch=3)}})
            engine.destroy()
    """.format(tests=os.path.dirname(os.path.abspath(__file__)), place=str(tmp_path))
    told = on_ranks(program, 2)
    assert [each[0] for each in told] == [0, 0], told


def test_the_file_is_the_checkpoints_wherever_that_goes(tmp_path):
    given = {"args": argparse.Namespace(lr=0.1)}
    engine = engine_in(tmp_path)
    step(engine, batches(1)[0])
    engine.save_checkpoint(tmp_path / "kept", client_state=given)
    assert os.path.dirname(files(tmp_path / "kept")[0]) == "step-00000001"
    (tmp_path / "kept" / "step-00000001").rename(tmp_path / "kept" / "best")
    step(engine, batches(1)[0])
    engine.save_checkpoint(tmp_path / "kept", client_state={"args": argparse.Namespace(lr=0.2)})
    (tmp_path / "kept" / "step-00000002").rename(tmp_path / "elsewhere")
    step(engine, batches(1)[0])
    engine.save_checkpoint(tmp_path / "kept", client_state={})
    assert engine.load_checkpoint(tmp_path / "kept", tag="best")[1] == given
    assert engine.load_checkpoint(tmp_path, tag="elsewhere")[1]["args"].lr == 0.2
    # As an older Penstock had it: beside the checkpoint.
    (name,) = [each for each in files(tmp_path / "kept") if each.startswith("best")]
    (tmp_path / "kept" / name).rename(tmp_path / "kept" / os.path.basename(name))
    engine.save_checkpoint(tmp_path / "kept", client_state={})
    assert engine.load_checkpoint(tmp_path / "kept", tag="best")[1] == given
    engine.destroy()


def test_a_decoupled_save_has_its_file_too_and_what_a_kill_left_goes_with_the_next(tmp_path):
    from penstock import _client_state

    given, kept = {"args": argparse.Namespace(lr=0.1)}, tmp_path / "kept"
    engine = engine_in(tmp_path, checkpoint={"writer": {"decoupled": True}})
    step(engine, batches(1)[0])
    engine.save_checkpoint(kept, client_state=given)
    step(engine, batches(1)[0])
    engine.save_checkpoint(kept, client_state=given)
    engine.wait_for_checkpoint()
    assert [os.path.dirname(each) for each in files(kept)] == ["step-00000001", "step-00000002"]
    # Another engine's that is between its file and its checkpoint stays, and what a killed one has left there goes.
    others, killed = (_client_state.write(str(kept), 3, 0, given) for _ in range(2))
    os.close(killed.descriptor)
    step(engine, batches(1)[0])
    engine.save_checkpoint(kept, client_state={})
    assert os.path.exists(others.settled) and not os.path.exists(killed.settled)
    others.discard()
    assert engine.load_checkpoint(kept, "global_step1")[1] == engine.load_checkpoint(kept, "global_step2")[1] == given
    engine.destroy()


@pytest.mark.parametrize("trusts", [False, True])
@pytest.mark.parametrize("what", ["pipe", "compressed", "overlapping"])
def test_what_is_no_file_of_ours_neither_hangs_nor_fills_memory(tmp_path, what, trusts, never_waits):
    engine = engine_in(tmp_path)
    step(engine, batches(1)[0])
    engine.save_checkpoint(tmp_path / "kept", client_state={"many": {1, 2}})
    path = tmp_path / "kept" / files(tmp_path / "kept")[0]
    path.unlink()
    if what == "pipe":
        os.mkfifo(path)
    else:
        torch.save({"many": torch.zeros(1 << 20)}, path)
        with zipfile.ZipFile(path) as whole:
            entries = {each: whole.read(each) for each in whole.namelist()}
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED if what == "compressed" else zipfile.ZIP_STORED) as out:
            for name, data in entries.items():
                out.writestr(name, data)
            if what == "overlapping":  # one entry's bytes under more names
                out.filelist.extend([next(each for each in out.filelist if each.file_size > 1 << 20)] * 3)
    before, peak = engine.global_steps, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises((OSError, RuntimeError), match="not a regular file|is not as it was written"):
        engine.load_checkpoint(tmp_path / "kept", trust_client_state=trusts)
    assert engine.global_steps == before and resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < peak + (256 << 10)
    engine.destroy()


def test_a_full_disk_is_no_value_that_cannot_be_pickled(tmp_path, monkeypatch):
    from penstock import _client_state

    class Full:
        def __init__(self, file, room):
            self.file, self.room = file, room

        def write(self, data):
            self.room -= len(memoryview(data).cast("B"))
            if self.room < 0:
                raise OSError(28, "No space left on device")
            return self.file.write(data)

        def flush(self):
            self.file.flush()

    own = _client_state.open_new

    @contextlib.contextmanager
    def full(new):
        with own(new) as file:
            yield Full(file, 1 << 20)

    monkeypatch.setattr(_client_state, "open_new", full)
    engine = engine_in(tmp_path)
    step(engine, batches(1)[0])
    with pytest.raises(OSError, match="client_state cannot be written .No space left") as told:
        engine.save_checkpoint(tmp_path / "kept", client_state={"big": torch.zeros(1 << 20)})
    assert told.value.errno == 28 and "client_state-step-00000001" in told.value.filename and os.listdir(tmp_path / "kept") == []

    class Refuses:
        def __reduce__(self):
            raise OSError(13, "of the value itself")

    with pytest.raises(TypeError, match="own cannot be pickled: .*of the value itself"):
        engine.save_checkpoint(tmp_path / "kept", client_state={"own": Refuses()})
    assert os.listdir(tmp_path / "kept") == []
    engine.destroy()
