"""Models that keep no rule of blocks: what they do besides calling a list of layers trains as plain PyTorch does, or is told."""

import copy
import warnings

import pytest

torch = pytest.importorskip("torch")

from engine_models import batches, make, net, step  # noqa: E402
from torch import nn  # noqa: E402


class Cache:
    """Keys of each layer, which a layer adds to, as transformers' caches."""

    def __init__(self):
        self.layers = []

    def update(self, keys, number):
        while len(self.layers) <= number:
            self.layers.append(Keys())
        known = self.layers[number].keys
        self.layers[number].keys = keys if known is None else torch.cat([known, keys], 1)
        return self.layers[number].keys


class Keys:
    keys = None


class Attention(nn.Module):
    def __init__(self, width, number):
        super().__init__()
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.number = number

    def forward(self, x, mask, cache):
        keys = cache.update(self.key(x), self.number)
        return x + (self.query(x) @ keys.transpose(1, 2) + mask).softmax(-1) @ keys


class Cached(nn.Module):
    """It makes a cache in each forward, whatever the caller says."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.layers = nn.ModuleList(Attention(16, number) for number in range(3))
        self.head = nn.Linear(16, 50)

    def forward(self, x, targets):
        cache, mask = Cache(), torch.zeros(x.shape[1], x.shape[1])
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x, mask, cache=cache)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class Reversible(torch.autograd.Function):
    """Keeps the last outputs alone: backward computes the layers' inputs from them, and the layers again."""

    @staticmethod
    def forward(ctx, one, two, layers):
        with torch.no_grad():
            for layer in layers:
                one, two = two, one + layer(two)
        ctx.save_for_backward(one.detach(), two.detach())
        ctx.layers = layers
        return one, two

    @staticmethod
    def backward(ctx, of_one, of_two):
        one, two = ctx.saved_tensors
        for layer in reversed(ctx.layers):
            given = one.detach().requires_grad_()
            with torch.enable_grad():
                made = layer(given)
                torch.autograd.backward(made, of_two)
            one, two = two - made.detach(), given.detach()
            of_one, of_two = of_two, of_one + given.grad
        return of_one, of_two, None


class RevNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(32, 50)

    def forward(self, x, targets):
        x = self.embed(x)
        x = torch.cat(Reversible.apply(x, x.clone(), self.layers), -1)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def plain(model, data):
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for batch in data:
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, dict(model.named_parameters())


@pytest.mark.parametrize("kind", [Cached, RevNet])
def test_what_a_model_does_besides_calling_its_layers_trains_as_plain_pytorch(tmp_path, kind):
    torch.manual_seed(0)
    model, data = kind(), batches(5)
    expected, weights = plain(model, data)
    with make(model, tmp_path, gradient_clipping=0.0) as engine:
        assert [step(engine, batch) for batch in data] == pytest.approx(expected, rel=1e-5)
        for name, value in engine.state_dict().items():
            torch.testing.assert_close(value, weights[name].detach(), rtol=1e-4, atol=1e-5)


def test_layers_that_a_function_may_call_in_its_backward_are_resident_and_part_of_the_plan(tmp_path):
    torch.manual_seed(0)
    with make(RevNet(), tmp_path) as engine:
        step(engine, batches(1)[0])
        resident = [name for block in engine._given.blocks if block.resident for name, _ in block.parameters]
        assert [name for name in resident if name.startswith("layers.")] and not [name for name in resident if name.startswith("head")]


def drops(engine, number):
    engine.module.left_out = number


def test_a_layer_that_is_left_out_of_some_steps_is_told_of_once_where_zeros_update_it(tmp_path):
    with make(net(), tmp_path, missing_gradients="zeros") as engine, pytest.warns(UserWarning, match=r"layers\.1\.\S+ has a gradient in some steps and none in others") as told:
        for number, batch in enumerate(batches(5)):
            drops(engine, 1 if number % 2 else None)
            step(engine, batch)
    assert len([each for each in told if "some steps" in str(each.message)]) == 1


def test_a_layer_that_is_left_out_is_plain_pytorchs_where_zeros_change_nothing(tmp_path):
    model, data = net(), batches(4)
    other = copy.deepcopy(model)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    expected = []
    for number, batch in enumerate(data):
        other.left_out = 1 if number % 2 else None
        loss = other(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with make(model, tmp_path, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), gradient_clipping=0.0, missing_gradients="zeros") as engine:
            for number, batch in enumerate(data):
                drops(engine, 1 if number % 2 else None)
                assert step(engine, batch) == pytest.approx(expected[number], rel=1e-5)
