"""An engine that has its blocks in the memory of a device: weights and gradients by its addresses, states there too, within a budget.

The device is zero/compute/test_device.h's, chosen by PENSTOCK_TEST_DEVICE, whose memory torch reads on the processor and whose copies come late.
The bits are those of host memory.
"""

import warnings

import pytest

torch = pytest.importorskip("torch")

import penstock  # noqa: E402
from engine_models import batches, make, net, step  # noqa: E402
from penstock._engine._tensor_memory import StepTensors, _ends_are_told  # noqa: E402
from torch import nn  # noqa: E402

NEEDS = 1 << 23  # bytes, of torch's tensors in the tests' steps and what is planned beside them


@pytest.fixture
def device(monkeypatch):
    """Chooses the device of tests from here on: device("cpu") is the processor."""

    def choose(options="capacity=256MiB,latency=1e-4"):
        if options == "cpu":
            monkeypatch.delenv("PENSTOCK_TEST_DEVICE", raising=False)
        else:
            monkeypatch.setenv("PENSTOCK_TEST_DEVICE", options)

    choose()
    return choose


def trained(engine, data, accumulation=1):
    losses = []
    for number, at in enumerate(range(0, len(data), accumulation)):
        torch.manual_seed(number)
        losses.append(step(engine, data[at]) if accumulation == 1 else engine.train_batch(data[at : at + accumulation]).item())
    return losses


def state_of(engine):
    return {name: value.clone() for name, value in engine.state_dict().items()}


def run(directory, model, data, accumulation=1, **options):
    """(losses, weights, what was planned, report) of a training."""
    with make(model, directory, gradient_accumulation_steps=accumulation, **options) as engine:
        losses = trained(engine, data, accumulation)
        return losses, state_of(engine), engine.plan(), dict(engine.report())


def assert_same(found, expected):
    assert found[0] == expected[0]
    assert all(torch.equal(value, expected[1][name]) for name, value in found[1].items())


@pytest.mark.parametrize("offload", ["cpu", "nvme", "none"])
@pytest.mark.parametrize("accumulation, dtype", [(1, torch.float32), (3, torch.float32), (1, torch.bfloat16), (2, torch.bfloat16)])
def test_the_bits_are_those_of_host_memory_at_every_budget(tmp_path, device, offload, accumulation, dtype):
    data = batches(4 * accumulation)
    where = {"offload": offload, "dtype": dtype}

    def one(name, **options):
        directory = tmp_path / name
        return run(directory, net(dropout=0.1), data, accumulation, **where, **options)

    device("cpu")
    expected = one("host")
    device()
    whole = one("whole")
    assert_same(whole, expected)
    assert expected[2]["updated_on_device_share"] == 0 and whole[2]["updated_on_device_share"] == 1
    if offload == "none":
        return
    least = whole[2]["least_device_memory_bytes"]
    for budget in (least, least + 60_000, least + 300_000):
        found = one(f"of {budget}", device_memory=budget)
        assert_same(found, expected)
        assert found[3]["peak_device_bytes"] <= budget
    with pytest.raises((ValueError, RuntimeError), match=str(least)):
        one("less", device_memory=least - 1)


def test_the_ratio_is_what_the_processor_updates(tmp_path, device):
    data = batches(4)
    device("cpu")
    expected = run(tmp_path / "host", net(tied=False), data, offload="cpu")
    device()
    shares = []
    for ratio in (1.0, 0.5, 0.0):
        config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": ratio}}}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = run(tmp_path / str(ratio), net(tied=False), data, config=config, offload="cpu")
        assert not any("ratio" in str(each.message) for each in caught)
        assert_same(found, expected)
        shares.append(found[2]["updated_on_device_share"])
        if ratio == 1.0:
            assert found[3]["totals"]["h2d_bytes"] > 0 and found[3]["totals"]["d2h_bytes"] > 0
    assert shares[0] == 0 and 0.3 <= shares[1] <= 0.5 and shares[2] == 1


@pytest.mark.parametrize("offload", ["cpu", "nvme"])
def test_saved_activations_wait_in_host_memory(tmp_path, device, offload):
    data = batches(6, size=2, length=256)
    device("cpu")
    expected = run(tmp_path / "host", net(layers=8, dropout=0.1), data, 2, offload=offload)
    device()
    kept = run(tmp_path / "kept", net(layers=8, dropout=0.1), data, 2, offload=offload, saved_activations="memory")
    assert kept[3]["saved_activations"]["written_bytes"] == 0
    asked = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "activation_checkpointing": {"cpu_checkpointing": True}}
    for name, options in (("keyword", {"saved_activations": "host"}), ("configuration", {"config": asked})):
        found = run(tmp_path / name, net(layers=8, dropout=0.1), data, 2, offload=offload, **options)
        assert_same(found, expected)
        # Of 11 uses the first has the batch, the embedding's are ids, and those of the last three stay.
        told = found[3]["saved_activations"]
        assert told["stages_that_spill"] == 7 and told["spilled_to"] == "host memory"
        assert told["written_bytes"] == told["read_bytes"] == 6 * 7 * 2 * 256 * 32 * 4
        assert found[3]["totals"]["d2h_bytes"] - kept[3]["totals"]["d2h_bytes"] == told["written_bytes"]
        assert found[2]["least_device_memory_bytes"] < kept[2]["least_device_memory_bytes"]
    least = found[2]["least_device_memory_bytes"]
    assert_same(run(tmp_path / "least", net(layers=8, dropout=0.1), data, 2, offload=offload, device_memory=least), expected)


def test_weights_come_past_host_memory_where_the_device_can(tmp_path, device):
    data = batches(4)
    # Weights that are read for backward alone: what is updated is the processor's.
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "aio": {"use_gds": True},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "ratio": 1.0}},
        "penstock": {"placement": "cpu"},
    }
    device("cpu")
    expected = run(tmp_path / "host", net(layers=6), data)
    device()
    by_host = run(tmp_path / "asked", net(layers=6), data, config=config)
    least = {"host_memory": by_host[2]["least_host_memory_bytes"], "device_memory": by_host[2]["least_device_memory_bytes"]}
    with make(net(layers=6), tmp_path / "told", config=config, **least) as engine:
        step(engine, data[0])
        assert not engine.report()["gds"]
        assert [line for line in engine.log() if "no GPUDirect Storage: " in line]
    device("capacity=256MiB,latency=1e-4,gds=1")
    found = run(tmp_path / "straight", net(layers=6), data, config=config, **least)
    assert_same(found, expected)
    assert found[3]["gds"] and found[3]["totals"]["gds_read_bytes"] > 0


def test_frozen_weights_have_no_state_there_either(tmp_path, device):
    data = batches(4)

    def model():
        made = net(tied=False)
        for layer in made.layers[:3]:
            layer.requires_grad_(False)
        made.layers[3].up.weight.requires_grad_(False)
        return made

    device("cpu")
    expected = run(tmp_path / "host", model(), data)
    device()
    found = run(tmp_path / "device", model(), data)
    assert_same(found, expected)
    assert found[2]["state_bytes"] == expected[2]["state_bytes"]
    # And a run goes on on either.
    with make(model(), tmp_path / "device", resume=True, device="cpu") as engine:
        on_host = step(engine, data[0])
    with make(model(), tmp_path / "host", resume=True) as engine:
        assert step(engine, data[0]) == on_host


def test_parameters_outside_of_blocks_and_forwards_by_the_dozen(tmp_path, device):
    class Outside(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net()
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x, targets=None):
            return self.net(x, targets) * self.scale.sum()

    data = batches(4)
    torch.manual_seed(3)
    device("cpu")
    expected = run(tmp_path / "host", Outside(), data)
    device()
    assert_same(run(tmp_path / "device", Outside(), data), expected)
    losses = []
    for where in ("cpu", "device"):
        device(*([where] if where == "cpu" else []))
        with make(net(), tmp_path / f"pairs {where}", forwards_per_step=2) as engine:
            for first, second in (data[:2], data[2:]):
                loss = engine(**first) + engine(**second)
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
    assert losses[:2] == losses[2:]


def test_an_error_in_a_block_gives_up_its_step(tmp_path, device):
    data = batches(3)
    with make(net(), tmp_path / "whole") as engine:
        expected = trained(engine, data)
    model = net()
    with make(model, tmp_path / "broken") as engine:
        losses = trained(engine, data[:1])
        hook = model.layers[2].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine(**data[1])
        hook.remove()
        losses += [step(engine, batch) for batch in data[1:]]
    assert losses == expected
    assert model.norm.weight.device.type == "cpu"


def test_a_checkpoint_and_values_by_name_are_those_of_the_device(tmp_path, device):
    data = batches(6)
    with make(net(), tmp_path / "whole", offload="cpu") as engine:
        expected = trained(engine, data)
    with make(net(), tmp_path / "parts", offload="cpu") as engine:
        losses = trained(engine, data[:3])
        with engine.gathered(write_back=True):
            for parameter in engine.module.parameters():
                parameter.data.mul_(1.0)
        engine.save_checkpoint(str(tmp_path / "kept"))
    with make(net(seed=5), tmp_path / "again", offload="cpu") as engine:
        engine.load_checkpoint(str(tmp_path / "kept"))
        for number, batch in enumerate(data[3:]):
            torch.manual_seed(3 + number)
            losses.append(step(engine, batch))
    assert losses == expected


def test_evaluation_alone(tmp_path, device):
    model = net().requires_grad_(False)
    data = batches(1)[0]
    with torch.no_grad():
        expected = net()(data["x"])
        with make(model, tmp_path, optimizer=None) as engine:
            assert torch.equal(engine(data["x"]), expected)


def test_a_plan_is_of_the_device(tmp_path, device):
    plan = penstock.plan(net(), example=batches(1)[0], state_dir=str(tmp_path), device_memory="64MiB")
    told = plan.as_dict()
    assert told["device"]["name"] == "test" and told["device"]["memory_budget_bytes"] == 64 << 20
    assert 0 < told["least_device_memory_bytes"] < 64 << 20
    assert not any("device_memory" in note for note in plan.notes)
    with pytest.raises((ValueError, RuntimeError), match="least"):
        penstock.plan(net(), example=batches(1)[0], state_dir=str(tmp_path), device_memory="100KiB")


def test_a_plan_is_of_the_device_that_the_configuration_names(tmp_path, device):
    plan = penstock.plan(net(), example=batches(1)[0], state_dir=str(tmp_path), config={"penstock": {"device": "cpu", "device_memory": "64MiB"}})
    assert plan.as_dict()["device"]["name"] != "test"
    assert any("device_memory" in note for note in plan.notes)


def test_without_a_device_its_settings_say_that_they_do_nothing(tmp_path, device):
    device("cpu")
    with pytest.warns(UserWarning, match="penstock.device_memory: accepted and ignored: from Python with device='cpu'"):
        make(net(), tmp_path, device_memory="1GiB").close()


@pytest.mark.skipif(not _ends_are_told(), reason="this torch does not tell when memory goes")
def test_what_a_steps_tensors_take_is_close_to_what_they_do():
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(64, 4096), nn.Linear(4096, 64)

        def forward(self, x):
            return self.down(torch.relu(self.up(x)))

    module, x = Wide(), torch.ones(32, 64)
    tensors = StepTensors(torch.device("cpu"))
    with torch.no_grad(), tensors.forward():
        tensors.block("wide", module, (x,), {})
    hidden, weights = 32 * 4096 * 4, sum(each.numel() * 4 for each in module.parameters())
    # The hidden layer or its gradient, and the gradients of weights.
    assert hidden + weights <= tensors.bytes(1) <= 4 * hidden + 2 * weights
    assert tensors.bytes(3) - tensors.bytes(1) == 2 * x.numel() * 4
    assert tensors.notes == [] and all(parameter.grad is None for parameter in module.parameters())
