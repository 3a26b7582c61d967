"""Parameters to which no gradient comes in some steps: torch.optim's meaning by default, DeepSpeed's under its name and by choice."""

import pathlib
import random
import signal
import warnings

import pytest

torch = pytest.importorskip("torch")

from engine_models import Layer, batches, make  # noqa: E402
from penstock.ops.lamb import FusedLamb  # noqa: E402
from test_ranks import COMMON, told  # noqa: E402
from torch import nn  # noqa: E402

STEPS = 20


class Dropped(nn.Module):
    """Layers are left out as its caller says. Their sizes are odd: parameters share scales of 8-bit states."""

    def __init__(self, layers=5, width=36, words=50):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words)

    def forward(self, x, targets, dropped=()):
        x = self.embed(x)
        for number, layer in enumerate(self.layers):
            if number not in dropped:
                x = layer(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def model_of(seed=0):
    torch.manual_seed(seed)
    return Dropped()


def drops(step, rank=0):
    """Which layers: the first steps' too, so that a first update comes late; and one that is in no step for a while."""
    drawn = random.Random(f"{step} {rank}")
    return tuple(number for number in range(5) if drawn.random() < 0.4 or (number == 3 and 5 <= step < 12))


class Lion(torch.optim.Optimizer):
    """As its paper says; nothing of it is penstock's."""

    def __init__(self, parameters, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(parameters, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                direction = torch.sign(beta1 * m + (1 - beta1) * p.grad)
                p.mul_(1 - lr * group["weight_decay"]).add_(direction, alpha=-lr)
                m.mul_(beta2).add_(p.grad, alpha=1 - beta2)


OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, lr_decay=0.1, weight_decay=0.01),
    "Lion": lambda p: Lion(p, lr=1e-3, weight_decay=0.1),
    "LAMB": lambda p: FusedLamb(p, lr=1e-2, weight_decay=0.1),
}


def plain(optimizer, data, clip=1.0, zeros=False):
    """Losses of the training without an engine, and its model. zeros: gradients that are missing are zeros."""
    model = model_of()
    made = optimizer(list(model.parameters()))
    losses = []
    for number, batch in enumerate(data):
        made.zero_grad(set_to_none=True)
        loss = model(**batch, dropped=drops(number))
        loss.backward()
        for each in model.parameters() if zeros else ():
            if each.grad is None:
                each.grad = torch.zeros_like(each)
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        made.step()
        losses.append(loss.item())
    return losses, model, made


def opened(engine):
    """The first forward, which calls every layer: a run is gone on with by the same blocks."""
    engine.module.eval()
    with torch.no_grad():
        engine(**batches(1, size=2)[0])
    engine.module.train()
    return engine


def train(engine, data, first=0):
    losses = []
    for number, batch in enumerate(data, first):
        loss = engine(**batch, dropped=drops(number))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def check(engine, model):
    for name, value in engine.state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("offload", ["nvme", "cpu"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_layers_that_are_dropped_at_random_train_as_in_plain_pytorch(tmp_path, kind, offload):
    optimizer, data = OPTIMIZERS[kind], batches(STEPS)
    expected, model, _ = plain(optimizer, data)
    losses = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for begin, end in ((0, 7), (7, 13), (13, STEPS)):
            other = model_of()
            place = tmp_path / ("state" if offload == "nvme" else "unused")
            resumes = offload == "nvme" and begin > 0
            engine = make(other, place, offload=offload, optimizer=optimizer(list(other.parameters())), resume=resumes)
            with engine:
                if offload == "cpu" and begin:
                    engine.load_checkpoint(tmp_path / "kept")
                opened(engine)
                losses += train(engine, data[begin:end], begin)
                if offload == "cpu":
                    engine.save_checkpoint(tmp_path / "kept")
                if end == STEPS:
                    check(engine, model)
    assert losses == pytest.approx(expected, rel=1e-5)


KILLED = """
    import os, signal, sys
    from test_missing_gradients import OPTIMIZERS, batches, make, model_of, opened, train
    model = model_of()
    engine = make(model, sys.argv[1], optimizer=OPTIMIZERS["AdamW"](list(model.parameters())), resume="auto")
    opened(engine)
    done = engine.global_steps
    train(engine, batches(20)[done:int(sys.argv[2])], done)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_run_that_was_killed_goes_on_with_the_counts_of_its_last_commit(tmp_path, in_child):
    data = batches(STEPS)
    expected, model, _ = plain(OPTIMIZERS["AdamW"], data)
    for end in (6, 15):
        status, _, error = in_child(KILLED, tmp_path / "state", end)
        assert status == -signal.SIGKILL, error
    other = model_of()
    with make(other, tmp_path / "state", optimizer=OPTIMIZERS["AdamW"](list(other.parameters())), resume=True) as engine:
        opened(engine)
        done = engine.global_steps
        assert 13 <= done <= 15
        assert train(engine, data[done:], done) == pytest.approx(expected[done:], rel=1e-5)
        check(engine, model)


@pytest.mark.parametrize("together", [False, True])
def test_a_gradient_of_one_micro_batch_is_one_of_the_step(tmp_path, together):
    # Those that are computed together leave out the same.
    def left_out(number, half):
        return drops(number, 0 if together else half)

    data = batches(2 * STEPS)
    model = model_of()
    made = OPTIMIZERS["AdamW"](list(model.parameters()))
    expected, losses = [], []
    for number in range(STEPS):
        made.zero_grad(set_to_none=True)
        total = 0.0
        for half in (0, 1):
            loss = model(**data[2 * number + half], dropped=left_out(number, half)) / 2
            loss.backward()
            total += loss.item()
        made.step()
        expected.append(total)
    other = model_of()
    with make(other, tmp_path, optimizer=OPTIMIZERS["AdamW"](list(other.parameters())), gradient_accumulation_steps=2, gradient_clipping=0.0) as engine:
        for number in range(STEPS):
            halves = [{**data[2 * number + half], "dropped": left_out(number, half)} for half in (0, 1)]
            if together:
                losses.append(engine.train_batch(halves).item())
                continue
            for batch in halves:
                loss = engine(**batch)
                engine.backward(loss)
                engine.step()
            losses.append(engine.last_step["loss"])
        check(engine, model)
    assert losses == pytest.approx(expected, rel=1e-5)


def test_zeros_are_deepspeeds_meaning_by_choice_and_under_its_name(tmp_path):
    from penstock import deepspeed

    data = batches(8)
    as_torch = plain(OPTIMIZERS["AdamW"], data)[0]
    by_zeros = plain(OPTIMIZERS["AdamW"], data, zeros=True)[0]
    assert as_torch != pytest.approx(by_zeros, rel=1e-4)
    stated = {"gradient_clipping": 1.0, "train_micro_batch_size_per_gpu": 4}
    stage = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path / "scratch")}}

    def by_keyword(model, optimizer):
        return make(model, tmp_path / "keyword", optimizer=optimizer, missing_gradients="zeros")

    def by_configuration(model, optimizer):
        return make(model, tmp_path / "configuration", optimizer=optimizer, config={**stated, "penstock": {"missing_gradients": "zeros"}})

    def under_its_name(model, optimizer):
        return deepspeed.initialize(model=model, optimizer=optimizer, config={**stated, "zero_optimization": stage})[0]

    def by_choice_under_its_name(model, optimizer):
        described = {**stated, "zero_optimization": stage, "penstock": {"missing_gradients": "skip"}}
        return deepspeed.initialize(model=model, optimizer=optimizer, config=described)[0]

    def under_its_name_on_a_device(model, optimizer):
        described = {**stated, "zero_optimization": stage, "penstock": {"device": "cpu"}}
        return deepspeed.initialize(model=model, optimizer=optimizer, config=described)[0]

    doors = {by_keyword: by_zeros, by_configuration: by_zeros, under_its_name: by_zeros, under_its_name_on_a_device: by_zeros, by_choice_under_its_name: as_torch}
    for door, expected in doors.items():
        model = model_of()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine = door(model, OPTIMIZERS["AdamW"](list(model.parameters())))
            assert train(engine, data) == pytest.approx(expected, rel=1e-5), door.__name__
            getattr(engine, "engine", engine).close()
        told_of = [str(each.message) for each in caught if "updated as by a gradient of zeros" in str(each.message)]
        assert len(told_of) == (1 if expected is by_zeros else 0), door.__name__
    with pytest.raises(ValueError, match=r"missing_gradients.*zeros"):
        make(model_of(), tmp_path / "wrong", missing_gradients="none")


def test_a_run_may_change_its_meaning_and_keeps_what_was_missed(tmp_path):
    data = batches(12)
    model = model_of()
    made = OPTIMIZERS["AdamW"](list(model.parameters()))
    expected = []
    for number, batch in enumerate(data):
        made.zero_grad(set_to_none=True)
        loss = model(**batch, dropped=drops(number))
        loss.backward()
        for each in model.parameters() if number >= 6 else ():
            each.grad = torch.zeros_like(each) if each.grad is None else each.grad
        made.step()
        expected.append(loss.item())
    losses = []
    for begin, meaning in ((0, "skip"), (6, "zeros")):
        other = model_of()
        engine = make(other, tmp_path, optimizer=OPTIMIZERS["AdamW"](list(other.parameters())), gradient_clipping=0.0, resume=begin > 0, missing_gradients=meaning)
        with engine, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            losses += train(opened(engine), data[begin : begin + 6], begin)
    assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("states", ["fp32", "8bit"])
def test_what_has_no_gradient_keeps_its_bits(tmp_path, states):
    config = {"train_micro_batch_size_per_gpu": 4, "penstock": {"optimizer_states": states}}
    model = model_of()
    with make(model, tmp_path, optimizer=OPTIMIZERS["AdamW"](list(model.parameters())), config=config) as engine:
        for number, batch in enumerate(batches(8)):
            before = {name: value.clone() for name, value in engine.state_dict().items()} if number else {}
            train(engine, [batch], number)
            for name, value in engine.state_dict().items() if number else ():
                left_out = name.startswith(tuple(f"layers.{each}." for each in drops(number)))
                assert torch.equal(value, before[name]) == left_out, f"step {number}, {name}"


def test_checkpoints_of_deepspeeds_have_a_count_for_each_parameter(tmp_path):
    data = batches(STEPS)
    expected, model, made = plain(OPTIMIZERS["AdamW"], data)
    half = plain(OPTIMIZERS["AdamW"], data[:10])
    counts = {name: int(half[2].state[value]["step"]) for name, value in half[1].named_parameters()}
    assert len(set(counts.values())) > 3
    other = model_of()
    with make(other, tmp_path / "state", optimizer=OPTIMIZERS["AdamW"](list(other.parameters()))) as engine:
        train(opened(engine), data[:10])
        out = pathlib.Path(engine.export_checkpoint(tmp_path / "out"))
    for name, count in counts.items():
        assert int(torch.load(out / "zero" / name / "step.pt")) == count, name
    other = model_of(seed=5)
    with make(other, tmp_path / "other", optimizer=OPTIMIZERS["AdamW"](list(other.parameters()))) as engine:
        engine.load_checkpoint(tmp_path / "out")
        assert train(engine, data[10:], 10) == pytest.approx(expected[10:], rel=1e-5)
        check(engine, model)


RANKS = COMMON + """
from test_missing_gradients import OPTIMIZERS, drops, model_of, opened
data = batches(20, size=12)
losses = []
for begin, end in ((0, 9), (9, 20)):
    model = model_of()
    engine = make(model, directory + "/state", optimizer=OPTIMIZERS["AdamW"](list(model.parameters())), resume="auto")
    opened(engine)
    for number in range(begin, end):
        step(engine, {**own(data[number]), "dropped": drops(number, rank)})
        losses.append(engine.last_step["loss"])
    state = model.state_dict()
    engine.close()
tell("losses", losses)
tell("state", {name: value.double().abs().sum().item() for name, value in state.items()})
"""


def test_a_gradient_of_one_rank_is_one_of_all(directory, on_ranks):
    first, second = told(on_ranks(RANKS, 2, directory))
    assert first == second
    model = model_of()
    made = OPTIMIZERS["AdamW"](list(model.parameters()))
    losses = []
    for number, batch in enumerate(batches(STEPS, size=12)):
        made.zero_grad(set_to_none=True)
        loss = 0
        for rank in (0, 1):
            own = {name: value[rank * 6 : rank * 6 + 6] for name, value in batch.items()}
            loss = loss + model(**own, dropped=drops(number, rank)) / 2
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        made.step()
        losses.append(loss.item())
    assert first["losses"] == pytest.approx(losses, rel=1e-5)
    for name, value in model.state_dict().items():
        assert first["state"][name] == pytest.approx(value.double().abs().sum().item(), rel=1e-5), name
