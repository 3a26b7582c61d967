"""A run whose first steps differ much from their prediction is planned once more, before a later training forward."""

import os

import pytest

torch = pytest.importorskip("torch")

import penstock  # noqa: E402
from penstock._engine import _preparation  # noqa: E402


def net():
    torch.manual_seed(3)
    return torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Tanh()) for _ in range(8)])


def train(directory, model=None, steps=8, **options):
    """Losses of some steps with an evaluation between them, values of all parameters, the report, and the lines of the log."""
    model = net() if model is None else model
    given = penstock.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), state_dir=str(directory), **options)
    with given[0] as engine:
        generator = torch.Generator().manual_seed(1)
        losses = []
        for number in range(steps):
            loss = engine(torch.randn(16, 256, generator=generator)).pow(2).mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            with torch.no_grad():
                losses.append(engine(torch.ones(2, 256)).sum().item())
            if number == 4:
                engine.flush()
        values = [value.clone() for value in engine.state_dict().values()]
        lines = engine.log()
        report = engine.report()
    return losses, values, report, lines


@pytest.fixture
def says_long_forwards(monkeypatch):
    """The first forward is said to have taken a thousand times as long as it did."""
    described = _preparation.described_stages
    monkeypatch.setattr(
        _preparation, "described_stages", lambda uses: [(name, block, 1e3 * forward, 1e3 * backward, inputs) for name, block, forward, backward, inputs in described(uses)]
    )


@pytest.mark.parametrize("host_memory, device", [(None, None), ("9MiB", None), (None, "capacity=256MiB,latency=1e-4")])
def test_a_run_that_was_predicted_wrong_is_planned_again_with_the_same_bits(tmp_path, says_long_forwards, monkeypatch, host_memory, device):
    if device is not None:  # with memory of its own, where the engine's blocks are
        monkeypatch.setenv("PENSTOCK_TEST_DEVICE", device)
    losses, values, report, lines = train(tmp_path / "again", host_memory=host_memory)
    off, values_off, report_off, lines_off = train(tmp_path / "off", host_memory=host_memory, replan="off")
    assert losses == off and all(torch.equal(one, other) for one, other in zip(values, values_off))
    told = report["replanned"]
    assert told["after_step"] == 3 and told["measured_step_seconds"] <= 0.5 * told["predicted_step_seconds"]
    assert told["outcome"] in ("moved", "stays", "unexplained") and (told["outcome"] == "moved") == bool(told["moved"])
    assert [line for line in lines if "planned again after step 3" in line]
    assert report_off["replanned"] is None and not [line for line in lines_off if "planned again" in line]
    if host_memory is not None:
        assert report["peak_managed_bytes"] <= report["host_memory_budget_bytes"]
    # It goes on in another process as it would have.
    assert train(tmp_path / "again", resume=True, steps=2)[2]["resumed_from_step"] == 8


def test_what_has_no_effect_says_so_to_who_asks_for_it(recwarn):
    model = net()
    engine = penstock.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), offload="cpu", replan="auto")[0]
    assert [each for each in recwarn if "replan" in str(each.message) and "state in memory" in str(each.message)]
    engine.close()
    with pytest.raises(ValueError, match="replan"):
        penstock.initialize(model=net(), state_dir=os.devnull, replan="often")
