"""DeepSpeed's zero_to_fp32 over checkpoints and state directories, the engine's and DeepSpeed's."""

import errno
import json
import os
import shutil
import tracemalloc

import pytest

torch = pytest.importorskip("torch")

import penstock  # noqa: E402
import penstock._fp32  # noqa: E402
import penstock.deepspeed  # noqa: E402, F401  # from here on deepspeed is found
from deepspeed.utils.zero_to_fp32 import (  # noqa: E402
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    get_model_state_file,
    load_state_dict_from_zero_checkpoint,
)
from engine_models import batches, make, net, step  # noqa: E402
from penstock import _programs  # noqa: E402
from penstock._engine import _parameters  # noqa: E402
from penstock._engine._json import decode, encode  # noqa: E402
from torch import nn  # noqa: E402

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Normed(nn.Module):
    """With buffers that training changes, one that it does not, and a frozen layer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 3)
        self.register_buffer("scale", torch.arange(3.0).half() + 1)
        self.register_buffer("hidden", torch.ones(2), persistent=False)
        self.first.requires_grad_(False)

    def forward(self, x, targets):
        return nn.functional.cross_entropy(self.last(self.norm(self.first(x))) * self.scale.float(), targets)


def normed_batch(seed):
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(16, 8, generator=generator), "targets": torch.randint(0, 3, (16,), generator=generator)}


def masters(engine):
    return {name: engine.read_state(parameter) for name, parameter in engine.module.named_parameters()}


def check(state, expected):
    for name, value in expected.items():
        assert state[name].dtype == torch.float32 and torch.equal(state[name], value), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_checkpoint_gives_its_masters(tmp_path, dtype):
    with make(net(), tmp_path / "run", dtype=DTYPES[dtype], config={"penstock": {"optimizer_states": "8bit"}} if dtype == "fp32" else None) as engine:
        for batch in batches(3):
            step(engine, batch)
        engine.save_checkpoint(tmp_path / "kept")
        expected = masters(engine)
        step(engine, batches(1, seed=2)[0])
        engine.save_checkpoint(tmp_path / "kept", "last")
        newer = masters(engine)
        with pytest.raises(OSError, match="in use by a training: close its engine"):
            get_fp32_state_dict_from_zero_checkpoint(tmp_path / "run")
    for where, tag in ((tmp_path / "kept", "step-00000003"), (tmp_path / "kept" / "step-00000003", None)):
        state = get_fp32_state_dict_from_zero_checkpoint(where, tag)
        check(state, expected)
        assert set(state) == {*expected, "head.weight"}  # the tied one
        assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()
    for where, tag in ((tmp_path / "kept", None), (tmp_path / "kept", "last"), (tmp_path / "run", None)):
        check(get_fp32_state_dict_from_zero_checkpoint(where, tag), newer)
    model = load_state_dict_from_zero_checkpoint(net(seed=7), tmp_path / "kept")
    check(model.state_dict(), newer)


def test_state_in_memory_stripes_and_a_run_that_was_loaded(tmp_path):
    with make(net(), tmp_path / "no", offload="none") as engine:
        step(engine, batches(1)[0])
        engine.save_checkpoint(tmp_path / "kept")
        expected = masters(engine)
    check(get_fp32_state_dict_from_zero_checkpoint(tmp_path / "kept"), expected)
    dirs = [str(tmp_path / "a"), str(tmp_path / "b")]
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with penstock.initialize(model=model, optimizer=optimizer, state_dir=dirs, gradient_clipping=1.0)[0] as engine:
        engine.load_checkpoint(tmp_path / "kept")
        step(engine, batches(1, seed=3)[0])
        expected = masters(engine)
    check(get_fp32_state_dict_from_zero_checkpoint(dirs), expected)
    with pytest.raises(ValueError, match="several directories"):
        get_fp32_state_dict_from_zero_checkpoint(dirs, "tag")


def test_buffers_and_what_is_frozen(tmp_path):
    torch.manual_seed(0)
    model = Normed()
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-2)
    with make(model, tmp_path / "run", optimizer=optimizer) as engine:
        for seed in range(3):
            step(engine, normed_batch(seed))
        engine.save_checkpoint(tmp_path / "kept")
        expected = {name: value.clone() for name, value in engine.state_dict().items()}
    for where in (tmp_path / "kept", tmp_path / "run"):
        state = get_fp32_state_dict_from_zero_checkpoint(where)
        assert set(state) == set(expected)
        for name, value in expected.items():
            assert torch.equal(state[name], value.float() if value.is_floating_point() else value), name
        assert state["norm.num_batches_tracked"] == 3 and state["scale"].dtype == torch.float32
        left = get_fp32_state_dict_from_zero_checkpoint(where, exclude_frozen_parameters=True)
        assert set(expected) - set(left) == {"first.weight", "first.bias"}


def test_several_ranks_are_one(tmp_path, on_ranks):
    told = on_ranks(
        """
        import sys
        sys.path.insert(0, sys.argv[2])
        import torch
        from engine_models import batches, make, net, step
        engine = make(net(), sys.argv[1] + "/run")
        for batch in batches(2):
            step(engine, batch)
        engine.save_checkpoint(sys.argv[1] + "/kept")
        state = {name: engine.read_state(parameter) for name, parameter in engine.module.named_parameters()}
        if engine.global_rank == 0:
            torch.save(state, sys.argv[1] + "/expected")
        engine.close()
        """,
        2,
        tmp_path,
        os.path.dirname(__file__),
    )
    assert [status for status, _, _ in told] == [0, 0], told
    expected = torch.load(tmp_path / "expected")
    for where in ("kept", "run"):
        check(get_fp32_state_dict_from_zero_checkpoint(tmp_path / where), expected)


def test_files_are_what_transformers_loads(tmp_path):
    with make(net(), tmp_path / "run") as engine:
        step(engine, batches(1)[0])
        engine.save_checkpoint(tmp_path / "kept")
        expected = {**masters(engine), "head.weight": masters(engine)["embed.weight"]}
    convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "kept", tmp_path / "one")
    assert os.listdir(tmp_path / "one") == ["pytorch_model.bin"]
    check(torch.load(tmp_path / "one" / "pytorch_model.bin"), expected)
    convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "kept", tmp_path / "file.pt")  # Lightning's
    check(torch.load(tmp_path / "file.pt"), expected)
    convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "kept", tmp_path / "shards", max_shard_size="10KB", safe_serialization=True)
    index = json.loads((tmp_path / "shards" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(expected) and index["metadata"]["total_size"] == sum(4 * value.numel() for value in expected.values())
    assert sorted({*index["weight_map"].values(), "model.safetensors.index.json"}) == sorted(os.listdir(tmp_path / "shards"))
    safetensors = pytest.importorskip("safetensors.torch")
    for file in set(index["weight_map"].values()):
        there = safetensors.load_file(tmp_path / "shards" / file)
        assert sum(4 * value.numel() for value in there.values()) <= 10_000
        assert set(there) == {name for name, place in index["weight_map"].items() if place == file}
        check(there, {name: expected[name] for name in there})
    with pytest.raises(ValueError, match="max_shard_size"):
        convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "kept", tmp_path / "no", max_shard_size="many")
    # What another form left would be loaded in its place.
    shards = tmp_path / "shards"
    convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "kept", shards, safe_serialization=True)
    assert not (shards / "model.safetensors.index.json").exists() and (shards / "model.safetensors").exists()
    convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "kept", shards, max_shard_size="10KB", safe_serialization=True)
    assert (shards / "model.safetensors.index.json").exists() and not (shards / "model.safetensors").exists()
    convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "kept", shards, max_shard_size="20KB", safe_serialization=True)
    index = json.loads((shards / "model.safetensors.index.json").read_text())
    assert {*index["weight_map"].values(), "model.safetensors.index.json"} == set(os.listdir(shards)), "shards of the older one stay"


@pytest.mark.parametrize("call", ["fsync", "link", "replace", "rename"])
def test_weights_that_cannot_be_written_leave_the_old_ones(tmp_path, monkeypatch, call):
    with make(net(), tmp_path / "run") as engine:
        step(engine, batches(1)[0])
        engine.save_checkpoint(tmp_path / "kept")
    out = tmp_path / "shards"
    convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "kept", out, max_shard_size="10KB", safe_serialization=True)
    before = {name: (out / name).read_bytes() for name in os.listdir(out)}
    assert len(before) > 3
    real, left = getattr(os, call), [3]

    def full(*arguments, **keywords):
        left[0] -= 1
        if left[0] == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*arguments, **keywords)

    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match="No space"):
        convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "kept", out, max_shard_size="10KB", safe_serialization=True)
    monkeypatch.undo()
    assert {name: (out / name).read_bytes() for name in os.listdir(out)} == before


def test_of_two_conversions_into_one_directory_at_once_the_later_one_stands_alone(tmp_path, monkeypatch):
    with make(net(), tmp_path / "run") as engine:
        step(engine, batches(1)[0])
        engine.save_checkpoint(tmp_path / "kept")
        expected = masters(engine)
    write, others = penstock._fp32._write_safetensors, []

    def beside_another(*arguments):
        if not others:
            others.append("under way")
            others.extend(penstock._fp32.write_weights(tmp_path / "kept", tmp_path / "out", 20_000, True))
        write(*arguments)

    monkeypatch.setattr(penstock._fp32, "_write_safetensors", beside_another)
    written = penstock._fp32.write_weights(tmp_path / "kept", tmp_path / "out", 40_000, True)
    assert len(others) > len(written) > 2
    assert sorted(os.listdir(tmp_path / "out")) == sorted(map(os.path.basename, written))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) >= set(expected) and {*index["weight_map"].values()} == {os.path.basename(path) for path in written[:-1]}


def test_an_index_is_read_as_far_as_real_ones_go(tmp_path):
    """Of 400,000 tensors; one of 16 MiB of brackets is none, and takes no memory."""
    index, shard = tmp_path / "model.safetensors.index.json", "model-00001-of-00002.safetensors"
    index.write_text(json.dumps({"metadata": {}, "weight_map": {f"layers.{number}.weight": shard for number in range(400_000)}}))
    assert penstock._fp32._shards_of(str(index), "model", ".safetensors") == [str(tmp_path / shard)]
    index.write_text('{"weight_map": {"a": "%s"}, "b": [%s0]}' % (shard, "{}," * 5_000_000))
    tracemalloc.start()
    assert penstock._fp32._shards_of(str(index), "model", ".safetensors") == []
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 << 20


def test_the_script_beside_checkpoints_is_put_there_whole_and_waits_for_nobody(tmp_path, never_waits):
    path = tmp_path / penstock._fp32.SCRIPT
    penstock._fp32.place_script(tmp_path)
    right, mode = path.read_bytes(), path.stat().st_mode
    assert mode & 0o777 == 0o755
    before = path.stat().st_ino
    penstock._fp32.place_script(tmp_path)
    assert path.stat().st_ino == before, "a right one is written anew"
    for other in (b"", b"another", right + b"more"):
        path.write_bytes(other)
        penstock._fp32.place_script(tmp_path)
        assert path.read_bytes() == other and path.stat().st_mode == mode
    path.unlink()
    os.mkfifo(path)
    penstock._fp32.place_script(tmp_path)
    assert os.listdir(tmp_path) == [path.name] and path.is_fifo()
    path.unlink()
    path.symlink_to("nowhere")
    penstock._fp32.place_script(tmp_path)
    assert os.listdir(tmp_path) == [path.name] and os.readlink(path) == "nowhere"


def test_a_checkpoint_is_not_written_over(tmp_path):
    with make(net(), tmp_path / "run") as engine:
        step(engine, batches(1)[0])
        engine.save_checkpoint(tmp_path / "kept")
    store = next(os.path.join(place, "penstock.store") for place, _, names in os.walk(tmp_path / "kept") if "penstock.store" in names)
    os.symlink(store, tmp_path / "other.bin")
    deepspeeds = tmp_path / "mp_rank_00_model_states.pt"
    deepspeeds.write_bytes(b"values")
    for place in (tmp_path / "other.bin", deepspeeds):
        with pytest.raises(ValueError, match="own file"):
            penstock._fp32.write_weights(tmp_path / "kept", place)
    assert deepspeeds.read_bytes() == b"values"
    assert len(get_fp32_state_dict_from_zero_checkpoint(tmp_path / "kept")) > 1


def test_no_weights_go_into_a_state_or_a_checkpoint(tmp_path):
    def files():
        return sorted(str(path) for path in tmp_path.rglob("*"))

    with make(net(), tmp_path / "run") as engine:
        step(engine, batches(1)[0])
        kept = engine.save_checkpoint(tmp_path / "kept", "best", wait=True)
        before = files()
        for place in (tmp_path / "run", kept, tmp_path / "kept" / "best"):
            with pytest.raises(ValueError, match="a state or checkpoint .*give another directory"):
                engine.export_checkpoint(place)
    for place in (tmp_path / "run", kept, tmp_path / "kept" / "best", os.path.join(kept, "below", "it")):
        for out in (place, os.path.join(place, "weights.bin")):
            for safe in (False, True):
                with pytest.raises(ValueError, match="a state or checkpoint .*give another directory"):
                    convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "kept", out, safe_serialization=safe)
    assert files() == before
    # As DeepSpeed's users write them, beside the checkpoints.
    convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "kept", tmp_path / "kept")
    assert (tmp_path / "kept" / "pytorch_model.bin").exists()


def test_a_buffer_that_safetensors_does_not_have(tmp_path):
    model = net()
    model.register_buffer("turns", torch.ones(2, dtype=torch.complex64))
    with make(model, tmp_path / "run") as engine:
        step(engine, batches(1)[0])
        engine.save_checkpoint(tmp_path / "kept")
    with pytest.raises(ValueError, match="complex64"):
        convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "kept", tmp_path / "no", safe_serialization=True)
    assert torch.equal(get_fp32_state_dict_from_zero_checkpoint(tmp_path / "kept")["turns"], model.turns)


def test_what_is_no_checkpoint_names_the_way_out(tmp_path):
    with make(net(), tmp_path / "run") as engine:
        step(engine, batches(1)[0])
        engine.save_checkpoint(tmp_path / "kept")
    with pytest.raises(FileNotFoundError, match="no checkpoint .*other"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path / "kept", "other")
    with pytest.raises(OSError, match="neither a state directory nor a checkpoint"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    with pytest.raises(FileNotFoundError, match="get_fp32_state_dict_from_zero_checkpoint"):
        get_model_state_file(tmp_path / "kept", 3)
    named = tmp_path / "kept" / "step-00000001" / "parameters.json"
    text = named.read_text()
    named.write_text(text[:-9])
    with pytest.raises(ValueError, match="parameters.json is damaged"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path / "kept")
    # Of a run that was there before.
    described = without_digest(text)
    described["model"]["fingerprint"] += "0"
    named.write_text(_parameters.text_of(described))
    with pytest.raises(ValueError, match=r"no parameters.json that names its parameters.*model.state_dict\(\)"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path / "kept")
    named.unlink()
    with pytest.raises(ValueError, match="engine.load_checkpoint"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path / "kept")
    with make(net(), tmp_path / "new") as engine:  # it is a checkpoint all the same
        engine.load_checkpoint(tmp_path / "kept")
        step(engine, batches(1)[0])
        assert engine.global_steps == 2


def without_digest(text):
    """What parameters.json says, as an older Penstock wrote it."""
    described = json.loads(text)
    assert len(described.pop("sha256")) == 64
    return described


def kept_with_all(tmp_path):
    """A checkpoint with a frozen layer, a tied name and buffers, and its parameters.json."""
    torch.manual_seed(0)
    model = Normed()
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-2)
    with make(model, tmp_path / "run", optimizer=optimizer) as engine:
        step(engine, normed_batch(0))
        path = engine.save_checkpoint(tmp_path / "kept")
    return os.path.join(path, "parameters.json")


def test_no_changed_digit_of_the_description_shifts_a_weight(tmp_path):
    """Blocks, places, shapes and buffers stand there as digits of a text: each other one of them is another text of JSON."""
    path = kept_with_all(tmp_path)
    with open(path, encoding="ascii") as file:
        text = file.read()
    assert get_fp32_state_dict_from_zero_checkpoint(tmp_path / "kept")
    digits = [at for at, character in enumerate(text) if character.isdigit() or character in "AQgw"]
    assert len(digits) > 100
    for at in digits:
        other = text[:at] + ("1" if text[at] != "1" else "2") + text[at + 1 :]
        with open(path, "w", encoding="ascii") as file:
            file.write(other)
        with pytest.raises(ValueError, match="parameters.json is damaged: .*: load the checkpoint itself") as refused:
            get_fp32_state_dict_from_zero_checkpoint(tmp_path / "kept")
        assert "\n" not in str(refused.value)
    with make(net(), tmp_path / "second") as engine:
        with pytest.raises(ValueError, match="parameters.json is damaged"):
            engine.load_checkpoint(tmp_path / "kept", load_module_only=True)


def places_of(described):
    return {each[0]: each for each in described["parameters"]}


WRONG = {
    "shifted": lambda d: places_of(d)["last.bias"].__setitem__(3, places_of(d)["last.bias"][3] + 1),
    "over another": lambda d: places_of(d)["last.bias"].__setitem__(3, 0),
    "behind the end": lambda d: places_of(d)["last.bias"].__setitem__(3, 1 << 40),
    "below 0": lambda d: places_of(d)["last.weight"].__setitem__(3, -64),
    "a larger shape": lambda d: places_of(d)["last.weight"][1].append(3),
    "a smaller shape": lambda d: places_of(d)["first.weight"].__setitem__(1, []) or places_of(d)["first.bias"].__setitem__(3, 128),
    "a shape that is none": lambda d: places_of(d)["last.weight"].__setitem__(1, "many"),
    "sizes without end": lambda d: places_of(d)["last.weight"].__setitem__(1, [1 << 60] * 1000),
    "another block": lambda d: places_of(d)["last.weight"].__setitem__(2, 0),
    "no block": lambda d: places_of(d)["last.weight"].__setitem__(2, 99),
    "no number": lambda d: places_of(d)["last.weight"].__setitem__(2, True),
    "one less": lambda d: d["parameters"].remove(places_of(d)["norm.weight"]),
    "one twice": lambda d: d["parameters"].append(d["parameters"][0]),
    "a name that is none": lambda d: d["parameters"][0].__setitem__(0, ["x"]),
    "trains perhaps": lambda d: d["parameters"][0].__setitem__(4, 1),
    "no parameter": lambda d: d["parameters"].__setitem__(0, {"name": "x"}),
    "parameters by name": lambda d: d.update(parameters=places_of(d)),
    "no parameters": lambda d: d.pop("parameters"),
    "an empty list of them": lambda d: d["parameters"].clear(),
    "no buffers": lambda d: d.pop("buffers"),
    "buffers in a list": lambda d: d.update(buffers=[]),
    "a buffer of a parameter's name": lambda d: d["buffers"].update({"last.bias": d["buffers"]["scale"]}),
    "a buffer that is no tensor": lambda d: d["buffers"].update(scale=1.0),
    "a buffer of another type": lambda d: d["buffers"]["scale"].update(dtype="save"),
    "a buffer of another shape": lambda d: d["buffers"]["scale"].update(shape=[1000]),
    "a buffer without bytes": lambda d: d["buffers"]["scale"].pop("value"),
    "a buffer with odd bytes": lambda d: d["buffers"]["scale"].update(value="AAA!AAAA"),
    "another tag": lambda d: d["buffers"]["scale"].update(__penstock__="pickle"),
    "a tag that is a list": lambda d: d["buffers"]["scale"].update(__penstock__=[]),
    "tied in a list": lambda d: d.update(tied=["x"]),
    "tied to nothing": lambda d: d.update(tied={"x": "nothing"}),
    "tied to a list": lambda d: d.update(tied={"x": []}),
    "a large buffer that is no name": lambda d: d.update(large_buffers=[3]),
    "another key": lambda d: d.update({"sha257": "0"}),
    "a digest that is none": lambda d: d.update({"sha256": "0"}),
}


def test_a_description_without_a_digest_is_of_this_state_or_refused(tmp_path, capsys):
    """As an older Penstock wrote it: what it says is looked at all the same."""
    path = kept_with_all(tmp_path)
    expected = get_fp32_state_dict_from_zero_checkpoint(tmp_path / "kept")
    with open(path, encoding="ascii") as file:
        text = file.read()
    for name, change in {"as it was": lambda d: None, **WRONG}.items():
        described = without_digest(text)
        change(described)
        with open(path, "w", encoding="ascii") as file:
            json.dump(described, file)
        if name == "as it was":
            found = get_fp32_state_dict_from_zero_checkpoint(tmp_path / "kept")
            assert set(found) == set(expected) and all(torch.equal(found[each], expected[each]) for each in found)
            continue
        with pytest.raises(ValueError, match="parameters.json is damaged: .*: load the checkpoint itself") as refused:
            pytest.fail(f"{name}: {get_fp32_state_dict_from_zero_checkpoint(tmp_path / 'kept')}")
        assert "\n" not in str(refused.value) and len(str(refused.value)) < 1000, name
        with pytest.raises(SystemExit) as ended:
            penstock._fp32.main([str(tmp_path / "kept"), str(tmp_path / "out")])
        assert str(ended.value.code).startswith("zero_to_fp32.py: ") and not (tmp_path / "out").exists(), name


def test_values_that_encode_does_not_return_are_a_line():
    for right in ({"a": (1, float("inf"))}, {1: [None, True]}, torch.ones(2, 3), torch.empty(0), torch.ones((), dtype=torch.bool)):
        again = decode(json.loads(json.dumps(encode(right))))
        assert torch.equal(again, right) and again.dtype == right.dtype if isinstance(right, torch.Tensor) else again == right
    nested = []
    for _ in range(100_000):
        nested = [nested]
    tensor = encode(torch.ones(2))
    for wrong in (
        {"__penstock__": "tuple"}, {"__penstock__": "float", "value": []}, {"__penstock__": "dict", "value": [1]}, {"__penstock__": "dict", "value": [[[], 1]]},
        {"__penstock__": "x", "value": []}, {"__penstock__": 1}, {**tensor, "dtype": "qint8"}, {**tensor, "dtype": 3}, {**tensor, "shape": [-2]}, nested,
    ):  # fmt: skip
        with pytest.raises(ValueError) as refused:
            decode(wrong)
        assert "\n" not in str(refused.value)


def test_a_checkpoint_that_was_about_to_be_replaced(tmp_path):
    with make(net(), tmp_path / "run") as engine:
        step(engine, batches(1)[0])
        engine.save_checkpoint(tmp_path / "kept")
        expected = masters(engine)
    (tmp_path / "kept" / "step-00000001").rename(tmp_path / "kept" / ".step-00000001.replaced")
    check(get_fp32_state_dict_from_zero_checkpoint(tmp_path / "kept"), expected)


@pytest.mark.parametrize("case", ["zero1", "zero2", "zero3", "universal"])
def test_deepspeeds_own(tmp_path, case):
    deepspeeds = pytest.importorskip("test_deepspeed_checkpoint")
    if case not in deepspeeds.golden["cases"]:
        pytest.skip(f"no golden checkpoint {case}")
    checkpoint = deepspeeds.unpack(case, tmp_path / "theirs")
    with deepspeeds.initialize(deepspeeds.gpt(), case, state_dir=tmp_path / "state") as engine:
        engine.load_checkpoint(checkpoint)
        deepspeeds.look(engine)
        expected = masters(engine)
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint)
    check(state, expected)
    assert state["lm_head.weight"] is not None and torch.equal(state["lm_head.weight"], state["transformer.wte.weight"])
    tag = next(name for name in os.listdir(checkpoint) if os.path.isdir(checkpoint / name))
    check(get_fp32_state_dict_from_zero_checkpoint(checkpoint, tag), expected)
    assert get_model_state_file(checkpoint / tag, 3).endswith("_model_states.pt")
    shutil.rmtree(checkpoint / tag)
    with pytest.raises(FileNotFoundError, match="no checkpoint .*global_step4.*give tag="):
        get_fp32_state_dict_from_zero_checkpoint(checkpoint)


def test_the_program(tmp_path, capsys, monkeypatch):
    with make(net(), tmp_path / "run") as engine:
        step(engine, batches(1)[0])
        expected = masters(engine)

    def program(*arguments):
        monkeypatch.setattr("sys.argv", ["penstock", "zero_to_fp32", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            _programs.penstock()
        return (ended.value.code, *capsys.readouterr())

    status, out, err = program(tmp_path / "run", tmp_path / "out")
    assert (status, out, err) == (0, f"{tmp_path / 'out' / 'model.safetensors'}\n", "")
    safetensors = pytest.importorskip("safetensors.torch")
    check(safetensors.load_file(tmp_path / "out" / "model.safetensors"), expected)
    status, out, err = program(tmp_path / "run", tmp_path / "out")
    assert status == 1 and not out and "--overwrite" in err
    assert program(tmp_path / "run", tmp_path / "out", "--overwrite")[0] == 0
    status, out, err = program(tmp_path, tmp_path / "out", "--overwrite")
    assert status == 1 and len(err.strip().splitlines()) == 1 and "neither a state directory" in err
