"""penstock.optim: torch.optim's results with the states on a drive, and nothing believed that was lost."""

import copy
import errno
import gc
import io
import os
import pickle
import subprocess
import sys

import pytest
import torch

import penstock
import penstock.optim
from penstock.optim import LAMB, SGD, Adagrad, Adam, AdamW, Lion

LEAST = 2 << 20  # the least host_memory
# With Adam's 8 bytes an element 17 MiB of states: over 8 times that, in some 80 tiles.
SIZES = [(1,), (7,), (3, 5, 7), (100, 129), (1_300_001,), (4096,), (50, 3), (900, 1000)]
MEDIUM = [(1,), (7,), (3, 5, 7), (100, 129), (300_001,), (4096,), (50, 3), (400, 500)]  # over twice the least memory
SMALL = [(1,), (7,), (3, 5, 7), (100, 129), (40_000,)]

TORCH = {
    "adamw": (AdamW, torch.optim.AdamW, dict(lr=1e-2, weight_decay=0.1)),
    "adam": (Adam, torch.optim.Adam, dict(lr=1e-2, betas=(0.8, 0.95))),
    "adagrad": (Adagrad, torch.optim.Adagrad, dict(lr=1e-2, lr_decay=0.1, initial_accumulator_value=0.5)),
    "sgd": (SGD, torch.optim.SGD, dict(lr=1e-2, weight_decay=0.1)),
    "momentum": (SGD, torch.optim.SGD, dict(lr=1e-2, momentum=0.9, dampening=0.3)),
    "nesterov": (SGD, torch.optim.SGD, dict(lr=1e-2, momentum=0.9, nesterov=True)),
}


def parameters(sizes=SIZES, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for size in sizes]


def set_gradients(params, step):
    generator = torch.Generator().manual_seed(1000 + step)
    for p in params:
        p.grad = (torch.randn(p.shape, generator=generator) * 0.3).to(p.dtype)


def train(optimizer, params, steps, first=0):
    for step in range(first, first + steps):
        set_gradients(params, step)
        optimizer.step()


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b))


def near(ours, theirs, relative=1e-6, floor=0.1):
    """Within 1e-6, relative to the value, or to `floor` where it is smaller (values are of order 1, and rounded there too)."""
    return all(((a.double() - b.double()).abs() <= relative * b.double().abs().clamp(min=floor)).all() for a, b in zip(ours, theirs))


def clone(params):
    return [torch.nn.Parameter(p.detach().clone()) for p in params]


class Failure(Exception):
    pass


# Results.


@pytest.mark.parametrize("name", TORCH)
def test_twenty_steps_are_torchs_with_states_eight_times_the_memory(name, directory):
    ours_class, torch_class, arguments = TORCH[name]
    sizes = SIZES if name == "adamw" else MEDIUM
    ours, plain = parameters(sizes), parameters(sizes)
    optimizer = ours_class(ours, **arguments, state_dir=directory, host_memory=LEAST)
    oracle = torch_class(plain, **arguments)
    train(optimizer, ours, 20)
    train(oracle, plain, 20)
    assert near(ours, plain) if name.startswith("ada") else same(ours, plain)
    stats = optimizer.stats()
    if name == "adamw":
        assert stats["drive_bytes"] > 8 * LEAST and stats["resident_bytes"] == 0 and stats["ring_bytes"] == LEAST
        assert stats["written_bytes"] == 20 * stats["drive_bytes"] and stats["read_bytes"] == 19 * stats["drive_bytes"]
    assert os.listdir(directory) == []


def lamb_oracle(params, steps, lr, betas, eps, weight_decay):
    moments = [(torch.zeros_like(p, dtype=torch.float64), torch.zeros_like(p, dtype=torch.float64)) for p in params]
    values = [p.detach().double() for p in params]
    for step in range(1, steps + 1):
        set_gradients(params, step - 1)
        for i, p in enumerate(params):
            g, (m, v) = p.grad.double(), moments[i]
            m.mul_(betas[0]).add_(g, alpha=1 - betas[0])
            v.mul_(betas[1]).add_(g * g, alpha=1 - betas[1])
            u = (m / (1 - betas[0] ** step)) / ((v / (1 - betas[1] ** step)).sqrt() + eps) + weight_decay * values[i]
            trust = (values[i].norm() / u.norm()).clamp(0.01, 10.0)
            values[i] -= lr * trust * u
    return values


def test_lamb_is_its_papers_with_parameters_in_many_tiles(directory):
    params = parameters(MEDIUM)
    arguments = dict(lr=1e-2, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.01)
    expected = lamb_oracle(clone(params), 6, **arguments)
    train(LAMB(params, **arguments, state_dir=directory, host_memory=LEAST), params, 6)
    assert near(params, expected, 2e-6)


def test_lion_is_the_in_memory_one(directory):
    from penstock.ops.lion import DeepSpeedCPULion

    ours, other = parameters(MEDIUM), parameters(MEDIUM)
    train(Lion(ours, lr=1e-3, weight_decay=0.1, state_dir=directory, host_memory=LEAST), ours, 4)
    train(DeepSpeedCPULion(other, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1), other, 4)
    assert same(ours, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [AdamW, Lion, LAMB, SGD, Adagrad])
def test_the_bits_depend_on_no_memory_and_no_place(kind, dtype, directory):
    arguments = dict(momentum=0.9) if kind is SGD else {}
    found = []
    for places in (dict(host_memory=LEAST), dict(host_memory="64MiB"), dict(nvme_offload_fraction=0.0),
                   dict(nvme_offload_fraction=0.4, host_memory=LEAST), dict(nvme_offload_fraction=1.0, host_memory="16MiB")):
        params = parameters(MEDIUM, dtype)
        optimizer = kind(params, lr=1e-3, **arguments, state_dir=directory, **places)
        train(optimizer, params, 2)
        found.append([p.detach().clone() for p in params])
    assert all(same(found[0], other) for other in found[1:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_parameters_have_an_fp32_master(dtype, directory):
    ours = parameters(MEDIUM, dtype)
    masters = [torch.nn.Parameter(p.detach().float()) for p in ours]
    optimizer = AdamW(ours, lr=1e-4, state_dir=directory, host_memory=LEAST)
    oracle = torch.optim.AdamW(masters, lr=1e-4)
    for step in range(20):
        set_gradients(ours, step)
        for p, m in zip(ours, masters):
            m.grad = p.grad.float()
        optimizer.step()
        oracle.step()
    state = optimizer.state_dict()["state"]
    found = [state[i]["master"] for i in range(len(ours))]
    assert near(found, masters)
    assert all(torch.equal(m.to(dtype), p) or (m.to(dtype) != p).float().mean() < 1e-3 for m, p in zip(found, ours))
    # Steps of 1e-4 are lost on bfloat16 alone.
    assert any((m != p.float()).any() for m, p in zip(found, ours))
    stats = optimizer.stats()
    elements = sum(p.numel() for p in ours)
    assert stats["drive_bytes"] / elements < {torch.bfloat16: 10.2, torch.float16: 12.2}[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_parameter_that_was_changed_otherwise_is_noticed(dtype, directory):
    for change in ("copy", "data", "one element"):
        ours = parameters(SMALL, dtype)
        optimizer = AdamW(ours, lr=1e-3, state_dir=directory, host_memory=LEAST)
        train(optimizer, ours, 3)
        new = [torch.randn_like(p) for p in ours]
        with torch.no_grad():
            for p, n in zip(ours, new):
                if change == "copy":
                    p.copy_(n)
                elif change == "data":
                    p.data = n.clone()
                else:
                    p.view(-1)[0] = 5.0
        masters = optimizer.state_dict()["state"]
        if change != "one element":
            found = [masters[i]["master"] for i in range(len(new))]
            assert all(torch.equal(m.to(dtype), n) for m, n in zip(found, new))
            # By chance a new fp16 value is what its old master is rounded to: such a one keeps it.
            assert all((m != n.float()).float().mean() < 0.01 for m, n in zip(found, new))
        else:
            assert all(masters[i]["master"].reshape(-1)[0] == 5.0 for i in range(len(ours)))
        for p in ours:
            p.grad = torch.zeros_like(p)
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        before = clone(ours)
        optimizer.step()
        assert same(ours, before)


def test_gradients_that_are_missing_leave_a_parameter_alone(directory):
    ours, plain = parameters(SMALL), parameters(SMALL)
    optimizer, oracle = AdamW(ours, state_dir=directory, host_memory=LEAST), torch.optim.AdamW(plain)
    for step in range(6):
        for params in (ours, plain):
            set_gradients(params, step)
            for i, p in enumerate(params):
                if (i + step) % 3 == 0:
                    p.grad = None
        optimizer.step()
        oracle.step()
    assert near(ours, plain)
    steps = [int(optimizer.state_dict()["state"][i]["step"]) for i in range(len(ours))]
    assert steps == [int(oracle.state_dict()["state"][i]["step"]) for i in range(len(ours))]


def test_any_layout(directory):
    base = torch.randn(8, 3, 5, 5)
    one = torch.nn.Parameter(base.clone())
    two = torch.nn.Parameter(base.clone().to(memory_format=torch.channels_last))
    three = torch.nn.Parameter(base.clone().permute(3, 1, 0, 2))
    optimizer = AdamW([one, two, three], lr=0.1, state_dir=directory)
    for step in range(3):
        g = torch.randn(8, 3, 5, 5)
        one.grad, two.grad, three.grad = g, g.clone(), g.permute(3, 1, 0, 2).contiguous()
        optimizer.step()
    assert torch.equal(one, two) and torch.equal(one, three.permute(2, 1, 3, 0))
    state = optimizer.state_dict()["state"]
    assert torch.equal(state[0]["exp_avg"], state[1]["exp_avg"]) and state[1]["exp_avg"].stride() == two.stride()
    again = [torch.nn.Parameter(p.detach().clone()) for p in (one, two, three)]
    other = AdamW(again, lr=0.1, state_dir=directory)
    other.load_state_dict(optimizer.state_dict())
    for p, q in zip((one, two, three), again):
        p.grad = q.grad = torch.ones_like(p)
    optimizer.step(), other.step()
    assert same((one, two, three), again)


# A training loop's ways.


def test_a_whole_loop_is_torchs(directory):
    """Groups, schedulers, clipping, accumulation, a group that is added late, zero_grad: three lines differ."""
    losses = {}
    for name in ("torch", "penstock"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 300), torch.nn.GELU(), torch.nn.LayerNorm(300), torch.nn.Linear(300, 8))
        late = torch.nn.Linear(8, 8)
        groups = [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0, "lr": 3e-3},
        ]
        if name == "torch":
            optimizer = torch.optim.AdamW(groups, lr=1e-2)
        else:
            optimizer = AdamW(groups, lr=1e-2, state_dir=directory, host_memory=LEAST)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[1e-2, 3e-3], total_steps=40, cycle_momentum=False)
        losses[name] = []
        for step in range(20):
            if step == 5:
                optimizer.add_param_group({"params": late.parameters(), "lr": 1e-3, "max_lr": 1e-3, "initial_lr": 1e-4, "min_lr": 1e-6})
            optimizer.zero_grad()
            for _ in range(3):
                x = torch.randn(16, 64)
                loss = (late(model(x)) - x[:, :8]).square().mean() / 3
                loss.backward()
                losses[name].append(float(loss.detach()))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            scheduler.step()
    worst = max(abs(a - b) / abs(b) for a, b in zip(losses["penstock"], losses["torch"]))
    assert worst < 1e-5 and losses["torch"][-1] < losses["torch"][0]


def test_closures_hooks_and_maximize(directory):
    p, q = parameters(SMALL), parameters(SMALL)
    optimizer, oracle = Adam(p, maximize=True, state_dir=directory), torch.optim.Adam(q, maximize=True)
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append(1))

    def closure(optimizer, params):
        def compute():
            assert torch.is_grad_enabled()
            optimizer.zero_grad()
            loss = sum((x * x).sum() for x in params)
            loss.backward()
            return loss

        return compute

    for _ in range(3):
        assert optimizer.step(closure(optimizer, p)).item() == pytest.approx(oracle.step(closure(oracle, q)).item(), rel=1e-5)
    assert near(p, q) and seen == [1, 1, 1]


@pytest.mark.skipif(not hasattr(torch, "amp") or not hasattr(torch.amp, "GradScaler"), reason="needs torch.amp.GradScaler")
@pytest.mark.parametrize("unscale", [False, True])
def test_grad_scaler(unscale, directory):
    found = {}
    for name in ("torch", "penstock"):
        p = parameters(SMALL)
        optimizer = torch.optim.AdamW(p, lr=1e-2) if name == "torch" else AdamW(p, lr=1e-2, state_dir=directory)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        for step in range(6):
            set_gradients(p, step)
            for q in p:
                q.grad.mul_(scaler.get_scale())
            if step == 3:
                p[2].grad[0] = float("inf")
            scaler.scale(torch.ones(()))
            if unscale:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(p, 1.0)
            scaler.step(optimizer)
            scaler.update()
        found[name] = (p, scaler.get_scale())
    assert near(found["penstock"][0], found["torch"][0]) and found["penstock"][1] == found["torch"][1]


def test_a_stale_graph_is_an_error(directory):
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = AdamW([p], state_dir=directory)
    loss = (p**2).sum()
    p.grad = torch.ones(3)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_learning_rates_may_be_tensors_and_implementations_may_be_asked_for(directory):
    p, q = parameters(SMALL), parameters(SMALL)
    train(AdamW(p, lr=torch.tensor(1e-2), foreach=True, state_dir=directory), p, 2)
    train(AdamW(q, lr=torch.tensor(1e-2).item(), fused=True, state_dir=directory), q, 2)
    assert same(p, q)


def test_nan_and_infinity_go_where_torch_lets_them_go(directory):
    for value in (float("nan"), float("inf")):
        ours, plain = parameters([(5,)]), parameters([(5,)])
        for p, optimizer in ((ours[0], AdamW(ours, state_dir=directory)), (plain[0], torch.optim.AdamW(plain))):
            p.grad = torch.ones(5)
            p.grad[2] = value
            optimizer.step()
        assert torch.equal(ours[0].isnan(), plain[0].isnan())


# Checkpoints.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [*TORCH, "lion", "lamb"])
@pytest.mark.parametrize("model_first", [True, False])
def test_training_goes_on_bit_for_bit_from_a_checkpoint(name, dtype, model_first, directory):
    kind, arguments = {"lion": (Lion, {}), "lamb": (LAMB, {})}.get(name) or TORCH[name][::2]
    params = parameters(SMALL, dtype)
    optimizer = kind(params, **arguments, state_dir=directory, nvme_offload_fraction=1.0)
    train(optimizer, params, 3)
    file = io.BytesIO()
    torch.save({"model": [p.detach() for p in params], "optimizer": optimizer.state_dict()}, file)
    train(optimizer, params, 3, first=3)
    file.seek(0)
    saved = torch.load(file)
    again = parameters(SMALL, dtype, seed=9)
    other = kind(again, **arguments, state_dir=directory, nvme_offload_fraction=1.0)
    train(other, again, 1)  # what it had is replaced
    for first in (model_first, not model_first):
        if first:
            with torch.no_grad():
                for p, s in zip(again, saved["model"]):
                    p.copy_(s)
        else:
            other.load_state_dict(saved["optimizer"])
    train(other, again, 3, first=3)
    assert same(params, again)


@pytest.mark.parametrize("name", TORCH)
def test_state_dicts_go_to_torch_and_come_from_there(name, directory):
    kind, torch_kind, arguments = TORCH[name]
    ours, plain = parameters(SMALL), parameters(SMALL)
    optimizer = kind(ours, **arguments, state_dir=directory)
    oracle = torch_kind(plain, **arguments)
    empty, torch_empty = optimizer.state_dict(), oracle.state_dict()
    assert empty["state"].keys() == torch_empty["state"].keys()
    train(optimizer, ours, 3)
    train(oracle, plain, 3)
    mine, theirs = optimizer.state_dict(), oracle.state_dict()
    assert mine["param_groups"] == theirs["param_groups"]
    if mine["state"] or name != "sgd":
        assert mine["state"].keys() == theirs["state"].keys()
    for index, state in mine["state"].items():
        assert state.keys() == theirs["state"][index].keys()
        for key, value in state.items():
            assert value.dtype == theirs["state"][index][key].dtype
            assert torch.allclose(value, theirs["state"][index][key], rtol=1e-5, atol=1e-7)
    # Each goes on from the other's.
    a, b = clone(ours), clone(plain)
    first = torch_kind(a, **arguments)
    first.load_state_dict(mine)
    second = kind(b, **arguments, state_dir=directory)
    second.load_state_dict(theirs)
    for optimizer_of, params in ((first, a), (second, b), (optimizer, ours), (oracle, plain)):
        train(optimizer_of, params, 3, first=3)
    assert near(a, ours) and near(b, plain)


def test_torchs_bfloat16_moments_become_fp32(directory):
    plain = parameters(SMALL, torch.bfloat16)
    oracle = torch.optim.AdamW(plain)
    train(oracle, plain, 2)
    ours = clone(plain)
    optimizer = AdamW(ours, state_dir=directory)
    optimizer.load_state_dict(oracle.state_dict())
    state = optimizer.state_dict()["state"]
    for i, p in enumerate(ours):
        assert state[i]["exp_avg"].dtype == torch.float32
        assert torch.equal(state[i]["exp_avg"], oracle.state_dict()["state"][i]["exp_avg"].float())
        assert torch.equal(state[i]["master"], p.float())


def test_a_state_dict_is_a_snapshot_and_its_tensors_are_the_holders_own(directory):
    params = parameters(SMALL)
    optimizer = AdamW(params, state_dir=directory)
    train(optimizer, params, 1)
    first = optimizer.state_dict()["state"]
    kept = {i: s["exp_avg"].clone() for i, s in first.items()}
    train(optimizer, params, 1, first=1)
    assert all(torch.equal(first[i]["exp_avg"], kept[i]) for i in kept)
    first[4]["exp_avg"].fill_(7.0)
    assert not (optimizer.state_dict()["state"][4]["exp_avg"] == 7.0).any()
    optimizer.close()
    assert (first[4]["exp_avg"] == 7.0).all()  # it outlives the optimizer


def test_empty_parameters_are_no_trouble(directory):
    for dtype in (torch.float32, torch.bfloat16):
        params = parameters([(0, 4), (3,)], dtype)
        optimizer = AdamW(params, state_dir=directory)
        train(optimizer, params, 1)
        saved = optimizer.state_dict()
        assert saved["state"][0]["exp_avg"].shape == (0, 4)
        AdamW(clone(params), state_dir=directory).load_state_dict(saved)


def test_hooks_of_state_dicts_see_tensors(directory):
    params = parameters(SMALL)
    optimizer = AdamW(params, state_dir=directory)
    if not hasattr(optimizer, "register_load_state_dict_pre_hook"):
        pytest.skip("this torch has no such hooks")
    train(optimizer, params, 1)
    optimizer.register_state_dict_post_hook(lambda o, s: {**s, "mine": 1})
    saved = optimizer.state_dict()
    assert saved["mine"] == 1
    seen = []
    optimizer.register_load_state_dict_pre_hook(lambda o, s: seen.append(type(s["state"][0]["exp_avg"])))
    optimizer.load_state_dict(saved)
    assert seen == [torch.Tensor]
    optimizer.load_state_dict(saved)
    assert len(seen) == 2


def test_a_wrong_state_is_refused_with_nothing_changed(directory):
    params = parameters(SMALL)
    optimizer = AdamW(params, state_dir=directory)
    train(optimizer, params, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    for spoil, what in (
        (lambda s: s["state"][1].update(exp_avg=torch.zeros(3)), "shape"),
        (lambda s: s["state"][1].pop("exp_avg_sq"), "exp_avg_sq"),
        (lambda s: s["param_groups"].append(s["param_groups"][0]), "groups"),
        (lambda s: s["param_groups"][0]["params"].pop(), "group"),
        (lambda s: s["param_groups"][0].update(amsgrad=True), "amsgrad"),
        (lambda s: s["param_groups"][0].update(lr=-1.0), "learning rate"),
    ):
        wrong = copy.deepcopy(saved)
        spoil(wrong)
        with pytest.raises(ValueError, match=what):
            optimizer.load_state_dict(wrong)
    now = optimizer.state_dict()
    assert now["param_groups"] == saved["param_groups"]
    assert all(torch.equal(now["state"][i][k], saved["state"][i][k]) for i in saved["state"] for k in saved["state"][i])


def test_memory_stays_within_the_budget(in_child, directory):
    status, out, error = in_child(
        """
        import gc, os, resource, sys, torch, penstock.optim
        def rss():
            with open("/proc/self/statm") as file:
                return int(file.read().split()[1]) * 4096
        p = [torch.nn.Parameter(torch.zeros(1 << 21)) for _ in range(8)]
        for q in p:
            q.grad = torch.full_like(q, 0.5)
        one = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1 << 16))])  # what torch needs for itself
        one.param_groups[0]["params"][0].grad = torch.ones(1 << 16)
        one.step()
        before = rss()
        optimizer = penstock.optim.AdamW(p, state_dir=sys.argv[1], host_memory="8MiB")
        for _ in range(3):
            optimizer.step()
        state = optimizer.state_dict()
        assert optimizer.stats()["drive_bytes"] >= 128 << 20
        print((rss() - before) >> 20)
        """,
        directory,
    )
    assert status == 0, error
    assert int(out) <= 8 + 16, out  # of states of 128 MiB


def test_a_directory_for_the_states_is_made(directory):
    AdamW(parameters(SMALL), state_dir=directory / "new" / "dir")
    assert (directory / "new" / "dir").is_dir()


# What goes wrong.


def test_wrong_arguments_are_refused_by_name(directory):
    p = parameters(SMALL)
    with pytest.raises(ValueError, match="state_dir is missing"):
        AdamW(p)
    (directory / "file").touch()
    with pytest.raises(NotADirectoryError, match="state_dir is no directory"):
        AdamW(p, state_dir=directory / "file")
    with pytest.raises(ValueError, match="two names"):
        AdamW(p, state_dir=directory, nvme_offload_dir=directory)
    for wrong in (dict(host_memory=1 << 20), dict(host_memory="much"), dict(nvme_offload_fraction=1.5), dict(lr=-1.0),
                  dict(betas=(0.9, 1.0)), dict(betas=(0.9,)), dict(eps=-1.0), dict(weight_decay=-0.1), dict(amsgrad=True),
                  dict(capturable=True), dict(differentiable=True), dict(lr=float("nan"))):  # fmt: skip
        with pytest.raises(ValueError):
            AdamW(p, **{"state_dir": directory, **wrong})
    with pytest.raises(RuntimeError, match="foreach"):
        AdamW(p, foreach=True, fused=True, state_dir=directory)
    with pytest.raises(TypeError):
        AdamW(p, lr="fast", state_dir=directory)
    with pytest.raises(ValueError, match="Nesterov"):
        SGD(p, nesterov=True, state_dir=directory)
    with pytest.raises(ValueError):
        LAMB(p, max_coeff=0.001, state_dir=directory)
    with pytest.raises(TypeError, match="float64"):
        AdamW([torch.nn.Parameter(torch.zeros(3).double())], state_dir=directory)
    with pytest.raises(TypeError, match="complex64"):
        AdamW([torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64))], state_dir=directory)
    with pytest.raises(ValueError, match="meta"):
        AdamW([torch.nn.Parameter(torch.zeros(3, device="meta"))], state_dir=directory)
    with pytest.raises(ValueError, match="gaps"):
        AdamW([torch.zeros(8, 8)[:, ::2].requires_grad_()], state_dir=directory)
    with pytest.raises(ValueError, match="empty"):
        AdamW([], state_dir=directory)
    optimizer = AdamW(p, state_dir=directory)
    with pytest.raises(TypeError, match="parameter 0 of group 1"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2).double())]})
    assert len(optimizer.param_groups) == 1
    sgd = SGD(parameters(SMALL), state_dir=directory)
    sgd.param_groups[0]["momentum"] = 0.9
    set_gradients(sgd.param_groups[0]["params"], 0)
    with pytest.raises(ValueError, match="state"):
        sgd.step()


def test_wrong_gradients_change_nothing(directory):
    p = parameters(SMALL)
    optimizer = AdamW(p, state_dir=directory)
    before = clone(p)
    for spoil, error, match in (
        (lambda: setattr(p[4], "grad", p[4].grad.to_sparse()), ValueError, "parameter 4 of group 0"),
        (lambda: setattr(p[4], "data", p[4].data.double()), ValueError, "float64"),
    ):
        set_gradients(p, 0)
        spoil()
        with pytest.raises(error, match=match):
            optimizer.step()
        p[4].grad = None
        p[4].data = before[4].data.clone()
    assert same(p, before) and optimizer.state_dict()["state"] == {}


def test_pickling_copying_forking_and_closing(directory):
    p = parameters(SMALL)
    optimizer = AdamW(p, state_dir=directory)
    train(optimizer, p, 1)
    for way in (pickle.dumps, copy.deepcopy, copy.copy):
        with pytest.raises(TypeError, match="state_dict"):
            way(optimizer)
    pid = os.fork()
    if pid == 0:
        told = 0
        for call in (optimizer.step, optimizer.state_dict, lambda: optimizer.load_state_dict({"state": {}, "param_groups": []})):
            try:
                call()
            except RuntimeError as error:
                told += "forked child" in str(error)
        del optimizer
        gc.collect()
        os._exit(0 if told == 3 else 1)
    assert os.waitpid(pid, 0)[1] == 0
    train(optimizer, p, 1, first=1)
    with optimizer:
        pass
    for call in (optimizer.step, optimizer.state_dict, optimizer.stats):
        with pytest.raises(RuntimeError, match="closed"):
            call()
    optimizer.close()


def test_descriptors_and_files_go(directory):
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        p = parameters(SMALL)
        optimizer = AdamW(p, state_dir=directory, nvme_offload_fraction=1.0)
        train(optimizer, p, 1)
        optimizer.state_dict()
        del optimizer, p
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before and os.listdir(directory) == []


def test_a_killed_process_leaves_nothing(directory):
    child = subprocess.Popen(
        [sys.executable, "-c", f"""
import os, signal, torch, penstock.optim
p = [torch.nn.Parameter(torch.zeros(3_000_000))]
optimizer = penstock.optim.AdamW(p, state_dir={str(directory)!r}, host_memory="2MiB")
p[0].grad = torch.ones(3_000_000)
optimizer.step()
print("stepped", flush=True)
while True:
    optimizer.step()
"""],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert child.stdout.readline() == "stepped\n"
    child.kill()
    child.wait()
    child.stdout.close()
    assert os.listdir(directory) == []


def test_a_full_drive_is_found_at_construction(in_child, directory):
    status, out, error = in_child(
        """
        import errno, resource, sys, torch, penstock.optim
        resource.setrlimit(resource.RLIMIT_FSIZE, (20 << 20, 20 << 20))
        p = [torch.nn.Parameter(torch.zeros(1_000_000))]
        optimizer = penstock.optim.AdamW(p, state_dir=sys.argv[1], host_memory="2MiB")   # 8 MB
        try:
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(4_000_000))]})
        except OSError as failure:
            assert failure.errno == errno.EFBIG, failure
            print("told")
        assert len(optimizer.param_groups) == 1
        p[0].grad = torch.ones(1_000_000)
        optimizer.step()
        try:
            penstock.optim.AdamW([torch.nn.Parameter(torch.zeros(4_000_000))], state_dir=sys.argv[1], host_memory="2MiB")
        except OSError as failure:
            assert failure.errno == errno.EFBIG, failure
            print("told")
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 20 << 20))
        try:
            optimizer.state_dict()
        except OSError as failure:
            print("told")
        resource.setrlimit(resource.RLIMIT_FSIZE, (20 << 20, 20 << 20))
        optimizer.step()   # the copy failed, not the states
        """,
        directory,
    )
    assert (status, out.split()) == (0, ["told"] * 3), error


def shorten(optimizer, nbytes):
    os.truncate(f"/proc/self/fd/{optimizer._core.fileno()}", nbytes)


def test_a_failure_before_anything_was_changed_leaves_the_step_to_be_made_again(directory):
    ours, plain = parameters(MEDIUM), parameters(MEDIUM)
    optimizer = AdamW(ours, state_dir=directory, host_memory=LEAST)
    oracle = AdamW(plain, state_dir=directory, host_memory="64MiB")
    train(optimizer, ours, 1)
    train(oracle, plain, 1)
    saved = copy.deepcopy(optimizer.state_dict())
    size = os.fstat(optimizer._core.fileno()).st_size
    shorten(optimizer, 0)
    set_gradients(ours, 1)
    before = clone(ours)
    with pytest.raises(penstock.ShortFileError) as caught:
        optimizer.step()
    assert str(directory) in caught.value.filename and caught.value.offset == 0 and caught.value.length > 0
    assert same(ours, before)
    os.truncate(f"/proc/self/fd/{optimizer._core.fileno()}", size)  # as if the drive were back
    optimizer.load_state_dict(saved)
    optimizer.step()
    train(oracle, plain, 1, first=1)
    assert same(ours, plain)


def test_a_failure_in_the_middle_breaks_the_optimizer_until_a_checkpoint_is_loaded(directory):
    ours, plain = parameters(MEDIUM), parameters(MEDIUM)
    optimizer = AdamW(ours, state_dir=directory, host_memory=LEAST)
    oracle = AdamW(plain, state_dir=directory, host_memory="64MiB")
    train(optimizer, ours, 2)
    train(oracle, plain, 2)
    saved = copy.deepcopy({"model": [p.detach() for p in ours], "optimizer": optimizer.state_dict()})
    size = os.fstat(optimizer._core.fileno()).st_size
    shorten(optimizer, size // 2 // 4096 * 4096)
    set_gradients(ours, 2)
    with pytest.raises(penstock.ShortFileError) as caught:
        optimizer.step()
    assert caught.value.errno == errno.ENODATA and caught.value.offset > 0
    for call in (optimizer.step, optimizer.state_dict, lambda: optimizer.add_param_group({"params": parameters(SMALL)})):
        with pytest.raises(RuntimeError, match="load a checkpoint"):
            call()
    with torch.no_grad():
        for p, s in zip(ours, saved["model"]):
            p.copy_(s)
    optimizer.load_state_dict(saved["optimizer"])
    train(optimizer, ours, 2, first=2)
    train(oracle, plain, 2, first=2)
    assert same(ours, plain)


def test_an_interrupt_does_not_part_a_step_from_its_count(in_child, directory):
    """Ctrl-C while the extension works comes up when it returns: the step has been made, and is counted."""
    status, out, error = in_child(
        """
        import os, signal, sys, torch, penstock.optim
        p = [torch.nn.Parameter(torch.ones(3_000_000))]
        q = [torch.nn.Parameter(torch.ones(3_000_000))]
        optimizer = penstock.optim.AdamW(p, state_dir=sys.argv[1], host_memory="2MiB")
        other = penstock.optim.AdamW(q, state_dir=sys.argv[1], nvme_offload_fraction=0.0)
        p[0].grad = q[0].grad = torch.ones(3_000_000)
        core = optimizer._core
        class Interrupted:
            def __getattr__(self, name):
                return getattr(core, name)
            def step(self, *arguments):
                core.step(*arguments)
                os.kill(os.getpid(), signal.SIGINT)
        interrupts = 0
        for _ in range(4):
            optimizer._core = Interrupted()
            try:
                optimizer.step()
            except KeyboardInterrupt:
                interrupts += 1
            optimizer._core = core
            other.step()
        assert interrupts == 4
        optimizer.step(), other.step()
        assert torch.equal(p[0], q[0])
        assert optimizer.state_dict()["state"][0]["step"] == 5
        print("right")
        """,
        directory,
    )
    assert (status, out.strip()) == (0, "right"), error


def test_a_load_that_was_interrupted_is_made_again(directory, monkeypatch):
    p = parameters(SMALL)
    optimizer = AdamW(p, state_dir=directory)
    train(optimizer, p, 1)
    saved = copy.deepcopy(optimizer.state_dict())

    def interrupted(self, taken):
        raise KeyboardInterrupt

    monkeypatch.setattr(AdamW, "_set_states", interrupted)
    with pytest.raises(KeyboardInterrupt):
        optimizer.load_state_dict(saved)
    monkeypatch.undo()
    for call in (optimizer.step, optimizer.state_dict):
        with pytest.raises(RuntimeError, match="make it again"):
            call()
    optimizer.load_state_dict(saved)
    assert same([s["exp_avg"] for s in optimizer.state_dict()["state"].values()], [s["exp_avg"] for s in saved["state"].values()])


def test_a_failing_write_breaks_the_optimizer(in_child, directory):
    status, out, error = in_child(
        """
        import errno, os, resource, sys, torch, penstock.optim
        p = [torch.nn.Parameter(torch.zeros(3_000_000))]
        optimizer = penstock.optim.AdamW(p, state_dir=sys.argv[1], host_memory="2MiB")
        p[0].grad = torch.ones(3_000_000)
        optimizer.step()
        resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, 64 << 20))
        try:
            optimizer.step()
        except OSError as failure:
            assert failure.errno == errno.EFBIG and failure.offset >= 0 and failure.filename, failure
            print("told")
        try:
            optimizer.step()
        except RuntimeError as failure:
            assert "load a checkpoint" in str(failure)
            print("told")
        """,
        directory,
    )
    assert (status, out.split()) == (0, ["told"] * 2), error


def test_optim_is_there_without_an_import_of_its_own(in_child):
    status, out, error = in_child("import penstock; print(penstock.optim.AdamW.__name__)")
    assert (status, out.strip()) == (0, "AdamW"), error
