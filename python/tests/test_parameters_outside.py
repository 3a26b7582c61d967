"""Parameters that an engine has, as programs read them outside of its passes: a copy is one of the true value, or refused."""

import copy
import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

import penstock  # noqa: E402
import penstock.deepspeed as deepspeed  # noqa: E402
from engine_models import all_names, batches, make, net, plain_losses, step  # noqa: E402
from torch import nn  # noqa: E402


def begun(tmp_path, steps=2):
    config = {
        "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}},
        "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": str(tmp_path)}},
    }  # fmt: skip
    model = net(tied=False)
    engine = deepspeed.initialize(model=model, config=config)[0]
    for batch in batches(steps):
        step(engine, batch)
    _, trained = plain_losses(net(tied=False), all_names(model), [[batch] for batch in batches(steps)])
    return engine, dict(trained.named_parameters())


# As LLaVA saves its adapters, and with ignore_status those that it does not warn of.
def llavas_maybe_zero_3(param, ignore_status=False):
    from deepspeed import zero
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    if hasattr(param, "ds_id"):
        if param.ds_status == ZeroParamStatus.NOT_AVAILABLE and not ignore_status:
            pass  # it warns
        with zero.GatheredParameters([param]):
            param = param.data.detach().cpu().clone()
    else:
        param = param.detach().cpu().clone()
    return param


# As FastChat does, which is sure of it.
def fastchats_maybe_zero_3(param):
    from deepspeed import zero
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    if hasattr(param, "ds_id"):
        assert param.ds_status == ZeroParamStatus.NOT_AVAILABLE
        with zero.GatheredParameters([param]):
            param = param.data.detach().cpu().clone()
    else:
        param = param.detach().cpu().clone()
    return param


# As OpenRLHF writes a model.
def openrlhfs_state(model):
    import deepspeed as by_name
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    state = {}
    for name, value in model.named_parameters():
        fetched = [p for p in [value] if hasattr(p, "ds_id") and p.ds_status == ZeroParamStatus.NOT_AVAILABLE]
        with by_name.zero.GatheredParameters(fetched, enabled=len(fetched) > 0):
            state[name] = value.data.cpu().clone()
    return state


def test_the_saving_idioms_of_others_save_true_values(tmp_path):
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    engine, expected = begun(tmp_path)
    named = dict(engine.module.named_parameters())
    assert openrlhfs_state(engine.module).keys() == expected.keys()
    for save in (llavas_maybe_zero_3, fastchats_maybe_zero_3):
        for name, parameter in named.items():
            torch.testing.assert_close(save(parameter), expected[name].detach(), atol=2e-5, rtol=0)
    for name, value in openrlhfs_state(engine.module).items():
        torch.testing.assert_close(value, expected[name].detach(), atol=2e-5, rtol=0)
    weight = named["layers.0.up.weight"]
    assert weight.ds_shape == weight.shape and weight.ds_numel == weight.numel() and isinstance(weight.ds_id, int)
    assert len({each.ds_id for each in named.values()}) == len(named)
    assert weight.ds_status is ZeroParamStatus.NOT_AVAILABLE
    torch.testing.assert_close(weight.ds_tensor.view(weight.shape), expected["layers.0.up.weight"].detach(), atol=2e-5, rtol=0)
    with deepspeed.zero.GatheredParameters(list(named.values())):
        assert {each.ds_status for each in named.values()} == {ZeroParamStatus.AVAILABLE}
        assert all(bool(each.isfinite().all()) for each in named.values())
    assert weight.ds_status is ZeroParamStatus.NOT_AVAILABLE
    step(engine, batches(1)[0])
    engine.destroy()
    assert weight.ds_status is ZeroParamStatus.AVAILABLE  # the model outlives its engine
    assert all(bool(each.isfinite().all()) for each in named.values())


# As FastChat and LLaVA end a training.
def fastchats_save(engine, model, state, output_dir):
    save_16bit = engine.zero_gather_16bit_weights_on_model_save()
    assert save_16bit
    if engine.global_rank == 0:
        model.save_pretrained(output_dir, state_dict={name: value.cpu() for name, value in state.items()})


def test_the_ways_to_a_whole_model_write_true_values(tmp_path):
    """save_16bit_model, the consolidated state, save_pretrained, and zero_to_fp32 in its three forms, the script beside a checkpoint too."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    engine, expected = begun(tmp_path / "nvme")

    def check(state):
        assert set(state) == set(expected)
        for name, value in state.items():
            torch.testing.assert_close(value, expected[name].detach(), atol=2e-5, rtol=0)

    check(engine._zero3_consolidated_16bit_state_dict())
    check(engine.module_state_dict())
    assert engine.save_16bit_model(tmp_path / "half", "weights.bin")
    check(torch.load(tmp_path / "half" / "weights.bin"))
    saved = {}
    engine.module.save_pretrained = lambda directory, state_dict: saved.update(state_dict)
    fastchats_save(engine, engine.module, engine._zero3_consolidated_16bit_state_dict(), tmp_path)
    check(saved)
    engine.save_checkpoint(tmp_path / "kept")
    check(get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "kept")))
    beside = tmp_path / "kept" / "zero_to_fp32.py"
    before = beside.stat()
    assert before.st_mode & 0o111
    step(engine, batches(1)[0])
    engine.save_checkpoint(tmp_path / "kept")
    assert beside.stat().st_ino == before.st_ino
    engine.destroy()
    moved = (tmp_path / "kept").rename(tmp_path / "moved")

    def alone(*arguments):
        return subprocess.run(
            [sys.executable, "zero_to_fp32.py", *arguments], cwd=moved, capture_output=True, text=True, timeout=300,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip

    ran = alone(".", "out", "-t", "global_step2")
    assert ran.returncode == 0, ran.stderr
    check(torch.load(moved / "out" / "pytorch_model.bin"))
    ran = alone(".", "out.bin", "-t", "global_step7")
    assert ran.returncode == 1 and ran.stderr.startswith("zero_to_fp32.py: ") and len(ran.stderr.splitlines()) == 1


def test_a_copy_outside_is_a_copy_of_the_value(tmp_path):
    model = net()
    with make(model, tmp_path) as engine:
        for batch in batches(2):
            step(engine, batch)
        weight, expected = model.layers[0].up.weight, engine.state_dict()["layers.0.up.weight"].clone()
        assert isinstance(weight, nn.Parameter) and not hasattr(weight, "ds_id")
        with torch.no_grad():
            copies = [weight.clone(), weight.cpu(), weight.to(torch.float64), weight.float(), weight.double()]
            copies += [torch.tensor(weight.tolist()), torch.from_numpy(weight.detach().numpy())]
        copies += [weight.detach(), weight.detach().cpu().clone(), weight.data.clone(), copy.deepcopy(weight).detach()]
        for each in copies:
            assert torch.equal(each.to(torch.float32), expected)
        for graph in (weight.clone, weight.cpu, weight.float):
            assert torch.equal(graph(), expected)
            with pytest.raises(RuntimeError, match=r"up\.weight is used outside.*torch\.no_grad"):
                graph().sum().backward()
        torch.save({"weight": weight.detach(), "other": weight.data}, tmp_path / "saved.pt")
        assert b"penstock" not in (tmp_path / "saved.pt").read_bytes()
        assert torch.equal(torch.load(tmp_path / "saved.pt")["weight"], expected) and type(weight.detach() + 0) is torch.Tensor
        # Within gathered of others too.
        with engine.gathered([model.norm.weight]):
            assert torch.equal(weight.detach(), expected) and model.norm.weight.isfinite().all()
        assert torch.equal(model.layers[0].state_dict()["up.weight"], expected)
        # In a step there is no value to be read.
        loss = engine(**batches(1)[0])
        with pytest.raises(RuntimeError, match="between step"):
            weight.detach()
        engine.backward(loss)
        engine.step()
        assert not torch.equal(weight.detach(), expected)
        last = weight.detach()
    with pytest.raises(RuntimeError, match="closed"):
        weight.detach().clone()
    with make(net(), tmp_path, resume=True) as engine:
        step(engine, batches(1)[0])
    # A closed engine's model goes on, from what is on the drive.
    other = net()
    with make(other, tmp_path / "more") as engine:
        step(engine, batches(1)[0])
        last = other.norm.weight.detach()
    with make(other, tmp_path / "more", resume=True, optimizer=torch.optim.AdamW(other.parameters(), lr=1e-2)) as engine:
        engine.eval()
        engine(**batches(1)[0])
        assert torch.equal(other.norm.weight.detach(), last)


# What programs make of a parameter, or of several.
READS = {
    "stack": lambda weight: torch.stack([weight, weight]),
    "cat of views": lambda weight: torch.cat([weight.view(-1), weight.flatten()]),
    "parameters_to_vector": lambda weight: nn.utils.parameters_to_vector([weight, weight]),
    "contiguous": lambda weight: weight.contiguous(),
    "copy_": lambda weight: torch.empty_like(weight).copy_(weight),
    "float": lambda weight: weight.float(),
    "product": lambda weight: 1 * weight * 1,
    "row by row": lambda weight: torch.stack(list(weight)),
    "operand": lambda weight: nn.functional.linear(torch.ones(1, weight.shape[1]), weight),
    "norms": lambda weight: torch.stack(torch._foreach_norm([weight, weight])),
    "norm": lambda weight: weight.norm(),
    "lerp": lambda weight: torch.zeros(weight.shape).lerp_(weight, 0.5),
    "out": lambda weight: torch.mul(weight, 2, out=torch.empty(0)),
    "module": lambda weight: nn.utils.stateless.functional_call(nn.Linear(32, 64), {"weight": weight}, torch.ones(1, 32)),
    "function": lambda weight: type("Twice", (torch.autograd.Function,), {"forward": staticmethod(lambda _, x: x * 2)}).apply(weight),
    "transposed": lambda weight: weight.T @ weight.mT.T,
}


@pytest.mark.parametrize("how", READS)
def test_whatever_reads_a_parameter_outside_has_its_value_or_is_refused_by_name(tmp_path, how):
    model = net(tied=False)
    with make(model, tmp_path) as engine:
        step(engine, batches(1)[0])
        weight, value = model.layers[0].up.weight, engine.state_dict()["layers.0.up.weight"].clone()
        with torch.no_grad():
            torch.manual_seed(0)
            found = READS[how](weight)
            torch.manual_seed(0)
            assert torch.equal(found, READS[how](nn.Parameter(value)))
        if how not in ("function", "lerp", "out", "norms"):  # of which torch refuses lerp and out itself, and an older one norms
            torch.manual_seed(0)
            found = READS[how](weight)
            torch.manual_seed(0)
            torch.testing.assert_close(found.detach(), READS[how](nn.Parameter(value)).detach(), rtol=0, atol=0)
            with pytest.raises(RuntimeError, match=r"layers\.0\.up\.weight is used outside.*torch\.no_grad"):
                found.sum().backward()
        # Comparisons have no graph.
        assert bool((weight == value).all()) and not bool(weight.isnan().any()) and weight.tolist() == value.tolist()
        # In a step there is none to be read.
        loss = engine(**batches(1)[0])
        with torch.no_grad(), pytest.raises(RuntimeError, match=r"a step is open: layers\.0\.up\.weight"):
            READS[how](weight)
        engine.backward(loss)
        engine.step()


# By name: what torch computes of a weight, in C++ that asks no tensor's class unless it is made to.
UNASKED = {
    "vmap": lambda weight: torch.vmap(lambda row: row.sum())(weight),
    "vmap's other operand": lambda weight: torch.vmap(lambda x: (x * weight).sum())(torch.ones(3, *weight.shape)),
    "grad": lambda weight: torch.func.grad(lambda w: w.pow(3).sum())(weight),
    "grad in a dictionary": lambda weight: torch.func.grad(lambda of: of["w"].pow(3).sum())({"w": weight})["w"],
    "grad of another": lambda weight: torch.func.grad(lambda x: (x * weight).sum())(torch.tensor(1.0)),
    "vjp": lambda weight: torch.func.vjp(lambda w: w.pow(3).sum(), weight)[1](torch.tensor(1.0))[0],
    "jvp": lambda weight: torch.func.jvp(lambda w: w.pow(3).sum(), (weight,), (torch.ones(weight.shape),))[1],
    "jacrev": lambda weight: torch.func.jacrev(lambda w: w.pow(3).sum(0))(weight),
    "jacfwd": lambda weight: torch.func.jacfwd(lambda w: w[:2, :2].pow(3).sum())(weight),
    "script": lambda weight: torch.jit.script(nn.functional.relu)(weight),
    "script's keyword": lambda weight: torch.jit.script(nn.functional.relu)(input=weight),
    "dlpack": lambda weight: torch.from_dlpack(torch.utils.dlpack.to_dlpack(weight)),
}


@pytest.mark.parametrize("how", UNASKED)
def test_what_asks_no_tensors_class_has_the_value_or_is_refused_by_name(tmp_path, how):
    if how not in ("script", "script's keyword", "dlpack") and not hasattr(torch, "func"):
        pytest.skip("this torch has no torch.func")
    model = net(tied=False)
    with make(model, tmp_path) as engine:
        step(engine, batches(1)[0])
        weight, value = model.layers[0].up.weight, engine.state_dict()["layers.0.up.weight"].clone()
        expected = UNASKED[how](value)
        with torch.no_grad():
            assert torch.equal(UNASKED[how](weight), expected)
        if how != "dlpack":
            found = UNASKED[how](weight)
            assert torch.equal(found.detach(), expected)
            if found.requires_grad:
                with pytest.raises(RuntimeError, match=r"layers\.0\.up\.weight is used outside.*torch\.no_grad"):
                    found.sum().backward()
        loss = engine(**batches(1)[0])
        # Within grad and its kin a gradient is wanted even under no_grad.
        with torch.no_grad(), pytest.raises(RuntimeError, match=r"a step is open: layers\.0\.up\.weight|layers\.0\.up\.weight is used outside"):
            UNASKED[how](weight)
        engine.backward(loss)
        engine.step()
        assert torch.equal(UNASKED[how](value), expected)  # others' tensors are as they were


def test_a_gradient_of_the_programs_own_is_refused_by_name_and_none_is_none(tmp_path):
    model = net(tied=False)
    with make(model, tmp_path) as engine:
        step(engine, batches(1)[0])
        weight = model.layers[0].up.weight

        def refused():
            with pytest.raises(RuntimeError, match=r"layers\.0\.up\.weight is given a gradient, which would count for nothing.*register_hook"):
                weight.grad = torch.ones(weight.shape)
            weight.grad = None
            assert weight.grad is None

        refused()
        loss = engine(**batches(1)[0])
        refused()
        engine.backward(loss)
        refused()
        engine.step()
        # As the message says.
        value = engine.state_dict()["layers.0.up.weight"].clone()
        handle = weight.register_hook(lambda gradient: gradient * float("nan"))
        engine.backward(engine(**batches(1)[0]))
        engine.step()
        assert engine.last_step["skipped"] and torch.equal(engine.state_dict()["layers.0.up.weight"], value)
        handle.remove()
        step(engine, batches(1)[0])
        assert not engine.last_step["skipped"]


@pytest.mark.skipif(not hasattr(torch, "func"), reason="this torch has no torch.func")
def test_functionalize_is_refused_by_name(tmp_path):
    model = net(tied=False)
    with make(model, tmp_path) as engine:
        step(engine, batches(1)[0])
        weight = model.layers[0].up.weight
        for given in (weight, weight.detach()):
            with pytest.raises(RuntimeError, match=r"layers\.0\.up\.weight is given to torch\.func\.functionalize.*clone\(\)"):
                torch.func.functionalize(lambda w: w * 2)(given)
        assert torch.equal(torch.func.functionalize(lambda w: w * 2)(weight.detach().clone()), engine.state_dict()["layers.0.up.weight"] * 2)


@pytest.mark.parametrize("given", ["parameter", "data"])
def test_a_scripted_function_changes_a_parameter_in_place(tmp_path, given):
    @torch.jit.script
    def doubled(x: torch.Tensor):
        return x.mul_(2.0)

    model = net(tied=False)
    with make(model, tmp_path) as engine:
        step(engine, batches(1)[0])
        weight, value = model.layers[0].up.weight, engine.state_dict()["layers.0.up.weight"].clone()
        with torch.no_grad():
            doubled(weight if given == "parameter" else weight.data)
        assert torch.equal(engine.state_dict()["layers.0.up.weight"], 2 * value)


def test_a_frozen_parameter_is_read_with_a_graph_to_others(tmp_path):
    model = net(tied=False)
    model.layers[0].requires_grad_(False)
    trained = [each for each in model.parameters() if each.requires_grad]
    with make(model, tmp_path, optimizer=torch.optim.AdamW(trained, lr=1e-2)) as engine:
        step(engine, batches(1)[0])
        x = torch.ones(1, 32, requires_grad=True)
        nn.functional.linear(x, model.layers[0].up.weight).sum().backward()
        torch.testing.assert_close(x.grad[0], engine.state_dict()["layers.0.up.weight"].sum(0), rtol=1e-5, atol=1e-5)


class Special(nn.Parameter):
    """As peft and bitsandbytes have classes of their own."""


def test_a_parameter_of_another_class_is_no_less_whole(tmp_path):
    model = net(tied=False)
    model.layers[0].up.weight = Special(model.layers[0].up.weight.detach().clone())
    weight = model.layers[0].up.weight
    with make(model, tmp_path) as engine:
        step(engine, batches(1)[0])
        value = engine.state_dict()["layers.0.up.weight"]
        assert isinstance(weight, Special) and "not in memory" in repr(weight)
        assert torch.equal(weight.detach(), value) and type(copy.deepcopy(weight)) is Special
        with torch.no_grad():
            assert torch.equal(weight * 1, value)
        with engine.gathered():
            assert type(weight) is Special and torch.equal(weight.data, value)


def test_what_is_made_of_a_copy_in_another_module_is_its_own(tmp_path):
    model, plain = net(tied=False), net(tied=False)
    with make(model, tmp_path) as engine:
        step(engine, batches(1)[0])
        state = engine.state_dict()
        for (name, parameter), (_, other) in zip(model.named_parameters(), list(plain.named_parameters())):
            holder, _, short = name.rpartition(".")
            given = parameter.data if other.dim() == 1 else parameter.detach()
            setattr(plain.get_submodule(holder), short, nn.Parameter(given))
        assert {type(each) for each in plain.parameters()} == {nn.Parameter} and all(each.is_leaf for each in plain.parameters())
        expected, _ = plain_losses(plain, all_names(plain), [[batch] for batch in batches(2, seed=5)])
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        for batch, loss in zip(batches(2, seed=5), expected):
            optimizer.zero_grad()
            found = plain(**batch)
            found.backward()
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            optimizer.step()
            assert found.item() == pytest.approx(loss, abs=1e-6)
        for name, value in engine.state_dict().items():
            assert torch.equal(value, state[name])
        # An array of numpy's would be changed without a word.
        with pytest.raises(ValueError, match="read-only"):
            model.norm.weight.detach().numpy()[:] = 0


# What programs do to a parameter between steps, peft's merge and AdaLoRA's masks among it.
CHANGES = {
    "data": lambda weight: weight.data.mul_(2),
    "data +=": lambda weight: exec("weight.data += 0.5", {"weight": weight}),
    "data =": lambda weight: setattr(weight, "data", weight.detach() * 3),
    "data = a view": lambda weight: setattr(weight, "data", (weight.detach().t() * 3).t()),
    "detach": lambda weight: weight.detach().zero_(),
    "an element": lambda weight: weight.data.__setitem__((0, 1), 1.0),
    "masked_fill_": lambda weight: weight.masked_fill_(weight > 0, 0.25),
    "copy_": lambda weight: weight.copy_(torch.full_like(weight, 0.5)),
    "+=": lambda weight: weight.__iadd__(0.5),
    "init": lambda weight: nn.init.normal_(weight),
    "init of a view": lambda weight: nn.init.zeros_(weight.data[:2]),
    "views of views": lambda weight: weight.data.view(-1)[3:].t().unbind()[0].fill_(4),
    "foreach": lambda weight: torch._foreach_mul_([weight, weight.data], 0.5),
    "out": lambda weight: torch.clamp(weight, -0.01, 0.01, out=weight),
    "out of data": lambda weight: torch.clamp(weight.data, -0.01, 0.01, out=weight.data),
    "inplace=": lambda weight: nn.functional.relu(weight, inplace=True),
    "aten": lambda weight: torch.ops.aten.mul_.Scalar(weight, 3),
    "aten of data": lambda weight: torch.ops.aten.mul_(weight.data, 3),
    "apply_": lambda weight: weight.data.apply_(lambda value: 2 * value),
    "load_state_dict": lambda weight: weight.copy_(weight.detach().clone().double() * 2),
    "vector_to_parameters": lambda weight: nn.utils.vector_to_parameters(2 * nn.utils.parameters_to_vector([weight]), [weight]),
    "max_norm": lambda weight: nn.functional.embedding(torch.tensor([0, 1]), weight, max_norm=0.01),
    "view_as": lambda weight: weight.data.view(-1).view_as(weight).mul_(5),
    "reshape_as": lambda weight: weight.detach().flatten().reshape_as(weight).mul_(5),
    "expand_as": lambda weight: weight.data.expand_as(weight).mul_(5),
    "type_as": lambda weight: weight.data.type_as(weight).mul_(5),
    "to": lambda weight: weight.data[:3].to(weight).mul_(5),
    "two copies": lambda weight: [each.add_(1) for each in (weight.data, weight.detach())],
}  # fmt: skip


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("inference", [False, True])
def test_a_change_in_place_between_steps_is_one_of_the_parameter(tmp_path, how, inference):
    """As in a gather to the bit, and training goes on from it as plain PyTorch does."""
    model, plain, data = net(tied=False), net(tied=False), batches(5)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)

    def plain_step(batch):
        plain_optimizer.zero_grad()
        loss = plain(**batch)
        loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        plain_optimizer.step()
        return loss.item()

    with make(model, tmp_path) as engine:
        for batch in data[:2]:
            assert step(engine, batch) == pytest.approx(plain_step(batch), abs=1e-5)
        names = [name for name, each in plain.named_parameters() if each.dim() == 2][:2]
        for name in names:
            weight, copied = model.get_parameter(name), nn.Parameter(model.get_parameter(name).detach().clone())
            with torch.inference_mode(inference and how != "data = a view"), torch.no_grad():
                torch.manual_seed(0)
                CHANGES[how](copied)
                torch.manual_seed(0)
                CHANGES[how](weight)
            assert torch.equal(weight.detach(), copied) and "not in memory" in repr(weight)
            plain.get_parameter(name).data.copy_(copied)
        for batch in data[2:]:
            assert step(engine, batch) == pytest.approx(plain_step(batch), abs=1e-5)
        expected = engine.state_dict()
    other = net(seed=1, tied=False)
    with make(other, tmp_path, resume=True) as engine:
        engine.eval()(**data[0])
        for name, value in engine.state_dict().items():
            assert torch.equal(value, expected[name])


# What programs do with a parameter (a), the values it had, and one of plain PyTorch's (b). Each returns what it has kept.
def _averages(a, b):
    backup, shadow = a.data, b.detach().clone()
    a.data = shadow
    assert torch.equal(a.detach(), b)
    a.data = backup  # without a clone, as some EMA classes have it
    return [backup, shadow]


def _swap(a, b):
    a.data, b.data = b.data, a.data
    return [a.detach(), b.detach()]


def _swap_the_other_way(a, b):
    b.data, a.data = a.data, b.data
    return [a.detach(), b.detach()]


def _difference(a, b):
    before = a.detach()
    a.data = a.data + 1
    return [before, a.detach() - before]


def _transposed(a, b):
    before = a.data
    a.data = a.data.t()
    return [before, a.detach() - before]


def _kept_view(a, b):
    row = a.data[1]
    a.data = b.data * 2
    a.data.mul_(3)
    return [row, a.data[1] - row]


@pytest.mark.parametrize("how", [_averages, _swap, _swap_the_other_way, _difference, _transposed, _kept_view])
def test_what_was_read_keeps_its_value_when_the_parameter_gets_another_tensor(tmp_path, how):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with penstock.initialize(model=model, optimizer=optimizer, state_dir=str(tmp_path))[0] as engine:
        engine.backward(engine(torch.randn(8, 16)).pow(2).mean())
        engine.step()
        weight = model[2].weight
        others = [nn.Parameter(torch.randn(16, 16)) for _ in range(2)]
        others[1].data.copy_(others[0].data)
        plain = nn.Parameter(weight.detach().clone())
        found, expected = how(weight, others[0]), how(plain, others[1])
        assert [torch.equal(each, other) for each, other in zip(found, expected)] == [True] * len(expected)
        assert torch.equal(engine.state_dict()["2.weight"], plain) and torch.equal(others[0], others[1])


def test_two_parameters_of_an_engine_change_places(tmp_path):
    model = net(tied=False)
    with make(model, tmp_path) as engine:
        step(engine, batches(1)[0])
        before, (first, second) = engine.state_dict(), (model.layers[0].up.weight, model.layers[1].up.weight)
        first.data, second.data = second.data, first.data
        after = engine.state_dict()
        assert torch.equal(after["layers.0.up.weight"], before["layers.1.up.weight"])
        assert torch.equal(after["layers.1.up.weight"], before["layers.0.up.weight"])
        step(engine, batches(1)[0])


def test_a_value_that_was_replaced_is_not_changed_without_a_word(tmp_path):
    model = net(tied=False)
    with make(model, tmp_path) as engine:
        step(engine, batches(1)[0])
        weight = model.layers[0].up.weight
        old, given = weight.data, torch.ones(64, 32)
        weight.data = given
        with pytest.raises(RuntimeError, match=r"layers\.0\.up\.weight that was read before.*Read it again.*clone\(\)"):
            old.mul_(2)
        weight.data = weight.detach() * 1  # the same values, of another tensor
        assert torch.equal(weight.detach(), given)
        weight.data.mul_(3)
        assert torch.equal(weight.detach(), 3 * given) and torch.equal(engine.state_dict()["layers.0.up.weight"], 3 * given)


def test_the_bits_of_a_change_in_place_are_those_of_one_in_a_gather(tmp_path):
    """Of a model in 16 bits, whose masters have more: what a change leaves as it is keeps them, element by element."""
    masters = {}
    for where in ("in place", "gathered"):
        model = net(tied=False).to(torch.bfloat16)
        with make(model, tmp_path / where, dtype="bf16") as engine:
            step(engine, batches(1)[0])
            changed, same = model.layers[0].up.weight, model.layers[1].up.weight
            before, others = engine.read_state(same).clone(), engine.read_state(changed)[1:].clone()
            if where == "gathered":
                with engine.gathered([changed, same], write_back=True), torch.no_grad():
                    changed[0] *= 2
                    same.clamp_(-100, 100)
            else:
                with torch.no_grad():
                    changed[0] *= 2
                    same.clamp_(-100, 100)
            masters[where] = engine.read_state(changed)
            assert torch.equal(masters[where][1:], others) and not torch.equal(others, others.bfloat16().float())
            assert torch.equal(engine.read_state(same), before) and not torch.equal(before, before.bfloat16().float())
    assert torch.equal(masters["in place"], masters["gathered"])


@pytest.mark.parametrize("name", ["normal_", "uniform_", "constant_", "kaiming_uniform_", "kaiming_normal_", "trunc_normal_", "xavier_uniform_", "ones_"])
def test_torchs_init_changes_a_parameter_in_grad_mode(tmp_path, name):
    model, init = net(tied=False), getattr(nn.init, name)
    more = (0.25,) if name == "constant_" else ()
    with make(model, tmp_path) as engine:
        step(engine, batches(1)[0])
        weight, expected = model.layers[0].up.weight, torch.empty(64, 32)
        for given in (weight, expected):
            torch.manual_seed(0)
            assert init(given, *more) is given
        assert torch.equal(engine.state_dict()["layers.0.up.weight"], expected)
        other = nn.Linear(32, 64)
        for layer in (model.layers[1].up, other):
            torch.manual_seed(1)
            layer.reset_parameters()
        assert torch.equal(model.layers[1].up.weight.detach(), other.weight) and torch.equal(model.layers[1].up.bias.detach(), other.bias)
        step(engine, batches(1)[0])


def test_a_copy_that_was_saved_or_copied_is_the_parameters_still(tmp_path):
    model = net(tied=False)
    with make(model, tmp_path / "run") as engine:
        step(engine, batches(1)[0])
        held = model.norm.weight.detach()
        expected = held.clone()
        torch.save({"weight": held}, tmp_path / "saved.pt")
        copied = copy.deepcopy(held)
        held.mul_(2)
        assert type(copied) is torch.Tensor and torch.equal(copied, expected) and torch.equal(torch.load(tmp_path / "saved.pt")["weight"], expected)
        copied.mul_(3)
        assert torch.equal(engine.state_dict()["norm.weight"], 2 * expected)


def test_a_frozen_parameter_is_changed_too(tmp_path):
    model = net(tied=False)
    model.layers.requires_grad_(False)
    trained = [each for each in model.parameters() if each.requires_grad]
    with make(model, tmp_path, optimizer=torch.optim.AdamW(trained, lr=1e-2)) as engine:
        step(engine, batches(1)[0])
        frozen, head = model.layers[0].up.weight, model.head.weight
        expected = frozen.detach() + head.detach()[:1] * 0 + 1
        frozen.data += head[:1] * 0 + 1  # a graph that nobody asks for anything
        assert torch.equal(frozen.detach(), expected)
        first = engine.eval()(**batches(1)[0]).item()
        model.layers[0].up.weight.data -= 1
        assert engine(**batches(1)[0]).item() != first
        step(engine.train(), batches(1)[0])


def test_a_change_in_place_that_cannot_be_made_is_refused(tmp_path):
    model = net(tied=False)
    with make(model, tmp_path) as engine:
        step(engine, batches(1)[0])
        weight = model.layers[0].up.weight
        before, old, given = engine.state_dict(), weight.data, torch.ones(64, 32)
        # Of a leaf with a graph, by torch itself.
        with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
            weight.mul_(2)
        with torch.no_grad():
            for change in (weight.t_, lambda: weight.resize_(3)):
                with pytest.raises(RuntimeError, match=r"layers\.0\.up\.weight is given another shape, type or memory"):
                    change()
            with pytest.raises(RuntimeError, match="must match the size"):
                torch._foreach_add_([weight, model.norm.weight], [torch.ones(64, 32), torch.ones(3)])
        assert torch.equal(weight.detach(), before["layers.0.up.weight"])
        # What no class is asked of, or gives another type, is told by the next forward.
        for change in (lambda: weight.set_(torch.ones(64, 32)), lambda: setattr(weight, "data", given.double())):
            with torch.no_grad():
                change()
            with pytest.raises(RuntimeError, match=r"layers\.0\.up\.weight was given a value outside"):
                engine(**batches(1)[0])
        assert torch.equal(weight.detach(), before["layers.0.up.weight"])
        # Within a step.
        loss = engine(**batches(1)[0])
        for change in (lambda: weight.data.mul_(2), lambda: setattr(weight, "data", given)):
            with pytest.raises(RuntimeError, match=r"a step is open: layers\.0\.up\.weight"):
                change()
        with pytest.raises(RuntimeError, match=r"layers\.0\.up\.weight that was read before a forward.*Read it again"):
            old.mul_(2)
        engine.zero_grad()
        loss = engine(**batches(1)[0])
        engine.backward(loss)
        engine.read_state(weight, "gradient")
        with pytest.raises(RuntimeError, match=r"engine\.step\(\) comes next"):
            weight.data.mul_(2)
        engine.step()
        # What a parameter was set to is its memory in plain PyTorch.
        before = weight.detach().clone()
        weight.data = given
        engine.eval()(**batches(1)[0])
        given.mul_(2)
        with pytest.raises(RuntimeError, match=r"layers\.0\.up\.weight was given a tensor .* changed in place afterwards"):
            engine(**batches(1)[0])
        assert torch.equal(weight.detach(), torch.ones(64, 32))
        weight.data = before
        step(engine.train(), batches(1)[0])
        # What has memory of its own is the script's.
        assert (weight.data[0].clone().zero_() == 0).all() and (weight.data * 2).mul_(0).sum() == 0
    with pytest.raises(RuntimeError, match="closed"), torch.no_grad():
        weight.mul_(2)


def test_a_change_within_an_accumulation_is_refused_where_its_gradients_would_change(tmp_path):
    model, data = net(tied=False), batches(4)
    with make(model, tmp_path, gradient_accumulation_steps=2) as engine:
        for batch in data[:2]:
            engine.backward(engine(**batch))
            with torch.no_grad(), pytest.raises(RuntimeError, match=r"norm\.weight is changed between a backward and its step"):
                model.norm.weight.mul_(2)
            engine.step()
        before = model.norm.weight.detach().clone()
        with torch.no_grad():
            model.norm.weight.mul_(2)
        assert torch.equal(model.norm.weight.detach(), 2 * before)


def test_what_moves_a_model_where_it_is_changes_nothing(tmp_path):
    model = net()
    with make(model, tmp_path) as engine:
        step(engine, batches(1)[0])
        before = engine.state_dict()
        model.cpu().to("cpu", torch.float32)
        assert "not in memory" in repr(model.norm.weight)
        for name, value in engine.state_dict().items():
            assert torch.equal(value, before[name])
        step(engine, batches(1)[0])


def test_changes_in_place_over_ranks_are_the_same_on_all(tmp_path, on_ranks):
    program = """
        import sys, torch
        sys.path[:0] = [{tests!r}]
        from engine_models import batches, make, net, step

        model = net(tied=False)
        with make(model, {place!r}) as engine:
            step(engine, batches(1)[0])
            with torch.no_grad():
                model.norm.weight.mul_(2)
                model.layers[0].up.weight.data += 1
                try:
                    model.norm.weight.add_(engine.global_rank)
                except (RuntimeError, ValueError) as error:
                    print("REFUSED", error)
            print("SUM", model.norm.weight.detach().sum().item())
            step(engine, batches(1)[0])
    """.format(tests=os.path.dirname(os.path.abspath(__file__)), place=str(tmp_path))
    told = on_ranks(program, 2)
    assert [each[0] for each in told] == [0, 0], told
    assert len({each[1].split("SUM")[1] for each in told}) == 1
    assert all("REFUSED ranks 0 and 1 were given different values for norm.weight" in each[1] for each in told), told


@pytest.mark.parametrize("offload", ["nvme", "none"])
def test_an_engine_that_ends_gives_the_values_back(tmp_path, offload):
    model = net(dropout=0.0)
    where = {"state_dir": str(tmp_path / "run")} if offload == "nvme" else {"offload": "none"}
    engine = penstock.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2), gradient_clipping=1.0, **where)[0]
    for batch in batches(2):
        step(engine, batch)
    expected = {name: value.clone() for name, value in engine.state_dict().items()}
    loss = engine.eval()(**batches(1, seed=4)[0]).item()
    engine.close(keep_values=True)
    assert {type(each) for each in model.parameters()} == {nn.Parameter} and not [n for n in vars(model) if n in ("forward", "state_dict")]
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name
    assert model.eval()(**batches(1, seed=4)[0]).item() == pytest.approx(loss, abs=1e-6)
    copied = copy.deepcopy(model)
    copied(**batches(1)[0]).backward()
    # And another engine takes it, without a state of the first.
    model.train()
    data = batches(2, seed=6)
    losses, _ = plain_losses(copied.train(), all_names(model), [[batch] for batch in data])
    with make(model, tmp_path / "second") as engine:
        assert [step(engine, batch) for batch in data] == pytest.approx(losses, abs=1e-5)


def test_a_model_gets_another_engine(tmp_path):
    """As Trainer makes one for evaluate(), one for train(), and another for a second train()."""
    offload = {"device": "nvme", "nvme_path": str(tmp_path)}
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0, "zero_optimization": {"stage": 3, "offload_param": offload}}
    model, data = net(), batches(4)
    plain = net()
    first = deepspeed.initialize(model=model, config=config)[0]  # evaluates only
    with torch.no_grad():
        assert first.eval()(**data[0]).item() == pytest.approx(plain(**data[0]).item(), abs=1e-6)
    for part in (data[:2], data[2:]):
        expected, plain = plain_losses(plain, all_names(plain), [[batch] for batch in part])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        engine = deepspeed.initialize(model=model.train(), optimizer=optimizer, config=config)[0]
        assert [step(engine, batch) for batch in part] == pytest.approx(expected, abs=1e-5)
    with pytest.raises(RuntimeError, match="closed"):
        first(**data[0]) if model.forward is None else first.engine.flush()
    engine.destroy()
    assert list(tmp_path.iterdir()) == []


def test_without_an_optimizer_there_are_no_states(tmp_path):
    """A reference model: as DeepSpeed's engine then, it computes and has nothing to step."""
    model = net()
    expected = net()(**batches(1)[0]).item()
    parameters = sum(each.numel() for each in model.parameters())
    config = {"train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": False}}
    nvme = {**config, "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": str(tmp_path)}}}
    for given in (nvme, {**config, "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}, config):
        model = net()
        engine, optimizer, _, scheduler = deepspeed.initialize(model=model, config=given)
        assert optimizer is None and scheduler is None and engine.optimizer is None
        for mode in (True, False):
            engine.train(mode)
            assert engine(**batches(1)[0]).item() == pytest.approx(expected, abs=1e-6)
        if given is nvme:
            assert engine.engine.plan()["state_bytes"] <= 4 * parameters + (1 << 20)
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            assert torch.equal(model.norm.weight, net().norm.weight)
        for call in (lambda engine=engine: engine.backward(torch.zeros(())), engine.step):
            with pytest.raises(RuntimeError, match="must provide optimizer"):
                call()
        assert engine.train_micro_batch_size_per_gpu() == 4 and engine.world_size == 1
        engine.destroy()
    halves = deepspeed.initialize(model=net(), config={**config, "bf16": {"enabled": True}})[0]
    assert halves.module.norm.weight.dtype == torch.bfloat16
