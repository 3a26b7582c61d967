"""Forwards one by one for one step: gradient accumulation as scripts write it, and losses of several forwards."""

import copy
import random

import pytest

torch = pytest.importorskip("torch")

from engine_models import all_names, batches, make, net, plain_losses  # noqa: E402
from torch import nn  # noqa: E402


def in_threes(count):
    data = batches(3 * count)
    return [data[at : at + 3] for at in range(0, 3 * count, 3)]


def train(engine, steps, calls_step="each"):
    """The losses of the steps, each from forwards one by one."""
    losses = []
    for number, step in enumerate(steps):
        torch.manual_seed(number)
        total = 0.0
        for batch in step:
            loss = engine(**batch)
            engine.backward(loss)
            if calls_step == "each":
                engine.step()
            total += loss.item() / len(step)
        if calls_step == "once":
            engine.step()
        losses.append(total)
    return losses


@pytest.mark.parametrize("calls_step", ["each", "once"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_losses_are_plain_pytorchs(tmp_path, calls_step, dropout):
    model, steps = net(dropout=dropout), in_threes(6)
    expected, trained = plain_losses(model, all_names(model), steps)
    with make(model, tmp_path, gradient_accumulation_steps=3) as engine:
        assert train(engine, steps, calls_step) == pytest.approx(expected, abs=1e-5)
        assert engine.global_steps == 6
        assert engine.last_step["loss"] == pytest.approx(expected[-1], abs=1e-5)
        for name, value in trained.state_dict().items():
            torch.testing.assert_close(engine.state_dict()[name], value, atol=2e-4, rtol=0)


def test_one_by_one_has_the_bits_of_all_at_once(tmp_path):
    steps = in_threes(4)
    with make(net(), tmp_path / "once", gradient_accumulation_steps=3) as engine:
        expected = [engine.train_batch(step).item() for step in steps]
        norm = engine.get_global_grad_norm()
    with make(net(), tmp_path / "each", gradient_accumulation_steps=3) as engine:
        train(engine, steps[:2])
        assert engine.train_batch(steps[2]).item() == expected[2]  # both ways in one run
        train(engine, steps[3:])
        assert torch.tensor(engine.last_step["loss"]).item() == expected[3]
        assert engine.get_global_grad_norm() == norm


def test_a_block_is_read_once_for_each_forward_and_twice_for_the_step(tmp_path):
    steps = in_threes(3)
    read = {}
    for how in ("at once", "one by one"):
        with make(net(layers=24, width=64), tmp_path / how, gradient_accumulation_steps=3) as engine:
            train(engine, steps[:1])
            engine.close()
        least = None
        for budget in (None, "least"):
            directory = tmp_path / f"{how} {budget}"
            with make(net(layers=24, width=64), directory, gradient_accumulation_steps=3, host_memory=least) as engine:
                for step in steps:
                    engine.train_batch(step) if how == "at once" else train(engine, [step])
                least = engine.plan()["least_host_memory_bytes"]
                weights = 4 * sum(parameter.numel() for parameter in engine.module.parameters())
                read[how] = engine.last_step["nvme_read_bytes"]
    assert read["one by one"] <= read["at once"] + 3.3 * weights


def test_the_callers_loss_may_be_anything(tmp_path):
    """A pair of forwards for one loss, outputs that are changed in place, and a scheduler in between."""
    model, data = net(), batches(12)
    plain = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)

    def margin(of, first, second):
        good, bad = of(first["x"]), of(second["x"])
        good *= 0.5
        return nn.functional.softplus(bad.logsumexp(-1).mean() - good.logsumexp(-1).mean()) + of(**first)

    with make(model, tmp_path, gradient_clipping=0, forwards_per_step=3) as engine:
        for first, second in zip(data[::2], data[1::2]):
            expected = margin(plain, first, second)
            optimizer.zero_grad()
            expected.backward()
            optimizer.step()
            loss = margin(engine, first, second)
            engine.optimizer.zero_grad()  # between forward and backward, as many write it
            engine.backward(loss)
            engine.step()
            assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
        assert engine.global_steps == 6


def test_a_boundary_that_comes_early(tmp_path):
    """As accelerate does it at the end of an epoch: fewer micro-batches, each with its share of three."""
    model, steps = net(), in_threes(2)
    plain = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    with make(model, tmp_path, gradient_accumulation_steps=3, gradient_clipping=0) as engine:
        for step in (steps[0], steps[1][:2], steps[0]):
            optimizer.zero_grad()
            for number, batch in enumerate(step):
                expected = plain(**batch)
                (expected / 3).backward()
                engine.set_gradient_accumulation_boundary(number + 1 == len(step))
                loss = engine(**batch)
                engine.backward(loss / 3, scale_wrt_gas=False)
                engine.step()
                assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
            optimizer.step()
        assert engine.global_steps == 3


def test_zero_grad_gives_up_what_was_accumulated(tmp_path):
    steps = in_threes(3)
    with make(net(), tmp_path / "plain", gradient_accumulation_steps=3) as engine:
        expected = train(engine, steps)
    with make(net(), tmp_path / "again", gradient_accumulation_steps=3) as engine:
        engine.backward(engine(**steps[2][0]))
        engine.step()
        engine.zero_grad()
        assert train(engine, steps) == expected


def test_evaluation_and_looking_within_an_accumulation(tmp_path):
    steps = in_threes(3)
    with make(net(), tmp_path / "plain", gradient_accumulation_steps=3) as engine:
        expected = train(engine, steps)
    with make(net(), tmp_path / "looked", gradient_accumulation_steps=3) as engine:
        losses = train(engine, steps[:1])
        torch.manual_seed(1)
        for number, batch in enumerate(steps[1]):
            loss = engine(**batch)
            losses.append(loss.item() / 3)
            engine.eval()
            with torch.no_grad():
                engine(**steps[0][0])
            engine.train()
            engine.backward(loss)
            engine.state_dict()
            engine.step()
        losses = [losses[0], sum(losses[1:])]
        torch.manual_seed(2)
        losses += train(engine, steps[2:])
        assert losses == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("when", ["forward", "again"])
def test_an_exception_gives_up_its_forward_or_its_step(tmp_path, when):
    model, steps = net(), in_threes(3)
    with make(net(), tmp_path / "plain", gradient_accumulation_steps=3) as engine:
        expected = train(engine, steps)

    class Fault(Exception):
        pass

    failing = [False]

    def hook(*_):
        if failing[0]:
            raise Fault

    model.layers[2].down.register_forward_hook(hook)
    with make(model, tmp_path, gradient_accumulation_steps=3) as engine:
        assert train(engine, steps[:1]) == expected[:1]
        torch.manual_seed(1)
        if when == "forward":
            engine.backward(engine(**steps[1][0]))
            engine.step()
            failing[0] = True
            with pytest.raises(Fault):
                engine(**steps[1][1])
            failing[0] = False
            engine.zero_grad()
        else:
            for batch in steps[1]:
                engine.backward(engine(**batch))
            failing[0] = True
            with pytest.raises(Fault):
                engine.step()
            failing[0] = False
            assert engine.global_steps == 1
        for at in (1, 2):
            torch.manual_seed(at)
            assert train(engine, [steps[at]]) == [expected[at]]


class Noisy(nn.Module):
    """Draws from Python's generator in its forward, as layer drop does; or keeps something between calls."""

    def __init__(self, keeps):
        super().__init__()
        self.net = net()
        self.keeps = keeps
        self.calls = 0

    def forward(self, x, targets):
        self.calls += 1
        factor = self.calls if self.keeps else random.choice([0.5, 1.0, 2.0])
        return factor * self.net(x, targets)


def test_random_numbers_of_python_are_drawn_again(tmp_path):
    model, steps = Noisy(keeps=False), in_threes(3)
    plain = copy.deepcopy(model)
    random.seed(5)
    expected, _ = plain_losses(plain, all_names(plain), steps)
    random.seed(5)
    with make(model, tmp_path, gradient_accumulation_steps=3) as engine:
        assert train(engine, steps) == pytest.approx(expected, abs=1e-5)


class Elsewhere(nn.Module):
    """Keeps something where nobody sees it."""

    def __init__(self):
        super().__init__()
        self.net = net()
        calls = [0]
        self.count = lambda: calls.__setitem__(0, calls[0] + 1) or calls[0]

    def forward(self, x, targets):
        return self.count() * self.net(x, targets)


def test_a_forward_that_is_another_the_second_time_is_refused(tmp_path):
    with make(Elsewhere(), tmp_path, gradient_accumulation_steps=3) as engine:
        with pytest.raises(RuntimeError, match="something else when it was computed again"):
            train(engine, in_threes(1))
        assert engine.global_steps == 0


def test_an_input_that_is_changed_before_the_step_is_refused(tmp_path):
    steps = in_threes(1)
    with make(net(), tmp_path, gradient_accumulation_steps=3) as engine:
        for batch in steps[0]:
            engine.backward(engine(**batch))
        steps[0][1]["x"].zero_()
        with pytest.raises(RuntimeError, match="changed in place before step"):
            engine.step()


def test_running_means_count_each_batch_once(tmp_path):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8, affine=False), nn.Linear(8, 1))
    plain = copy.deepcopy(model)
    # A bias before a norm has no gradient but rounding, which Adam would make steps of.
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    options = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "blocks": ["0", "1", "2", "4"]}
    with make(model, tmp_path, gradient_clipping=0, gradient_accumulation_steps=2, **options) as engine:
        for number in range(4):
            optimizer.zero_grad()
            for half in range(2):
                x = torch.randn(16, 8, generator=torch.Generator().manual_seed(2 * number + half))
                expected = plain(x).square().mean()
                (expected / 2).backward()
                loss = engine(x).square().mean()
                engine.backward(loss)
                assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
            optimizer.step()
            engine.step()
        for (name, value), other in zip(model.named_buffers(), plain.buffers()):
            torch.testing.assert_close(value, other, msg=name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(tmp_path, dtype):
    steps = in_threes(5)
    with make(net(), tmp_path / "once", gradient_accumulation_steps=3, dtype=dtype) as engine:
        expected = [engine.train_batch(step).item() for step in steps]
        skipped = engine.skipped_steps
    with make(net(), tmp_path / "each", gradient_accumulation_steps=3, dtype=dtype) as engine:
        assert train(engine, steps) == pytest.approx(expected, abs=1e-6)
        assert engine.skipped_steps == skipped


def test_autocast_is_that_of_the_forward(tmp_path):
    model, steps = net(), in_threes(4)
    plain = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    with make(model, tmp_path, gradient_accumulation_steps=3, gradient_clipping=0) as engine:
        for step in steps:
            optimizer.zero_grad()
            for batch in step:
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    expected, loss = plain(**batch), engine(**batch)
                (expected / 3).backward()
                engine.backward(loss)
                engine.step()
                assert loss.item() == pytest.approx(expected.item(), abs=2e-3)
            optimizer.step()


def test_forwards_that_nobody_holds_cost_nothing(tmp_path):
    steps = in_threes(2)
    with make(net(), tmp_path, gradient_accumulation_steps=3) as engine:
        for batch in steps[0] * 4:
            engine(**batch)  # in training mode, and nothing is made of it
        assert len(engine._training._accumulation._forwards) <= 1
        with pytest.raises(RuntimeError, match="without a backward"):
            engine.optimizer.step()
        assert train(engine, steps)[0] > 0


def test_a_loss_whose_backward_is_called_itself(tmp_path):
    """As in plain PyTorch where nothing is scaled; refused where 16 bits ask for that."""
    steps = in_threes(3)
    with make(net(), tmp_path / "engine", gradient_accumulation_steps=3) as engine:
        expected = train(engine, steps)
    with make(net(), tmp_path / "loss", gradient_accumulation_steps=3) as engine:
        for number, step in enumerate(steps):
            torch.manual_seed(number)
            losses = [engine(**batch) / 3 for batch in step]
            assert sum(loss.item() for loss in losses) == pytest.approx(expected[number], abs=1e-6)
            for loss in losses:
                loss.backward()
            engine.step()
            assert engine.last_step["loss"] != engine.last_step["loss"]  # not known
    with make(net(), tmp_path / "fp16", gradient_accumulation_steps=3, dtype=torch.float16) as engine:
        with pytest.raises(RuntimeError, match=r"engine.backward\(loss\)"):
            engine(**steps[0][0]).backward()


def test_more_forwards_than_were_said_are_all_of_the_step(tmp_path):
    model, data = net(), batches(10)
    plain = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    with make(model, tmp_path, forwards_per_step=2, gradient_clipping=0) as engine:
        for step in (data[:3], data[3:8], data[8:]):
            optimizer.zero_grad()
            for batch in step:
                expected = plain(**batch)
                expected.backward()
                loss = engine(**batch)
                loss.backward()
                assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
            optimizer.step()
            engine.step()
        assert engine.global_steps == 3


def test_two_backwards_of_a_forward_are_one_micro_batch(tmp_path):
    data = batches(2)
    with make(net(), tmp_path, gradient_accumulation_steps=2) as engine:
        for batch in data:
            loss = engine(**batch)
            engine.backward(loss, retain_graph=True)
            engine.backward(loss)
            engine.step()
        assert engine.global_steps == 1


def test_a_forward_that_the_step_has_left_behind_is_refused(tmp_path):
    data = batches(3)
    with make(net(), tmp_path, gradient_accumulation_steps=2) as engine:
        early, late = engine(**data[0]), engine(**data[1])
        engine.backward(early)
        engine.optimizer.step()
        with pytest.raises(RuntimeError, match="backward comes before step"):
            engine.backward(late)


class Hidden(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def test_an_output_that_is_fed_back_is_refused(tmp_path):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    with make(Hidden(), tmp_path, forwards_per_step=2) as engine:
        loss = engine(engine(x)).square().mean()
        engine.backward(loss)
        with pytest.raises(RuntimeError, match="input of another one"):
            engine.step()
        assert engine.global_steps == 0


def test_a_commit_within_an_accumulation_has_the_running_means_of_its_step(tmp_path):
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(2))

        def forward(self, x):
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x.square().mean()

    def model():
        torch.manual_seed(0)
        return Normed()

    data = list(torch.randn(6, 4, 8, generator=torch.Generator().manual_seed(3)))

    def train(engine, data):
        for x in data:
            engine.backward(engine(x))
            engine.step()

    def means(engine):
        return [(buffer.tolist()) for buffer in engine.module.buffers()]

    with make(model(), tmp_path / "whole", gradient_accumulation_steps=2) as engine:
        train(engine, data)
        expected = means(engine)
    engine = make(model(), tmp_path / "cut", gradient_accumulation_steps=2)
    train(engine, data[:4])
    engine.backward(engine(data[4]))
    engine.save_checkpoint(tmp_path / "checkpoints")  # between two micro-batches
    engine.close()
    with make(model(), tmp_path / "other", gradient_accumulation_steps=2) as resumed:
        resumed.load_checkpoint(tmp_path / "checkpoints")
        train(resumed, data[4:])
        assert means(resumed) == expected
