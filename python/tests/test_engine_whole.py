"""Nothing of a model that an engine has is silently without its values or its gradients."""

import copy
import os
import re

import pytest

torch = pytest.importorskip("torch")

import engine_models  # noqa: E402
import penstock  # noqa: E402
import torch.utils.checkpoint  # noqa: E402, F811
from engine_models import Layer, all_names, batches, make, net, plain_losses  # noqa: E402
from torch import nn  # noqa: E402


def step(engine, batch, number=0):
    torch.manual_seed(number)
    return engine_models.step(engine, batch)


class Outside(nn.Module):
    """Uses a weight of a block where that block is not called."""

    def __init__(self, how):
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.layers = nn.ModuleList(Layer(32) for _ in range(2))
        self.head = nn.Linear(32, 50)
        self.how = how

    def forward(self, x, targets):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        if self.how == "a tied head that is no module":
            logits = self.head(x) + x @ self.embed.weight.t()
        elif self.how == "a part of a block":
            logits = self.head(self.layers[0].down(self.layers[0].up(x)))
        else:
            logits = self.head(x)
            assert self.layers[0].up.weight.dtype.is_floating_point and self.embed.weight.shape[1] == 32
            logits = logits + torch.zeros_like(self.head.bias)
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("how", ["a tied head that is no module", "a part of a block"])
@pytest.mark.parametrize("several", [1, 2])
def test_a_weight_that_is_used_outside_of_its_block_trains_as_in_plain_torch(tmp_path, how, several):
    torch.manual_seed(0)
    model, data = Outside(how), batches(6)
    steps = [data[at : at + several] for at in range(0, len(data), several)]
    expected, plain = plain_losses(model, all_names(model), steps)
    with make(model, tmp_path, gradient_accumulation_steps=several) as engine:
        for micro_batches, of_plain in zip(steps, expected):
            found = [step(engine, batch) for batch in micro_batches]
            assert sum(found) / several == pytest.approx(of_plain, abs=1e-5)
        assert engine.global_steps == len(steps)
        state = engine.state_dict()
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, atol=1e-4, rtol=0, msg=lambda text, name=name: f"{name}: {text}")


def test_shape_and_type_of_a_weight_may_be_asked_for_anywhere(tmp_path):
    with make(Outside("no other way"), tmp_path) as engine:
        assert step(engine, batches(1)[0]) > 0


# Of weights themselves, as adapters' penalties are: of some blocks, of one that two uses have, and of a weight that the forward does not use.
def penalty(model):
    up, down = model.layers[1].up.weight, model.layers[2].down.weight
    return 0.1 * up.pow(2).sum() + (down @ up).trace() * 0.01 + model.head.weight.norm() + 0.05 * (model.layers[3].norm.weight - 1).abs().sum()


WAYS = ("after the forward", "before the forward", "by itself", "by itself before", "by itself first")
# Without it a forward whose pass is open is not computed again, and such a loss is refused by name.
needs_edges = pytest.mark.skipif(
    not hasattr(torch.autograd.graph, "get_gradient_edge"), reason="torch before 2.1 does not ask for gradients at edges"
)


@needs_edges
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("several", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_a_loss_of_weights_themselves_is_that_of_plain_torch(tmp_path, way, several, tied):
    def loss_of(model, call, batch, number, backward):
        before = penalty(model) if "before" in way and number % 3 else None
        if way == "by itself first" and number % 3:
            backward(penalty(model))
            loss = call(**batch)
            backward(loss)
            return loss.item()
        loss = call(**batch)
        more = [] if number % 3 == 0 else [penalty(model) if before is None else before]
        if "by itself" in way:
            backward(loss)
            for each in more:
                backward(each)
        else:
            backward(sum(more, loss))
        return loss.item()

    data = batches(12)
    plain, model = net(tied=tied), net(tied=tied)
    for each in (plain, model):
        each.left_out = 3  # its weights are in the penalty alone
    optimizer, expected = torch.optim.AdamW(plain.parameters(), lr=1e-2), []
    for number, batch in enumerate(data):
        expected.append(loss_of(plain, plain, batch, number, lambda loss: (loss / several).backward()))
        if (number + 1) % several == 0:
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    with make(model, tmp_path, gradient_accumulation_steps=several, missing_gradients="skip") as engine:
        found = []
        for number, batch in enumerate(data):
            found.append(loss_of(model, engine, batch, number, engine.backward))
            engine.step()
        state = {name: value.clone() for name, value in engine.state_dict().items()}
    assert found == pytest.approx(expected, abs=1e-5)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, atol=1e-4, rtol=0)


@pytest.mark.parametrize("several", [1, 2])
def test_a_step_of_weights_alone_is_that_of_plain_torch(tmp_path, several):
    def of(model, call, number):
        return penalty(model) if number in (3, 4, 5, 8, 10) else call(**data[number])

    data, losses = batches(12), {}
    plain, model = net(tied=False), net(tied=False)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    losses["plain"] = []
    for number in range(len(data)):
        loss = of(plain, plain, number)
        (loss / several).backward()
        losses["plain"].append(loss.item())
        if number == 3:
            gradient = plain.layers[1].up.weight.grad.clone()
        if (number + 1) % several == 0:
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    with make(model, tmp_path, gradient_accumulation_steps=several, missing_gradients="skip") as engine:
        losses["ours"] = []
        for number in range(len(data)):
            loss = of(model, engine, number)
            engine.backward(loss)
            if number == 3:
                torch.testing.assert_close(engine.read_state(model.layers[1].up.weight, "gradient"), gradient)
            engine.step()
            losses["ours"].append(loss.item())
            if several == 1 and number == 3:
                assert engine.last_step["loss"] == pytest.approx(loss.item())
        if several == 1:
            with pytest.raises(RuntimeError, match="no step is open"):
                engine.step()
        state = {name: value.clone() for name, value in engine.state_dict().items()}
    assert losses["ours"] == pytest.approx(losses["plain"], abs=1e-5)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, atol=1e-4, rtol=0)


@needs_edges  # and products in fp16 on the processor
def test_a_step_of_weights_alone_has_no_scale_in_fp16(tmp_path):
    model = net(tied=False)
    with make(model, tmp_path, dtype=torch.float16) as engine:
        step(engine, batches(1)[0])
        with pytest.raises(RuntimeError, match="only loss is of parameters.*fp16"):
            engine.backward(penalty(model))
        step(engine, batches(1)[0])


@needs_edges
def test_a_loss_of_weights_that_is_not_the_steps_is_refused_by_name(tmp_path):
    with make(net(tied=False), tmp_path) as engine:
        data = batches(4)
        step(engine, data[0])
        weight = engine.module.layers[1].up.weight
        old = weight.pow(2).sum()
        step(engine, data[1])
        loss = engine(**data[2])
        with pytest.raises(RuntimeError, match=r"layers\.1\.up\.weight is used outside.*engine\.backward"):
            weight.pow(2).sum().backward()
        with pytest.raises(RuntimeError, match=r"a value of layers\.1\.up\.weight that was read before the last step"):
            engine.backward(loss + old)
        engine.zero_grad()
        assert step(engine, data[3]) > 0  # no worse than any exception


class Walks(nn.Module):
    """Uses a block's weight outside from its second forward on."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer(32) for _ in range(3))
        self.forwards = 0

    def forward(self, x):
        self.forwards += 1
        for layer in self.layers:
            x = layer(x)
        if self.forwards > 3:
            x = x @ self.layers[0].norm.weight.diag()
        return x.pow(2).mean()


def test_a_weight_that_is_used_outside_later_on_is_named(tmp_path):
    with make(Walks(), tmp_path) as engine:
        for _ in range(2):
            step(engine, {"x": torch.randn(2, 32)})
        with pytest.raises(RuntimeError, match="layers.0.norm.weight"):
            for _ in range(3):
                step(engine, {"x": torch.randn(2, 32)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_deepcopy_is_a_whole_model_of_its_own(tmp_path, dtype):
    data = batches(4)
    with make(net(), tmp_path, dtype=dtype) as engine:
        losses = [step(engine, batch, number) for number, batch in enumerate(data[:2])]
        made = copy.deepcopy(engine.module)
        whole = engine.state_dict()
        assert "_penstock_engine" not in made.__dict__ and type(made) is type(engine.module)
        assert made.head.weight is made.embed.weight
        for name, value in made.state_dict().items():
            assert torch.equal(value, whole[name]), name
        layer = copy.deepcopy(engine.module.layers[1])
        assert torch.equal(layer.up.weight, whole["layers.1.up.weight"])
        # It computes by itself, and its gradients are its own.
        loss = made(**data[2])
        loss.backward()
        assert made.embed.weight.grad is not None and len(losses) == engine.global_steps
        if dtype == torch.float32:
            assert step(engine, data[2], 2) == pytest.approx(loss.item(), abs=1e-6)
        copy.deepcopy(made)
        again = make(made, tmp_path / "of the copy", dtype=dtype)
        with again:
            assert step(again, data[3]) > 0


def test_a_deepcopy_within_a_step_is_refused(tmp_path):
    with make(net(), tmp_path) as engine:
        step(engine, batches(1)[0])
        loss = engine(**batches(1)[0])
        with pytest.raises(RuntimeError, match="a step is open"):
            copy.deepcopy(engine.module)
        engine.backward(loss)
        engine.step()


def test_the_state_dict_of_a_part_is_whole(tmp_path):
    with make(net(), tmp_path) as engine:
        step(engine, batches(1)[0])
        whole = engine.state_dict()
        for part in ("layers", "layers.2", "layers.2.up", "embed", "head"):
            state = engine.module.get_submodule(part).state_dict(prefix=f"{part}.")
            assert state
            for name, value in state.items():
                assert torch.equal(value, whole[name]), name
        with pytest.raises(RuntimeError, match="gathered"):
            engine.module.layers.state_dict(keep_vars=True)
        with engine.gathered():
            kept = engine.module.layers.state_dict(keep_vars=True)
            assert kept["2.up.weight"] is engine.module.layers[2].up.weight
            assert torch.equal(engine.module.layers.state_dict()["2.up.weight"], whole["layers.2.up.weight"])
    for ask in (engine.module.state_dict, engine.module.layers.state_dict, lambda: copy.deepcopy(engine.module)):
        with pytest.raises(RuntimeError, match="closed"):
            ask()


def test_a_second_checkpoint_of_a_step_takes_the_place_of_the_first(tmp_path):
    data = batches(4)
    with make(net(), tmp_path / "run") as engine:
        for number, batch in enumerate(data[:2]):
            step(engine, batch, number)
        first = engine.save_checkpoint(tmp_path / "kept", "mine", {"which": 1})
        assert engine.save_checkpoint(tmp_path / "kept", "mine", {"which": 2}) == first
        assert sorted(path.name for path in (tmp_path / "kept").iterdir() if path.name.startswith("step")) == ["step-00000002"]
        expected = [step(engine, batch, number + 2) for number, batch in enumerate(data[2:])]
    other = make(net(seed=5), tmp_path / "other", overwrite=True)
    with other:
        other.load_checkpoint(tmp_path / "kept", "mine")
        assert [step(other, batch, number + 2) for number, batch in enumerate(data[2:])] == expected
        assert other.client_state == {"which": 2}


def test_a_checkpoint_that_could_not_be_replaced_stands(tmp_path, monkeypatch):
    with make(net(), tmp_path / "run") as engine:
        step(engine, batches(1)[0])
        path = engine.save_checkpoint(tmp_path / "kept", client_state={"which": 1})
        engine.wait_for_checkpoint()
        real, calls = engine._run.core, []

        class Full:
            def __getattr__(self, name):
                return getattr(real, name)

            def begin_checkpoint(self, parent, *_):
                calls.append(parent)
                raise OSError(28, "No space left on device", parent)

        engine._run.core = Full()
        with pytest.raises(OSError, match="No space"):
            engine.save_checkpoint(tmp_path / "kept", client_state={"which": 2})
        engine._run.core = real
        assert len(calls) == 1
    other = make(net(seed=5), tmp_path / "other")
    with other:
        assert other.load_checkpoint(tmp_path / "kept")[0] == path
        other(**batches(1)[0])
        assert other.client_state == {"which": 1}


def test_what_a_kill_has_left_of_a_checkpoint_that_was_replaced_goes_with_the_next(tmp_path):
    kept = tmp_path / "kept"
    with make(net(), tmp_path / "run") as engine:
        step(engine, batches(1)[0])
        path = engine.save_checkpoint(kept, client_state={"which": 1}, wait=True)
        os.rename(path, kept / ".step-00000001.replaced")  # and killed
    with make(net(seed=5), tmp_path / "other") as other:
        assert other.load_checkpoint(kept) == (str(kept / ".step-00000001.replaced"), {"which": 1})
        with torch.no_grad():
            other(**batches(1)[0])
        other.save_checkpoint(kept, wait=True)
        assert sorted(each.name for each in kept.iterdir()) == ["latest", "step-00000001"]


class Checkpoints(nn.Module):
    """torch.utils.checkpoint of the model's own."""

    def __init__(self, around, reentrant, layers=3, width=32):
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.layers = nn.ModuleList(Layer(width, 0.1) for _ in range(layers))
        self.head = nn.Linear(width, 50)
        self.around, self.reentrant = around, reentrant

    def forward(self, x, targets):
        from torch.utils.checkpoint import checkpoint

        x = self.embed(x)
        if self.around == "all":
            x = checkpoint(lambda x: self.layers[2](self.layers[1](self.layers[0](x))), x, use_reentrant=self.reentrant)
        else:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("around", ["each", "all"])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("several", [1, 2])
def test_checkpointing_of_the_models_own_around_blocks_is_refused_in_a_line(tmp_path, around, reentrant, several):
    torch.manual_seed(0)
    model, data = Checkpoints(around, reentrant), batches(2)
    expected, _ = plain_losses(model, all_names(model), [[batch] for batch in data])
    with make(model, tmp_path, gradient_accumulation_steps=several) as engine:
        try:
            losses = [step(engine, batch, number) for number, batch in enumerate(data)]
        except RuntimeError as error:
            assert re.search("layers.*torch.utils.checkpoint.*leave it out", str(error))
        else:
            # Before torch 2.1 the inner one of two that are not reentrant is all that counts.
            assert not reentrant and not hasattr(torch.utils.checkpoint, "_checkpoint_without_reentrant_generator")
            assert losses[:1] == pytest.approx(expected[:1], abs=1e-5) and (several == 2 or losses == pytest.approx(expected, abs=1e-5))


class CheckpointsInside(Layer):
    def forward(self, x, scale=1.0):
        from torch.utils.checkpoint import checkpoint

        return checkpoint(super().forward, x, scale, use_reentrant=False)


@pytest.mark.parametrize("several", [1, 2])
def test_checkpointing_within_a_block_is_as_ever(tmp_path, several):
    model = net(dropout=0.2)
    for number in (0, 1, 3):
        model.layers[number] = CheckpointsInside(32, 0.2)
    data = batches(3)
    expected, _ = plain_losses(model, all_names(model), [[batch] * several for batch in data], per_step_seed=several == 1)
    with make(model, tmp_path, gradient_accumulation_steps=several) as engine:
        if several == 1:
            assert [step(engine, batch, number) for number, batch in enumerate(data)] == pytest.approx(expected, abs=1e-5)
        else:
            for batch in data:
                engine.train_batch([batch, batch])


@pytest.mark.parametrize("of_model, given", [("bfloat16", "float32"), ("float32", "bfloat16"), ("float16", "float32")])
def test_floating_inputs_are_of_the_models_type_from_the_first_forward_on(tmp_path, of_model, given):
    if of_model == "float16" and torch.__version__ < "2.1":
        pytest.skip("this torch computes no float16 on the processor")
    torch.manual_seed(0)
    dtype, inputs = getattr(torch, of_model), getattr(torch, given)
    model = nn.Sequential(*[Layer(32) for _ in range(3)]).to(dtype)
    engine = penstock.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), state_dir=str(tmp_path), dtype=torch.bfloat16
    )[0]
    with engine:
        for _ in range(2):
            loss = engine(torch.randn(2, 32).to(inputs)).float().pow(2).mean()
            engine.backward(loss)
            engine.step()
            assert loss.item() > 0
