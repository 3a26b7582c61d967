"""Forwards as models and scripts have them: they keep things, are several, are looked into; losses are plain PyTorch's."""

import copy

import pytest

torch = pytest.importorskip("torch")

from engine_models import batches, make, net, step  # noqa: E402
from torch import nn  # noqa: E402

HAS_EDGES = hasattr(torch.autograd.graph, "get_gradient_edge")
needs_edges = pytest.mark.skipif(not HAS_EDGES, reason="torch 2.1 and newer")


def inputs(count, rows=4):
    return list(torch.randn(count, rows, 8, generator=torch.Generator().manual_seed(2)))


def seeded(made, seed=0):
    torch.manual_seed(seed)
    return made()


def optimizer_of(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr)


def on_drive(model, directory, **options):
    return make(model, directory, optimizer=optimizer_of(model), gradient_clipping=0, **options)


def same_weights(engine, plain, atol=1e-6):
    state = engine.state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, atol=atol, rtol=0, msg=lambda text, name=name: f"{name}: {text}")


# --- forwards that keep something


class Counts(nn.Module):
    """Its calls are counted by itself, by a layer, by an object and by a list; each has a part in what it gives."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.calls = nn.Linear(8, 8), 0

        def forward(self, x):
            self.calls += 1
            return torch.tanh(self.linear(x)) * (1 + 0.1 * self.calls)

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Counts.Layer() for _ in range(3))
        self.head = nn.Linear(8, 1)
        self.calls = 0
        self.meter = type("Meter", (), {})()
        self.meter.total = 0.0
        self.seen = []
        self.scale = torch.ones(())

    def forward(self, x):
        self.calls += 1
        self.seen.append(self.calls)
        self.meter.total += 1.0
        self.scale = self.scale * 0.9
        self.rows = x[:, :1]  # of this call, for what follows
        for layer in self.layers:
            x = layer(x) + self.rows * self.scale
        return self.head(x).square().mean() * (1 + 0.1 * self.calls + 0.01 * len(self.seen) + 0.001 * self.meter.total)


@pytest.mark.parametrize("how", ["one", "accumulated", "train_batch", "evaluated first"])
def test_a_forward_that_counts_is_made_as_often_as_the_script_makes_it(tmp_path, how):
    model = seeded(Counts)
    plain, data = copy.deepcopy(model), inputs(9)
    optimizer = optimizer_of(plain)
    many = 1 if how == "one" else 3
    with on_drive(model, tmp_path, gradient_accumulation_steps=many) as engine:
        if how == "evaluated first":
            with torch.no_grad():
                assert engine(data[0]).item() == pytest.approx(plain(data[0]).item(), abs=1e-6)
        for at in range(0, 9, many):
            optimizer.zero_grad()
            expected = [plain(x) / many for x in data[at : at + many]]
            for each in expected:
                each.backward()
            optimizer.step()
            if how in ("train_batch", "evaluated first"):
                loss = engine.train_batch(data[at : at + many])
            else:
                loss = torch.zeros(())
                for x in data[at : at + many]:
                    each = engine(x)
                    loss += each.detach() / many
                    engine.backward(each)
                    engine.step()
            assert loss.item() == pytest.approx(sum(expected).item(), abs=1e-6)
        for one, other in [(model, plain), *zip(model.layers, plain.layers)]:
            assert one.calls == other.calls
        assert model.seen == plain.seen and model.meter.total == plain.meter.total
        same_weights(engine, plain)


class CountsNowAndThen(nn.Module):
    """Layers count the batches that they find large, in themselves or in an object that they share with the model."""

    class Layer(nn.Module):
        def __init__(self, shared):
            super().__init__()
            self.linear, self.large, self.shared = nn.Linear(8, 8), 0, shared

        def forward(self, x):
            if x.sum() > 0:
                self.large += 1
            self.shared.calls += 1
            return torch.tanh(self.linear(x)) * (1 + 0.1 * self.large + 0.001 * self.shared.calls)

    def __init__(self):
        super().__init__()
        self.shared = type("Shared", (), {})()
        self.shared.calls = 0
        self.layers = nn.ModuleList(CountsNowAndThen.Layer(self.shared) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_a_counter_that_some_forwards_leave_alone_is_that_of_the_script(tmp_path):
    model = seeded(CountsNowAndThen)
    plain = copy.deepcopy(model)
    optimizer = optimizer_of(plain)
    # The last of each step changes no counter of a layer's own.
    data = [sign * x.abs() for x, sign in zip(inputs(15), [1, 1, -1] * 5)]
    with on_drive(model, tmp_path, gradient_accumulation_steps=3) as engine:
        for at in range(0, 15, 3):
            optimizer.zero_grad()
            expected = [plain(x) / 3 for x in data[at : at + 3]]
            for each in expected:
                each.backward()
            optimizer.step()
            assert engine.train_batch(data[at : at + 3]).item() == pytest.approx(sum(expected).item(), abs=1e-6)
        assert [layer.large for layer in model.layers] == [layer.large for layer in plain.layers]
        assert model.shared.calls == plain.shared.calls
        same_weights(engine, plain)


class CountsLater(nn.Module):
    """A layer of its, and itself, begin to count in their seventh forward, in numbers, lists, objects and tensors."""

    class Layer(nn.Module):
        def __init__(self, what):
            super().__init__()
            self.linear, self.what = nn.Linear(8, 8), what
            self.count, self.seen, self.total = 0, [], torch.zeros(())
            self.meter = type("Meter", (), {})()
            self.meter.calls = 0

        def counted(self, x):
            if self.what == "number":
                self.count += 1
            elif self.what == "list":
                self.seen.append(0)
            elif self.what == "object":
                self.meter.calls += 1
            else:
                self.total += 1
            return self.count + len(self.seen) + self.meter.calls + self.total

        def forward(self, x, begun):
            return torch.tanh(self.linear(x)) * (1 + 0.1 * (self.counted(x) if begun else 0))

    def __init__(self, what):
        super().__init__()
        self.layers = nn.ModuleList(CountsLater.Layer(what) for _ in range(3))
        self.calls = self.late = 0

    def forward(self, x):
        self.calls += 1
        if self.calls > 6:
            self.late += 1
        for number, layer in enumerate(self.layers):
            x = layer(x, self.calls > 6 and number == 1)
        return x.square().mean() * (1 + 0.1 * self.late)


@pytest.mark.parametrize("what", ["number", "list", "object", "tensor"])
@pytest.mark.parametrize("how", ["one", "accumulated", "train_batch"])
def test_a_forward_that_begins_to_count_later_is_made_as_often_as_the_script_makes_it(tmp_path, how, what):
    model = seeded(lambda: CountsLater(what))
    plain, data = copy.deepcopy(model), inputs(12)
    optimizer = optimizer_of(plain)
    many = 1 if how == "one" else 2
    with on_drive(model, tmp_path, gradient_accumulation_steps=many) as engine:
        for at in range(0, 12, many):
            optimizer.zero_grad()
            expected = [plain(x) / many for x in data[at : at + many]]
            for each in expected:
                each.backward()
            optimizer.step()
            if how == "train_batch":
                assert engine.train_batch(data[at : at + many]).item() == pytest.approx(sum(expected).item(), abs=1e-6)
            else:
                for x, loss in zip(data[at : at + many], expected):
                    found = engine(x)
                    engine.backward(found)
                    engine.step()
                    assert found.item() == pytest.approx(many * loss.item(), abs=1e-6)
        for one, other in zip(model.layers, plain.layers):
            assert (one.count, one.seen, one.meter.calls, one.total) == (other.count, other.seen, other.meter.calls, other.total)
        same_weights(engine, plain)


def test_a_large_tensor_that_is_changed_in_place_later_is_told_and_the_next_step_goes_on(tmp_path):
    class Sums(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.total = nn.Linear(8, 8), torch.zeros(3, 3000)

        def forward(self, x):
            if x.mean() > 10:
                self.total += 1
            return torch.tanh(self.linear(x)) * (1 + 0.1 * self.total.mean())

    model = seeded(lambda: nn.Sequential(Sums(), Sums(), nn.Linear(8, 1)))
    plain = copy.deepcopy(model)
    with on_drive(model, tmp_path) as engine:
        told = 0
        for number, x in enumerate(inputs(12)):
            x = x + (100 if number > 7 else 0)
            state = engine.state_dict() if engine.started else None
            totals = [sums.total.clone() for sums in model[:2]]
            try:
                loss = engine(x).square().mean()
                engine.backward(loss)
                engine.step()
            except RuntimeError as error:
                assert "changes a tensor of (3, 3000) in place" in str(error)
                told += 1
                continue
            if state is None:
                continue
            plain.load_state_dict(state)
            for sums, of_plain, total in zip(model[:2], plain[:2], totals):
                of_plain.total = total
            plain.zero_grad()
            expected = plain(x).square().mean()
            expected.backward()
            torch.optim.SGD(plain.parameters(), lr=0.1).step()
            assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
            assert [sums.total.mean().item() for sums in model[:2]] == [sums.total.mean().item() for sums in plain[:2]]
            same_weights(engine, plain)
        assert told == 1 and engine.global_steps == 11


class Caches(nn.Module):
    """Its positions are made in the first call, and kept."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.positions = None

    def forward(self, x):
        if self.positions is None or self.positions.shape != x.shape:
            self.positions = torch.arange(x.numel(), dtype=x.dtype).reshape(x.shape) / x.numel()
        for layer in self.layers:
            x = layer(x + self.positions)
        return x.square().mean()


def test_a_tensor_that_an_evaluation_in_inference_mode_kept_does_not_end_training(tmp_path):
    model = seeded(Caches)
    plain = copy.deepcopy(model)
    optimizer = optimizer_of(plain)
    data = inputs(3)
    with on_drive(model, tmp_path) as engine:
        for each in (plain, engine):
            with torch.inference_mode():
                each(data[0])
        for x in data:
            optimizer.zero_grad()
            plain(x).backward()
            optimizer.step()
            loss = engine(x)
            engine.backward(loss)
            engine.step()
        same_weights(engine, plain)


class RegistersItsHooks(nn.Module):
    """In its first call."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.ready = False

    def forward(self, x):
        if not self.ready:
            self.layers[0].register_forward_hook(lambda module, given, returned: returned * 1.1)
            self.ready = True
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def test_hooks_that_a_first_forward_registers_are_registered_once(tmp_path):
    model = seeded(RegistersItsHooks)
    plain = copy.deepcopy(model)
    optimizer = optimizer_of(plain)
    with on_drive(model, tmp_path) as engine:
        for x in inputs(4):
            optimizer.zero_grad()
            plain(x).backward()
            optimizer.step()
            loss = engine(x)
            engine.backward(loss)
            engine.step()
        same_weights(engine, plain)


class Keeps(nn.Module):
    """Part of its loss is made of what it keeps in an attribute and in a list."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(8, 8)
        self.kept = []

    def forward(self, x):
        self.kept.clear()
        for layer in self.layers:
            x = layer(x)
            self.kept.append(x.square().mean())
        self.mean = x.mean()
        return self.head(x)


@pytest.mark.parametrize("how", ["attributes", "hooks"])
@pytest.mark.parametrize("many", [1, 3])
def test_a_loss_of_what_a_forward_keeps_has_all_its_gradients(tmp_path, how, many):
    model = seeded(Keeps)
    plain, data = copy.deepcopy(model), inputs(6)
    optimizer = optimizer_of(plain)

    def looked_into(module):
        seen = {}
        if how == "hooks":
            module.layers[0][0].register_forward_hook(lambda _, args, out: seen.update(inner=out))
            module.layers[1].register_forward_hook(lambda _, args, out: seen.update(given=args[0], outer=out))
            module.layers[2].register_forward_pre_hook(lambda _, args: seen.update(before=args[0]))
        return seen

    def loss_of(call, module, seen, x):
        out = call(x)
        if how == "hooks":
            return out.square().mean() + sum(value.square().mean() for value in seen.values())
        return out.square().mean() + sum(module.kept) + module.mean

    engines, plains = looked_into(model), looked_into(plain)
    with on_drive(model, tmp_path, gradient_accumulation_steps=many) as engine:
        for at in range(0, 6, many):
            optimizer.zero_grad()
            for x in data[at : at + many]:
                expected = loss_of(plain, plain, plains, x)
                (expected / many).backward()
                loss = loss_of(engine, model, engines, x)
                engine.backward(loss)
                engine.step()
                assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
            optimizer.step()
        same_weights(engine, plain)


# --- several forwards, without a word of it


def train_both(model, directory, losses_of, data, **options):
    """Steps of losses_of(call, batch), which gives the losses whose backwards make a step; with the engine and without."""
    plain = copy.deepcopy(model)
    optimizer = optimizer_of(plain)
    with on_drive(model, directory, **options) as engine:
        for number, batch in enumerate(data):
            torch.manual_seed(number)
            optimizer.zero_grad()
            expected = []
            for loss in losses_of(plain, batch):
                loss.backward()
                expected.append(loss.item())
            optimizer.step()
            torch.manual_seed(number)
            found = []
            for loss in losses_of(engine, batch):
                engine.backward(loss)
                found.append(loss.item())
            engine.step()
            assert found == pytest.approx(expected, abs=1e-5)
        assert engine.global_steps == len(data)
        same_weights(engine, plain, atol=1e-5)


def with_a_target(call, x):
    y = call(x)
    with torch.no_grad():
        target = call(x.flip(0))
    yield (y - target).square().mean()


def of_two(call, x):
    yield (call(x) - call(x.flip(0))).pow(2).mean()


def of_two_and_one(call, x):
    yield (call(x) - call(x.flip(0))).pow(2).mean()
    yield call(x + 1).square().mean()


def two_backwards(call, x):
    yield call(x).square().mean()
    yield (call(x.flip(0)) - 1).square().mean()


@needs_edges
@pytest.mark.parametrize("losses_of", [with_a_target, of_two, of_two_and_one, two_backwards])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_several_forwards_of_a_step(tmp_path, losses_of, dropout):
    def model():
        return nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 8)), nn.BatchNorm1d(8), nn.Linear(8, 8))

    train_both(seeded(model), tmp_path, losses_of, inputs(5))


@needs_edges
@pytest.mark.parametrize("where", ["in the script", "in the model"])
def test_an_evaluation_between_backward_and_step_leaves_a_step_of_large_outputs_whole(tmp_path, where):
    class Large(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
            self.head = nn.Linear(8, 70000)

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            out = self.head(x)  # of more elements than are copied
            return out.square().mean(), out

    model = seeded(Large)
    plain = copy.deepcopy(model)
    optimizer = optimizer_of(plain)
    with on_drive(model, tmp_path) as engine:
        for x in inputs(4):
            evaluated = []
            for call, made in ((plain, optimizer), (engine, engine)):
                optimizer.zero_grad()
                loss, out = call(x)
                loss = loss if where == "in the model" else (out - 1).square().mean()
                engine.backward(loss) if call is engine else loss.backward()
                with torch.no_grad():
                    evaluated.append(call(x.flip(0))[0].item())
                made.step()
            assert evaluated[1] == pytest.approx(evaluated[0], abs=1e-6)
        assert engine.global_steps == 4
        same_weights(engine, plain, atol=1e-5)


@needs_edges
def test_steps_of_one_forward_and_of_several_take_turns(tmp_path):
    def losses_of(call, batch):
        number, x = batch
        yield from of_two(call, x) if number % 3 == 1 else [call(x).square().mean()]

    train_both(seeded(lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))), tmp_path, losses_of, list(enumerate(inputs(7))))


@needs_edges
def test_a_discriminator_and_what_it_judges(tmp_path):
    """DCGAN: two backwards and one step of the one; the other's gradients come through it."""
    judge, maker = seeded(lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))), seeded(lambda: nn.Linear(8, 8), 1)
    plain_judge, plain_maker = copy.deepcopy(judge), copy.deepcopy(maker)
    with on_drive(judge, tmp_path) as engine:
        optimizers = [(optimizer_of(plain_judge), optimizer_of(plain_maker)), (engine, optimizer_of(maker))]
        for x in inputs(4):
            losses = []
            for call, make_one, (ours, others) in zip((plain_judge, engine), (plain_maker, maker), optimizers):
                (plain_judge if call is plain_judge else judge).zero_grad()
                fake = make_one(x)
                real_loss, fake_loss = (call(x) - 1).square().mean(), call(fake.detach()).square().mean()
                for loss in (real_loss, fake_loss):
                    engine.backward(loss) if call is engine else loss.backward()
                ours.step()
                others.zero_grad()
                loss = (call(fake) - 1).square().mean()
                engine.backward(loss) if call is engine else loss.backward()
                others.step()
                losses.append([each.item() for each in (real_loss, fake_loss, loss)])
            assert losses[0] == pytest.approx(losses[1], abs=1e-6)
        judge.zero_grad()
        same_weights(engine, plain_judge)
        torch.testing.assert_close(maker.weight, plain_maker.weight, atol=1e-6, rtol=0)


def test_gradients_in_evaluation_mode(tmp_path):
    def model():
        return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 1)).eval()

    train_both(seeded(model), tmp_path, lambda call, x: [call(x).square().mean()], inputs(3))


def penalized(call, x):
    x = x.clone().requires_grad_()
    out = call(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    yield out.square().mean() + (slope.norm(dim=1) - 1).square().mean()


def test_a_gradient_of_gradients_is_served_in_one_block_and_refused_otherwise(tmp_path):
    def model():
        return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    train_both(seeded(model), tmp_path / "whole", penalized, inputs(3), config={"penstock": {"blocks": [""]}})
    made = seeded(model)
    with on_drive(made, tmp_path / "blocks") as engine:
        with pytest.raises(RuntimeError, match="create_graph.*blocks"):
            next(penalized(engine, inputs(1)[0]))


@needs_edges
def test_a_backward_of_its_own_says_what_to_call(tmp_path):
    data = inputs(2)
    with on_drive(seeded(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))), tmp_path) as engine:
        first = engine(data[0])
        engine(data[1])
        with pytest.raises(RuntimeError, match=r"engine\.backward\(loss\)"):
            first.square().mean().backward()


@pytest.mark.parametrize("many", [1, 2])
def test_a_gradient_is_read_between_backward_and_step(tmp_path, many):
    model, data = net(), batches(4)
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    with make(model, tmp_path, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), gradient_clipping=0.5, gradient_accumulation_steps=many) as engine:
        for at in range(0, 4, many):
            optimizer.zero_grad()
            for batch in data[at : at + many]:
                (plain(**batch) / many).backward()
                loss = engine(**batch)
                engine.backward(loss)
                if batch is data[at + many - 1]:
                    for name, parameter in plain.named_parameters():
                        torch.testing.assert_close(engine.read_state(dict(model.named_parameters())[name], "gradient"), parameter.grad, atol=1e-5, rtol=0)
                    with pytest.raises(RuntimeError, match=r"engine\.step\(\) comes next"):
                        engine(**batch)
                engine.step()
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            optimizer.step()
        assert engine.global_steps == 4 // many
        same_weights(engine, plain, atol=1e-5)


# --- weights that are used elsewhere than in their module's forward, or not at all


class Scattered(nn.Module):
    """Parameters of its own around layers, one of another module, a module that is never called, one that is skipped at first."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.token = nn.Parameter(torch.randn(1, 8))
        self.table = nn.Embedding(5, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.never = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.left_out = 1

    def forward(self, x):
        x = x * self.scale + self.token + self.table.weight.mean(0)
        for number, layer in enumerate(self.layers):
            if number != self.left_out:
                x = layer(x) + nn.functional.linear(x, self.frozen.weight)
        return x @ self.table.weight.t()


def scattered_losses(call, module, batch):
    number, x = batch
    module.left_out = (1, None, 2, 1, None)[number]
    return call(x).square().mean()


@pytest.mark.parametrize("how", ["one", "accumulated", "train_batch"])
def test_weights_used_anywhere_are_in_memory_for_the_pass(tmp_path, how):
    model = seeded(Scattered)
    plain = copy.deepcopy(model)
    trained = [each for each in plain.parameters() if each.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    ours = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    many = 2 if how in ("accumulated", "train_batch") else 1
    with make(model, tmp_path, optimizer=ours, gradient_clipping=0, gradient_accumulation_steps=many) as engine:
        for number, x in enumerate(inputs(5)):
            optimizer.zero_grad()
            expected = scattered_losses(plain, plain, (number, x))
            expected.backward()
            optimizer.step()
            if how == "train_batch":
                model.left_out = plain.left_out
                loss = engine.train_batch([x, x], loss=lambda module, given: module(given).square().mean())
            else:
                for _ in range(many):
                    loss = scattered_losses(engine, model, (number, x))
                    engine.backward(loss)
                    engine.step()
            assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
        same_weights(engine, plain, atol=1e-5)
        engine.save_checkpoint(tmp_path / "checkpoints")
        with make(seeded(Scattered, 9), tmp_path / "again", optimizer=lambda given: torch.optim.SGD(given, lr=0.1), gradient_clipping=0) as again:
            again.load_checkpoint(tmp_path / "checkpoints")
            with torch.no_grad():
                again(x)
                again.module.left_out = plain.left_out
                torch.testing.assert_close(again(x), plain(x), atol=1e-5, rtol=0)


class Drops(nn.Module):
    """Layers that training drops at random, and one that training alone has."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6))
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        for layer in self.layers:
            if not self.training or torch.rand(()) > 0.5:
                x = x + layer(x)
        return self.head(x).square().mean()


def test_layers_that_are_dropped_at_random_have_their_place(tmp_path):
    train_both(seeded(Drops), tmp_path, lambda call, x: [call(x)], inputs(6))
    with on_drive(seeded(Drops, 1), tmp_path, resume=True) as engine:
        torch.manual_seed(5)  # others are dropped
        engine(inputs(1)[0])
        assert not any(block.resident for block in engine._given.blocks)


def test_what_is_in_memory_for_the_pass_is_in_the_plan(tmp_path):
    class Wide(nn.Module):
        def __init__(self, outside):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
            self.wide, self.outside = nn.Linear(2048, 2048, bias=False), outside

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            wide = nn.functional.pad(x, (0, 2040))
            return (nn.functional.linear(wide, self.wide.weight) if self.outside else self.wide(wide)).square().mean()

    least = []
    for outside in (False, True):
        model = Wide(outside)
        with on_drive(model, tmp_path / str(outside)) as engine:
            step(engine, {"x": inputs(1)[0]})
            least.append(engine.plan()["least_host_memory_bytes"])
    assert least[1] >= least[0] + 2 * 4 * 2048 * 2048


def test_values_gathered_within_a_forward_are_there_for_it(tmp_path):
    deepspeed = pytest.importorskip("penstock.deepspeed")

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
            self.head = nn.Linear(8, 8)

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            with deepspeed.zero.GatheredParameters([self.head.weight, self.head.bias]):
                return (x @ self.head.weight.t() + self.head.bias).square().mean()

    model = seeded(Head)
    plain, data = copy.deepcopy(model), inputs(3)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    config = {
        "train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 1e-2}},
        "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": str(tmp_path)}},
        "penstock": {"forwards_per_step": 2},
    }  # fmt: skip
    engine = deepspeed.initialize(model=model, config=config)[0]
    for x in data:
        optimizer.zero_grad()
        expected = plain(x)
        expected.backward()
        optimizer.step()
        loss = engine(x)
        engine.backward(loss)
        engine.step()
        assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    engine.destroy()


def test_values_gathered_within_a_later_forward_alone_are_fetched_there(tmp_path):
    """TRL's trainers that generate first read the head's weight in their own forward, with and without a graph."""
    deepspeed = pytest.importorskip("penstock.deepspeed")

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
            self.head = nn.Linear(8, 8, bias=False)

        def forward(self, x, fused, of=None):
            for layer in self.layers:
                x = layer(x)
            if not fused:
                return self.head(x)
            weight = self.head.weight if of is None else of(self)
            with deepspeed.zero.GatheredParameters([weight]):
                return (x @ weight.t()).square().mean()

    steps, plain = inputs(10), seeded(Head)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    expected = []
    for x in steps:
        expected.append(plain(x, True).item())
        plain(x, True).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    offload = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": str(tmp_path)}}
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0, "zero_optimization": offload}
    for blocks, accumulation in ((None, 1), (None, 2), (["layers.0", "layers.1", "layers.2"], 1)):
        model = seeded(Head)
        given = {**config, "gradient_accumulation_steps": accumulation, "penstock": {"blocks": blocks} if blocks else {}}
        engine = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2), config=given)[0]
        losses = []
        for x in steps:
            with torch.no_grad(), deepspeed.zero.GatheredParameters(list(model.parameters())):
                engine(x, False)
                losses.append(engine(x, True).item())
            for _ in range(accumulation):
                engine.backward(engine(x, True))
                engine.step()
        assert losses == pytest.approx(expected, abs=1e-5)
        if blocks is None and accumulation == 1:  # backward would have to compute again what is made of it
            with pytest.raises(RuntimeError, match=r"gathered within a forward.*blocks=\[\.\.\.\]"):
                engine(x, True, lambda module: module.layers[1][0].weight)
        engine.destroy()


def test_a_part_that_is_called_by_itself_is_one_pass(tmp_path):
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
            self.scale = nn.Parameter(torch.ones(()), requires_grad=False)

        def forward(self, x):
            return (self.body(x) * self.scale).square().mean()

    x = inputs(1)[0]
    for first in ("the part", "the model"):
        with make(seeded(Parts), tmp_path / first, blocks=["body.0", "body.2"]) as engine:
            if first == "the model":
                engine.backward(engine(x))
                engine.step()
            with torch.no_grad():
                made = engine.module.body(x)
            assert made.square().mean().item() == pytest.approx(engine.module.eval()(x).item(), abs=1e-6)
            engine.module.train()
            again = engine.module.body(x)  # as peft's prompts are, when they are saved
            assert torch.equal(again.detach(), made)
            with pytest.raises(RuntimeError, match="outside of the model's forward"):
                again.sum().backward()


class Wrapped(nn.Module):
    """Its body has all parameters."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)], nn.Linear(8, 1))

    def forward(self, x):
        return self.body(x).square().mean()


def plain_steps(model, loss_of, steps):
    """Losses of SGD, `steps` has the inputs of each."""
    optimizer, losses = optimizer_of(model), []
    for given in steps:
        for x in given:
            loss = loss_of(model, x)
            losses.append(loss.item())
            (loss / len(given)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("first", ["training", "evaluation", "the model"])
def test_a_part_that_has_all_parameters_trains_in_the_models_place(tmp_path, accumulation, first):
    steps = [inputs(12)[at : at + accumulation] for at in range(0, 12, accumulation)]
    plain = seeded(Wrapped)
    expected = plain_steps(plain, lambda model, x: model.body(x).square().mean(), steps)
    with on_drive(seeded(Wrapped), tmp_path, gradient_accumulation_steps=accumulation) as engine:
        if first == "evaluation":
            with torch.no_grad():
                engine.module.body(steps[0][0])
        losses = []
        for number, given in enumerate(steps):
            for x in given:
                loss = engine(x) if first == "the model" and number % 2 == 0 else engine.module.body(x).square().mean()
                losses.append(loss.item())
                engine.backward(loss)
                engine.step()
        assert losses == pytest.approx(expected, abs=1e-6)
        same_weights(engine, plain)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("lasts", [False, True])
def test_a_forward_that_is_put_in_the_models_place_is_the_models(tmp_path, accumulation, lasts):
    """For one call, as Lightning puts its training_step there, which calls parts in turn; or for good, around the model's own."""
    steps = [inputs(12)[at : at + accumulation] for at in range(0, 12, accumulation)]

    def parts(model, x):
        return model.body[3](torch.relu(model.body[1](model.body[0](x)))).square().mean() if not lasts else model(x) * 2

    plain = seeded(Wrapped)
    expected = plain_steps(plain, parts, steps)
    with on_drive(seeded(Wrapped), tmp_path, gradient_accumulation_steps=accumulation) as engine:
        module = engine.module
        own = module.forward

        def once(x):
            module.forward = own
            return parts(module, x)

        def around(x):
            return own(x) * 2

        if lasts:
            module.forward = around
        losses = []
        for given in steps:
            for x in given:
                if not lasts:
                    own = module.forward
                    module.forward = once
                loss = engine(x)
                losses.append(loss.item())
                engine.backward(loss)
                engine.step()
                assert (module.forward is around) == lasts
        assert losses == pytest.approx(expected, abs=1e-6)
        same_weights(engine, plain)


def test_a_forward_without_gradients_calls_blocks_in_any_order(tmp_path):
    class Loops(Wrapped):
        def forward(self, x, order=(0, 1, 2)):
            for each in order:
                x = self.body[each](x)
            return self.body[3](x).square().mean()

    plain = seeded(Loops)
    with on_drive(seeded(Loops), tmp_path) as engine:
        engine.backward(engine(inputs(1)[0]))
        engine.step()
        plain_steps(plain, lambda model, x: model(x), [inputs(1)])
        with torch.no_grad():
            for order in ((2, 1, 0), (0, 0, 0, 1), (1,), (0, 1, 2)):
                assert engine(inputs(1)[0], order).item() == pytest.approx(plain(inputs(1)[0], order).item(), abs=1e-6)
        engine.backward(engine(inputs(1)[0]))
        engine.step()
        plain_steps(plain, lambda model, x: model(x), [inputs(1)])
        same_weights(engine, plain)


@pytest.mark.parametrize("wrong", [{"blocks": "layers"}, {"blocks": [1]}, {"forwards_per_step": 0}, {"blokcs": []}])
def test_a_wrong_word_of_blocks_in_the_configuration_is_refused(tmp_path, wrong):
    with pytest.raises((TypeError, ValueError), match=next(iter(wrong))):
        make(net(), tmp_path, config={"penstock": wrong})
