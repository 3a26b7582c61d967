"""DeepSpeed's CPU optimizers: torch.optim's results, and what hurt their users."""

import copy
import json
import os
import pickle

import pytest
import torch

from penstock.ops.adagrad import DeepSpeedCPUAdagrad
from penstock.ops.adam import DeepSpeedCPUAdam
from penstock.ops.lion import DeepSpeedCPULion

GOLDEN = os.path.join(os.path.dirname(__file__), "..", "..", "tests", "golden", "optimizers.json")
SIZES = [(1,), (7,), (255,), (3, 5, 7), (100, 129), (40_000,)]


class Lion(torch.optim.Optimizer):
    """Lion by its paper, in torch's own operations."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                beta1, beta2 = group["betas"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_((m * beta1 + p.grad * (1 - beta1)).sign_(), alpha=-group["lr"])
                m.mul_(beta2).add_(p.grad, alpha=1 - beta2)


def parameters(dtype=torch.float32, seed=0, sizes=SIZES):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for size in sizes]


def gradients(params, step, dtype=None):
    generator = torch.Generator().manual_seed(1000 + step)
    return [(torch.randn(p.shape, generator=generator) * 0.3).to(dtype or p.dtype) for p in params]


def train(optimizer, params, steps=20, dtype=None):
    for step in range(steps):
        for p, g in zip(params, gradients(params, step)):
            p.grad = g.to(dtype or p.dtype)
        optimizer.step()


def close(ours, oracle, lr, steps=20):
    """Each of the steps rounds p (half a unit in its last place) and an update of at most a few lr (a few of its units)."""
    unit = 2.0**-24
    for a, b in zip(ours, oracle):
        bound = steps * unit * (b.abs().double() * 2 + 64 * lr)
        assert ((a.double() - b.double()).abs() <= bound).all()


PAIRS = {
    "adamw": (
        lambda p: DeepSpeedCPUAdam(p, lr=1e-2, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, foreach=False),
    ),
    "adam": (
        lambda p: DeepSpeedCPUAdam(p, lr=1e-2, weight_decay=0.1, adamw_mode=False, betas=(0.8, 0.99), eps=1e-6),
        lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1, betas=(0.8, 0.99), eps=1e-6),
    ),
    "adagrad": (
        lambda p: DeepSpeedCPUAdagrad(p, lr=1e-2, weight_decay=0.1),
        lambda p: torch.optim.Adagrad(p, lr=1e-2, weight_decay=0.1),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_fp32_is_torchs(name):
    ours, oracle = parameters(), [torch.nn.Parameter(p.detach().double()) for p in parameters()]
    plain = parameters()
    train(PAIRS[name][0](ours), ours)
    train(PAIRS[name][1](plain), plain)
    optimizer = PAIRS[name][1](oracle)
    for step in range(20):
        for p, g in zip(oracle, gradients(ours, step)):
            p.grad = g.double()
        optimizer.step()
    if name == "adam":
        # g + wd * p cancels, and m / sqrt(v) of the first steps has that cancellation's relative error: no bound in units.
        worst = [max((p.double() - o).abs().max() for p, o in zip(found, oracle)) for found in (ours, plain)]
        assert worst[0] <= 2 * worst[1]
    else:
        close(ours, oracle, 1e-2)
        close(ours, plain, 1e-2)


def test_lion_is_its_papers():
    ours, plain = parameters(), [torch.nn.Parameter(p.detach().double()) for p in parameters()]
    train(DeepSpeedCPULion(ours, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1), ours)
    optimizer = Lion(plain, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
    for step in range(20):
        for p, g in zip(plain, gradients(ours, step)):
            p.grad = g.double()
        optimizer.step()
    close(ours, plain, 1e-3)


def test_without_bias_correction():
    ours = [torch.nn.Parameter(torch.tensor([1.0, -2.0]))]
    ours[0].grad = torch.tensor([0.5, 0.25])
    DeepSpeedCPUAdam(ours, lr=0.1, bias_correction=False).step()
    g = torch.tensor([0.5, 0.25])
    expected = torch.tensor([1.0, -2.0]) - 0.1 * (0.1 * g) / ((0.001 * g * g).sqrt() + 1e-8)
    assert torch.allclose(ours[0].detach(), expected, rtol=1e-6)


def golden_cases():
    with open(GOLDEN) as file:
        golden = json.load(file)
    for case in golden["cases"]:
        config = case["config"]["optimizer"]
        if config["type"] in ("Adam", "AdamW", "Adagrad"):
            yield golden, config["type"], dict(config["params"]), case["weights"]


@pytest.mark.skipif(not os.path.exists(GOLDEN), reason="needs tests/golden of the repository")
def test_deepspeeds_golden_updates():
    count = 0
    for golden, kind, params, weights in golden_cases():
        p = torch.nn.Parameter(torch.tensor(golden["start"]))
        if params.pop("torch_adam", False):
            params.setdefault("weight_decay", 0.01)  # torch's own default
        adamw = params.pop("adam_w_mode", True)
        optimizer = DeepSpeedCPUAdagrad([p], **params) if kind == "Adagrad" else DeepSpeedCPUAdam([p], adamw_mode=adamw, **params)
        for gradient, expected in zip(golden["gradients"], weights):
            p.grad = torch.tensor(gradient)
            optimizer.step()
            assert torch.allclose(p.detach().double(), torch.tensor(expected, dtype=torch.float64), rtol=2e-6, atol=1e-8), (kind, params)
        count += 1
    assert count >= 6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", PAIRS)
def test_sixteen_bit_parameters_are_computed_in_fp32_and_rounded_once_a_step(name, dtype):
    ours, plain = parameters(dtype), parameters(dtype)
    optimizer = PAIRS[name][0](ours)
    masters = [torch.nn.Parameter(p.detach().float()) for p in plain]
    oracle = PAIRS[name][1](masters)
    for step in range(20):
        for p, m, g in zip(ours, masters, gradients(ours, step)):
            p.grad, m.grad = g, g.float()
        optimizer.step()
        oracle.step()
        for m in masters:
            m.data.copy_(m.to(dtype).float())
        if step == 0:
            for p, m in zip(ours, masters):
                # A value within an fp32 rounding of the middle may go either way.
                assert ((p.float() - m).abs() <= torch.finfo(dtype).eps * m.abs()).all()
                assert (p.float() != m).float().mean() < 1e-2
    state = optimizer.state[ours[0]]
    assert all(value.dtype == torch.float32 for key, value in state.items() if key != "step")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_states_in_the_parameters_type(dtype):
    ours = parameters(dtype)
    optimizer = DeepSpeedCPUAdam(ours, lr=1e-2, fp32_optimizer_states=False)
    whole = parameters(dtype)
    other = DeepSpeedCPUAdam(whole, lr=1e-2)
    train(optimizer, ours)
    train(other, whole)
    for p, q in zip(ours, whole):
        assert optimizer.state[p]["exp_avg"].dtype == optimizer.state[p]["exp_avg_sq"].dtype == dtype
        assert (p - q).float().abs().max() < 0.1
        assert (p - q).float().abs().mean() < 4e-3
        m = other.state[q]["exp_avg"]
        assert torch.allclose(optimizer.state[p]["exp_avg"].float(), m, atol=float(m.abs().max()) * 0.05 + 1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_may_have_another_type(dtype):
    """DeepSpeed reads them as the parameter's type, beyond their end."""
    exact = parameters()
    ours = parameters()
    first, second = DeepSpeedCPUAdam(exact), DeepSpeedCPUAdam(ours)
    for p, q, g in zip(exact, ours, gradients(ours, 0)):
        p.grad = g.to(dtype).float()
        if hasattr(q, "grad_dtype"):
            q.grad_dtype = None
        try:
            q.grad = g.to(dtype)
        except RuntimeError:
            pytest.skip("this torch wants gradients of the parameter's type")
    first.step()
    second.step()
    assert all(torch.equal(p, q) for p, q in zip(exact, ours))


def test_any_layout_is_updated_in_its_place():
    """DeepSpeed updates a copy of such parameters, and loses it."""
    base = torch.randn(8, 3, 5, 5)
    one = torch.nn.Parameter(base.clone())
    two = torch.nn.Parameter(base.clone().to(memory_format=torch.channels_last))
    three = torch.nn.Parameter(base.clone().permute(3, 1, 0, 2))
    optimizer = DeepSpeedCPUAdam([one, two, three], lr=0.1)
    for step in range(3):
        g = torch.randn(8, 3, 5, 5)
        one.grad, two.grad, three.grad = g, g.clone(), g.permute(3, 1, 0, 2).contiguous()
        optimizer.step()
    assert torch.equal(one, two) and torch.equal(one, three.permute(2, 1, 3, 0))
    assert not torch.equal(one, base)
    with pytest.raises(ValueError, match="gaps"):
        DeepSpeedCPUAdam([torch.nn.Parameter(torch.zeros(8, 8))[:, ::2].detach().requires_grad_()])


def test_thread_counts_change_no_bit():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = parameters(sizes=[(300_001,)])
        train(DeepSpeedCPUAdam(one), one, 2)
        torch.set_num_threads(3)
        three = parameters(sizes=[(300_001,)])
        train(DeepSpeedCPUAdam(three), three, 2)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(one[0], three[0])


def test_a_forked_child_goes_on():
    torch.set_num_threads(2)
    p = parameters(sizes=[(100_000,)])
    optimizer = DeepSpeedCPUAdam(p)
    train(optimizer, p, 1)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        optimizer.step()
        os.write(write, b"done")
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0 and os.read(read, 4) == b"done"
    os.close(read), os.close(write)


def test_sparse_gradients_of_adagrad():
    torch.manual_seed(1)
    ours = torch.nn.Embedding(50, 6, sparse=True)
    plain = copy.deepcopy(ours)
    first = DeepSpeedCPUAdagrad(ours.parameters(), lr=0.1)
    second = torch.optim.Adagrad(plain.parameters(), lr=0.1)
    for step in range(5):
        index = torch.randint(0, 50, (12,))
        for model, optimizer in ((ours, first), (plain, second)):
            optimizer.zero_grad()
            (model(index) ** 2).sum().backward()
            optimizer.step()
    assert torch.allclose(ours.weight, plain.weight, rtol=1e-6, atol=1e-7)
    with pytest.raises(ValueError, match="weight_decay"):
        first.param_groups[0]["weight_decay"] = 0.1
        first.step()
    ours.weight.grad = ours.weight.grad.to_sparse() if not ours.weight.grad.is_sparse else ours.weight.grad
    with pytest.raises(ValueError, match="sparse=False"):
        DeepSpeedCPUAdam(ours.parameters()).step()


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_copies_in_sixteen_bits(kind):
    p = parameters()
    copies = [torch.zeros(q.shape, dtype=kind) for q in p]
    optimizer = DeepSpeedCPUAdam(p)
    for q, g in zip(p, gradients(p, 0)):
        q.grad = g
    optimizer.step(fp16_param_groups=[copies])
    assert all(torch.equal(c, q.detach().to(kind)) for c, q in zip(copies, p))


def test_states_are_deepspeeds_and_come_from_torch():
    p = parameters()
    optimizer = DeepSpeedCPUAdam(p, lr=1e-2)
    train(optimizer, p, 3)
    state = optimizer.state[p[0]]
    assert set(state) == {"step", "exp_avg", "exp_avg_sq"} and state["step"] == 3 and isinstance(state["step"], int)
    q = parameters()
    torch_optimizer = torch.optim.AdamW(q, lr=1e-2, weight_decay=0.0)
    train(torch_optimizer, q, 3)
    r = [torch.nn.Parameter(x.detach().clone()) for x in q]
    ours = DeepSpeedCPUAdam(r, lr=1.0)
    ours.load_state_dict(torch_optimizer.state_dict())
    assert ours.param_groups[0]["lr"] == 1e-2
    train(torch_optimizer, q, 3)
    train(ours, r, 3)
    close(r, q, 1e-2)


def test_bfloat16_parameters_keep_fp32_states_through_a_state_dict():
    p = parameters(torch.bfloat16)
    optimizer = DeepSpeedCPUAdam(p)
    train(optimizer, p, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    weights = [q.detach().clone() for q in p]
    train(optimizer, p, 2)
    r = [torch.nn.Parameter(w) for w in weights]
    again = DeepSpeedCPUAdam(r)
    again.load_state_dict(saved)
    assert again.state[r[0]]["exp_avg"].dtype == torch.float32
    train(again, r, 2)
    assert all(torch.equal(a, b) for a, b in zip(p, r))
    broken = copy.deepcopy(saved)
    broken["state"][0]["exp_avg"] = torch.zeros(3)
    before = copy.deepcopy(again.state_dict())
    with pytest.raises(ValueError, match="shape"):
        again.load_state_dict(broken)
    assert torch.equal(again.state[r[1]]["exp_avg"], before["state"][1]["exp_avg"])


def test_it_pickles_whole():
    p = parameters()
    optimizer = DeepSpeedCPUAdam(p, adamw_mode=False, weight_decay=0.1, fp32_optimizer_states=False)
    train(optimizer, p, 2)
    again = pickle.loads(pickle.dumps(optimizer))
    assert again.adam_w_mode is False and again.fp32_optimizer_states is False
    q = again.param_groups[0]["params"]
    train(optimizer, p, 2)
    train(again, q, 2)
    assert all(torch.equal(a, b) for a, b in zip(p, q))


def test_schedulers_closures_and_groups():
    p = parameters()
    optimizer = DeepSpeedCPUAdam([{"params": p[:2], "lr": 0.1}, {"params": p[2:]}], lr=0.2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def closure():
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = sum((q**2).sum() for q in p)
        loss.backward()
        return loss

    first = optimizer.step(closure)
    scheduler.step()
    second = optimizer.step(closure)
    assert second < first and optimizer.param_groups[0]["lr"] == 0.05
    assert p[0]._version > 0


def test_a_changed_parameter_is_seen_by_autograd():
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = DeepSpeedCPUAdam([p])
    loss = (p**2).sum()
    p.grad = torch.ones(3)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_nan_and_infinity_go_where_torch_lets_them_go():
    for value in (float("nan"), float("inf")):
        ours, plain = parameters(sizes=[(5,)]), parameters(sizes=[(5,)])
        for p, optimizer in ((ours[0], DeepSpeedCPUAdam(ours)), (plain[0], torch.optim.AdamW(plain, weight_decay=0))):
            p.grad = torch.ones(5)
            p.grad[2] = value
            optimizer.step()
        assert torch.equal(ours[0].isnan(), plain[0].isnan())


def test_wrong_arguments_raise():
    p = parameters()
    for wrong in (dict(lr=-1), dict(betas=(1.0, 0.9)), dict(betas=0.9), dict(eps=-1), dict(weight_decay=-0.1), dict(amsgrad=True), dict(lr=float("nan"))):
        with pytest.raises(ValueError):
            DeepSpeedCPUAdam(p, **wrong)
    for wrong in (dict(adamw_mode="false"), dict(fp32_optimizer_states=1), dict(bias_correction="no"), dict(lr="1")):
        with pytest.raises(TypeError):
            DeepSpeedCPUAdam(p, **wrong)
    with pytest.raises(TypeError, match="float64"):
        DeepSpeedCPUAdam([torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))])
    with pytest.raises(TypeError, match="complex64"):
        DeepSpeedCPULion([torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64))])
    with pytest.raises(ValueError, match="meta"):
        DeepSpeedCPUAdagrad([torch.nn.Parameter(torch.zeros(3, device="meta"))])
    optimizer = DeepSpeedCPUAdam(p)
    with pytest.raises(TypeError, match="parameter 0 of group 1"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2).double())]})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(ValueError):
        DeepSpeedCPUAdam([])


def test_nothing_changes_when_one_gradient_is_refused():
    p = parameters()
    before = [q.detach().clone() for q in p]
    optimizer = DeepSpeedCPUAdam(p)
    for q, g in zip(p, gradients(p, 0)):
        q.grad = g
    p[-1].grad = p[-1].grad.to_sparse()
    with pytest.raises(ValueError, match="parameter 5 of group 0"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(p, before)) and not optimizer.state[p[0]]


def test_empty_parameters_are_no_trouble():
    p = [torch.nn.Parameter(torch.empty(0, 4)), torch.nn.Parameter(torch.ones(2))]
    optimizer = DeepSpeedCPUAdam(p)
    for q in p:
        q.grad = torch.ones_like(q)
    optimizer.step()
    assert (p[1] < 1).all()


def test_a_subgroup_steps_and_goes_back():
    """SuperOffload's: one parameter at a time, its states kept under the subgroup's number."""
    torch.manual_seed(0)
    value = torch.randn(300)
    gradients = [torch.randn(300) for _ in range(3)]
    oracle = torch.nn.Parameter(value.clone())
    expected = torch.optim.AdamW([oracle], lr=1e-2, weight_decay=0.1)
    ours = DeepSpeedCPUAdam([torch.nn.Parameter(torch.zeros(1))], lr=1e-2, weight_decay=0.1)
    parameter = torch.nn.Parameter(value.clone())
    kept = []
    for gradient in gradients:
        oracle.grad = gradient.clone()
        expected.step()
        parameter = torch.nn.Parameter(parameter.data)
        parameter.grad = gradient.clone()
        ours.param_groups[0]["params"] = [parameter]
        kept.append((parameter.detach().clone(), [ours.state[7][key].clone() if ours.state[7] else torch.zeros(300) for key in ("exp_avg", "exp_avg_sq")]))
        ours.step_subgroup(7)
        torch.testing.assert_close(parameter.data, oracle.data, atol=1e-6, rtol=1e-5)
    assert ours.state[7]["step"] == 3
    for gradient, (before, moments) in zip(reversed(gradients), reversed(kept)):
        parameter.grad = gradient.clone()
        ours.rollback_subgroup(7)
        torch.testing.assert_close(parameter.data, before, atol=2e-4, rtol=1e-3)
        for key, moment in zip(("exp_avg", "exp_avg_sq"), moments):
            torch.testing.assert_close(ours.state[7][key], moment, atol=2e-4, rtol=1e-3)
    assert ours.state[7]["step"] == 0
    with pytest.raises(RuntimeError, match="step count is 0"):
        ours.rollback_subgroup(7)
    with pytest.raises(RuntimeError, match="sub_group_id 8 as it has not been initialized"):
        ours.rollback_subgroup(8)
    assert ours.step_subgroup(9, closure=lambda: 3.0) == 3.0
