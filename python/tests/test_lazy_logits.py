"""Logits that are not computed: what is made of them is what plain PyTorch makes of logits, values, gradients, shapes and types."""

import contextlib
import copy
import io
import pickle
import random
import warnings

import pytest

torch = pytest.importorskip("torch")

from penstock._engine._autograd_settings import AutogradSettings  # noqa: E402
from penstock._engine._lazy_logits import LazyLogits, Source, is_lazy  # noqa: E402
from penstock._engine._tensor_memory import Live, _ends_are_told  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

IGNORED = -100


def lazy(hidden, weight, bias, chunk, asked):
    source = Source(hidden, chunk, AutogradSettings(), lambda: (weight, bias), lambda name, size: asked.append(name))
    like = functional.linear(hidden.detach().reshape(-1, hidden.shape[-1])[:0], weight.detach(), None if bias is None else bias.detach())
    return LazyLogits.of(source, like.dtype, weight.shape[0], torch.is_grad_enabled())


# --- what losses do with logits. Each is given logits [batch, tokens, vocabulary], labels and a generator of choices.


def shifted(logits, labels):
    return logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()


def cross_entropy(logits, labels, choose):
    options = {"reduction": choose.choice(["mean", "sum", "none"]), "label_smoothing": choose.choice([0.0, 0.1])}
    if choose.random() < 0.3:
        options["weight"] = torch.linspace(0.5, 1.5, logits.shape[-1], dtype=logits.dtype)
    logits, labels = shifted(logits, labels)
    if "weight" in options and choose.random() < 0.5:
        options["label_smoothing"] = 0.0
    return functional.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1), ignore_index=IGNORED, **options)


def transformers_loss(logits, labels, choose):
    logits = logits.float()
    labels = functional.pad(labels, (0, 1), value=IGNORED)[..., 1:].contiguous()
    loss = functional.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1).to(logits.device), ignore_index=IGNORED, reduction="sum")
    return loss / torch.tensor(5)


def z_loss(logits, labels, choose):
    z = torch.logsumexp(logits.float(), dim=-1, keepdim=choose.random() < 0.5)
    return cross_entropy(logits, labels, choose).sum() + 1e-2 * z.pow(2).mean()


def capped(logits, labels, choose):
    return transformers_loss(torch.tanh(logits / 3.0) * 3.0, labels, choose)


def temperature(logits, labels, choose):
    return torch.gather(functional.log_softmax(logits / 0.7, -1), -1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)


def selective(logits, labels, choose):
    index = labels.clamp(min=0)
    taken = torch.gather(logits, dim=-1, index=index.unsqueeze(-1)).squeeze(-1)
    return taken - torch.stack([torch.logsumexp(each, dim=-1) for each in logits])


def selective_by_row(logits, labels, choose):
    rows = [functional.log_softmax(row, dim=-1).gather(-1, at.clamp(min=0).unsqueeze(-1)).squeeze(-1) for row, at in zip(logits, labels)]
    return torch.stack(rows)


def entropy(logits, labels, choose):
    found = []
    for part in logits.reshape(-1, logits.shape[-1]).split(choose.choice([2, 5])):
        logs = functional.log_softmax(part, dim=-1)
        found.append(-(torch.exp(logs) * logs).sum(-1))
    return torch.cat(found)


def whole_entropy(logits, labels, choose):
    logs = logits.log_softmax(-1)
    return -(logs.exp() * logs).sum(dim=-1).mean()


def smoothed(logits, labels, choose):
    logs = -functional.log_softmax(logits, dim=-1)
    at = labels.unsqueeze(-1)
    mask = at.eq(IGNORED)
    taken = logs.gather(dim=-1, index=at.clamp(min=0)).masked_fill(mask, 0.0)
    return 0.9 * taken.sum() + 0.1 * logs.sum(dim=-1, keepdim=True, dtype=torch.float32).masked_fill(mask, 0.0).sum()


def nll(logits, labels, choose):
    logs = functional.log_softmax(logits.flatten(0, 1), -1)
    return functional.nll_loss(logs, labels.flatten(), ignore_index=IGNORED, reduction=choose.choice(["mean", "sum", "none"]))


def masked(logits, labels, choose):
    return logits[labels != IGNORED].mean() + logits[0, 1:].sum() + logits[:, 0].float().sum(-1).mean() + logits[None, :, -1].sum()


def best(logits, labels, choose):
    values, at = logits.max(dim=-1)
    assert torch.equal(at, logits.argmax(-1)) and at.dtype == torch.int64
    return values.sum() + torch.topk(logits, 2).values.sum() + logits.topk(3, -1)[0].sum() + logits.amax(-1).sum()


def arithmetic(logits, labels, choose):
    return ((1 - logits) * 2.0 + 3.0 - logits / 2).sum(-1) - (-logits).mean(-1) + (logits.double() ** 2).sum()


def views(logits, labels, choose):
    parts = [*logits.unbind(0), logits.narrow(1, 0, 2), logits.select(1, 0), logits.unsqueeze(0).squeeze(0), *logits.chunk(2, dim=1)]
    return sum(each.logsumexp(-1).sum() for each in parts)


def of_some_words(logits, labels, choose):
    few = logits[..., :5]
    return functional.cross_entropy(few.reshape(-1, 5), labels.clamp(0, 4).reshape(-1))


CHUNKED = [
    cross_entropy, transformers_loss, z_loss, capped, temperature, selective, selective_by_row, entropy, whole_entropy, smoothed, nll, masked, best,
    arithmetic, views, of_some_words,
]  # fmt: skip


class Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x * x).sum()

    @staticmethod
    def backward(ctx, gradient):
        return 2 * ctx.saved_tensors[0] * gradient


def of_a_function(logits, labels, choose):
    return Squares.apply(logits)


def product(logits, labels, choose):
    return logits.softmax(-1) @ torch.linspace(0, 1, logits.shape[-1]).to(logits.dtype)


def other_dimension(logits, labels, choose):
    return functional.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORED) + logits.sum(1).pow(2).sum() + logits.float().std()


def set_in_place(logits, labels, choose):
    flat = logits.view(-1, logits.shape[-1])
    logits[..., 1:3] = 0
    return (flat * flat).sum()


def changed_after_use(logits, labels, choose):
    half = logits / 2
    logits.mul_(0.5)
    return (half * logits).sum() + half.logsumexp(-1).sum() + logits.logsumexp(-1).sum()


def retained(logits, labels, choose):
    logits.retain_grad()
    loss = (logits * logits).sum()
    loss.backward(retain_graph=True)
    return loss + 0 * logits.grad.sum()


WHOLE = {
    of_a_function: None, product: "matmul", other_dimension: "transpose", set_in_place: "__setitem__", changed_after_use: "mul_", retained: "retain_grad",
}  # fmt: skip


def both(of, seed, dtype, autocast, few=False):
    """What it is of plain logits, and of lazy ones: (result, gradients, types); and which operations asked for whole ones."""
    choose = random.Random(seed)
    batch, tokens, words, width = choose.randint(1, 3), choose.randint(3, 9), choose.randint(6, 17), choose.randint(2, 8)
    chunk, has_bias, trains = choose.randint(1, 12), choose.random() < 0.5, choose.random() < 0.8
    pattern = choose.choice(["some", "none", "first", "all but one"])
    found, asked = [], []
    for kind in ("plain", "lazy"):
        torch.manual_seed(seed)
        given = torch.randn(batch, tokens, width).to(dtype).requires_grad_()
        weight = nn.Parameter(torch.randn(words, width).to(dtype), requires_grad=trains)
        bias = nn.Parameter(torch.randn(words).to(dtype)) if has_bias else None
        labels = torch.randint(0, words, (batch, tokens))
        if pattern == "some":
            labels[torch.rand(labels.shape) < 0.4] = IGNORED
            labels[0, 1] = 1
        elif pattern == "first":
            labels[:, :1] = IGNORED
        elif pattern == "all but one":
            labels[:] = IGNORED
            labels[0, -1] = 2
        with torch.autocast("cpu", dtype=autocast) if autocast else contextlib.nullcontext():
            hidden = given * 1
            logits = functional.linear(hidden, weight, bias) if kind == "plain" else lazy(hidden, weight, bias, chunk, asked)
            result = of(logits, labels, random.Random(seed))
        result.float().sum().backward()
        gradients = [each.grad for each in (given, weight, bias) if each is not None and each.requires_grad]
        found.append((result.detach(), gradients, (result.dtype, result.shape, logits.dtype, logits.shape, logits.device, logits.requires_grad)))
    return found, asked, f"seed {seed}: {of.__name__}, {dtype}, {autocast}, labels {pattern}, chunks of {chunk}"


def assert_same(found, exact, told):
    plain, ours = found
    assert plain[2] == ours[2], told
    # bf16 has 8 bits: a sum of its parts in another order is another number.
    tolerance = 1e-5 if exact else 5e-2
    for one, other in zip([plain[0], *plain[1]], [ours[0], *ours[1]]):
        scale = max(1.0, float(one.float().abs().max()))
        torch.testing.assert_close(other.float(), one.float(), rtol=tolerance, atol=tolerance * scale, equal_nan=True, msg=lambda text: f"{told}\n{text}")


TYPES = [(torch.float32, None), (torch.bfloat16, None), (torch.float32, torch.bfloat16), (torch.float64, None)]


@pytest.mark.parametrize("of", CHUNKED, ids=lambda of: of.__name__)
@pytest.mark.parametrize("dtype, autocast", TYPES)
def test_what_losses_do_is_plain_pytorchs(of, dtype, autocast):
    for seed in range(6):
        found, asked, told = both(of, seed, dtype, autocast)
        assert not asked, told
        assert_same(found, dtype != torch.bfloat16 and autocast is None, told)


@pytest.mark.parametrize("of", WHOLE, ids=lambda of: of.__name__)
@pytest.mark.parametrize("dtype, autocast", TYPES)
def test_what_asks_for_whole_logits_has_them_and_is_named(of, dtype, autocast):
    named = set()
    for seed in range(6):
        found, asked, told = both(of, seed, dtype, autocast)
        named.update(asked)
        assert len(asked) <= (2 if WHOLE[of] is None else 1), told  # once; a Function's has no graph, and then a small chunk does not ask at all
        assert_same(found, dtype != torch.bfloat16 and autocast is None, told)
    assert WHOLE[of] is None or named == {WHOLE[of]}


def made(rows=10, words=7, width=3, chunk=4, grad=True):
    torch.manual_seed(0)
    hidden, weight = torch.randn(1, rows, width), nn.Parameter(torch.randn(words, width))
    asked = []
    with torch.set_grad_enabled(grad):
        return lazy(hidden, weight, None, chunk, asked), functional.linear(hidden, weight), asked, weight


def test_it_looks_like_a_tensor_and_leaves_as_one():
    logits, plain, asked, _ = made()
    assert isinstance(logits, torch.Tensor) and torch.is_tensor(logits) and is_lazy(logits)
    assert (logits.shape, logits.dtype, logits.ndim, len(logits), logits.size(-1), logits.numel()) == (plain.shape, plain.dtype, 3, 1, 7, 70)
    assert logits.requires_grad and not logits.is_leaf and logits.is_contiguous() and logits.stride() == plain.stride() and not asked
    assert is_lazy(logits.detach()) and not logits.detach().requires_grad and logits.cpu() is logits
    for leaves in (lambda each: each.numpy(), lambda each: each.tolist(), lambda each: each.cpu().numpy(), lambda each: each.data):
        logits, plain, asked, _ = made(grad=False)
        assert torch.equal(torch.as_tensor(leaves(logits)), torch.as_tensor(leaves(plain))) and len(asked) == 1
    logits, plain, asked, _ = made(grad=False)
    assert type(copy.deepcopy(logits)) is torch.Tensor and repr(logits) == repr(plain) and torch.equal(logits, plain)
    assert torch.equal(pickle.loads(pickle.dumps(logits)), plain)
    file = io.BytesIO()
    torch.save(logits, file)
    file.seek(0)
    assert torch.equal(torch.load(file), plain) and asked == ["copy.deepcopy"]  # once
    assert torch.equal(torch.stack([logits, logits]), torch.stack([plain, plain])) and torch.equal(logits.new_tensor([1.0]), torch.ones(1))


def test_whole_logits_are_computed_once_and_have_their_graph():
    logits, plain, asked, weight = made()
    assert not is_lazy(logits.exp().pow(2).cumsum(-1)) and asked == ["cumsum"]
    logits.transpose(0, 1), logits @ torch.ones(7)
    assert asked == ["cumsum"] and logits.whole() is logits.whole()
    (logits.cumsum(-1)).sum().backward()
    of_lazy, weight.grad = weight.grad, None
    plain.cumsum(-1).sum().backward()
    torch.testing.assert_close(of_lazy, weight.grad)


def test_without_gradients_nothing_has_a_graph_and_with_them_it_has_again():
    logits, plain, _, weight = made()
    with torch.no_grad():
        assert not logits.double().requires_grad and not logits.logsumexp(-1).requires_grad and not logits.cumsum(-1).requires_grad
    functional.cross_entropy(logits[0], torch.arange(10) % 7).backward()
    of_lazy, weight.grad = weight.grad, None
    functional.cross_entropy(plain[0], torch.arange(10) % 7).backward()
    torch.testing.assert_close(of_lazy, weight.grad)


def test_a_hook_comes_before_what_is_computed_in_chunks():
    logits, plain, asked, _ = made()
    seen = []
    logits.register_hook(lambda gradient: seen.append(gradient.shape))
    functional.cross_entropy(logits[0], torch.arange(10) % 7).backward()
    assert seen == [plain.shape] and asked == ["register_hook"]
    logits, plain, asked, _ = made()
    functional.cross_entropy(logits[0], torch.arange(10) % 7)
    with pytest.raises(RuntimeError, match="register_hook of logits comes after cross_entropy of them was computed in chunks.*logits_chunk_size=0"):
        logits.register_hook(print)


def test_what_the_head_was_given_must_stay_as_it_is():
    hidden, weight = torch.randn(1, 10, 3), nn.Parameter(torch.randn(7, 3))
    logits = lazy(hidden, weight, None, 4, [])
    hidden.add_(1)
    with pytest.raises(RuntimeError, match="what the head was given was changed in place"):
        logits.logsumexp(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_memory_of_a_loss_is_that_of_a_chunk(dtype):
    if not _ends_are_told():
        pytest.skip("this torch does not tell when memory goes")
    tokens, words, width, chunk = 4096, 512, 16, 64

    def peak(of):
        hidden, weight = torch.randn(1, tokens, width, dtype=dtype, requires_grad=True), nn.Parameter(torch.randn(words, width, dtype=dtype))
        labels = torch.randint(0, words, (tokens,))
        with warnings.catch_warnings(), Live() as live:
            warnings.simplefilter("error")
            loss = functional.cross_entropy(of(hidden, weight).float().view(-1, words), labels)
            loss.backward()
        return live.peak

    whole = tokens * words * 4
    assert peak(functional.linear) > 2 * whole
    # The gradients of what the head has and is given, a value for each token, and a few copies of a chunk's logits.
    own = 3 * 4 * (tokens * width + words * width) + 40 * tokens
    assert peak(lambda hidden, weight: lazy(hidden, weight, None, chunk, [])) < own + 8 * chunk * words * 4 < whole / 3


def test_memory_that_is_not_there_is_refused_by_name():
    logits, _, _, _ = made()
    for take in (lambda each: each.data_ptr(), lambda each: each[:, :-1].float().data_ptr(), lambda each: each.untyped_storage()):
        with pytest.raises(RuntimeError, match="logits_chunk_size=0"):
            take(logits)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_no_token_is_a_loss_too(reduction):
    logits, plain, _, _ = made()
    none, labels = torch.zeros(1, 10, dtype=torch.bool), torch.zeros(1, 10, dtype=torch.long)
    got, wanted = (functional.cross_entropy(each[none], labels[none], reduction=reduction) for each in (logits, plain))
    assert torch.equal(got, wanted) or (got.isnan().all() and wanted.isnan().all())


def test_a_constant_is_what_it_was_when_it_was_given():
    logits, plain, _, _ = made(grad=False)
    temperature, labels = torch.tensor(2.0), torch.zeros(10, dtype=torch.long)
    scaled, wanted = logits / temperature, plain / temperature
    temperature.fill_(9.0)
    assert torch.allclose(functional.cross_entropy(scaled.view(-1, 7), labels), functional.cross_entropy(wanted.view(-1, 7), labels))


def test_a_contiguous_copy_is_a_copy():
    logits, plain, _, _ = made(grad=False)
    part, wanted = (each.view(2, 5, 7)[:, :-1].contiguous() for each in (logits, plain))
    part.div_(2)
    assert torch.allclose(part, wanted / 2) and torch.allclose(logits + 0, plain)
