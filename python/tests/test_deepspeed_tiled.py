"""DeepSpeed's tiled linear layers and computations in parts of a sequence, and its checkpointing: values and gradients are those of the whole."""

import importlib

import pytest

torch = pytest.importorskip("torch")

import penstock.deepspeed as deepspeed  # noqa: E402
from engine_models import batches, make, net, step  # noqa: E402
from torch import nn  # noqa: E402

sequence = importlib.import_module("deepspeed.runtime.sequence_parallel.ulysses_sp")
tiling = importlib.import_module("deepspeed.runtime.zero.tiling")
checkpointing = deepspeed.checkpointing


def assert_same(found, expected):
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("in_splits, out_splits", [(1, 1), (3, 1), (1, 3), (3, 2), (10, 7)])
def test_a_linear_layer_in_tiles(bias, in_splits, out_splits):
    whole, x = nn.Linear(10, 7, bias=bias), torch.randn(4, 10, requires_grad=True)
    tiled = deepspeed.zero.TiledLinear(10, 7, bias, in_splits=in_splits, out_splits=out_splits, init_linear=whole)
    assert len(tiled.linears) == out_splits and len(tiled.linears[0]) == in_splits and tiling.TiledLinear is deepspeed.zero.TiledLinear
    assert_same([tiled(x)], [whole(x)])
    assert_same(torch.autograd.grad(tiled(x).pow(2).sum(), x), torch.autograd.grad(whole(x).pow(2).sum(), x))
    assert sum(each.numel() for each in tiled.parameters()) == sum(each.numel() for each in whole.parameters())
    apart = tiling.TiledLinear(10, 7, bias, in_splits, out_splits, input_is_already_split=True, combine_out_splits=False, init_linear=whole)
    parts = apart(x.split([end - begin for begin, end in zip(tiled.in_parts, tiled.in_parts[1:])], -1) if in_splits > 1 else x)
    assert len(parts) == out_splits
    assert_same([torch.cat(parts, -1)], [whole(x)])


def test_what_tiles_cannot_be_is_said():
    for given, told in (({"in_splits": 0}, "in_splits is 0: from 1 to the 10 features"), ({"out_splits": 8}, "out_splits is 8: from 1 to the 7 features")):
        with pytest.raises(RuntimeError, match=told):
            tiling.TiledLinear(10, 7, **given)
    with pytest.raises(ValueError, match=r"a weight of \(7, 9\) with a bias is copied to one of \(7, 10\) with"):
        tiling.TiledLinear(10, 7, init_linear=nn.Linear(9, 7))
    with pytest.raises(ValueError, match="the input is in 2 parts, and in_splits is 3"):
        tiling.TiledLinear(10, 7, in_splits=3, input_is_already_split=True)([torch.ones(1, 5)] * 2)


class Returning(nn.Linear):
    """As Megatron's: the bias is not added."""

    def __init__(self, *args, scale=1.0, **options):
        super().__init__(*args, **options)
        self.scale = scale

    def forward(self, x):
        return self.scale * nn.functional.linear(x, self.weight), self.bias


def test_layers_that_return_their_bias():
    whole, x = nn.Linear(10, 7), torch.randn(4, 10)
    tiled = deepspeed.zero.TiledLinearReturnBias(10, 7, in_splits=2, out_splits=3, linear_cls=Returning, init_linear=whole, scale=2.0)
    made, bias = tiled(x)
    assert_same([made, bias], [2 * nn.functional.linear(x, whole.weight), whole.bias])
    assert tiling.TiledLinearReturnBias(10, 7, bias=False, linear_cls=Returning)(x)[1] is None


def test_tiles_are_blocks_of_an_engine(tmp_path):
    def model():
        made = net()
        for layer in made.layers:
            layer.up = tiling.TiledLinear(32, 64, in_splits=2, out_splits=2, init_linear=layer.up)
        return made

    def losses(made, directory):
        with make(made, directory) as engine:
            return [step(engine, batch) for batch in batches(6)]

    assert losses(model(), tmp_path / "tiled") == pytest.approx(losses(net(), tmp_path / "whole"), rel=1e-5)


@pytest.mark.parametrize("shape", [(2, 11, 6), (1, 12, 6), (11, 6)])
@pytest.mark.parametrize("params", [None, "all"])
def test_an_mlp_in_shards(shape, params):
    torch.manual_seed(0)
    mlp, found = nn.Sequential(nn.Linear(6, 20), nn.GELU(), nn.Linear(20, 6)), []
    for tiled in (False, True):
        mlp.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        x = torch.randn(*shape, requires_grad=True)
        given = None if params is None else list(mlp.parameters())
        out = sequence.TiledMLP.apply(lambda self, x: self(x), mlp, x, 4, given) if tiled else mlp(x)
        (out * torch.linspace(0, 1, 6)).sum().backward()
        found.append([out.detach(), x.grad, *(each.grad for each in mlp.parameters())])
    assert_same(*found)


@pytest.mark.parametrize("way", ["sequence_tiled_compute", "TiledFusedLogitsLoss"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_in_shards(way, reduction):
    torch.manual_seed(0)
    head, found = nn.Linear(6, 9), []

    def loss(x, y):
        return nn.functional.cross_entropy(head(x).reshape(-1, 9), y.reshape(-1), reduction=reduction)

    for tiled in (False, True):
        head.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        x, y = torch.randn(2, 12, 6, requires_grad=True), torch.randint(9, (2, 12))
        if not tiled:
            made = loss(x, y)
        elif way == "TiledFusedLogitsLoss":
            made = sequence.TiledFusedLogitsLoss.apply(lambda self, x, y: loss(x, y), None, x, y, None, 4, [head.weight], reduction)
        else:
            made = sequence.sequence_tiled_compute(
                loss, 12, 4, {"x": x, "y": y}, {}, "x", compute_params=[head.weight], output_unshard_dimension=0, output_reduction=reduction
            )
        (3 * made).backward()
        found.append([made.detach(), x.grad, head.weight.grad, head.bias.grad])
    assert_same(*found)


def test_a_function_of_a_sequence_in_shards():
    weight = nn.Parameter(torch.randn(6, 6))

    def scaled(x, y, by):
        return (x @ weight) * y * by

    x, y = torch.randn(2, 10, 6, requires_grad=True), torch.randn(2, 10, 6)
    out = sequence.sequence_tiled_compute(scaled, 10, 3, {"x": x, "y": y}, {"by": 2.0}, "x", None, 1, None)
    assert_same([out, *torch.autograd.grad(out.pow(2).sum(), [x])], [scaled(x, y, 2.0), *torch.autograd.grad(scaled(x, y, 2.0).pow(2).sum(), [x])])
    for keyword, told in ((dict(output_reduction="max"), "output_reduction is 'max'"), (dict(grad_requiring_tensor_key="z"), "'z': one of kwargs_to_shard")):
        with pytest.raises(ValueError, match=told):
            sequence.sequence_tiled_compute(scaled, 10, 3, {"x": x, "y": y}, {"by": 2.0}, **{"grad_requiring_tensor_key": "x", **keyword})


def test_a_masked_loss_in_shards_and_what_does_not_fit():
    head = nn.Linear(6, 9)

    def loss(self, x, y, mask):
        return (nn.functional.cross_entropy(self(x), y, reduction="none") * mask).sum()

    x, y, mask = torch.randn(2, 8, 6, requires_grad=True), torch.randint(9, (2, 8)), torch.rand(2, 8).round()
    apply = sequence.TiledFusedLogitsLoss.apply
    made, whole = apply(loss, head, x, y, mask, 3, None, "sum"), loss(head, x.flatten(0, 1), y.flatten(), mask.flatten())
    assert_same([made, *torch.autograd.grad(made, [x])], [whole, *torch.autograd.grad(whole, [x])])
    with pytest.raises(ValueError, match=r"x, y and mask have the shapes \(2, 8, 6\), \(2, 7\): each begins with"):
        apply(loss, head, x, y[:, 1:], None, 3, None, "sum")
    with pytest.raises(ValueError, match="output_reduction is 'none'"):
        apply(loss, head, x, y, mask, 3, None, "none")


def test_what_is_drawn_is_drawn_again_in_backward():
    dropout, x = nn.Dropout(0.5), torch.ones(1, 40, 3, requires_grad=True)
    out = sequence.TiledMLP.apply(lambda self, x: self(x), dropout, x, 7, [])
    out.sum().backward()
    assert torch.equal(x.grad, out.detach())


# --- deepspeed.checkpointing


def test_checkpointing_computes_again_where_there_is_no_engine(tmp_path):
    calls = []

    def doubled(x, y):
        calls.append(1)
        return (x * y).tanh()

    x = torch.randn(3, requires_grad=True)
    for call in (checkpointing.checkpoint, checkpointing.non_reentrant_checkpoint):
        calls.clear()
        out = call(doubled, x, 2.0)
        assert_same(torch.autograd.grad(out.sum(), x), torch.autograd.grad((x * 2.0).tanh().sum(), x))
        assert len(calls) == 2
    model = net()
    for layer in model.layers:
        layer.forward = lambda x, own=layer.forward: checkpointing.checkpoint(own, x)
    with make(model, tmp_path / "inside") as engine:
        inside = [step(engine, batch) for batch in batches(4)]
    with make(net(), tmp_path / "plain") as engine:
        assert inside == [step(engine, batch) for batch in batches(4)]


def test_random_states_have_names():
    tracker = checkpointing.get_cuda_rng_tracker()
    checkpointing.model_parallel_cuda_manual_seed(3)
    first = torch.rand(2)
    with tracker.fork():
        inside = torch.rand(2)
    second = torch.rand(2)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(4), torch.cat([first, second])) and not torch.equal(inside, first)
    states = tracker.get_states()
    with tracker.fork("model-parallel-rng"):
        more = torch.rand(2)
    tracker.set_states(states)
    with tracker.fork():
        assert torch.equal(torch.rand(2), more)
    checkpointing.model_parallel_reconfigure_tp_seed(3)
    with tracker.fork():
        assert torch.equal(torch.rand(2), inside)
    tracker.add("mine", 5)
    for name, seed in (("mine", 6), ("other", 5)):
        with pytest.raises(ValueError, match="of this name, or of this seed, is there already"):
            tracker.add(name, seed)
    with pytest.raises(ValueError, match="there is no state 'none'"):
        with tracker.fork(name="none"):
            pass
    tracker.reset()
    assert tracker.get_states() == {} and tracker is checkpointing.get_cuda_rng_tracker()
    checkpointing.partition_activations_in_checkpoint(True)
    checkpointing.set_num_layers(3)
    assert checkpointing.num_layers == 3
