"""What scripts do by mistake is refused in a line that says what to do, before it costs anything."""

import pytest

torch = pytest.importorskip("torch")

import penstock  # noqa: E402
from engine_models import Net, all_names, batches, make, net, plain_losses, step  # noqa: E402
from torch import nn  # noqa: E402


class Clamped(nn.Module):
    """A layer that changes its weight in forward, in training alone where `careful`."""

    def __init__(self, careful=False):
        super().__init__()
        self.careful = careful
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        if self.training or not self.careful:
            with torch.no_grad():
                self.weight.clamp_(-0.5, 0.5)
        return x @ self.weight


@pytest.mark.parametrize("layer", [Clamped, lambda: nn.Embedding(8, 8, max_norm=0.1)])
def test_a_forward_that_changes_a_weight_is_refused_before_anything_is_made(tmp_path, layer):
    torch.manual_seed(0)
    model = nn.Sequential(layer(), nn.Linear(8, 8))
    x = torch.ones(2, 8) if isinstance(model[0], Clamped) else torch.arange(8)
    engine = make(model, tmp_path / "run")
    with pytest.raises(TypeError, match=r"0\.weight is changed in place"):
        engine(x)
    assert not (tmp_path / "run").exists() and model[0].weight.isfinite().all()


def test_a_weight_that_is_changed_in_a_later_forward_ends_the_engine_and_no_commit(tmp_path):
    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), Clamped(careful=True), nn.Linear(8, 8))

    engine = make(model().eval(), tmp_path)
    x = torch.ones(2, 8)
    before = engine(x)
    engine.train()
    with pytest.raises(RuntimeError, match=r"1\.weight is changed in place"):
        engine(x)
    engine.eval()
    with pytest.raises(RuntimeError, match="This engine ends here"):
        engine.flush()
    engine.close()
    with make(model().eval(), tmp_path, resume=True) as engine:
        assert torch.equal(engine(x), before)
