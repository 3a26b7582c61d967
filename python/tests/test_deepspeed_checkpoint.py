"""Runs of DeepSpeed's that a driven engine goes on with, and its own as DeepSpeed's universal checkpoints. tests/golden/deepspeed.json has
what DeepSpeed wrote, and with which losses it went on (tests/golden/make_deepspeed.py)."""

import base64
import json
import math
import os
import pathlib
import resource
import shutil
import subprocess
import sys
import textwrap
import warnings

import pytest

torch = pytest.importorskip("torch")

import penstock  # noqa: E402
from engine_models import batches, make, net, step  # noqa: E402
from torch import nn  # noqa: E402

GOLDEN = pathlib.Path(__file__).resolve().parents[2] / "tests" / "golden" / "deepspeed.json"
if not GOLDEN.exists():
    pytest.skip("no golden checkpoints beside the tests", allow_module_level=True)
golden = json.loads(GOLDEN.read_text())
KINDS = ("parameter", "first moment", "second moment")
MASK, ODD = (1 << 64) - 1, 0x9E3779B97F4A7C15


@pytest.fixture(autouse=True)
def one_thread():
    """Of models this small, threads do nothing but wait for each other where other programs run."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def unpack(name, directory):
    """A checkpoint as it lay there."""
    for file, text in golden["cases"][name]["files"].items():
        path = directory / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(text))
    return directory


def gpt(**changes):
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    torch.manual_seed(5)  # not its values
    options = {key: value for key, value in {**golden["model"], **changes}.items() if key != "model_type"}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**options, use_cache=False, bos_token_id=0, eos_token_id=0)).train()


def config_of(name):
    """One process computes what several did."""
    return {**golden["cases"][name]["config"], "train_micro_batch_size_per_gpu": golden["batch"]}


def mix(x):
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = ((x ^ (x >> shift)) * factor) & MASK
    return x ^ (x >> 31)


def rows_of(number):
    """The sequences of a step (models/data/dataset.h)."""
    text = torch.frombuffer(bytearray(base64.b64decode(golden["text"])), dtype=torch.int16).long()
    seq, rows = golden["seq"], []
    for row in range(golden["batch"]):
        h = mix((1 + ODD) & MASK)
        h = mix(h ^ ((number + 2 * ODD) & MASK))
        h = mix(h ^ ((row + 3 * ODD) & MASK))
        at = (h * (len(text) - seq)) >> 64
        rows.append(text[at : at + seq + 1])
    return torch.stack(rows)


def steps(engine, last):
    """(loss, the next rate) of the steps up to `last`."""
    made = []
    while engine.global_steps < last:
        rows = rows_of(engine.global_steps + 1)
        logits = engine(input_ids=rows[:, :-1]).logits.float()
        loss = nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), rows[:, 1:].reshape(-1))
        engine.backward(loss)
        engine.step()
        made.append((loss.item(), engine.get_lr()[0]))
    return made


def initialize(model, name="zero3", **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # notes on the configuration
        return penstock.initialize(model=model, config=config_of(name), **options)[0]


def everything(engine):
    return {name: [engine.read_state(parameter, kind) for kind in KINDS] for name, parameter in engine.module.named_parameters()}


def look(engine):
    """Makes the state, and no step."""
    with torch.no_grad():
        engine.module(input_ids=rows_of(1)[:, :-1])


@pytest.mark.parametrize("place", ["drive", "memory"])
@pytest.mark.parametrize("name", golden["cases"])
def test_a_run_goes_on_with_the_losses_of_deepspeed(tmp_path, name, place):
    case = golden["cases"][name]
    checkpoint = unpack(name, tmp_path / "checkpoint")
    with initialize(gpt(), name, **({"state_dir": tmp_path / "state"} if place == "drive" else {})) as engine:
        path, client = engine.load_checkpoint(checkpoint)
        assert os.path.dirname(path) == str(checkpoint) and client == {} and engine.global_steps == golden["saved"]
        made = steps(engine, case["losses"][-1]["step"])
    expected = case["losses"][golden["saved"] :]
    tolerance = 1e-5 if case["dtype"] == "fp32" else 0.02  # bf16 arithmetic goes in another order
    assert [loss for loss, _ in made] == pytest.approx([each["loss"] for each in expected], abs=tolerance)
    assert [lr for _, lr in made] == pytest.approx([each["lr"] for each in expected], rel=1e-12)


def test_many_files_take_few_descriptors(tmp_path):
    checkpoint, soft = unpack("universal", tmp_path / "theirs"), resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    with initialize(gpt(), "universal", state_dir=tmp_path / "state") as engine:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        try:
            engine.load_checkpoint(checkpoint)
            look(engine)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        assert engine.global_steps == 4


def test_what_was_loaded_is_a_run_like_any_other(tmp_path):
    """It resumes, also before its first step, and is checkpointed in the engine's own format."""
    checkpoint, expected = unpack("zero2", tmp_path / "theirs"), golden["cases"]["zero2"]["losses"]
    with initialize(gpt(), "zero2", state_dir=tmp_path / "state") as engine:
        engine.load_checkpoint(checkpoint, tag="global_step4")
        look(engine)
    with initialize(gpt(), "zero2", state_dir=tmp_path / "state", resume=True) as engine:
        look(engine)
        first = steps(engine, 6)
        engine.save_checkpoint(tmp_path / "ours")
    with initialize(gpt(), "zero2", state_dir=tmp_path / "other") as engine:
        engine.load_checkpoint(tmp_path / "ours")
        look(engine)
        assert engine.global_steps == 6
        made = first + steps(engine, 8)
    assert [loss for loss, _ in made] == pytest.approx([each["loss"] for each in expected[4:]], abs=1e-5)


def test_what_is_exported_is_loaded_bit_for_bit(tmp_path):
    with initialize(gpt(), state_dir=tmp_path / "first") as engine:
        engine.load_checkpoint(unpack("zero3", tmp_path / "theirs"))
        engine.client_state["lost"] = True
        steps(engine, 5)
        engine.client_state = {"epoch": 3, "names": ["a", None], "rate": 0.1}
        before, moments = everything(engine), engine.last_step
        out = engine.export_checkpoint(tmp_path / "out")
        assert out == str(tmp_path / "out" / "global_step5_universal")
        with pytest.raises(FileExistsError, match="overwrite=True"):
            engine.export_checkpoint(tmp_path / "out")
        assert engine.export_checkpoint(tmp_path / "out", overwrite=True) == out
        expected = steps(engine, 8)
    assert moments["step"] == 5
    assert sorted(os.listdir(tmp_path / "out")) == ["global_step5_universal", "latest_universal"]
    assert (tmp_path / "out" / "latest_universal").read_text() == "global_step5_universal"
    for name, values in before.items():
        for file, value in zip(("fp32", "exp_avg", "exp_avg_sq"), values):
            assert torch.equal(torch.load(f"{out}/zero/{name}/{file}.pt")["param"], value), (name, file)
        assert torch.load(f"{out}/zero/{name}/step.pt").item() == 5  # torch_adam's counts are tensors
    with initialize(gpt(), state_dir=tmp_path / "second") as engine:
        assert engine.load_checkpoint(tmp_path / "out") == (out, {"epoch": 3, "names": ["a", None], "rate": 0.1})
        look(engine)
        after = everything(engine)
        assert engine.client_state["epoch"] == 3
        assert all(torch.equal(a, b) for name in before for a, b in zip(before[name], after[name]))
        assert steps(engine, 8) == expected


def test_what_does_not_fit_is_named_and_leaves_nothing(tmp_path):
    checkpoint, state = unpack("zero1", tmp_path / "theirs"), tmp_path / "state"

    def refused(match, model=None, where=checkpoint, tag=None, error=ValueError, optimizer=None, **options):
        with initialize(model or gpt(), "zero1", state_dir=state, optimizer=optimizer) as engine:
            with pytest.raises(error, match=match):
                engine.load_checkpoint(where, tag, **options)
        assert not (state / "penstock.store").exists()

    refused(r"transformer.wte.weight is \[29, 12\] there and \[29, 16\] in this model", gpt(n_embd=16))
    refused("no parameter transformer.h.1.*names= says which", gpt(n_layer=2))
    refused("transformer.h.0.*has no place in this model", gpt(n_layer=0))
    refused("no parameter embedding", names={"transformer.wte.weight": "embedding"})
    refused("names= has wte, which is no parameter of this model", names={"wte": "embedding"})
    refused("a mapping", names={"wte": 3}, error=TypeError)
    (tmp_path / "names.json").write_text("[")
    refused("is no JSON", names=tmp_path / "names.json")
    refused("weights alone", load_module_only=True)
    refused("weights alone", load_optimizer_states=False)
    refused("Adam's moments, and this optimizer is SGD", optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    frozen = gpt()
    frozen.transformer.wpe.weight.requires_grad_(False)
    refused("transformer.wpe.weight is frozen", frozen)
    with initialize(gpt(), "zero1", state_dir=state) as engine:
        engine.load_checkpoint(checkpoint)
        frozen = engine.module.transformer.ln_f.bias.requires_grad_(False)  # after it was looked at
        with pytest.raises(ValueError, match="transformer.ln_f.bias is frozen"):
            look(engine)
        frozen.requires_grad_(True)
        look(engine)
        assert engine.global_steps == 4


def test_half_a_checkpoint_is_refused_and_the_old_run_stays(tmp_path):
    checkpoint, state = unpack("zero1", tmp_path / "theirs"), tmp_path / "state"
    first, second = (checkpoint / "global_step4" / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1))
    with initialize(gpt(), "zero1", state_dir=state) as engine:
        engine.load_checkpoint(checkpoint)
        steps(engine, 5)
        before = everything(engine)

    def refused(match, error=ValueError):
        with initialize(gpt(), "zero1", state_dir=state, overwrite=True) as engine:
            with pytest.raises(error, match=match):
                engine.load_checkpoint(checkpoint)

    whole = second.read_bytes()
    second.write_bytes(whole[: len(whole) // 2])
    refused("cut short", OSError)
    second.unlink()
    refused("of a run of 2 ranks, of which 1 are here")
    first.rename(second)
    refused("state of rank 0 is missing")
    second.rename(first)
    second.write_bytes(whole)
    (checkpoint / "global_step4" / "mp_rank_00_model_states.pt").unlink()
    refused(r"no \*_model_states.pt", FileNotFoundError)
    # Between load_checkpoint and the first forward, too.
    shutil.rmtree(checkpoint)
    with initialize(gpt(), "zero1", state_dir=state, overwrite=True) as engine:
        engine.load_checkpoint(unpack("zero1", checkpoint))
        second.unlink()
        with pytest.raises(ValueError, match="of which 1 are here"):
            look(engine)
    with initialize(gpt(), "zero1", state_dir=state) as engine:
        engine.load_checkpoint(unpack("zero1", checkpoint))
        with pytest.raises(FileExistsError, match="overwrite=True"):
            look(engine)
    with initialize(gpt(), "zero1", state_dir=state, resume=True) as engine:
        look(engine)
        after = everything(engine)
        assert engine.global_steps == 5
    assert all(torch.equal(a, b) for name in before for a, b in zip(before[name], after[name]))


def test_names_of_another_model_are_mapped(tmp_path):
    class Wrapped(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, **batch):
            return self.model(**batch)

    checkpoint, expected = unpack("universal", tmp_path / "theirs"), golden["cases"]["universal"]["losses"]
    names = {f"model.{name}": name for name, _ in gpt().named_parameters()}
    with initialize(Wrapped(gpt()), "universal", state_dir=tmp_path / "none") as engine:
        with pytest.raises(ValueError, match="no parameter model.transformer.*names= says which"):
            engine.load_checkpoint(checkpoint)
    (tmp_path / "names.json").write_text(json.dumps(names))
    for number, given in enumerate((names, tmp_path / "names.json")):
        with initialize(Wrapped(gpt()), "universal", state_dir=tmp_path / f"state{number}") as engine:
            engine.load_checkpoint(checkpoint, names=given)
            assert steps(engine, 5)[0][0] == pytest.approx(expected[4]["loss"], abs=1e-5)
            out = pathlib.Path(engine.export_checkpoint(tmp_path / f"out{number}", "mine", names=given))
        assert sorted(os.listdir(out / "zero")) == sorted([*names.values(), "optimizer_state.pt"])


# --- what the golden checkpoints do not have, in files as DeepSpeed writes them


class Various(nn.Module):
    """Parameters of every number of dimensions, and buffers that training changes."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.layers = nn.ModuleList(nn.Linear(144 if number == 0 else 16, 16) for number in range(3))
        self.scale = Scale()
        self.head = nn.Linear(16, 2)

    def forward(self, x, targets):
        x = torch.relu(self.norm(self.conv(x))).flatten(1)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return nn.functional.mse_loss(self.head(self.scale(x)), targets)


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.by = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return x * self.by


def various():
    torch.manual_seed(0)
    return Various()


def images(count):
    generator = torch.Generator().manual_seed(2)
    return [{"x": torch.randn(4, 1, 6, 6, generator=generator), "targets": torch.randn(4, 2, generator=generator)} for _ in range(count)]


def two_groups(model):
    return torch.optim.AdamW(
        [
            {"params": [each for each in model.parameters() if each.dim() > 1], "weight_decay": 0.1},
            {"params": [each for each in model.parameters() if each.dim() <= 1], "weight_decay": 0.0, "lr": 5e-3},
        ],
        lr=1e-2,
    )


def falling(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 1 / (1 + count / 5))


def zero3(directory, model, optimizer, scheduler, made, ranks=2, most=300, **client):
    """A checkpoint of plain torch's training as ZeRO-3 would leave it: parameters cut over ranks, flat tensors of at most `most`."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    tag = directory / f"global_step{made}"
    tag.mkdir(parents=True)
    buffers = dict(model.named_buffers())
    states = {
        "module": {**{name: torch.empty(0) for name, _ in model.named_parameters()}, **buffers},
        "buffer_names": list(buffers),
        "param_shapes": [{names[id(each)]: each.shape for each in group["params"]} for group in optimizer.param_groups],
        "frozen_param_shapes": None,
        "shared_params": {},
        "lr_scheduler": scheduler.state_dict(),
        "skipped_steps": 0,
        "global_steps": made,
        "global_samples": 4 * made,
        "dp_world_size": ranks,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": "0.19.8",
        **client,
    }
    for rank in range(ranks):
        flat, rest = [], []

        def mine(tensor, rank=rank):
            part = math.ceil(tensor.numel() / ranks)
            padded = nn.functional.pad(tensor.detach().reshape(-1), (0, part * ranks - tensor.numel()))
            return padded[rank * part : (rank + 1) * part]

        for group in optimizer.param_groups:
            rest.append({"lr": 0.0, **{key: value for key, value in group.items() if key != "params"}, "params": []})
            begin = True
            for each in group["params"]:
                if begin or sum(map(torch.numel, flat[-1][0])) >= most:
                    flat.append(([], [], []))
                begin = False
                for to, value in zip(flat[-1], (each, optimizer.state[each]["exp_avg"], optimizer.state[each]["exp_avg_sq"])):
                    to.append(mine(value))
        joined = [[torch.cat(each) for each in three] for three in flat]
        base = {
            "state": {
                number: {"step": torch.tensor(float(made)), "exp_avg": m, "exp_avg_sq": v} for number, (_, m, v) in enumerate(joined)
            },
            "param_groups": rest,
        }
        optimizer_states = {"zero_stage": 3, "partition_count": ranks, "fp32_flat_groups": [p for p, _, _ in joined], "optimizer_state_dict": base}
        torch.save({"optimizer_state_dict": optimizer_states, "ds_version": "0.19.8"}, tag / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        torch.save(states, tag / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
    (directory / "latest").write_text(tag.name)
    assert len(joined) > len(optimizer.param_groups)
    return directory


def plain_run(model, data):
    optimizer = two_groups(model)
    scheduler = falling(optimizer)
    losses = []
    for batch in data:
        optimizer.zero_grad()
        loss = model(**batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses, optimizer, scheduler


def engine_of(directory, **options):
    model = various()
    return make(model, directory, optimizer=two_groups(model), lr_scheduler=falling, **options)


def test_groups_sub_groups_buffers_schedulers_and_client_states_go_on(tmp_path):
    data, plain = images(10), various()
    _, optimizer, scheduler = plain_run(plain, data[:5])
    client = {"epoch": 3, "best": {"loss": 0.5, "steps": [1, 2]}, "weights": torch.ones(2), "seen": {1: 2}}
    checkpoint = zero3(tmp_path / "theirs", plain, optimizer, scheduler, 5, **client)
    expected, _, _ = plain_run(various(), data)
    with engine_of(tmp_path / "state") as engine:
        with pytest.warns(UserWarning, match=r"client_state.*: weights \(a tensor\) cannot be kept"):
            path, there = engine.load_checkpoint(checkpoint)
        assert path == str(checkpoint / "global_step5") and there == {"epoch": 3, "best": {"loss": 0.5, "steps": [1, 2]}, "seen": {1: 2}}
        assert [step(engine, batch) for batch in data[5:7]] == pytest.approx(expected[5:7], abs=1e-5)
        assert engine.lr_scheduler.last_epoch == 7 and engine.client_state == there
        with pytest.warns() as told:
            engine.export_checkpoint(tmp_path / "out")
        for what in ("no buffers from a universal checkpoint: norm.running_mean", "client_state: seen is more", "groups have different learning rates"):
            assert any(what in str(each.message) for each in told), what
        before, lr = everything(engine), engine.get_lr()
        buffers = {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
        assert [step(engine, batch) for batch in data[7:]] == pytest.approx(expected[7:], abs=1e-5)
    theirs = torch.load(tmp_path / "out" / "global_step7_universal" / "zero" / "optimizer_state.pt")
    assert [group["weight_decay"] for group in theirs["param_groups"]] == [0.1, 0.0]
    for group in theirs["optimizer_state_dict"]["param_groups"]:  # stage 3 takes the first's for all
        assert "weight_decay" not in group and group["lr"] == lr[0]
    with engine_of(tmp_path / "again") as engine:
        engine.load_checkpoint(tmp_path / "out")
        with torch.no_grad():
            for name, buffer in engine.module.named_buffers():
                buffer.copy_(buffers[name])
        losses = [step(engine, batch) for batch in data[7:]]
    assert losses == pytest.approx(expected[7:], abs=1e-5)
    with engine_of(tmp_path / "bits") as engine:
        engine.load_checkpoint(tmp_path / "out")
        engine.eval()
        with torch.no_grad():
            engine(**data[0])
        after = everything(engine)
        assert engine.get_lr() == lr and engine.global_steps == 7
    assert all(torch.equal(a, b) for name in before for a, b in zip(before[name], after[name]))


def test_rates_of_groups_that_nothing_sets_anew_are_left_to_the_script(tmp_path):
    model = various()
    with make(model, tmp_path / "state", optimizer=two_groups(model)) as engine:
        step(engine, images(1)[0])
        with pytest.warns(UserWarning, match="different learning rates: DeepSpeed's stage 3 leaves them as its own optimizer has them"):
            engine.export_checkpoint(tmp_path / "out")
    theirs = torch.load(tmp_path / "out" / "global_step1_universal" / "zero" / "optimizer_state.pt")
    assert [group["lr"] for group in theirs["param_groups"]] == [1e-2, 5e-3]
    assert all("lr" not in group for group in theirs["optimizer_state_dict"]["param_groups"])


def test_groups_and_schedulers_of_another_kind_are_told_or_refused(tmp_path):
    data, plain = images(4), various()
    _, optimizer, scheduler = plain_run(plain, data[:2])
    checkpoint = zero3(tmp_path / "theirs", plain, optimizer, scheduler, 2)
    model = various()
    with make(model, tmp_path / "one") as engine:
        engine.load_checkpoint(checkpoint)
        with pytest.raises(ValueError, match="has 2 parameter groups of different options, and the optimizer 1"):
            step(engine, data[2])
    model = various()
    optimizer = two_groups(model)
    optimizer.param_groups[0].update(weight_decay=0.3, eps=1e-6)
    optimizer.param_groups[1].update(eps=1e-6)
    with make(model, tmp_path / "told", optimizer=optimizer, lr_scheduler=lambda of: torch.optim.lr_scheduler.StepLR(of, 1)) as engine:
        engine.load_checkpoint(checkpoint, load_lr_scheduler_states=False)
        told = "weight_decay of group 0 is 0.1, as the checkpoint has it, and 0.3 was given; eps is 1e-06, and was 1e-08"
        with pytest.warns(UserWarning, match=told):
            step(engine, data[2])
        assert engine.optimizer.param_groups[0]["weight_decay"] == 0.1 and engine.lr_scheduler.last_epoch == 1
    # A scheduler that counts otherwise.
    model = various()
    with make(model, tmp_path / "other", optimizer=two_groups(model), lr_scheduler=Counting) as engine:
        engine.load_checkpoint(checkpoint)
        with pytest.warns(UserWarning, match="none of Counting's"):
            step(engine, data[2])


def nested(optimizer):
    lr_scheduler = torch.optim.lr_scheduler
    warm = lr_scheduler.LinearLR(optimizer, start_factor=0.25, total_iters=3)
    chain = lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(optimizer, factor=0.5, total_iters=7), lr_scheduler.ExponentialLR(optimizer, 0.9)])
    return chain if optimizer.defaults["lr"] == 0.02 else lr_scheduler.SequentialLR(optimizer, [warm, falling(optimizer)], [3])


@pytest.mark.parametrize("lr", [0.01, 0.02])
def test_schedulers_of_schedulers_go_on(tmp_path, lr):
    data, plain = images(8), various()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=lr)
    scheduler, rates = nested(optimizer), []
    for number, batch in enumerate(data):
        optimizer.zero_grad()
        plain(**batch).backward()
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
        if number == 4:
            checkpoint = zero3(tmp_path / "theirs", plain, optimizer, scheduler, 5)
    model = various()
    with make(model, tmp_path / "state", optimizer=torch.optim.AdamW(model.parameters(), lr=lr), lr_scheduler=nested) as engine:
        engine.load_checkpoint(checkpoint)
        made = []
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="load_checkpoint")
            for batch in data[5:]:
                step(engine, batch)
                made.append(engine.get_lr()[0])
    assert made == pytest.approx(rates[5:], rel=1e-12)


def test_what_a_scheduler_does_not_take_is_told(tmp_path):
    data, plain = images(3), various()
    _, optimizer, scheduler = plain_run(plain, data[:2])
    scheduler.milestones = {3: object}
    scheduler.nested = [{"inner": object}]
    checkpoint = zero3(tmp_path / "theirs", plain, optimizer, scheduler, 2)

    def other(optimizer):
        made = falling(optimizer)
        made.nested = [{"inner": 5, "more": 6}]
        return made

    def steps_at(*milestones):
        return lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones)

    milestones = zero3(tmp_path / "steps", plain, optimizer, steps_at(2, 7)(optimizer), 2)
    for number, given in enumerate(((2, 7), (2, 8))):
        model = various()
        with make(model, tmp_path / f"steps{number}", optimizer=two_groups(model), lr_scheduler=steps_at(*given)) as engine:
            engine.load_checkpoint(milestones)
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                step(engine, data[2])
            assert any("scheduler's state: milestones" in str(each.message) for each in told) == bool(number)
    model = various()
    with make(model, tmp_path / "state", optimizer=two_groups(model), lr_scheduler=other) as engine:
        engine.load_checkpoint(checkpoint)
        with pytest.warns(UserWarning, match="not taken over of its scheduler's state: milestones, nested.0.inner"):
            step(engine, data[2])
        assert engine.lr_scheduler.last_epoch == 3


def test_the_checkpoint_that_was_looked_at_is_the_one_that_is_read(tmp_path):
    data, plain = images(4), various()
    optimizer = two_groups(plain)
    scheduler = falling(optimizer)
    for made in (1, 2):
        optimizer.zero_grad()
        plain(**data[made]).backward()
        optimizer.step()
        scheduler.step()
        checkpoint = zero3(tmp_path / "theirs", plain, optimizer, scheduler, made)
        if made == 1:
            first = plain.head.weight.detach().clone()
    (checkpoint / "latest").write_text("global_step1")
    with engine_of(tmp_path / "state") as engine:
        path, _ = engine.load_checkpoint(checkpoint)
        (checkpoint / "latest").write_text("global_step2")
        assert engine.global_steps == 1
        with torch.no_grad():
            engine(**data[0])
        assert path == str(checkpoint / "global_step1") and engine.global_steps == 1
        assert torch.equal(engine.read_state(engine.module.head.weight), first)
    # Of the same name, and another one by then.
    with engine_of(tmp_path / "other") as engine:
        engine.load_checkpoint(checkpoint, "global_step1")
        shutil.rmtree(checkpoint / "global_step1")
        (checkpoint / "global_step2").rename(checkpoint / "global_step1")
        with pytest.raises(ValueError, match="is at step 2 now, and was at step 1 when it was looked at"):
            step(engine, data[2])


class Counting:
    def __init__(self, optimizer):
        self.count = 0

    def step(self):
        self.count += 1

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def test_the_loss_scale_goes_on(tmp_path):
    data = batches(6)
    config = {"fp16": {"enabled": True, "initial_scale_power": 6, "loss_scale_window": 2}, "gradient_clipping": 1.0}

    def fp16(directory):
        model = net()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return penstock.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), config=config, state_dir=directory)[0]

    with fp16(tmp_path / "first") as engine:
        for batch in data[:4]:
            step(engine, batch)
        engine.export_checkpoint(tmp_path / "out")
        expected = [(step(engine, batch), engine.last_step["loss_scale"]) for batch in data[4:]]
    with fp16(tmp_path / "second") as engine:
        engine.load_checkpoint(tmp_path / "out")
        assert [(step(engine, batch), engine.last_step["loss_scale"]) for batch in data[4:]] == expected
    assert expected[0][1] > 64


def one_step(directory, **client):
    """A checkpoint of a step of Various; the model."""
    plain = various()
    _, optimizer, scheduler = plain_run(plain, images(1))
    return zero3(directory, plain, optimizer, scheduler, 1, **client), plain


def change(path, do):
    """Of a file of torch.save."""
    values = torch.load(path, weights_only=False)
    do(values)
    torch.save(values, path)


def test_client_states_come_back_as_they_were_or_are_named(tmp_path):
    kept = {"infinite": [math.inf, -math.inf], "pair": (1, ("a", None)), "keys": {1: "a", (2, "b"): True}, "own": {"__penstock__": "mine"}, "far": -(2**63)}
    lost = {"raw": b"abc", "tags": {1, 2}, "huge": 2**63, "deep": {"er": [b""]}}
    checkpoint, _ = one_step(tmp_path / "theirs", **kept, **lost, nan=math.nan)
    for file in (checkpoint / "global_step1").glob("*_model_states.pt"):
        change(file, lambda values: values.update({7: "seven"}))
    with engine_of(tmp_path / "state") as engine:
        why = r"raw \(bytes\), tags \(a set\), huge \(a number of more than 64 bits\), deep \(bytes\), 7 \(such a key\) cannot be kept"
        with pytest.warns(UserWarning, match=why):
            client = engine.load_checkpoint(checkpoint)[1]
        assert math.isnan(client.pop("nan")) and client == kept
        step(engine, images(2)[1])
        assert math.isnan(engine.client_state.pop("nan")) and engine.client_state == kept
        engine.client_state = {"good": [1, -(2**63)], "large": {"a": 2**63}, "small": -(2**63) - 1, "keys": {1: 2}, 5: "five", "global_steps": 9, "no": math.inf}
        with pytest.warns(UserWarning, match="client_state: large, small, keys, 5, no, global_steps is more than"):
            out = engine.export_checkpoint(tmp_path / "out")
    states = torch.load(f"{out}/mp_rank_00_model_states.pt")
    assert states["good"] == [1, -(2**63)] and states["global_steps"] == 2 and "5" not in states and "large" not in states


def test_buffers_are_found_as_parameters_are_or_named(tmp_path):
    checkpoint, plain = one_step(tmp_path / "theirs")
    files = list((checkpoint / "global_step1").glob("*_model_states.pt"))
    own = dict(plain.named_buffers())

    def loaded(name, names=None):
        model = various()
        engine = make(model, tmp_path / name, optimizer=two_groups(model), lr_scheduler=falling)
        engine.load_checkpoint(checkpoint, names=names)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            engine.eval()
            with torch.no_grad():
                engine(**images(1)[0])
        buffers = {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
        engine.close()
        return buffers, [str(each.message) for each in told if "buffers" in str(each.message)]

    def renamed(prefix):
        def do(values):
            values["module"] = {f"{prefix}{name.rsplit('old.')[-1].removeprefix('module.')}": value for name, value in values["module"].items()}
            values["buffer_names"] = [name for name in values["module"] if "norm.running" in name or "num_batches" in name]
        return do

    for file in files:
        change(file, renamed("module."))
    buffers, told = loaded("prefixed")
    assert all(torch.equal(buffers[name], own[name]) for name in own) and not told
    for file in files:
        change(file, renamed("old."))
    buffers, told = loaded("mapped", {name: f"old.{name}" for name in own})
    assert all(torch.equal(buffers[name], own[name]) for name in own) and not told
    _, told = loaded("unknown")
    assert len(told) == 1 and "buffers that the checkpoint does not have keep the values that the model has: norm.running_mean" in told[0]
    for file in files:
        change(file, renamed(""))
        change(file, lambda values: values["module"].update({"norm.running_mean": torch.ones(4, 2)[:, 0]}))
    _, told = loaded("unreadable")
    assert len(told) == 1 and "buffers that cannot be read there keep the values that the model has: norm.running_mean" in told[0]


def test_universal_checkpoints_have_buffers_and_were_of_tensor_parallelism(tmp_path):
    with initialize(gpt(), "universal", state_dir=tmp_path / "one") as engine:
        engine.load_checkpoint(unpack("universal", tmp_path / "theirs"))
        look(engine)
        expected = everything(engine)
    tag = tmp_path / "theirs" / "global_step4_universal"
    (tag / "zero" / "transformer.mask").mkdir()
    torch.save({"param": torch.ones(3)}, tag / "zero" / "transformer.mask" / "fp32.pt")
    with initialize(gpt(), "universal", state_dir=tmp_path / "none") as engine:
        with pytest.raises(ValueError, match="transformer.mask has no moments there"):
            engine.load_checkpoint(tmp_path / "theirs")

    def parallel(values):
        values["buffer_names"] = ["transformer.mask"]
        values["mp_world_size"] = 2
        values["param_shapes"] = [{name: torch.Size([max(1, shape[0] // 2), *shape[1:]]) for name, shape in each.items()} for each in values["param_shapes"]]

    for file in tag.glob("*_model_states.pt"):
        change(file, parallel)
    shutil.copy(tag / "mp_rank_00_model_states.pt", tag / "mp_rank_01_model_states.pt")
    with initialize(gpt(), "universal", state_dir=tmp_path / "two") as engine:
        engine.load_checkpoint(tmp_path / "theirs")
        look(engine)
        made = everything(engine)
    assert all(torch.equal(a, b) for name in made for a, b in zip(made[name], expected[name]))


def test_a_latest_that_is_missing_is_told(tmp_path):
    checkpoint, _ = one_step(tmp_path / "theirs")
    with engine_of(tmp_path / "state") as engine:
        engine.load_checkpoint(checkpoint)
        step(engine, images(2)[1])
        with pytest.warns(UserWarning):
            engine.export_checkpoint(checkpoint)
        engine.save_checkpoint(tmp_path / "ours")
        step(engine, images(2)[1])
        with pytest.warns(UserWarning):
            engine.export_checkpoint(tmp_path / "ours")
    (checkpoint / "latest").write_text("global_step9")
    with engine_of(tmp_path / "none") as engine:
        with pytest.raises(FileNotFoundError, match="global_step9"):
            engine.load_checkpoint(checkpoint)
        with pytest.raises(FileNotFoundError, match="global_step9"):
            engine.load_checkpoint(checkpoint, names={"head.weight": "head.weight"})
        (checkpoint / "latest").unlink()
        assert engine.load_checkpoint(checkpoint)[0] == str(checkpoint / "global_step2_universal")
    # Of this engine's own: its process was killed while it was replaced.
    (tmp_path / "ours" / "step-00000002").rename(tmp_path / "ours" / ".step-00000002.replaced")
    with engine_of(tmp_path / "none") as engine:
        assert engine.load_checkpoint(tmp_path / "ours")[0].endswith(".step-00000002.replaced")


def test_a_small_file_of_very_many_values_is_refused(tmp_path):
    value = [1]
    for _ in range(24):
        value = [value, value]
    for name, client in (("client", {"bomb": value}), ("config", {"ds_config": {"a": value}}), ("rates", {"lr_scheduler": {"a": value}})):
        checkpoint, _ = one_step(tmp_path / name, **client)
        with engine_of(tmp_path / "none") as engine:
            with pytest.raises(ValueError, match="has more values beside its tensors than are read"):
                engine.load_checkpoint(checkpoint)


def test_a_long_client_state_is_given_back(tmp_path):
    checkpoint, _ = one_step(tmp_path / "theirs", losses=[0.5] * 300_000)
    with engine_of(tmp_path / "state") as engine:
        assert engine.load_checkpoint(checkpoint)[1] == {"losses": [0.5] * 300_000}
        with pytest.warns(UserWarning, match="too large for commits"):
            step(engine, images(2)[1])


@pytest.mark.parametrize("theirs, ours, note", [("static", "dynamic", "is 1 for ever, and is not taken over: this run's begins with 64"),
                                                ("dynamic", "static", "is 128 and dynamic, and is not taken over: this run's begins with 32"),
                                                ("static", "static", "is 1 for ever"), ("none", "dynamic", "is not there")])  # fmt: skip
def test_a_loss_scale_of_another_kind_is_told(tmp_path, theirs, ours, note):
    data = batches(2)
    config = {"fp16": {"enabled": True, "initial_scale_power": 6} if ours == "dynamic" else {"enabled": True, "loss_scale": 32}, "gradient_clipping": 1.0}

    def fp16(directory, config):
        model = net()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return penstock.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), config=config, state_dir=directory)[0]

    there = {"dynamic": {"enabled": True, "initial_scale_power": 7}, "static": {"enabled": True, "loss_scale": 1}, "none": {"enabled": False}}[theirs]
    with fp16(tmp_path / "first", {**config, "fp16": there}) as engine:
        step(engine, data[0])
        engine.export_checkpoint(tmp_path / "out")
    with fp16(tmp_path / "second", config) as engine:
        engine.load_checkpoint(tmp_path / "out")
        with pytest.warns(UserWarning, match=note):
            step(engine, data[1])
        assert engine.last_step["loss_scale"] == (64 if ours == "dynamic" else 32)


def test_many_ranks_take_few_descriptors(tmp_path):
    plain, soft = various(), resource.getrlimit(resource.RLIMIT_NOFILE)
    _, optimizer, scheduler = plain_run(plain, images(1))
    checkpoint = zero3(tmp_path / "theirs", plain, optimizer, scheduler, 1, ranks=48, most=20)
    with engine_of(tmp_path / "state") as engine:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 30, soft[1]))
        try:
            engine.load_checkpoint(checkpoint)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, soft)
        engine.eval()
        with torch.no_grad():
            engine(**images(1)[0])
        assert torch.equal(engine.read_state(engine.module.head.weight), plain.head.weight)


def test_state_in_memory_that_finds_no_room_names_tmpdir(tmp_path, monkeypatch):
    checkpoint, soft = unpack("zero1", tmp_path / "theirs"), resource.getrlimit(resource.RLIMIT_FSIZE)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with initialize(gpt(), "zero1") as engine:
        engine.load_checkpoint(checkpoint)
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, soft[1]))
        try:
            with pytest.raises(OSError, match=f"passes through TMPDIR .{tmp_path}"):
                look(engine)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, soft)
    assert not [name for name in os.listdir(tmp_path) if name.startswith("penstock-import-")]


@pytest.mark.parametrize("states", ["bf16", "8bit"])
def test_narrow_states_are_rounded_as_ever(tmp_path, states):
    with initialize(gpt(), state_dir=tmp_path / "exact") as engine:
        engine.load_checkpoint(unpack("zero3", tmp_path / "theirs"))
        look(engine)
        exact = everything(engine)
    config = {**config_of("zero3"), "penstock": {"optimizer_states": states}}
    with pytest.warns():
        engine = penstock.initialize(model=gpt(), config=config, state_dir=tmp_path / "narrow")[0]
    with engine:
        engine.load_checkpoint(tmp_path / "theirs")
        look(engine)
        for name, (master, m, v) in everything(engine).items():
            assert torch.equal(master, exact[name][0])
            for value, expected in ((m, exact[name][1]), (v, exact[name][2])):
                torch.testing.assert_close(value, expected, atol=float(expected.abs().max()) / 16, rtol=0)


RANKS = """
import json, os, sys, warnings
sys.path.insert(0, sys.argv[1])
warnings.simplefilter("ignore")
import torch
import test_deepspeed_checkpoint as tests
directory, rank = sys.argv[2], int(os.environ["RANK"])
config = tests.golden["cases"]["zero3"]["config"]
engine = tests.penstock.initialize(model=tests.gpt(), config=config, state_dir=directory + "/state", device="cpu")[0]
engine.load_checkpoint(directory + "/theirs")
losses = []
while engine.global_steps < 8:
    rows = tests.rows_of(engine.global_steps + 1)[rank : rank + 1]
    logits = engine(input_ids=rows[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), rows[:, 1:].reshape(-1))
    engine.backward(loss)
    engine.step()
    losses.append(engine.last_step["loss"])
engine.export_checkpoint(directory + "/out")
print(json.dumps(losses))
engine.close()
"""


def test_several_ranks_go_on_from_it(tmp_path, on_ranks):
    unpack("zero3", tmp_path / "theirs")
    expected = [each["loss"] for each in golden["cases"]["zero3"]["losses"][4:]]
    for status, out, error in on_ranks(RANKS, 2, os.path.dirname(__file__), tmp_path):
        assert status == 0, error
        assert json.loads(out) == pytest.approx(expected, abs=1e-5)
    assert os.listdir(tmp_path / "out")


def test_scripts_of_deepspeed_find_their_checkpoint(tmp_path, in_child):
    unpack("zero1", tmp_path / "theirs")
    text = """
        import json, sys, warnings
        sys.path.insert(0, sys.argv[1])
        warnings.simplefilter("ignore")
        import penstock.deepspeed as deepspeed
        import torch
        torch.set_num_threads(1)
        import test_deepspeed_checkpoint as tests
        engine, *_ = deepspeed.initialize(model=tests.gpt(), config=tests.config_of("zero1"))
        path, client = engine.load_checkpoint(sys.argv[2] + "/theirs", load_module_strict=True)
        assert path.endswith("global_step4") and client == {}
        losses = tests.steps(engine, 8)
        engine.export_checkpoint(sys.argv[2] + "/out")
        print(json.dumps([loss for loss, _ in losses]))
    """
    status, out, error = in_child(text, os.path.dirname(__file__), tmp_path)
    assert status == 0, error
    assert json.loads(out.splitlines()[-1]) == pytest.approx([each["loss"] for each in golden["cases"]["zero1"]["losses"][4:]], abs=1e-5)
    assert (tmp_path / "out" / "latest_universal").read_text() == "global_step8_universal"


def test_a_trainer_goes_on_from_a_directory_that_it_made_with_deepspeed(tmp_path):
    pytest.importorskip("accelerate")
    unpack("zero3", tmp_path / "out" / "checkpoint-4")
    script = tmp_path / "script.py"
    script.write_text(
        """
import json, sys
sys.path.insert(0, sys.argv[1])
import torch, transformers
import test_deepspeed_checkpoint as tests
torch.set_num_threads(1)
losses = []

class Trainer(transformers.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **unused):
        rows = inputs["input_ids"]
        logits = model(input_ids=rows[:, :-1]).logits.float()
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), rows[:, 1:].reshape(-1))
        losses.append(loss.item())
        return loss

    def _get_train_sampler(self, *unused):
        return torch.utils.data.SequentialSampler(self.train_dataset)

class Stop(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **unused):
        control.should_training_stop = state.global_step == 8

out = sys.argv[2]
arguments = transformers.TrainingArguments(
    out, max_steps=12, per_device_train_batch_size=2, learning_rate=1e-3, adam_beta2=0.99, weight_decay=0.05, warmup_steps=6, save_strategy="no",
    report_to=[], use_cpu=True, disable_tqdm=True, deepspeed=tests.config_of("zero3"),
)
transformers.trainer_callback.TrainerState(global_step=4, max_steps=12, train_batch_size=2).save_to_json(out + "/checkpoint-4/trainer_state.json")
data = [{"input_ids": row} for step in range(1, 13) for row in tests.rows_of(step)]
trainer = Trainer(model=tests.gpt(), args=arguments, train_dataset=data, callbacks=[Stop()])
trainer.train(resume_from_checkpoint=out + "/checkpoint-4")
assert trainer.state.global_step == 8
print("LOSSES", json.dumps(losses))
"""
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(
        [sys.executable, "-m", "penstock.run", str(script), os.path.dirname(__file__), str(tmp_path / "out")],
        capture_output=True, text=True, timeout=300, env=environment,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-4000:]
    (told,) = [line for line in ran.stdout.splitlines() if line.startswith("LOSSES ")]
    expected = [each["loss"] for each in golden["cases"]["zero3"]["losses"][4:]]
    assert json.loads(told[len("LOSSES ") :]) == pytest.approx(expected, abs=1e-5)


def test_a_kill_while_it_is_loaded_loses_nothing(tmp_path):
    text = """
        import sys
        import torch, penstock
        from torch import nn
        torch.set_num_threads(1)
        model = nn.Sequential(nn.Linear(2048, 1024, bias=False), nn.Tanh(), nn.Linear(1024, 2048, bias=False))
        engine = penstock.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), state_dir=sys.argv[1], device="cpu")[0]
        if len(sys.argv) > 3:
            engine.load_checkpoint(sys.argv[2])
            print("loads", flush=True)
        x = torch.ones(1, 2048)
        loss = engine(x).square().mean()
        if len(sys.argv) == 3:
            engine.backward(loss)
            engine.step()
            engine.export_checkpoint(sys.argv[2])
        print(engine.global_steps)
        engine.close()
    """

    def run(directory, *more):
        arguments = [sys.executable, "-c", textwrap.dedent(text), tmp_path / directory, tmp_path / "theirs", *more]
        return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})

    assert run("first").communicate()[0] == "1\n"
    child, store = run("second", "load"), tmp_path / "second" / "penstock.store"
    while not store.exists() and child.poll() is None:
        pass
    child.kill()
    child.communicate()
    resumes = penstock._core.holds_run([str(tmp_path / "second")])  # it was quicker
    if not resumes:
        assert run("second", "load").communicate()[0] == "loads\n1\n"


def test_an_export_says_what_it_lacks(tmp_path):
    data = batches(2)
    with make(net(), tmp_path / "new") as engine:
        with torch.no_grad():
            engine(**data[0])
        with pytest.raises(ValueError, match="no moments to export"):
            engine.export_checkpoint(tmp_path / "out")
        step(engine, data[0])
        for tag in ("", "a/b", "..", ".hidden", 5):
            with pytest.raises(ValueError, match="tag is"):
                engine.export_checkpoint(tmp_path / "out", tag)
        with pytest.raises(ValueError, match="names= has nobody"):
            engine.export_checkpoint(tmp_path / "out", names={"nobody": "else"})
        engine(**data[1])
        with pytest.raises(RuntimeError, match="a step is open"):
            engine.export_checkpoint(tmp_path / "out")
        engine.zero_grad()
    frozen = net()
    frozen.norm.weight.requires_grad_(False)
    with make(frozen, tmp_path / "frozen", optimizer=torch.optim.AdamW([each for each in frozen.parameters() if each.requires_grad])) as engine:
        step(engine, data[0])
        with pytest.raises(ValueError, match="norm.weight is frozen"):
            engine.export_checkpoint(tmp_path / "out")
    model = net()
    with make(model, tmp_path / "sgd", optimizer=torch.optim.SGD(model.parameters(), lr=0.1)) as engine:
        step(engine, data[0])
        with pytest.raises(ValueError, match="this optimizer is SGD"):
            engine.export_checkpoint(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_export_replaces_only_what_is_one_and_loses_nothing(tmp_path):
    data, out = batches(2), tmp_path / "out"
    with make(net(), tmp_path / "state") as engine:
        step(engine, data[0])
        for tag in ("latest", "latest_universal", "step-00000001", "step-00000009"):
            with pytest.raises(ValueError, match="tag is"):
                engine.export_checkpoint(out, tag)
        (out / "mine").mkdir(parents=True)
        (out / "mine" / "thesis.txt").write_text("years")
        with pytest.raises(ValueError, match="mine is no universal checkpoint"):
            engine.export_checkpoint(out, "mine", overwrite=True)
        assert (out / "mine" / "thesis.txt").read_text() == "years" and os.listdir(out) == ["mine"]
        path = pathlib.Path(engine.export_checkpoint(out, "good"))
        # The file that says which is the latest cannot be written: the tag is whole, and stays.
        (out / "latest_universal").unlink()
        (out / "latest_universal").mkdir()
        (out / "latest_universal" / "full").mkdir()
        with pytest.raises(IsADirectoryError, match="latest_universal"):
            engine.export_checkpoint(out, "good", overwrite=True)
        shutil.rmtree(out / "latest_universal")
        # Its process was killed between the two names.
        path.rename(out / ".good.replaced")
        assert engine.export_checkpoint(out, "other") and not path.exists()
        with pytest.raises(FileExistsError):
            engine.export_checkpoint(out, "good")
        assert (path / "zero").is_dir() and not (out / ".good.replaced").exists()
        step(engine, data[1])
        engine.export_checkpoint(out, "good", overwrite=True)
    assert sorted(os.listdir(out)) == ["good", "latest_universal", "mine", "other"]
    assert (out / "latest_universal").read_text() == "good"
    assert torch.load(path / "mp_rank_00_model_states.pt")["global_steps"] == 2


def test_state_passes_through_tiles(tmp_path, in_child):
    """What the first forward takes beyond a new run's is less than a parameter, in and out."""
    text = """
        import resource, sys
        import torch, penstock
        from torch import nn

        def peak():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4096, 2048, bias=False), nn.Tanh(), nn.Linear(2048, 4096, bias=False))
        engine = penstock.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), state_dir=sys.argv[1] + "/" + sys.argv[2],
                                     host_memory=160 << 20)[0]
        if sys.argv[2] == "second":
            engine.load_checkpoint(sys.argv[1] + "/out")
        x = torch.randn(4, 4096)
        engine.backward(engine(x).square().mean())
        engine.step()
        engine.flush()
        before = peak()
        if sys.argv[2] == "first":
            engine.export_checkpoint(sys.argv[1] + "/out")
        print(before, peak())
        engine.close()
    """
    peaks = {}
    for run in ("first", "second"):
        status, out, error = in_child(text, tmp_path, run)
        assert status == 0, error
        peaks[run] = [int(each) for each in out.split()]
    parameter = 4096 * 2048 * 4
    assert peaks["first"][1] - peaks["first"][0] < parameter + (48 << 20)
    assert peaks["second"][0] - peaks["first"][0] < parameter
