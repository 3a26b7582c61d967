"""penstock.initialize: an unmodified module trains as in plain PyTorch, and nothing that goes wrong leaves it broken."""

import copy
import json
import os
import re
import signal
import subprocess
import sys
import threading
import warnings

import pytest

torch = pytest.importorskip("torch")

import penstock  # noqa: E402
from engine_models import Net, all_names, batches, make, net, plain_losses, step  # noqa: E402
from torch import nn  # noqa: E402


def adamw(model, **options):
    return torch.optim.AdamW(model.parameters(), **{"lr": 1e-2, **options})


def run(engine, steps):
    losses = []
    for number, batch in enumerate(steps):
        torch.manual_seed(number)
        losses.append(step(engine, batch))
    return losses


def both(engine, plain, optimizer, loss_of):
    """A step of each, from `loss_of` the model: the engine's loss, and plain PyTorch's."""
    optimizer.zero_grad()
    expected = loss_of(plain)
    expected.backward()
    optimizer.step()
    loss = loss_of(engine)
    engine.backward(loss)
    engine.step()
    return loss.item(), expected.item()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_losses_are_plain_pytorchs(tmp_path, tied, dropout):
    model = net(tied=tied, dropout=dropout)
    data = batches(12)
    expected, trained = plain_losses(model, all_names(model), [[batch] for batch in data])
    with make(model, tmp_path) as engine:
        assert run(engine, data) == pytest.approx(expected, abs=1e-5)
        state = engine.state_dict()
        for name, value in trained.state_dict().items():
            assert state[name].shape == value.shape
            torch.testing.assert_close(state[name], value, atol=2e-4, rtol=0)


def test_at_the_least_budget_the_bits_are_the_same(tmp_path):
    data = batches(6)
    with make(net(layers=32, width=128), tmp_path / "free") as engine:
        expected = run(engine, data)
        plan = engine.plan()
    with make(net(layers=32, width=128), tmp_path / "least", host_memory=plan["least_host_memory_bytes"]) as engine:
        assert run(engine, data) == expected
        info = engine.plan()
        assert info["peak_managed_bytes"] <= info["host_memory_bytes"] < info["state_bytes"]
    with pytest.raises(RuntimeError, match="memory"):
        with make(net(layers=32, width=128), tmp_path / "less", host_memory=plan["least_host_memory_bytes"] // 2) as engine:
            run(engine, data)


@pytest.mark.parametrize("offload", ["cpu", "none"])
def test_state_in_memory(tmp_path, offload):
    model, data = net(), batches(5)
    expected, _ = plain_losses(model, all_names(model), [[batch] for batch in data])
    engine = penstock.initialize(model=model, optimizer=adamw(model), offload=offload, gradient_clipping=1.0)[0]
    with engine:
        assert run(engine, data[:3]) == pytest.approx(expected[:3], abs=1e-5)
        engine.save_checkpoint(tmp_path, client_state={"epoch": 1})
    model = net(seed=1)
    engine = penstock.initialize(model=model, optimizer=adamw(model), offload=offload, gradient_clipping=1.0)[0]
    with engine:
        assert engine.load_checkpoint(tmp_path)[1] == {"epoch": 1}
        assert run(engine, data[3:]) == pytest.approx(expected[3:], abs=1e-5)


def test_groups_and_schedulers_are_torchs(tmp_path):
    model, data = net(), batches(10)
    decayed = [name for name, p in model.named_parameters() if p.dim() > 1]
    others = [name for name, p in model.named_parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.3, "lr": 2e-2}, {"params": others, "weight_decay": 0.0}]

    def schedule(optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda s: 1 / (1 + s), lambda s: 0.9**s])

    expected, _ = plain_losses(model, groups, [[batch] for batch in data], schedule=schedule)
    named = dict(model.named_parameters())
    optimizer = torch.optim.AdamW([{**group, "params": [named[name] for name in group["params"]]} for group in groups], lr=1e-2)
    with make(model, tmp_path, optimizer=optimizer, lr_scheduler=schedule) as engine:
        assert run(engine, data) == pytest.approx(expected, abs=1e-5)
        assert engine.get_lr() == pytest.approx([2e-2 / 11, 1e-2 * 0.9**10])


def test_micro_batches_in_vertical_order(tmp_path):
    model = net()
    data = batches(12)
    steps = [data[at : at + 3] for at in range(0, 12, 3)]
    expected, _ = plain_losses(model, all_names(model), steps)
    with make(model, tmp_path, gradient_accumulation_steps=3) as engine:
        losses = [engine.train_batch(step).item() for step in steps]
        assert losses == pytest.approx(expected, abs=1e-5)
        with pytest.raises(ValueError, match="2 micro-batches given"):
            engine.train_batch(data[:2])
        assert engine.train_batch(data_iter=iter(data)).item() > 0


def test_other_optimizers(tmp_path):
    makers = {
        "adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1),
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    }
    data = batches(6)
    for name, maker in makers.items():
        model = net()
        plain = copy.deepcopy(model)
        optimizer = maker(plain.parameters())
        expected = []
        for batch in data:
            optimizer.zero_grad()
            loss = plain(**batch)
            loss.backward()
            optimizer.step()
            expected.append(loss.item())
        with make(model, tmp_path / name, optimizer=maker, gradient_clipping=0) as engine:
            assert run(engine, data) == pytest.approx(expected, abs=1e-5), name


def lamb_losses(model, data, lr, eps, weight_decay, fused, betas=(0.9, 0.999), bounds=(0.01, 10.0)):
    """In float64, by the paper (algorithm 2) or by DeepSpeed's FusedLamb."""
    plain = copy.deepcopy(model).double()
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in plain.parameters()]
    losses = []
    for number, batch in enumerate(data, 1):
        plain.zero_grad()
        loss = plain(**{name: value.double() if value.is_floating_point() else value for name, value in batch.items()})
        loss.backward()
        losses.append(loss.item())
        first, second = 1 - betas[0] ** number, 1 - betas[1] ** number
        with torch.no_grad():
            for p, (m, v) in zip(plain.parameters(), moments):
                m.mul_(betas[0]).add_(p.grad, alpha=1 - betas[0])
                v.mul_(betas[1]).addcmul_(p.grad, p.grad, value=1 - betas[1])
                update = m / (v.sqrt() + eps) if fused else (m / first) / ((v / second).sqrt() + eps)
                update = update + weight_decay * p
                of_p, of_u = p.norm().item(), update.norm().item()
                trust = min(max(of_p / of_u, bounds[0]), bounds[1]) if of_p and of_u else 1.0
                p.sub_(update * (lr * trust * (second**0.5 / first if fused else 1.0)))
    return losses


@pytest.mark.parametrize("door", ["FusedLamb", "JSON", "LAMB", "JSON of the paper"])
def test_lamb_at_every_door(tmp_path, door):
    from penstock.ops.lamb import FusedLamb

    data = batches(6)
    model = net()
    fused = door in ("FusedLamb", "JSON")
    values = dict(lr=1e-2, eps=1e-4, weight_decay=0.01)
    expected = lamb_losses(model, data, fused=fused, **values)
    keywords = {}
    if door == "FusedLamb":
        keywords["optimizer"] = lambda p: FusedLamb(p, **values)
    elif door == "LAMB":
        keywords["optimizer"] = lambda p: penstock.optim.LAMB(p, **values, state_dir=tmp_path / "unused")
    else:
        keywords["optimizer"] = None
        params = {**values, **({} if fused else {"corrects_rate": False})}
        keywords["config"] = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "Lamb", "params": params}}
    runs = []
    for place in ("nvme", "cpu", "none"):
        keywords["offload"] = place
        directory = {"state_dir": str(tmp_path / place)} if place == "nvme" else {}
        with penstock.initialize(model=copy.deepcopy(model), gradient_clipping=0, **directory, **keywords)[0] as engine:
            runs.append(run(engine, data))
    assert runs[0] == pytest.approx(expected, abs=1e-5)
    assert runs[1] == runs[0] and runs[2] == runs[0]


def test_lamb_goes_on_with_the_bits_of_a_run_left_alone(tmp_path):
    from penstock.ops.lamb import FusedLamb

    data = batches(8)
    model = net()

    def maker(parameters):
        return FusedLamb(parameters, lr=1e-2, weight_decay=0.01)

    with make(copy.deepcopy(model), tmp_path / "whole", optimizer=maker) as engine:
        whole = run(engine, data)
    with make(copy.deepcopy(model), tmp_path / "parts", optimizer=maker) as engine:
        first = run(engine, data[:3])
    with make(copy.deepcopy(model), tmp_path / "parts", optimizer=maker, resume=True) as engine:
        assert first + run(engine, data[3:]) == whole
    with pytest.raises((RuntimeError, ValueError), match='optimizer is "lamb" there'):
        with make(model, tmp_path / "parts", optimizer=adamw(model), resume=True) as engine:
            run(engine, data[:1])


def test_a_step_of_fused_lamb_alone_is_that_of_the_formulas():
    from penstock.ops.lamb import FusedLamb

    data = batches(4)
    model = net()
    expected = lamb_losses(model, data, lr=1e-2, eps=1e-4, weight_decay=0.01, fused=True)
    optimizer = FusedLamb(model.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.01)
    losses = []
    for batch in data:
        optimizer.zero_grad()
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == pytest.approx(expected, abs=1e-5)
    assert len(optimizer.get_lamb_coeffs()) == len(list(model.parameters()))
    assert all(0.01 <= each <= 10 for each in optimizer.get_lamb_coeffs())


def test_what_an_optimizer_cannot_be(tmp_path):
    model = net()
    used = adamw(model)
    model(**batches(1)[0]).backward()
    used.step()
    with pytest.raises(ValueError, match="has made steps"):
        make(model, tmp_path, optimizer=used)
    with pytest.raises(TypeError, match="has no RMSprop"):
        make(model, tmp_path, optimizer=torch.optim.RMSprop(model.parameters()))
    with pytest.raises(ValueError, match="amsgrad"):
        make(model, tmp_path, optimizer=adamw(model, amsgrad=True))
    parameters = list(model.parameters())
    groups = [{"params": parameters[:1], "eps": 1e-3}, {"params": parameters[1:]}]
    with pytest.raises(ValueError, match="group 1 has another eps"):
        make(model, tmp_path, optimizer=torch.optim.AdamW(groups))


def test_a_rate_may_not_change_within_a_step(tmp_path):
    model, data = net(), batches(3)
    with make(model, tmp_path) as engine:
        run(engine, data[:1])
        engine.backward(engine(**data[1]))
        engine.optimizer.param_groups[0]["lr"] = 1.0
        with pytest.raises(RuntimeError, match="changed between the forward and step"):
            engine.step()
        engine.optimizer.param_groups[0]["lr"] = 1e-2
        run(engine, data[1:])


def test_evaluation_between_steps_changes_nothing(tmp_path):
    data = batches(6)
    with make(net(dropout=0.1), tmp_path / "a") as engine:
        expected = run(engine, data)
    model = net(dropout=0.1)
    plain = copy.deepcopy(model)
    with make(model, tmp_path / "b") as engine:
        losses = run(engine, data[:2])
        engine.eval()
        with torch.no_grad():
            first = engine(data[0]["x"])
        assert not first.requires_grad and not torch.equal(first, plain.eval()(data[0]["x"]))
        engine.train()
        for number, batch in enumerate(data[2:], 2):
            torch.manual_seed(number)
            loss = engine(**batch)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    assert losses == expected


def test_parameters_keep_their_shape_and_take_no_memory(tmp_path):
    model, data = net(), batches(2)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    with make(model, tmp_path) as engine:
        run(engine, data)
        for name, p in model.named_parameters():
            assert p.shape == shapes[name] and p.numel() == shapes[name].numel() and p.grad is None
            assert p.untyped_storage().nbytes() == 4 if hasattr(p, "untyped_storage") else True
            assert torch.isfinite(p.detach()).all(), "its value is read for that"
        with engine.gathered():
            assert not any(torch.isnan(p).any() for p in model.parameters())
        assert all(p.untyped_storage().nbytes() == 4 for p in model.parameters() if hasattr(p, "untyped_storage"))


def test_a_value_that_is_written_is_trained_on(tmp_path):
    model, data = net(), batches(4)
    other = net(seed=5)
    expected, _ = plain_losses(other, all_names(other), [[batch] for batch in data[1:2]])
    with make(model, tmp_path) as engine:
        run(engine, data[:1])
        model.load_state_dict(other.state_dict())
        loss = engine(**data[1])
        assert loss.item() == pytest.approx(expected[0], abs=1e-5)
        engine.backward(loss)
        engine.step()
        before = engine.read_state(model.norm.weight)
        with engine.gathered([model.norm.weight], write_back=True):
            with torch.no_grad():
                model.norm.weight.zero_()
        assert torch.count_nonzero(before) and not torch.count_nonzero(engine.read_state(model.norm.weight))
        assert engine.read_state(model.head.weight, "second moment").abs().sum() > 0
        with pytest.raises(ValueError, match="shape"):
            engine.write_state(model.norm.weight, torch.zeros(3))


class Interrupting(nn.Module):
    """Raises where it is told to: in forward, when it is computed again, or in backward."""

    calls = 0  # of the class: an attribute of the module would be what it was when it is computed again

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.raises = None

    def forward(self, x):
        Interrupting.calls += 1
        if self.raises == Interrupting.calls:
            raise KeyError("the model's own")
        out = self.inner(x)
        if self.raises == "backward" and out.requires_grad:
            out.register_hook(lambda gradient: 1 // 0)
        return out


@pytest.mark.parametrize("when", [1, 2, "backward"])
@pytest.mark.parametrize("layer", [0, 2, 3])
def test_an_exception_gives_up_its_step_and_no_more(tmp_path, when, layer):
    data = batches(6)
    expected = plain_losses(net(), all_names(net()), [[batch] for batch in data])[0]
    model = net()
    model.layers[layer] = Interrupting(model.layers[layer])
    with make(model, tmp_path) as engine:
        losses = run(engine, data[:2])
        Interrupting.calls, model.layers[layer].raises = 0, when
        # torch 1.13 makes a RuntimeError of what is raised while a block is computed again.
        with pytest.raises(ZeroDivisionError if when == "backward" else (KeyError, RuntimeError)):
            engine.backward(engine(**data[3]))
        model.layers[layer].raises = None
        assert losses + run(engine, data[2:]) == pytest.approx(expected, abs=1e-5)


def test_a_forward_without_backward_is_given_up(tmp_path):
    data = batches(4)
    expected = plain_losses(net(), all_names(net()), [[batch] for batch in data])[0]
    model = net()
    with make(model, tmp_path) as engine:
        losses = run(engine, data[:1])
        abandoned = engine(**data[3])
        losses += run(engine, data[1:2])
        with pytest.raises(RuntimeError, match="no training forward is open"):
            engine.backward(abandoned)
        with pytest.raises(RuntimeError, match="no step is open"):
            engine.step()
        first = engine(**data[2])
        engine(**data[3])
        if hasattr(torch.autograd.graph, "get_gradient_edge"):  # torch 2.1 and newer: it is computed again
            engine.backward(first)
            engine.step()
            losses += [first.item()] + run(engine, data[3:])
        else:
            with pytest.raises(RuntimeError, match="another forward began"):
                engine.backward(first)
            losses += run(engine, data[2:])
    assert losses == pytest.approx(expected, abs=1e-5)


def test_a_second_backward_of_one_forward_is_refused(tmp_path):
    model, data = net(), batches(2)
    with make(model, tmp_path) as engine:
        loss = engine(**data[0])
        engine.backward(loss, retain_graph=True)
        with pytest.raises(RuntimeError):
            engine.backward(loss)
        run(engine, data)


def test_an_input_that_is_changed_in_place_is_refused(tmp_path):
    class Adds(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x):
            x += 1
            return x * self.weight

    for first in (nn.Identity(), nn.Linear(8, 8)):
        model = nn.Sequential(first, Adds(), nn.Linear(8, 8))
        with make(model, tmp_path / type(first).__name__) as engine:
            with pytest.raises(RuntimeError, match="1 changes one of its inputs in place"):
                engine(torch.ones(2, 8))


def test_an_output_may_be_changed_in_place_outside(tmp_path):
    class Adds(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
                x += 1
                x.mul_(0.5)
            return x.square().mean()

    torch.manual_seed(0)
    model = Adds()
    data = [{"x": torch.randn(4, 8)} for _ in range(4)]
    expected = plain_losses(model, all_names(model), [[batch] for batch in data])[0]
    with make(model, tmp_path) as engine:
        assert run(engine, data) == pytest.approx(expected, abs=1e-6)


def test_a_block_that_is_none_is_named(tmp_path):
    with pytest.raises(ValueError, match="no module 'body'"):
        make(net(), tmp_path, blocks=["body"])


def test_given_blocks(tmp_path):
    model, data = net(tied=False), batches(5)
    expected = plain_losses(model, all_names(model), [[batch] for batch in data])[0]
    names = ["embed", "layers.0", "layers.1.norm", "layers.1.up", "layers.1.down", "layers.2", "layers.3", "norm", "head"]
    with make(model, tmp_path, blocks=names) as engine:
        assert run(engine, data) == pytest.approx(expected, abs=1e-5)


def test_running_means_count_each_batch_once(tmp_path):
    def model():
        torch.manual_seed(0)
        # No bias before the norm: its gradient is rounding, and Adam makes steps of it.
        part = lambda: nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh())  # noqa: E731
        return nn.Sequential(part(), part(), part(), nn.Linear(8, 1))

    plain, ours = model(), model()
    optimizer = adamw(plain)
    with make(ours, tmp_path, gradient_clipping=0, blocks=["0", "1", "2", "3"]) as engine:
        for number in range(5):
            x = torch.randn(16, 8, generator=torch.Generator().manual_seed(number))
            loss, expected = both(engine, plain, optimizer, lambda model, x=x: model(x).square().mean())
            assert loss == pytest.approx(expected, abs=1e-6)
        for (name, value), other in zip(ours.named_buffers(), plain.buffers()):
            torch.testing.assert_close(value, other, msg=name)


def test_a_step_without_backward_is_refused(tmp_path):
    data = batches(4)
    expected = plain_losses(net(), all_names(net()), [[batch] for batch in data])[0]
    with make(net(), tmp_path) as engine:
        losses = run(engine, data[:1])
        engine(**data[1])
        with pytest.raises(RuntimeError, match="without a backward"):
            engine.step()
        engine(**data[1]).backward()  # without engine.backward: the same, where no loss is scaled
        engine.step()
        losses += run(engine, data[2:])
    assert losses == pytest.approx(expected[:1] + expected[2:], abs=1e-5)


def test_what_is_decided_before_the_first_forward(tmp_path):
    model, data = net(tied=False), batches(3)
    with make(model, tmp_path) as engine:
        run(engine, data[:1])
        model.layers[1].up.weight.requires_grad_(False)
        with pytest.raises(RuntimeError, match="requires_grad of layers.1.up.weight"):
            engine(**data[1])
        model.layers[1].up.weight.requires_grad_(True)
        run(engine, data[1:])
        with pytest.raises(ValueError, match="has an engine already"):
            make(model, tmp_path / "second")
    with pytest.raises(ValueError, match="values went with its engine"):
        make(model, tmp_path / "third")(**data[0])
    model = net(tied=False)
    model.head.weight = nn.Parameter(model.embed.weight.data)  # one memory, two parameters
    with pytest.raises(ValueError, match="share memory"):
        make(model, tmp_path / "fourth")


def test_parameters_that_no_group_has_stay(tmp_path):
    model, data = net(tied=False), batches(4)
    names = [{"params": [name for name, _ in model.named_parameters() if "layers.1" not in name and "bias" not in name]}]
    named = dict(model.named_parameters())
    kept = {name: value.detach().clone() for name, value in named.items() if name not in names[0]["params"]}
    expected = plain_losses(model, names, [[batch] for batch in data], clip=0)[0]
    optimizer = torch.optim.AdamW([named[name] for name in names[0]["params"]], lr=1e-2)
    with make(model, tmp_path, optimizer=optimizer, gradient_clipping=0) as engine:
        assert run(engine, data) == pytest.approx(expected, abs=1e-5)
        state = engine.state_dict()
        for name, value in kept.items():
            assert torch.equal(state[name], value), name


def test_odd_shapes(tmp_path):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.5))
            self.none = nn.Parameter(torch.zeros(0, 4))
            self.turned = nn.Parameter(torch.randn(8, 8).t())

        def forward(self, x):
            return self.scale * (x @ self.turned) + self.none.sum()

    torch.manual_seed(0)
    model = nn.Sequential(Odd(), Odd())
    plain = copy.deepcopy(model)
    optimizer = adamw(plain)
    with make(model, tmp_path, gradient_clipping=0) as engine:
        for number in range(4):
            x = torch.randn(3, 8, generator=torch.Generator().manual_seed(number))
            loss, expected = both(engine, plain, optimizer, lambda model, x=x: model(x).square().mean())
            assert loss == pytest.approx(expected, rel=1e-6)
        assert engine.state_dict()["0.scale"].shape == ()


def test_dropout_of_micro_batches_is_the_same_in_backward(tmp_path):
    model = net(dropout=0.3)
    plain = copy.deepcopy(model)
    optimizer = adamw(plain)
    data = batches(12)
    with make(model, tmp_path, gradient_accumulation_steps=2, gradient_clipping=0) as engine:
        for number in range(6):
            step = data[2 * number : 2 * number + 2]
            torch.manual_seed(number)
            seed = torch.randint(2**62, (1,)).item()
            optimizer.zero_grad()
            total = 0.0
            for batch, begins in zip(step, (number, seed)):  # each micro-batch has random numbers of its own
                torch.manual_seed(begins)
                loss = plain(**batch) / 2
                loss.backward()
                total += loss.item()
            optimizer.step()
            torch.manual_seed(number)
            assert engine.train_batch(step).item() == pytest.approx(total, abs=1e-5)


def test_a_backward_whose_step_is_not_made_counts_for_nothing(tmp_path):
    data = batches(6)
    expected = plain_losses(net(), all_names(net()), [[batch] for batch in data])[0]
    with make(net(), tmp_path) as engine:
        losses = run(engine, data[:2])
        engine.backward(engine(**data[5]))  # no step: a loss that its owner does not like
        engine.zero_grad()
        losses += run(engine, data[2:4])
        engine.backward(engine(**data[5]))
        assert engine.global_steps == 4
    with make(net(seed=3), tmp_path, resume=True) as engine:
        losses += run(engine, data[4:])
        assert engine.global_steps == 6
    assert losses == pytest.approx(expected, abs=1e-5)


def test_a_forward_within_gathered_fetches_its_own(tmp_path):
    data = batches(3)
    expected, _ = plain_losses(net(), all_names(net()), [[batch] for batch in data])
    model = net()
    with make(model, tmp_path) as engine:
        losses = run(engine, data[:1])
        with engine.gathered():
            whole = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
            losses += run(engine, data[1:2])
            changed = [name for name, parameter in model.named_parameters() if not torch.equal(parameter.detach(), whole[name])]
            assert sorted(changed) == sorted(whole)  # read as they are now
        losses += run(engine, data[2:])
    assert losses == pytest.approx(expected, abs=1e-5)


def test_a_forward_within_gathered_for_writing_is_refused(tmp_path):
    model, data = net(), batches(3)
    with make(model, tmp_path) as engine:
        run(engine, data[:1])
        before = engine.state_dict()
        with pytest.raises(RuntimeError, match="within engine.gathered"):
            with engine.gathered(write_back=True):
                with torch.no_grad():
                    engine(**data[1])
        for name, value in engine.state_dict().items():
            assert torch.equal(value, before[name])
        model.norm.weight.data = torch.ones(32).double()
        with pytest.raises(RuntimeError, match="norm.weight was given a value outside"):
            engine(**data[1])


def test_schedulers_of_the_optimizer_that_was_given(tmp_path):
    data = batches(8)

    def made(model):
        optimizer = adamw(model)
        return optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], gamma=0.1)

    plain = net()
    optimizer, scheduler = made(plain)
    expected = []
    for batch in data:
        optimizer.zero_grad()
        loss = plain(**batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        expected.append(loss.item())
    losses = []
    for part in (data[:3], data[3:]):  # the scheduler's state goes on too
        model = net()
        optimizer, scheduler = made(model)
        with make(model, tmp_path, optimizer=optimizer, lr_scheduler=scheduler, resume="auto") as engine:
            losses += run(engine, part)
    assert losses == pytest.approx(expected, abs=1e-5)


def test_what_is_kept_comes_back_as_it_was(tmp_path):
    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 1))

    state = {"t": (1, 2.5), 3: float("inf"), "x": torch.arange(3), "n": None, "l": [1, {"a": "b"}]}
    with make(model(), tmp_path) as engine:
        for number in range(3):
            engine.backward(engine(torch.randn(16, 8, generator=torch.Generator().manual_seed(number))).square().mean())
            engine.step()
        engine.client_state = state
        means = engine.module[1].running_mean.clone()
    again = model()
    with make(again, tmp_path, resume=True) as engine:
        engine.eval()
        engine(torch.zeros(2, 8))
        kept = engine.client_state
        assert torch.equal(kept.pop("x"), state["x"]) and kept == {key: each for key, each in state.items() if key != "x"}
        assert torch.equal(again[1].running_mean, means) and again[1].num_batches_tracked == 3
        engine.client_state = {"f": lambda: 0}
        with pytest.raises(TypeError, match="function cannot be kept"):
            engine.flush()
        engine.client_state = {}


def test_another_grouping_is_refused_on_resume(tmp_path):
    data = batches(2)
    with make(net(), tmp_path) as engine:
        run(engine, data)
    model = net()
    biases = [p for p in model.parameters() if p.dim() == 1]
    others = [p for p in model.parameters() if p.dim() > 1]
    engine = make(model, tmp_path, optimizer=torch.optim.AdamW([{"params": others}, {"params": biases}], lr=1e-2), resume=True)
    with pytest.raises((OSError, RuntimeError, ValueError)):
        engine(**data[0])
    engine.close()


class Odd(nn.Module):
    """A block that does what computing again makes hard."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.linear = nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.ones(8, 8))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x, debug=None):
        if self.how == "buffer":
            self.count += 1
            return self.linear(x) * self.count
        if self.how == "reassigned":
            self.scale = self.scale * 1.5
            return self.linear(x) * self.scale
        if self.how == "keyword":
            return self.linear(x) * (debug if debug is not None else 0)
        return self.linear(x) + self.weight[:4], self.weight  # and its own weights


@pytest.mark.parametrize("how", ["buffer", "reassigned", "keyword", "weights"])
def test_odd_blocks(tmp_path, how):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Odd(how) for _ in range(3)])
            self.out = nn.Linear(8, 1)

        def forward(self, x):
            more = 0.0
            for layer in self.layers:
                if how == "keyword":
                    x = layer(x, debug=torch.tensor(2.0))
                elif how == "weights":
                    x, weight = layer(x)
                    more = more + weight.sum() * 1e-2
                else:
                    x = layer(x)
            return self.out(x).square().mean() + more

    torch.manual_seed(0)
    model = Model()
    plain = copy.deepcopy(model)
    for each in (*model.layers, *plain.layers):  # parameters that a step does not use are another matter
        each.weight.requires_grad_(how == "weights")
    optimizer = adamw(plain)
    with make(model, tmp_path, gradient_clipping=0) as engine:
        for number in range(5):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
            loss, expected = both(engine, plain, optimizer, lambda model, x=x: model(x))
            assert loss == pytest.approx(expected, rel=1e-5)
        for (name, value), other in zip(model.named_buffers(), plain.buffers()):
            torch.testing.assert_close(value, other, msg=name)


def test_an_optimizer_with_another_ones_parameters(tmp_path):
    model = net()
    extra = nn.Parameter(torch.zeros(1))
    with pytest.raises(ValueError, match="is none of the model's"):
        make(model, tmp_path, optimizer=torch.optim.AdamW([*model.parameters(), extra]))


INTERRUPTED = """
import os, random, signal, sys, threading, time, torch, penstock
sys.path.insert(0, {tests!r})
from engine_models import batches, net
engine = penstock.initialize(model=net(), optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2), state_dir={directory!r})[0]
data = batches(60)
with torch.no_grad():
    engine.eval()(data[0]["x"])
engine.train()
# One interrupt for each time that it is armed, so that none comes where nobody waits for it.
stop, armed, lock = threading.Event(), [False], threading.Lock()
def interrupt():
    random.seed(1)
    while not stop.wait(random.random() * 0.02):
        with lock:
            if armed[0]:
                armed[0] = False
                os.kill(os.getpid(), signal.SIGINT)
thread = threading.Thread(target=interrupt)
losses, heard, tried = {{}}, 0, {{0}}  # a backward that has no step before the first one is refused
thread.start()
while engine.global_steps < 60:
    try:
        step = engine.global_steps
        armed[0] = step not in tried  # or on a slow machine no attempt might come to its end
        tried.add(step)
        loss = engine(**data[step])
        engine.backward(loss)
        losses[step] = loss.item()  # again, where the step was given up
        engine.step()
        armed[0] = False
        with lock:
            time.sleep(0)
    except KeyboardInterrupt:
        heard += 1
    except RuntimeError as error:  # torch 1.13 makes one of it within a hook
        assert "KeyboardInterrupt" in str(error), error
        heard += 1
stop.set()
thread.join()
engine.close()
print(heard, [losses[step] for step in range(60)], flush=True)
os._exit(0)  # an interrupt that came last may be heard while the interpreter ends
"""


def test_ctrl_c_at_random_moments(tmp_path):
    text = INTERRUPTED.format(tests=os.path.dirname(__file__), directory=str(tmp_path / "s"))
    out = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120)
    assert out.returncode == 0, out.stderr[-3000:]
    heard, losses = out.stdout.split(" ", 1)
    expected = plain_losses(net(), all_names(net()), [[batch] for batch in batches(60)], clip=0)[0]
    assert int(heard) > 0
    assert json.loads(losses) == pytest.approx(expected, abs=2e-3)


class Skipping(Net):
    """Leaves out layers, as layer drop does."""

    skip = ()

    def forward(self, x, targets=None):
        x = self.embed(x)
        for number, layer in enumerate(self.layers):
            if number not in self.skip:
                x = layer(x)
        logits = self.head(self.norm(x))
        return logits if targets is None else nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def test_layers_that_a_step_leaves_out(tmp_path):
    torch.manual_seed(0)
    model = Skipping(tied=False)
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    skips = [(), (1,), (0, 2), (3,), (0, 1, 2, 3), ()]
    with make(model, tmp_path, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), gradient_clipping=0) as engine:
        for skip, batch in zip(skips, batches(6)):
            model.skip = plain.skip = skip
            loss, expected = both(engine, plain, optimizer, lambda model, batch=batch: model(**batch))
            assert loss == pytest.approx(expected, abs=1e-5)


def test_frozen_parameters_stay_as_they_are(tmp_path):
    model, data = net(tied=False), batches(5)
    for p in list(model.embed.parameters()) + list(model.layers[1].parameters()) + [model.layers[2].up.weight]:
        p.requires_grad_(False)
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    names = [{"params": [name for name, p in model.named_parameters() if p.requires_grad]}]
    expected = plain_losses(model, names, [[batch] for batch in data])[0]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    with make(model, tmp_path, optimizer=optimizer) as engine:
        assert run(engine, data) == pytest.approx(expected, abs=1e-5)
        state = engine.state_dict()
        for name, value in frozen.items():
            assert torch.equal(state[name], value), name


def _last_layers_train(count=2, **options):
    model = net(tied=False, **options)
    for part in (model.embed, *model.layers[:-count]):
        part.requires_grad_(False)
    return model, [p for p in model.parameters() if p.requires_grad]


@pytest.mark.parametrize("way", ["steps", "batch", "accumulation"])
def test_backward_ends_at_the_first_block_that_trains(tmp_path, way):
    model, trained = _last_layers_train()
    model.embed.register_forward_hook(lambda module, inputs, out: out.requires_grad_(True))  # enable_input_require_grads of transformers
    each = 1 if way == "steps" else 2
    data = batches(5 * each)
    steps = [data[first : first + each] for first in range(0, len(data), each)]
    names = [{"params": [name for name, p in model.named_parameters() if p.requires_grad]}]
    expected = plain_losses(model, names, steps, clip=0)[0]
    calls = [0] * len(model.layers)
    for number, layer in enumerate(model.layers):
        layer.norm.register_forward_hook(lambda *_, number=number: calls.__setitem__(number, calls[number] + 1))
    losses, options = [], {} if way == "steps" else {"gradient_accumulation_steps": 2}
    with make(model, tmp_path, optimizer=torch.optim.AdamW(trained, lr=1e-2), gradient_clipping=0, **options) as engine:
        for number, pair in enumerate(steps):
            if number == 1:
                calls[:] = [0] * len(calls)  # without what was measured at first
            if way == "batch":
                losses.append(float(engine.train_batch(pair)))
            else:
                losses.append(sum(step(engine, batch) for batch in pair) / each)
    assert losses == pytest.approx(expected, abs=1e-5)
    passes = 4 * each
    forwards = 2 if way == "accumulation" else 1
    assert calls == [forwards * passes] * 2 + [(forwards + 1) * passes] * 2


class Prompted(nn.Module):
    """Takes what an embedding would have given; its last layers train."""

    def __init__(self, leaf=False):
        super().__init__()
        model = _last_layers_train()[0]
        self.layers, self.norm, self.head, self.leaf = model.layers, model.norm, model.head, leaf

    def forward(self, prompt, targets):
        x = prompt + 0 if not self.leaf else prompt.detach().requires_grad_(True)  # as transformers' speech models do, for checkpointing
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def test_gradients_of_what_goes_into_the_model(tmp_path):
    model, targets = Prompted(), batches(1)[0]["targets"]
    plain = copy.deepcopy(model)
    prompt = torch.randn(*targets.shape, 32)
    trained = [p for p in model.parameters() if p.requires_grad]
    with make(model, tmp_path / "wanted", optimizer=torch.optim.SGD(trained, lr=0.1), gradient_clipping=0) as engine:
        ours, theirs = (prompt.clone().requires_grad_(True) for _ in range(2))
        optimizer = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.1)
        for _ in range(3):
            ours.grad = theirs.grad = None
            loss = step(engine, {"prompt": ours, "targets": targets})
            expected = plain(theirs, targets)
            optimizer.zero_grad()
            expected.backward()
            optimizer.step()
            assert loss == pytest.approx(expected.item(), abs=1e-5)
            torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("hooked", [False, True])
def test_a_tensor_that_the_model_brings_in_below_what_trains(tmp_path, hooked):
    model, targets = Prompted(leaf=not hooked), batches(1)[0]["targets"]
    if hooked:  # transformers' enable_input_require_grads
        model.layers[0].register_forward_hook(lambda module, inputs, out: out.requires_grad_(True))
    data = [{"prompt": torch.randn(*targets.shape, 32), "targets": targets} for _ in range(3)]
    names = [{"params": [name for name, p in model.named_parameters() if p.requires_grad]}]
    expected = plain_losses(model, names, [[batch] for batch in data])[0]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    with make(model, tmp_path, optimizer=optimizer) as engine, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert run(engine, data) == pytest.approx(expected, abs=1e-5)
    lines = [str(each.message) for each in told if "requires a gradient" in str(each.message)]
    assert len(lines) == (0 if hooked else 1)
    assert hooked or re.search(r"layers\.0 is given .* backward ends at layers\.2", lines[0])


def test_a_gradient_that_backward_would_leave_out_is_refused(tmp_path):
    model, targets = Prompted(), batches(1)[0]["targets"]
    prompt = torch.randn(*targets.shape, 32)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    with make(model, tmp_path, optimizer=optimizer, gradient_accumulation_steps=2) as engine:
        batch, asking = {"prompt": prompt, "targets": targets}, {"prompt": prompt.clone().requires_grad_(True), "targets": targets}
        engine.train_batch([batch, batch])
        with pytest.raises(RuntimeError, match=r"backward ends at layers\.2, the first block that trains"):
            engine(**asking)
        with pytest.raises(RuntimeError, match="backward ends at"):
            engine.train_batch([batch, asking])
        engine.eval()
        with torch.no_grad():
            engine(**asking)
        engine.train()
        engine.train_batch([batch, batch])


def test_bf16_masters_are_fp32(tmp_path):
    model, data = net(), batches(20)
    expected = plain_losses(model, all_names(model), [[batch] for batch in data])[0]
    with make(model, tmp_path, dtype=torch.bfloat16) as engine:
        losses = run(engine, data)
        assert losses[-1] == pytest.approx(expected[-1], abs=0.1) and losses[-1] < losses[0]
        assert model.norm.weight.dtype == torch.bfloat16
        assert engine.read_state(model.norm.weight).dtype == torch.float32
        assert engine.state_dict()["norm.weight"].dtype == torch.float32  # as it came in


def computes_in_fp16():
    try:
        nn.functional.layer_norm(torch.ones(2, 2, dtype=torch.float16), (2,))
        return True
    except RuntimeError:
        return False


@pytest.mark.skipif(not computes_in_fp16(), reason="this torch does not compute in float16 on the processor")
def test_fp16_scales_its_loss(tmp_path):
    model, data = net(), batches(12)
    config = {"train_micro_batch_size_per_gpu": 4, "fp16": {"enabled": True, "initial_scale_power": 8}, "gradient_clipping": 1.0}
    with pytest.warns(UserWarning):
        engine = make(model, tmp_path, config=config)
    with engine:
        losses = run(engine, data)
        assert engine.last_step["loss_scale"] == 256 and losses[-1] < losses[0]
        loss = engine(**data[0])
        with pytest.raises(RuntimeError, match="engine.backward"):
            loss.backward()
        run(engine, data[:1])


def test_autocast(tmp_path):
    model, data = net(), batches(8)
    plain = copy.deepcopy(model)
    optimizer = adamw(plain)
    with make(model, tmp_path, gradient_clipping=0) as engine:
        def under_autocast(model, batch):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return model(**batch)

        for batch in data:
            loss, expected = both(engine, plain, optimizer, lambda model, batch=batch: under_autocast(model, batch))
            assert loss == pytest.approx(expected, abs=2e-3)


def test_one_autocast_around_everything(tmp_path):
    model, data = net(tied=False), batches(4)
    plain = copy.deepcopy(model)
    optimizer = adamw(plain)
    with make(model, tmp_path, gradient_clipping=0) as engine:
        with torch.autocast("cpu", dtype=torch.bfloat16):  # what it keeps of weights must not be taken for the next ones
            for batch in data:
                with torch.no_grad():
                    engine(**batch)
                loss = engine(**batch)
                engine.backward(loss)
                engine.step()
                with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
                    optimizer.zero_grad()
                    expected = plain(**batch)
                    expected.backward()
                    optimizer.step()
                assert loss.item() == pytest.approx(expected.item(), abs=2e-3)


CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.8, 0.99], "eps": 1e-7, "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 4, "warmup_type": "linear"}},
    "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}, "offload_optimizer": {"device": "nvme"}},
}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_deepspeed_configuration(tmp_path):
    config = copy.deepcopy(CONFIG)
    for key in ("offload_param", "offload_optimizer"):
        config["zero_optimization"][key]["nvme_path"] = str(tmp_path)
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(config))
    model, data = net(), batches(12)
    plain = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0, betas=(0.8, 0.99), eps=1e-7, weight_decay=0.1)
    expected, rates = [], []
    for number in range(6):
        rate = 1e-2 * min(1, max(0, number - 1) / 4)  # as DeepSpeed: two steps at 0
        optimizer.param_groups[0]["lr"] = rate
        rates.append(rate)
        optimizer.zero_grad()
        total = 0
        for batch in data[2 * number : 2 * number + 2]:
            loss = plain(**batch) / 2
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        expected.append(total)
    engine, optimizer, loader, scheduler = penstock.initialize(model=model, config=str(path))
    assert loader is None and scheduler is engine.lr_scheduler and optimizer is engine.optimizer
    with engine:
        seen = []
        for number in range(6):
            seen.append(engine.get_lr()[0])
            assert engine.train_batch(data[2 * number : 2 * number + 2]).item() == pytest.approx(expected[number], abs=1e-5)
        assert seen == pytest.approx(rates)
    with pytest.raises(ValueError, match="zero_optimisation|train_micro"):
        penstock.initialize(model=net(), config={"train_micro_batch_size_per_gpu": "many"})
    with pytest.raises(ValueError, match="state_dir"):
        penstock.initialize(model=net())
    with pytest.warns(UserWarning, match="autotuning"):
        penstock.initialize(model=net(), config={**CONFIG, "autotuning": {"enabled": True}}, state_dir=str(tmp_path / "t"))


def test_resume_goes_on_with_the_same_bits(tmp_path):
    data = batches(8)
    options = {"optimizer": lambda p: torch.optim.AdamW(p, lr=1e-2)}

    def schedule(optimizer):
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def go_on(engine, given):
        return [step(engine, batch) for batch in given]

    with make(net(dropout=0.3), tmp_path / "whole", lr_scheduler=schedule, **options) as engine:
        torch.manual_seed(3)
        expected = go_on(engine, data)
    with make(net(dropout=0.3), tmp_path / "parts", lr_scheduler=schedule, **options) as engine:
        torch.manual_seed(3)
        losses = go_on(engine, data[:3])
        engine.client_state = {"epoch": 7}
        losses += go_on(engine, data[3:5])
    with pytest.raises(FileExistsError, match="resume=True"):  # what is there is not overwritten unasked
        with make(net(), tmp_path / "parts") as engine:
            engine(**data[0])
    torch.manual_seed(99)
    with make(net(seed=42, dropout=0.3), tmp_path / "parts", lr_scheduler=schedule, resume=True, **options) as engine:
        assert engine.global_steps == 5  # before there is an engine
        engine.eval()
        with torch.no_grad():
            engine(**data[0])
        engine.train()
        assert engine.global_steps == 5 and engine.client_state == {"epoch": 7}
        losses += go_on(engine, data[5:])
    assert losses == expected


def test_checkpoints_go_to_another_directory_and_back(tmp_path):
    data = batches(6)
    with make(net(), tmp_path / "run") as engine:
        run(engine, data[:3])
        engine.state_dict()  # the step is committed before the client has said what it is
        path = engine.save_checkpoint(tmp_path / "kept", tag="good", client_state={"epoch": 2}, wait=True)
        assert os.path.isdir(path)
        expected = run(engine, data[3:])
    model = net(seed=9)
    with make(model, tmp_path / "again") as engine:
        assert engine.global_steps == 0
        found, _ = engine.load_checkpoint(tmp_path / "kept", tag="good")
        assert found == os.path.realpath(path) and engine.global_steps == 3
        losses = run(engine, data[3:])
        assert engine.client_state == {"epoch": 2} and engine.global_steps == 6
    assert losses == expected
    with make(net(), tmp_path / "third") as engine:
        assert engine.load_checkpoint(tmp_path / "nothing") == (None, {})
        with pytest.raises(FileNotFoundError):
            engine.load_checkpoint(tmp_path / "kept", tag="better")


KILLED = """
import os, sys, torch, penstock
sys.path.insert(0, {tests!r})
from engine_models import batches, net
data = batches(40)
engine = penstock.initialize(model=net(dropout=0.1), optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2), state_dir={directory!r},
                             gradient_clipping=1.0, resume="auto")[0]
with torch.no_grad():
    engine.eval()(data[0]["x"])
engine.train()
if engine.global_steps == 0:
    torch.manual_seed(3)
for batch in data[engine.global_steps:]:
    loss = engine(**batch)
    engine.backward(loss)
    engine.step()
    print(engine.global_steps, repr(loss.item()), flush=True)
engine.close()
"""


def test_a_run_that_is_killed_goes_on_with_the_same_bits(tmp_path):
    def program(directory):
        text = KILLED.format(tests=os.path.dirname(__file__), directory=str(directory))
        return subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)

    def lines(process, most=None):
        found = {}
        for line in process.stdout:
            step, loss = line.split()
            found[int(step)] = loss
            if most is not None and len(found) == most:
                process.send_signal(signal.SIGKILL)
                break
        process.stdout.close()
        process.wait()
        return found

    whole = program(tmp_path / "whole")
    expected = lines(whole)
    assert whole.returncode == 0 and len(expected) == 40
    seen = {}
    for most in (1, 5, 9, 13, None):
        process = program(tmp_path / "killed")
        for number, loss in lines(process, most).items():
            assert expected[number] == loss, f"step {number}"
            seen[number] = loss
    assert process.returncode == 0 and seen == expected


def test_ctrl_c_is_heard_while_the_engine_waits(tmp_path):
    text = """
import os, signal, sys, threading, torch, penstock
sys.path.insert(0, {tests!r})
from engine_models import batches, net
engine = penstock.initialize(model=net(), state_dir={directory!r}, gradient_accumulation_steps=2)[0]
data = batches(2)
engine.train_batch(data)
runtime = engine._run.runtime
runtime.begin(True, engine.optimizer.rates(), 2)
threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    engine._run.core.enter(False, 0, 1)  # the first micro-batch comes first
except KeyboardInterrupt:
    print("heard")
runtime.give_up("interrupted")
engine.train_batch(data)
print("goes on", engine.global_steps)
engine.close()
"""
    out = subprocess.run(
        [sys.executable, "-c", text.format(tests=os.path.dirname(__file__), directory=str(tmp_path / "s"))],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert out.stdout.split("\n")[:2] == ["heard", "goes on 2"], out.stderr


def test_loader_workers_and_children_leave_nothing_broken(tmp_path):
    model, data = net(), batches(6)
    expected = plain_losses(model, all_names(model), [[batch] for batch in data])[0]
    loader = torch.utils.data.DataLoader(data, batch_size=None, num_workers=2)
    with make(model, tmp_path) as engine:
        losses = []
        for number, batch in enumerate(loader):
            torch.manual_seed(number)
            loss = engine(**batch)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        child = os.fork()
        if child == 0:
            code = 1
            try:
                engine(**data[0])
            except RuntimeError as error:
                code = 0 if "parent process" in str(error) else 2
            os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        assert losses == pytest.approx(expected, abs=1e-5)
        run(engine, data[:1])


def test_a_closed_engine_says_so(tmp_path):
    model, data = net(), batches(2)
    engine = make(model, tmp_path)
    run(engine, data)
    engine.close()
    engine.close()
    with pytest.raises(RuntimeError, match="was closed"):
        engine(**data[0])
    with pytest.raises(RuntimeError, match="was closed"):
        model(**data[0])
    with pytest.raises(RuntimeError, match="closed"):
        engine.step()


def test_two_engines_train_at_once(tmp_path):
    data = batches(10)
    expected = plain_losses(net(), all_names(net()), [[batch] for batch in data], per_step_seed=False)[0]
    results = {}

    def train(name):
        with make(net_of[name], tmp_path / name) as engine:
            losses = []
            for batch in data:
                loss = engine(**batch)
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
            results[name] = losses

    net_of = {name: net() for name in ("a", "b")}
    threads = [threading.Thread(target=train, args=(name,)) for name in net_of]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results["a"] == results["b"] == pytest.approx(expected, abs=1e-5)


def test_a_missing_directory_and_a_full_one(tmp_path):
    model, data = net(), batches(1)
    with make(model, tmp_path / "a" / "b" / "c") as engine:
        run(engine, data)
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(NotADirectoryError, match="state_dir"):
        make(net(), blocked / "state")
