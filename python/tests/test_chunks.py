"""An engine that computes logits with their loss, and modules of tokens, in chunks: losses are plain PyTorch's, and what cannot be is refused by name."""

import contextlib
import copy
import json
import warnings

import pytest

torch = pytest.importorskip("torch")

import penstock  # noqa: E402
from engine_models import batches, make, net, step  # noqa: E402
from penstock._engine._chunked_modules import compute_in_chunks  # noqa: E402
from penstock._engine._heads import Heads  # noqa: E402
from penstock._engine._lazy_logits import is_lazy  # noqa: E402
from penstock._engine._pieces import Pieces  # noqa: E402
from penstock._engine._settings import Settings  # noqa: E402
from penstock._engine._tensor_memory import Live, StepTensors, _ends_are_told  # noqa: E402
from penstock._engine._trace import trace  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

CHUNK = 5  # of the 32 tokens of a batch
HAS_EDGES = hasattr(torch.autograd.graph, "get_gradient_edge")  # with which a forward whose pass has ended is computed again


@contextlib.contextmanager
def quiet():
    """Within, nothing asks for whole logits."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*asked for whole logits")
        yield


# --- losses of the caller's own. Each makes a step's loss of what `model` gives, in plain PyTorch and in an engine.


def cross_entropy(logits, targets):
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def logs_of(logits, targets):
    return functional.log_softmax(logits, -1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def of_one(model, first, second):
    logits = model(first["x"])
    return cross_entropy(logits, first["targets"]) + 1e-2 * torch.logsumexp(logits, -1).pow(2).mean()


def of_two(model, first, second):
    chosen, rejected = (logs_of(model(each["x"]), each["targets"]).sum(-1) for each in (first, second))
    return -functional.logsigmoid(0.05 * (chosen - rejected)).mean()


def of_two_at_once(model, first, second):
    one, other = model(first["x"]), model(second["x"])
    return cross_entropy(one, first["targets"]) - 0.5 * logs_of(other, second["targets"]).mean() + 1e-2 * one.logsumexp(-1).mean()


def beside_a_reference(model, first, second):
    logs = logs_of(model(first["x"]), first["targets"])
    with torch.no_grad():
        reference = logs_of(model(first["x"]), first["targets"])
    return -functional.logsigmoid(logs - 0.5 * reference).mean()


def after_an_evaluation(model, first, second):
    logits = model(first["x"])
    with torch.no_grad():
        model(second["x"])
    return cross_entropy(logits, first["targets"])


def of_the_model(model, first, second):
    return model(**first)


def of_whole_logits(model, first, second):
    logits = model(first["x"])
    return cross_entropy(logits, first["targets"]) + logits.cumsum(-1).tanh().mean()


LOSSES = [of_one, of_two, of_two_at_once, beside_a_reference, after_an_evaluation, of_the_model]


def plain(of, model, data, dtype=torch.float32):
    model = copy.deepcopy(model).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for first, second in zip(data[::2], data[1::2]):
        loss = of(model, first, second)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def ours(of, model, data, directory, **options):
    losses = []
    with make(model, directory, gradient_clipping=0, **{"logits_chunk_size": CHUNK, **options}) as engine:
        for first, second in zip(data[::2], data[1::2]):
            loss = of(engine, first, second)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        report = engine.report()
        assert (report["logits_chunk_tokens"], report["whole_logits_bytes"]) == (CHUNK, 4 * 32 * 50)
        assert not any(block.resident for block in engine._given.blocks)  # a head that is read after its call is no reason
    return losses


@pytest.mark.parametrize("of", LOSSES, ids=lambda of: of.__name__)
@pytest.mark.parametrize("tied", [True, False])
def test_losses_are_plain_pytorchs(tmp_path, of, tied):
    if not HAS_EDGES and of not in (of_one, of_the_model):
        pytest.skip("this torch knows no edges of a graph: a pass that ends before its backward is lost, as without chunks")
    model, data = net(tied=tied), batches(40)
    expected = plain(of, model, data)
    with quiet():
        assert ours(of, model, data, tmp_path) == pytest.approx(expected, rel=2e-6, abs=1e-5)


@pytest.mark.parametrize("of", [of_two, of_two_at_once])
def test_losses_of_forwards_that_are_said(tmp_path, of):
    model, data = net(), batches(20)
    expected = plain(of, model, data)
    with quiet():
        assert ours(of, model, data, tmp_path, forwards_per_step=2) == pytest.approx(expected, rel=2e-6, abs=1e-5)


def test_whole_logits_are_as_they_were_and_the_operation_is_named_once(tmp_path):
    model, data = net(), batches(12)
    expected = plain(of_whole_logits, model, data)
    with pytest.warns(UserWarning, match="cumsum asked for whole logits, which take 6.25 KiB: computed in chunks of 5 tokens are") as told:
        assert ours(of_whole_logits, model, data, tmp_path) == pytest.approx(expected, rel=2e-6, abs=1e-5)
    assert len([each for each in told if "whole logits" in str(each.message)]) == 1
    assert next(each for each in told if "whole logits" in str(each.message)).filename == __file__


@pytest.mark.parametrize("loss", ["the model's", "the caller's"])
def test_micro_batches_one_by_one(tmp_path, loss):
    def of(model, batch):
        return model(**batch) if loss == "the model's" else cross_entropy(model(batch["x"]), batch["targets"])

    model, data = net(), batches(40)
    expected, twin = [], copy.deepcopy(model)
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    for number, batch in enumerate(data):
        made = of(twin, batch)
        (made / 2).backward()
        expected.append(made.item())
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    found = []
    with quiet(), make(model, tmp_path, gradient_clipping=0, gradient_accumulation_steps=2, logits_chunk_size=CHUNK) as engine:
        for batch in data:
            made = of(engine, batch)
            engine.backward(made)
            engine.step()
            found.append(made.item())
    assert found == pytest.approx(expected, rel=2e-6, abs=1e-5)
    with quiet(), make(net(), tmp_path / "at once", gradient_clipping=0, gradient_accumulation_steps=2, logits_chunk_size=CHUNK) as engine:
        means = [engine.train_batch(list(pair), loss=of).item() for pair in zip(data[::2], data[1::2])]
    assert means == pytest.approx([(one + other) / 2 for one, other in zip(expected[::2], expected[1::2])], rel=2e-6, abs=1e-5)


class Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x * x).mean()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * x * gradient / x.numel()


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_function_that_looks_at_no_class_has_its_gradient(tmp_path, accumulation):
    """An autograd.Function of the caller's is given the tensor itself."""

    def of(model, first, second):
        return sum(Squares.apply(model(each["x"])) for each in (first, second)[:accumulation])

    model, data = net(), batches(12)
    expected = plain(of, model, data)
    assert ours(of, model, data, tmp_path, forwards_per_step=accumulation) == pytest.approx(expected, rel=2e-6, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_types_are_those_of_whole_logits(tmp_path, dtype):
    if dtype == torch.float16 and int(torch.__version__.split(".")[0]) < 2:
        pytest.skip("this torch multiplies no matrices of fp16 on the processor")
    told = []
    for chunk in (0, CHUNK):
        model = net()
        with make(model, tmp_path / str(chunk), dtype=dtype, logits_chunk_size=chunk) as engine:
            logits = engine(batches(1)[0]["x"])
            half = functional.log_softmax(logits, -1)
            loss = cross_entropy(logits, batches(1)[0]["targets"])
            told.append((logits.dtype, half.dtype, half.logsumexp(-1).dtype, logits.argmax(-1).dtype, loss.dtype, logits.float().dtype))
            assert is_lazy(logits) == (chunk > 0)
            engine.backward(loss)
            engine.step()
            assert loss.item() == pytest.approx(30.2, abs=0.5)
    assert told[0] == told[1]


def test_autocast_is_that_of_whole_logits(tmp_path):
    found = []
    for chunk in (0, CHUNK):
        losses = []
        with make(net(), tmp_path / str(chunk), logits_chunk_size=chunk) as engine:
            for batch in batches(6):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    logits = engine(batch["x"])
                    loss = cross_entropy(logits, batch["targets"])
                assert logits.dtype == torch.bfloat16 and loss.dtype == torch.float32
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
        found.append(losses)
    assert found[1] == pytest.approx(found[0], rel=2e-3)


# --- what a model returns


class Named(nn.Module):
    """Returns its loss and its logits, as transformers' models do."""

    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x, targets=None):
        logits = self.net(x)
        return {"loss": None if targets is None else cross_entropy(logits, targets), "logits": logits}


def test_an_evaluation_gives_what_it_gave(tmp_path):
    batch = batches(1)[0]
    expected = Named()(**batch)
    with make(Named(), tmp_path, logits_chunk_size=CHUNK) as engine:
        engine.eval()
        with torch.no_grad():
            alone, found = engine(batch["x"]), engine(**batch)
        assert type(alone["logits"]) is torch.Tensor and torch.equal(alone["logits"], expected["logits"])
        # Of a loss that the model has made, where nobody may want them: computed when they are looked at.
        assert is_lazy(found["logits"]) and found["loss"].item() == pytest.approx(expected["loss"].item(), rel=1e-6)
        engine.train()
        step_loss = engine(**batch)["loss"]
        engine.backward(step_loss)
        engine.step()
        torch.testing.assert_close(found["logits"].detach().cpu().numpy(), expected["logits"].detach().numpy())  # of the weights that they were made with


class Again(nn.Module):
    """Goes through its layers `times` times within one forward; its loss is of the logits of all of them."""

    def __init__(self):
        super().__init__()
        self.net, self.times = net(), 1

    def forward(self, x, targets):
        found = [self.net(x) for _ in range(self.times)]
        return {"loss": sum(cross_entropy(logits, targets) / (1 + at) for at, logits in enumerate(found)), "logits": found[0]}


def test_an_evaluation_that_calls_its_blocks_again_has_the_logits_of_each_call(tmp_path):
    batch, model = batches(1)[0], Again()
    with make(model, tmp_path, logits_chunk_size=CHUNK) as engine:
        engine.backward(engine(**batch)["loss"])
        engine.step()
        expected = Again()
        expected.load_state_dict(engine.state_dict())
        engine.eval()
        with torch.no_grad():
            for model.times in (3, 1, 2):
                expected.times = model.times
                with quiet():
                    found, wanted = engine(**batch), expected(**batch)
                torch.testing.assert_close(found["loss"], wanted["loss"], atol=1e-6, rtol=1e-6)
                torch.testing.assert_close(found["logits"].detach().cpu().numpy(), wanted["logits"].numpy(), atol=1e-6, rtol=1e-5)
                del found


def test_logits_that_are_kept_until_their_weights_are_gone_are_refused(tmp_path):
    model, data = Named(), batches(3)
    with make(model, tmp_path, logits_chunk_size=CHUNK) as engine:
        kept = engine(**data[0])
        engine.backward(kept["loss"])
        engine.step()
        for _ in range(2):
            with pytest.raises(RuntimeError, match="logits of this forward are asked for when its pass is over .* logits_chunk_size=0") as raised:
                kept["logits"].sum()
            assert "\n" not in str(raised.value)
            other = engine(**data[1])  # whose weights are where the first one's were
            engine.backward(other["loss"])
            engine.step()
        read = engine(**data[2])
        values = read["logits"].float().detach().clone()
        engine.backward(read["loss"])
        engine.step()
        assert values.shape == (4, 8, 50)


def test_a_copy_of_the_model_computes_with_its_own_weights(tmp_path):
    batch = batches(1)[0]
    with make(with_mlps(), tmp_path, logits_chunk_size=CHUNK, chunked_modules=["mlp"], chunk_size=7) as engine:
        step(engine, batch)
        copied = copy.deepcopy(engine.module)
        with torch.no_grad():
            expected = engine(**batch).item()
            assert copied(**batch).item() == pytest.approx(expected, rel=1e-6)
            for parameter in copied.parameters():
                parameter.zero_()
            assert copied(**batch).item() != pytest.approx(expected, rel=1e-2) and type(copied(batch["x"])) is torch.Tensor
        assert "<html" in engine.report().html()
    assert not any("forward" in part.__dict__ for part in engine.module.modules() if part is not engine.module)


def test_what_no_head_is_known_of_is_said(tmp_path):
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    with make(model, tmp_path, logits_chunk_size=2) as engine:
        with pytest.warns(UserWarning, match="logits_chunk_size: Sequential has no head that is known .* its logits|logits are computed whole"):
            engine(torch.ones(5, 4))
    with make(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)), tmp_path / "whole") as engine, warnings.catch_warnings():
        warnings.simplefilter("error")
        engine(torch.ones(5, 4))


def settings_of(**keywords):
    return Settings(None, {"offload": "none", **keywords})


def test_what_is_computed_in_chunks_is_what_was_asked_for():
    model = net()
    assert Heads(model, settings_of(logits_chunk_size=7)).chunk_of(8) == 7 and Heads(model, settings_of(logits_chunk_size=7)).chunk_of(7) == 0
    for asked in ({}, {"logits_chunk_size": 0}, {"host_memory": "64MiB"}):
        assert Heads(model, settings_of(**asked)).modules == []
    assert Heads(model, settings_of(logits_chunk_size=7)).modules == [model.head]


@pytest.mark.skipif(not HAS_EDGES, reason="this torch computes no forward again")
def test_steps_whose_logits_outlive_their_backward_go_on(tmp_path):
    """Accumulated by hand, without gradient_accumulation_steps: the second forward begins while the first's logits are held."""
    losses, model = {}, net()
    for size in (0, CHUNK):
        with make(copy.deepcopy(model), tmp_path / str(size), gradient_clipping=0, logits_chunk_size=size) as engine:
            losses[size] = []
            for first, second in zip(batches(6)[::2], batches(6)[1::2]):
                held = []
                for batch in (first, second):
                    held.append(engine(batch["x"]))
                    loss = cross_entropy(held[-1], batch["targets"])
                    engine.backward(loss)
                    losses[size].append(loss.item())
                engine.step()
    assert losses[CHUNK] == pytest.approx(losses[0], rel=1e-5)


def test_a_step_takes_the_memory_of_a_chunk(tmp_path):
    """Of torch's tensors: a whole step's, and what is found out of it beforehand."""
    if not _ends_are_told():
        pytest.skip("this torch does not tell when memory goes")
    words, chunk = 2000, 16
    peaks, counted = {}, {}
    batch = batches(1, size=8, length=64, words=words)[0]
    for size in (0, chunk):
        with make(net(width=8, words=words), tmp_path / str(size), logits_chunk_size=size) as engine:
            step(engine, batch)
            with Live() as live:
                step(engine, batch)
            peaks[size] = live.peak
        model, tensors = net(width=8, words=words), StepTensors(torch.device("cpu"))
        pieces = Pieces(model, settings_of(logits_chunk_size=size))
        pieces.install()
        blocks = penstock._engine._blocks.find_blocks(model)
        traced = trace(model, blocks, lambda model=model: model(**batch), tensors=tensors, pieces=pieces)
        pieces.remove()
        assert not tensors.notes
        counted[size] = tensors.bytes(1, traced.uses)
    whole, weights = 8 * 64 * words * 4, 8 * words * 4
    assert peaks[0] > 2 * whole and counted[0] > 2 * whole
    assert peaks[chunk] < whole / 2 and counted[chunk] < whole / 2
    assert peaks[chunk] <= counted[chunk] + 4 * weights


def test_a_plan_says_so(tmp_path):
    plan = penstock.plan(net(), example=batches(1)[0], state_dir=str(tmp_path), logits_chunk_size=CHUNK)
    assert "logits: in chunks of 5 tokens with their loss; whole ones would take 6400 bytes in fp32" in str(plan)
    assert not [note for note in penstock.plan(net(), example=batches(1)[0], state_dir=str(tmp_path)).notes if "logits" in note]


def test_the_configuration_says_it_too(tmp_path):
    config = {
        "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}},
        "penstock": {"logits_chunk_size": 9, "chunked_modules": ["down"], "chunk_size": 3},
    }  # fmt: skip
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    with penstock.initialize(model=net(), config=str(file))[0] as engine:
        step(engine, batches(1)[0])
        assert engine.report()["logits_chunk_tokens"] == 9 and len(engine._given.pieces.modules.modules) == 4


# --- modules of tokens


class Gated(nn.Module):
    def __init__(self, width, dropout=0.0):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(width, 3 * width), nn.Linear(3 * width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.dropout(self.down(functional.silu(self.gate(x)) * self.up(x)))


class Mixing(nn.Module):
    """Each token sees the one before it."""

    def __init__(self, width, dropout=0.0):
        super().__init__()
        self.up = nn.Linear(width, width)

    def forward(self, x):
        return self.up(x) + functional.pad(x, (0, 0, 1, 0))[..., :-1, :]


class Centred(Mixing):
    """Of all tokens."""

    def forward(self, x):
        return self.up(x - x.mean(-2, keepdim=True))


class Batched(Mixing):
    def __init__(self, width, dropout=0.0):
        super().__init__(width)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x):
        return self.norm(self.up(x).flatten(0, -2)).view_as(x)


def with_mlps(kind=Gated, dropout=0.0):
    model = net()
    torch.manual_seed(2)
    for layer in model.layers:
        layer.mlp = kind(32, dropout)
        layer.forward = None
        layer.__class__ = Layer
        del layer.forward
    return model


class Layer(nn.Module):
    def forward(self, x):
        return x + self.mlp(self.norm(x))


@pytest.mark.parametrize("named", [["mlp"], [Gated], ["Gated"], ["layers.0.mlp", "layers.2.mlp"]])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_modules_of_tokens_in_chunks(tmp_path, named, accumulation):
    model, data = with_mlps(), batches(20)

    def of(model, first, second):
        return sum(model(**each) for each in (first, second)[:accumulation])

    expected = plain(of, model, data)
    found = ours(of, model, data, tmp_path, forwards_per_step=accumulation, chunked_modules=named, chunk_size=7)
    assert found == pytest.approx(expected, rel=5e-6, abs=1e-5)  # of losses that begin at 30


@pytest.mark.parametrize("kind, name", [(Mixing, "a Mixing"), (Centred, "a Centred"), (Batched, "a Batched")])
def test_a_module_that_does_not_act_on_each_token_alone_is_refused_by_name(tmp_path, kind, name):
    with make(with_mlps(kind), tmp_path, chunked_modules=["mlp"], chunk_size=7) as engine:
        with pytest.raises(RuntimeError, match=f"chunked_modules: layers.0.mlp, {name}, gives a token something else among other tokens") as raised:
            engine(**batches(1)[0])
        assert "\n" not in str(raised.value)


class Keeping(Gated):
    """Acts on each token alone, and keeps something of a call in a way of its own."""

    def __init__(self, width, dropout=0.0, way=None):
        super().__init__(width)
        self.aux, self.calls, self.load = None, 0, {"tokens": [0]}
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("last", torch.zeros(width))
        self.way = way

    def forward(self, x, losses=None):
        if self.way == "a loss":
            self.aux = self.gate(x).pow(2).mean()
        elif self.way == "the first loss" and self.aux is None:
            self.aux = self.gate(x).pow(2).mean()
        elif self.way == "a number":
            self.calls += 1
        elif self.way == "within a list":
            self.load["tokens"][0] += x.shape[-2]
        elif self.way == "a buffer in place":
            self.seen.add_(x.shape[-2])
        elif self.way == "a buffer":
            self.last = x.detach().flatten(0, -2)[-1]
        elif self.way == "within":
            self.up.norm = x.norm()
        elif self.way == "what it is given":
            losses.append(x.mean())
        elif self.way == "in backward" and torch.is_grad_enabled():
            self.aux = self.gate(x).pow(2).mean()
        return super().forward(x)


class KeepingLayer(Layer):
    losses = []

    def forward(self, x):
        return x + self.mlp(self.norm(x), losses=self.losses)


WAYS = {
    "a loss": " \\(aux\\)", "the first loss": " \\(aux\\)", "a number": " \\(calls\\)", "within a list": "", "a buffer in place": " \\(seen\\)",
    "a buffer": " \\(last\\)", "within": " \\(norm\\)", "what it is given": "", "in backward": " \\(aux\\)",
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_a_module_that_keeps_something_of_a_call_is_refused_by_name(tmp_path, way):
    def keeping():
        model = with_mlps(lambda width, dropout: Keeping(width, way=way))
        for layer in model.layers:
            layer.__class__ = KeepingLayer
        return model

    batch = batches(1)[0]
    with make(keeping(), tmp_path, chunked_modules=["mlp"], chunk_size=7) as engine:
        expected = f"chunked_modules: layers.[0-9].mlp, a Keeping, keeps something of each call{WAYS[way]}, which would be a chunk's .*: leave it out"
        with pytest.raises(RuntimeError, match=expected) as raised:
            engine.backward(engine(**batch))
        assert "\n" not in str(raised.value)
    KeepingLayer.losses.clear()
    with make(keeping(), tmp_path / "whole", chunk_size=7) as engine:  # without chunks it trains
        assert step(engine, batch) > 0


def test_a_module_that_keeps_nothing_else_than_it_has_is_served(tmp_path):
    model, data = with_mlps(lambda width, dropout: Keeping(width)), batches(8)
    expected = plain(of_the_model, model, data)
    assert ours(of_the_model, model, data, tmp_path, chunked_modules=["mlp"], chunk_size=7) == pytest.approx(expected, rel=5e-6)


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
@pytest.mark.parametrize("when", ["before", "later"])
def test_a_hook_within_a_module_in_chunks_is_refused_by_name_and_one_of_it_sees_all_tokens(tmp_path, kind, when):
    if not hasattr(nn.Module, f"register_{kind}_hook"):
        pytest.skip(f"this torch has no {kind} hooks")
    model, seen = with_mlps(), []

    def hook(module, *tensors):
        seen.extend(each.shape[:-1].numel() for each in (tensors[-1] if isinstance(tensors[-1], tuple) else tensors[-1:]))

    getattr(model.layers[1].mlp, f"register_{kind}_hook")(hook)
    with make(model, tmp_path, chunked_modules=["mlp"], chunk_size=7) as engine:
        if when == "later":
            step(engine, batches(1)[0])
            assert seen and set(seen) == {32}
        getattr(model.layers[1].mlp.up, f"register_{kind}_hook")(hook)
        with pytest.raises(RuntimeError, match=r"chunked_modules: layers\.1\.mlp\.up, a Linear, has a hook, .*: leave layers\.1\.mlp out, or put the hook on"):
            engine(**batches(1)[0])


def test_dropout_is_no_reason_and_is_drawn_once(tmp_path):
    model = with_mlps(dropout=0.5)
    with make(model, tmp_path, chunked_modules=["mlp"], chunk_size=7) as engine:
        losses = [step(engine, batch) for batch in batches(30)]
    assert losses[-1] < losses[0]
    # Backward draws the numbers of forward: the gradient of the mean of what it gives is the mean of what it has passed on.
    layer, x = nn.Dropout(0.5), torch.ones(40, 3, requires_grad=True)
    torch.manual_seed(0)
    out = compute_in_chunks(lambda each: layer(each), x, [], 7)
    following = torch.rand(1)
    out.sum().backward()
    assert torch.equal(x.grad, out.detach()) and 0 < (x.grad == 0).sum() < x.numel()
    torch.manual_seed(0)
    compute_in_chunks(lambda each: layer(each), x, [], 7)
    assert torch.equal(torch.rand(1), following)


def test_names_that_are_none_and_calls_that_are_not_served(tmp_path):
    with pytest.raises(ValueError, match="chunked_modules: the model has no module 'mpl', none whose name ends in it, and none of a class of this name"):
        make(with_mlps(), tmp_path, chunked_modules=["mpl"])
    with pytest.raises(ValueError, match="chunked_modules: must be a list of names"):
        make(with_mlps(), tmp_path, chunked_modules="mlp")
    with pytest.raises(ValueError, match="chunk_size: must be a whole number"):
        make(with_mlps(), tmp_path, chunked_modules=["mlp"], chunk_size=0)

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = nn.Bilinear(4, 4, 4)

        def forward(self, x):
            return self.mlp(x, x)

    with make(Two(), tmp_path, chunked_modules=["mlp"]) as engine:
        with pytest.raises(RuntimeError, match="chunked_modules: mlp is called with 2 tensors"):
            engine(torch.ones(2, 9, 4))

    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = Pool()

        def forward(self, x):
            return self.mlp(x)

    class Pool(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)

        def forward(self, x):
            return super().forward(x).mean(-2)

    with make(Pooled(), tmp_path, chunked_modules=["mlp"]) as engine:
        with pytest.raises(RuntimeError, match="chunked_modules: mlp gives no tensor with the tokens that it is given"):
            engine(torch.ones(2, 9, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_in_chunks_are_those_of_all_tokens(dtype):
    torch.manual_seed(0)
    mlp = Gated(6).to(dtype)
    for shape in ((3, 11, 6), (33, 6), (1, 2, 5, 6)):
        found = []
        for chunks in (False, True):
            mlp.zero_grad(set_to_none=True)
            torch.manual_seed(1)
            x = torch.randn(*shape, dtype=dtype).requires_grad_()
            out = compute_in_chunks(mlp, x, list(mlp.parameters()), 4) if chunks else mlp(x)
            (out * torch.linspace(0, 1, 6, dtype=dtype)).sum().backward()
            found.append([out.detach(), x.grad, *(each.grad for each in mlp.parameters())])
        for one, other in zip(*found):
            assert one.dtype == other.dtype and one.shape == other.shape
            torch.testing.assert_close(other, one, rtol=1e-5 if dtype == torch.float32 else 5e-2, atol=1e-5 if dtype == torch.float32 else 5e-2)


def test_what_lies_between_the_matrices_is_a_chunks():
    if not _ends_are_told():
        pytest.skip("this torch does not tell when memory goes")

    def peak(chunk):
        mlp, x = Gated(16), torch.randn(1, 2048, 16, requires_grad=True)
        with Live() as live:
            out = mlp(x) if chunk is None else compute_in_chunks(mlp, x, list(mlp.parameters()), chunk)
            out.sum().backward()
        return live.peak

    given, weights = 2048 * 16 * 4, 4 * 3 * 16 * 48
    assert peak(None) > 5 * 3 * given
    assert peak(64) < 4 * given + 4 * weights + 8 * 64 * 48 * 4
