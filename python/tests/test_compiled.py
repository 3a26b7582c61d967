"""Blocks that the model's owner has given to torch.compile: they stay compiled in the engine's forwards, with the same losses."""

import warnings

import pytest

torch = pytest.importorskip("torch")

from engine_models import batches, make, net, step  # noqa: E402

pytestmark = pytest.mark.skipif(not hasattr(torch.nn.Module, "compile"), reason="since torch 2.2")


class Backend:
    """Computes what it is given to compile as it is, and counts."""

    def __init__(self):
        self.graphs = self.calls = 0

    def __call__(self, graph, inputs):
        self.graphs += 1

        def run(*arguments):
            self.calls += 1
            return graph(*arguments)

        return run


def trained(model, directory, data):
    with make(model, directory) as engine:
        return [step(engine, batch) for batch in data]


@pytest.fixture(autouse=True)
def alone():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("what", ["module", "forward"])
def test_what_was_compiled_stays_compiled(tmp_path, what):
    data, backend, model = batches(3), Backend(), net()
    for at, layer in enumerate(model.layers):
        if what == "module":
            model.layers[at] = torch.compile(layer, backend=backend)
        else:
            layer.forward = torch.compile(layer.forward, backend=backend)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses = trained(model, tmp_path / "compiled", data)
    assert not any("compiled in place" in str(each.message) for each in caught)
    assert losses == trained(net(), tmp_path / "plain", data)
    assert backend.graphs == 1, "compiled once for all layers, which differ in their weights alone"
    assert backend.calls == 2 * len(model.layers) * len(data), "forward, and once more for backward"


@pytest.mark.parametrize("what", ["head", "model", "model in place"])
def test_what_ends_in_the_last_block_may_be_compiled(tmp_path, what):
    """The last block is computed with its graph, in frames of the engine that dynamo leaves alone."""
    data, backend, model = batches(3), Backend(), net(tied=False)
    if what == "head":
        model.head = torch.compile(model.head, backend=backend)
    elif what == "model":
        model = torch.compile(model, backend=backend)
    else:
        model.compile(backend=backend)
    assert trained(model, tmp_path / "compiled", data) == trained(net(tied=False), tmp_path / "plain", data)


def test_what_was_compiled_in_place_is_told(tmp_path):
    data, backend, model = batches(3), Backend(), net()
    model.layers[1].compile(backend=backend)
    with pytest.warns(UserWarning, match=r"layers.1 was compiled in place.*torch.compile\(\) of it, in its place, stays compiled"):
        losses = trained(model, tmp_path / "compiled", data)
    assert losses == trained(net(), tmp_path / "plain", data) and backend.graphs == 0
