"""The inputs that blocks keep for backward, on the drive until then: the same losses, memory that is bounded, and what is said of it."""

import json
import os
import subprocess
import sys
import textwrap
import warnings

import pytest

torch = pytest.importorskip("torch")

import penstock  # noqa: E402
from engine_models import Layer, all_names, batches, make, net, plain_losses, step  # noqa: E402
from torch import nn  # noqa: E402

LONG = {"size": 2, "length": 256}  # of a batch: inputs of 64 KiB for each layer


def planned(engine):
    return engine.plan()["saved_activations"]


def trained(engine, steps, **of_batches):
    return [step(engine, batch) for batch in batches(steps, **{**LONG, **of_batches})]


def traffic(engine):
    """Bytes of inputs that left and came back, since the engine was made."""
    report = engine.report()["saved_activations"]
    return report["written_bytes"], report["read_bytes"]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_losses_have_the_same_bits_wherever_inputs_wait(tmp_path, dtype):
    losses = {}
    for where in ("memory", "drive"):
        engine = make(net(layers=8), tmp_path / where, saved_activations=where, dtype=dtype)
        losses[where] = trained(engine, 6)
        left, came_back = traffic(engine)
        assert (sum(planned(engine)["leaves"]) > 0) == (where == "drive") == (left > 0)
        if where == "drive":
            width = 4 if dtype == "fp32" else 2
            # The embedding's is the batch, and three positions are on their way.
            assert left == came_back == 6 * sum(planned(engine)["leaves"]) * 2 * 256 * 32 * width
        engine.close()
    assert losses["drive"] == losses["memory"]


def test_plain_pytorchs_losses_with_inputs_beyond_the_budget(tmp_path):
    model = net(layers=10)
    steps = [[batch] for batch in batches(20, size=4, length=1024)]
    expected, _ = plain_losses(model, all_names(model), steps)
    engine = make(model, tmp_path, host_memory="6MiB")
    losses = [step(engine, batch) for [batch] in steps]
    assert losses == pytest.approx(expected, rel=1e-5)
    leaves = sum(planned(engine)["leaves"])
    assert leaves > 0, "the planner has sent none, and 10 inputs of 512 KiB do not fit beside the state"
    assert traffic(engine) == (20 * leaves * 4 * 1024 * 32 * 4,) * 2
    report = engine.report()
    assert report["peak_managed_bytes"] <= 6 << 20
    engine.close()


def test_auto_keeps_inputs_in_memory_where_they_fit(tmp_path):
    engine = make(net(layers=8), tmp_path, host_memory="1GiB")
    trained(engine, 2)
    assert not any(planned(engine)["leaves"])
    assert traffic(engine) == (0, 0)
    engine.close()


def test_several_micro_batches_and_evaluations_in_between(tmp_path):
    losses = {}
    for where in ("memory", "drive"):
        torch.manual_seed(5)
        engine = make(net(layers=8, dropout=0.1), tmp_path / where, saved_activations=where, gradient_accumulation_steps=3)
        made = []
        for number in range(3):
            torch.manual_seed(number)
            made.append(float(engine.train_batch(iter(batches(3, seed=number, **LONG)))))
            engine.eval()
            with torch.no_grad():
                made.append(engine(**batches(1, seed=9, **LONG)[0]).item())
            engine.train()
        for batch in batches(3, seed=7, **LONG):  # one by one
            loss = engine(**batch)
            engine.backward(loss)
            made.append(loss.item())
            engine.step()
        losses[where] = made
        engine.close()
    assert losses["drive"] == losses["memory"]


class Odd(nn.Module):
    """Blocks that are given odd tensors: views, transposed, twice the same, whole numbers, and one that all are given."""

    def __init__(self, layers=8, width=32, words=50):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList(OddLayer(width) for _ in range(layers))
        self.head = nn.Linear(width, words)
        self.seen = []

    def forward(self, x, targets):
        positions = torch.arange(x.shape[1]).expand_as(x).contiguous()
        x = self.embed(x)
        for number, layer in enumerate(self.layers):
            large = torch.cat([x, x])
            wholes = (x.detach() * 100).to(torch.int32)
            x = layer(large[: len(x)], x.transpose(1, 2), twice=(x, x), wholes={"of": wholes}, positions=positions, gaps=large[:, ::2])
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), targets.flatten())


class OddLayer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = Layer(width)

    def forward(self, x, transposed, twice, wholes, positions, gaps):
        assert transposed.stride() == (transposed.shape[1] * transposed.shape[2], 1, transposed.shape[1]), "strides are those of forward"
        assert twice[0] is twice[1] and not (torch.is_grad_enabled() and transposed.is_leaf)
        more = transposed.transpose(1, 2) + twice[0] * twice[1] + wholes["of"].to(x.dtype) * 1e-4 + gaps[: len(x)].mean()
        return self.inner(x + 0.1 * more + (positions[..., None] * 1e-6).to(x.dtype))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_tensors_of_all_kinds_come_back_as_they_were(tmp_path, dtype):
    losses = {}
    for where in ("memory", "drive"):
        torch.manual_seed(0)
        engine = make(Odd(), tmp_path / where, saved_activations=where, dtype=dtype)
        losses[where] = trained(engine, 4)
        if where == "drive":
            assert traffic(engine)[0] > 0
        engine.close()
    assert losses["drive"] == losses["memory"]


class Holds(nn.Module):
    """Returns all hidden states, as output_hidden_states=True does."""

    def __init__(self, changes=False):
        super().__init__()
        self.net = net(layers=8)
        self.changes = changes

    def forward(self, x, targets):
        states = [self.net.embed(x)]
        for layer in self.net.layers:
            states.append(layer(states[-1]))
            if self.changes and len(states) == 6:
                with torch.no_grad():
                    states[1].mul_(2)
        logits = self.net.head(self.net.norm(states[-1]))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()) + 1e-3 * sum(state.square().mean() for state in states), states


def test_hidden_states_that_the_model_returns_are_right_and_it_is_said_that_they_take_memory(tmp_path):
    losses = {}
    for where in ("memory", "drive"):
        torch.manual_seed(0)
        engine = make(Holds(), tmp_path / where, saved_activations=where)
        losses[where] = []
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for batch in batches(3, size=2, length=4100):  # small tensors of an output are copies
                loss, states = engine(**batch)
                engine.backward(loss)
                engine.step()
                losses[where].append(loss.item())
        engine.close()
        lines = [str(each.message) for each in told if "output_hidden_states" in str(each.message)]
        assert len(lines) == (1 if where == "drive" else 0), [str(each.message) for each in told]
    assert losses["drive"] == losses["memory"]


def test_an_input_that_is_changed_in_place_later_is_refused(tmp_path):
    torch.manual_seed(0)
    engine = make(Holds(changes=True), tmp_path, saved_activations="drive")
    with pytest.raises(RuntimeError, match="changes one of its inputs in place"):
        loss, _ = engine(**batches(1, **LONG)[0])
        engine.backward(loss)
    engine.close()


def test_what_is_given_up_leaves_nothing_and_the_next_step_is_right(tmp_path):
    losses = {}
    for where in ("memory", "drive"):
        engine = make(net(layers=8), tmp_path / where, saved_activations=where)
        first, second, third = batches(3, **LONG)
        made = [step(engine, first)]
        engine(**second)  # its backward never comes
        made.append(step(engine, second))
        hook = engine.module.layers[2].up.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine(**third)
        hook.remove()
        made += [step(engine, third), step(engine, first)]
        losses[where] = made
        engine.close()
    assert losses["drive"] == losses["memory"]


def test_two_forwards_before_their_backwards(tmp_path):
    losses = {}
    for where in ("memory", "drive"):
        engine = make(net(layers=8), tmp_path / where, saved_activations=where, forwards_per_step=2)
        made = []
        for one, two in zip(batches(3, seed=1, **LONG), batches(3, seed=2, **LONG)):
            loss = engine(**one) + engine(**two)
            engine.backward(loss)
            engine.step()
            made.append(loss.item())
        losses[where] = made
        engine.close()
    assert losses["drive"] == losses["memory"]


def test_two_engines_side_by_side(tmp_path):
    engines = [make(net(layers=8), tmp_path / str(number), saved_activations=where) for number, where in enumerate(("memory", "drive", "drive"))]
    made = [[], [], []]
    for batch in batches(3, **LONG):
        for engine, losses in zip(engines, made):
            losses.append(step(engine, batch))
    assert made[0] == made[1] == made[2]
    for engine in engines:
        engine.close()


def test_longer_and_shorter_batches_than_the_first(tmp_path):
    losses = {}
    for where in ("memory", "drive"):
        engine = make(net(layers=8), tmp_path / where, saved_activations=where)
        made = []
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for number, length in enumerate((128, 512, 40, 300, 512, 1)):
                made.append(step(engine, batches(1, size=2, length=length, seed=number)[0]))
        losses[where] = made
        lines = [str(each.message) for each in told if "saved activations" in str(each.message)]
        assert len(lines) == (1 if where == "drive" else 0), lines
        engine.close()
    assert losses["drive"] == losses["memory"]


def test_a_plan_says_what_waits_where(tmp_path):
    example = batches(1, **LONG)[0]
    engine = make(net(layers=8), tmp_path, saved_activations="drive")
    step(engine, example)
    left = sum(engine.plan()["saved_activations"]["leaves"])
    assert left > 0 and f"saved activations of {left} of " in " ".join(engine.log())
    engine.close()
    plan = penstock.plan(net(layers=8), example=example, saved_activations="drive")
    assert plan["saved_activations"]["stages_that_spill"] == left
    assert f"the inputs of {left} of " in str(plan)
    assert penstock.plan(net(layers=8), example=example)["saved_activations"]["stages_that_spill"] == 0


def test_the_drive_is_refused_where_there_is_none():
    with pytest.raises(ValueError, match="saved_activations is \"drive\", and weights and states are in memory"):
        penstock.initialize(model=net(), offload="none", saved_activations="drive")
    with pytest.raises(ValueError, match="saved_activations"):
        penstock.initialize(model=net(), offload="none", saved_activations="disk")


def test_a_configurations_key_is_the_keyword(tmp_path):
    config = {"penstock": {"saved_activations": "drive", "state_dirs": [str(tmp_path)]}}
    engine, *_ = penstock.initialize(model=net(layers=8), config=config)
    step(engine, batches(1, **LONG)[0])
    assert sum(planned(engine)["leaves"]) > 0
    engine.close()


def test_frozen_blocks_first(tmp_path):
    losses = {}
    for where in ("memory", "drive"):
        model = net(layers=10, tied=False)
        for frozen in (model.embed, *model.layers[:4]):
            frozen.requires_grad_(False)
        engine = make(model, tmp_path / where, saved_activations=where)
        losses[where] = trained(engine, 3)
        engine.close()
    assert losses["drive"] == losses["memory"]


PEAK = """
    import sys, torch
    sys.path[:0] = {paths!r}
    from engine_models import batches, make, net
    from penstock._engine._given_tensors import ends_are_told
    from penstock._engine._tensor_memory import Live
    torch.set_num_threads(1)
    model = net(layers=24, width=64)
    engine = make(model, {directory!r}, saved_activations={where!r}, host_memory="24MiB")
    def one(batch):
        loss = engine(**batch)
        engine.backward(loss)
        engine.step()
        return loss.item()
    def rss():
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))
    small, *long = batches(1, size=1, length=64), *batches(3, size=4, length=4096)
    before = rss()
    losses = [one(batch) for batch in long]
    peak = rss() - before
    live = Live()
    if ends_are_told():  # since torch 2.1
        with live:
            one(long[0])
    told = engine.plan()["saved_activations"]
    print([peak, sum(told["leaves"]), told["torch_bytes"], losses, live.peak])
    engine.close()
"""


def test_the_process_stays_within_what_was_said(tmp_path):
    told = {}
    for where in ("memory", "drive"):
        code = textwrap.dedent(PEAK).format(paths=[os.path.dirname(__file__)], directory=str(tmp_path / where), where=where)
        ran = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        told[where] = json.loads(ran.stdout)
    inputs = 24 * 4 * 4096 * 64 * 4  # 96 MiB
    assert told["memory"][3] == told["drive"][3]
    assert told["drive"][1] == 24 + 3 - 1 - 3
    # What the three on their way and the block's own tensors take stays.
    assert told["memory"][0] - told["drive"][0] > 0.6 * inputs, told
    for _, _, said, _, live in told.values():
        assert live == 0 or 0.6 * said < live < 1.1 * said, told
    # The budget, and torch's tensors with what malloc keeps of them (docs/internals/memory.md).
    assert told["drive"][0] < (24 << 20) + 4 * told["drive"][2] + (64 << 20), told


def test_a_drive_that_is_full_ends_the_step_and_the_last_commit_stands(tmp_path):
    resource = pytest.importorskip("resource")
    engine = make(net(layers=8), tmp_path, saved_activations="drive")
    trained(engine, 2)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    longest = max(planned(engine)["scratch_bytes"], os.path.getsize(tmp_path / "penstock.store"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (longest + (1 << 16), before[1]))  # no file may be longer, as on a drive that is full
    try:
        with pytest.raises(OSError, match=r"penstock\.inputs.* bytes"):
            step(engine, batches(1, size=2, length=4096)[0])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    engine.close()  # the step alone had failed
    engine = make(net(layers=8), tmp_path, saved_activations="drive", resume=True)
    trained(engine, 1)
    assert engine.global_steps >= 2  # a step is committed beside the next one
    engine.close()
