"""penstock.optim with parameters on a device: they pass through host memory in pieces, in the order of streams, and the bits are the same.

Without a GPU the device is memory of the processor, beside a stand-in for CUDA's streams that does everything as late as it may (late_cuda.py).
"""

import signal

import pytest

torch = pytest.importorskip("torch")

from late_cuda import Late  # noqa: E402
from penstock.optim import LAMB, AdamW, Lion, _on_device, _on_drive  # noqa: E402

SIZES = [(1,), (7,), (3, 5, 7), (100, 129), (40_000,), (0,), (50, 3), (64, 64)]
PLACES = [{"host_memory": 2 << 20}, {"nvme_offload_fraction": 0.0}, {"nvme_offload_fraction": 1.0}]


@pytest.fixture
def cuda(monkeypatch):
    late = Late(monkeypatch)
    late.computes_at_once = False
    monkeypatch.setattr(_on_device, "cuda_of", lambda device: late)
    monkeypatch.setattr(_on_device, "_pinned", lambda size, device: torch.full((size,), 0xEE, dtype=torch.uint8))
    for module in (_on_device, _on_drive):
        monkeypatch.setattr(module, "is_on_device", lambda tensor: getattr(tensor, "lies_there", True))
    monkeypatch.setattr(_on_device, "_PIECE", 20_000)
    return late


def parameters(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    made = [torch.nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for size in SIZES]
    made.append(torch.nn.Parameter(torch.randn(30, 40, generator=generator).to(dtype).t()))
    return made


def gradients(params, step):
    generator = torch.Generator().manual_seed(100 + step)
    return [(torch.randn(p.shape, generator=generator) * 0.3).to(p.dtype) for p in params]


def in_host_memory(monkeypatch, kind, directory, dtype, steps, **place):
    """Values after these steps of the same optimizer, with its parameters in host memory."""
    params = parameters(dtype)
    with monkeypatch.context() as patch:
        patch.setattr(_on_drive, "is_on_device", lambda tensor: False)
        optimizer = kind(params, lr=1e-2, state_dir=directory, **place)
        for step in range(steps):
            for p, gradient in zip(params, gradients(params, step)):
                p.grad = gradient
            optimizer.step()
    return [p.detach().clone() for p in params]


def late_step(cuda, optimizer, params, step):
    """Gradients that come late, on the current stream, and a reader of the values behind the step; returns what it reads."""
    for p, gradient in zip(params, gradients(params, step)):
        p.grad = torch.full_like(p, float("nan"))
        cuda.current_stream().enqueue(lambda p=p, gradient=gradient: cuda.copy(p.grad, gradient))
    optimizer.step()
    read = []
    cuda.current_stream().enqueue(lambda: read.extend(p.detach().clone() for p in params))
    cuda.current_stream().synchronize()
    return read


@pytest.mark.parametrize("kind", [AdamW, Lion, LAMB])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("place", PLACES, ids=["memory first", "in memory", "on the drive"])
def test_the_bits_are_those_of_parameters_in_host_memory(cuda, monkeypatch, directory, kind, dtype, place):
    expected = in_host_memory(monkeypatch, kind, directory, dtype, 3, **place)
    params = parameters(dtype)
    optimizer = kind(params, lr=1e-2, state_dir=directory, **place)
    for step in range(3):
        with cuda.stream(cuda.Stream()):
            read = late_step(cuda, optimizer, params, step)
    assert all(map(torch.equal, read, expected))
    assert cuda.pending_copies() == []


@pytest.mark.parametrize("piece, most", [(1, 3), (20_000, 3), (1 << 30, 1)])
def test_a_few_pieces_of_host_memory_are_taken(cuda, monkeypatch, directory, piece, most):
    made = []
    monkeypatch.setattr(_on_device, "_PIECE", piece)
    monkeypatch.setattr(_on_device, "_pinned", lambda size, device: made.append(size) or torch.empty(size, dtype=torch.uint8))
    params = parameters()
    optimizer = AdamW(params, state_dir=directory)
    for step in range(3):
        late_step(cuda, optimizer, params, step)
    largest = 2 * 40_000 * 4
    assert len(made) == most and (max(made) == largest or piece > largest)


def test_some_parameters_in_host_memory_and_some_without_gradients(cuda, monkeypatch, directory):
    expected = in_host_memory(monkeypatch, AdamW, directory, torch.bfloat16, 2)
    params, still = parameters(torch.bfloat16), torch.nn.Parameter(torch.ones(5))
    for p in params[::2]:
        p.lies_there = False
    optimizer = AdamW([*params, still], lr=1e-2, state_dir=directory)
    for step in range(2):
        for p, gradient in zip(params, gradients(params, step)):
            p.grad = gradient
        optimizer.step()
    cuda.current_stream().synchronize()
    assert all(map(torch.equal, params, expected)) and torch.equal(still, torch.ones(5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_dict_is_that_of_host_memory_and_goes_on(cuda, monkeypatch, directory, dtype):
    expected = in_host_memory(monkeypatch, AdamW, directory, dtype, 4)
    params = parameters(dtype)
    optimizer = AdamW(params, lr=1e-2, state_dir=directory)
    for step in range(2):
        late_step(cuda, optimizer, params, step)
    saved = optimizer.state_dict()
    masters = [state["master"] for state in saved["state"].values() if "master" in state]
    assert len(masters) == (0 if dtype == torch.float32 else len(params))
    assert all(master.device.type == "cpu" and torch.equal(master.to(dtype), p) for master, p in zip(masters, params))
    again = AdamW(params, lr=1e-2, state_dir=directory)
    again.load_state_dict(saved)
    for step in range(2, 4):
        read = late_step(cuda, again, params, step)
    assert all(map(torch.equal, read, expected))


needs_hooks = pytest.mark.skipif(not hasattr(torch.Tensor, "register_post_accumulate_grad_hook"), reason="since torch 2.1")


def backward(cuda, params, step):
    """Makes these gradients by autograd, whose values come late on the current stream."""
    given = gradients(params, step)
    loss = sum((p * gradient).sum(dtype=torch.float32) for p, gradient in zip(params, given))
    loss.backward()


@needs_hooks
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_leave_as_they_come(cuda, monkeypatch, directory, dtype):
    expected = in_host_memory(monkeypatch, AdamW, directory, dtype, 3)
    params = parameters(dtype)
    params[0].lies_there = False
    optimizer = AdamW(params, lr=1e-2, state_dir=directory, offload_gradients=True)
    for step in range(3):
        backward(cuda, params, step)
        assert all(p.grad is None for p in params[1:]) and params[0].grad is not None
        optimizer.step()
        optimizer.zero_grad()
        cuda.current_stream().synchronize()
    assert all(map(torch.equal, params, expected))


@needs_hooks
def test_a_gradient_leaves_behind_what_makes_it(cuda, monkeypatch, directory):
    expected = in_host_memory(monkeypatch, AdamW, directory, torch.float32, 1)
    params = parameters()
    optimizer = AdamW(params, lr=1e-2, state_dir=directory, offload_gradients=True)
    for p, gradient in zip(params, gradients(params, 0)):
        p.grad = torch.full_like(p, float("nan"))
        cuda.current_stream().enqueue(lambda grad=p.grad, gradient=gradient: cuda.copy(grad, gradient))
        optimizer._gradient_came(p)
    optimizer.step()
    cuda.current_stream().synchronize()
    assert all(map(torch.equal, params, expected))


@needs_hooks
def test_a_second_backward_is_refused_where_gradients_have_left(cuda, directory):
    params = parameters()
    params[1].lies_there = False
    optimizer = AdamW(params, state_dir=directory, offload_gradients=True)
    backward(cuda, params, 0)
    with pytest.raises(RuntimeError, match="a second backward before step.*leave offload_gradients out to accumulate"):
        backward(cuda, params, 1)
    optimizer.zero_grad(set_to_none=False)
    assert torch.equal(params[1].grad, torch.zeros(7))
    optimizer.zero_grad()
    assert params[1].grad is None
    before = [p.detach().clone() for p in params]
    optimizer.step()
    assert all(map(torch.equal, params, before)), "they were forgotten"
    backward(cuda, params, 2)
    optimizer.step()
    cuda.current_stream().synchronize()
    assert not torch.equal(params[3], before[3])


@needs_hooks
def test_an_optimizer_that_is_gone_leaves_gradients_alone(cuda, directory):
    params = parameters()
    AdamW(params, state_dir=directory, offload_gradients=True)
    backward(cuda, params, 0)
    assert all(p.grad is not None for p in params)


class _Core:
    """The optimizer's, with something in the place of one of its calls of step."""

    def __init__(self, core, at, does):
        self._core, self._at, self._does = core, at, does
        self.steps = 0

    def __getattr__(self, name):
        return getattr(self._core, name)

    def step(self, *arguments):
        self.steps += 1
        if self.steps == self._at:
            self._does()
        return self._core.step(*arguments)


def _fails():
    raise OSError(5, "the drive")


def test_a_step_that_fails_before_anything_was_changed_can_be_made_again(cuda, monkeypatch, directory):
    expected = in_host_memory(monkeypatch, AdamW, directory, torch.float32, 1)
    params = parameters()
    optimizer = AdamW(params, lr=1e-2, state_dir=directory)
    optimizer._core = _Core(optimizer._core, 1, _fails)
    with pytest.raises(OSError, match="the drive"):
        late_step(cuda, optimizer, params, 0)
    assert cuda.pending_copies() == []
    assert all(map(torch.equal, late_step(cuda, optimizer, params, 0), expected))


def test_a_step_that_fails_in_the_middle_is_not_made_again(cuda, directory):
    params = parameters()
    optimizer = AdamW(params, lr=1e-2, state_dir=directory)
    late_step(cuda, optimizer, params, 0)
    saved = optimizer.state_dict()
    values = [p.detach().clone() for p in params]
    optimizer._core = _Core(optimizer._core, 2, _fails)
    with pytest.raises(OSError, match="the drive"):
        late_step(cuda, optimizer, params, 1)
    assert cuda.pending_copies() == []
    for call in (optimizer.step, optimizer.state_dict):
        with pytest.raises(RuntimeError, match="do not belong together"):
            call()
    with torch.no_grad():
        for p, value in zip(params, values):
            cuda.copy(p, value)
    optimizer.load_state_dict(saved)
    late_step(cuda, optimizer, params, 1)


def test_ctrl_c_takes_effect_after_the_step(cuda, monkeypatch, directory):
    expected = in_host_memory(monkeypatch, AdamW, directory, torch.float32, 2)
    params = parameters()
    optimizer = AdamW(params, lr=1e-2, state_dir=directory)
    optimizer._core = _Core(optimizer._core, 2, lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        late_step(cuda, optimizer, params, 0)
    assert all(map(torch.equal, late_step(cuda, optimizer, params, 1), expected))


def test_a_parameter_that_has_moved_is_named(cuda, directory):
    params = parameters()
    optimizer = AdamW(params, state_dir=directory)
    optimizer._shapes[params[0]] = (params[0].dtype, params[0].shape, torch.device("cuda", 0))
    params[0].grad = torch.ones_like(params[0])
    with pytest.raises(ValueError, match="on cpu now; this optimizer was made for .* on cuda:0: make the optimizer after"):
        optimizer.step()


def test_on_a_card(directory, monkeypatch):
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU here")
    expected = in_host_memory(monkeypatch, AdamW, directory, torch.bfloat16, 4)
    params = [torch.nn.Parameter(p.detach().cuda()) for p in parameters(torch.bfloat16)]
    optimizer = AdamW(params, lr=1e-2, state_dir=directory)
    for step in range(4):
        with torch.cuda.stream(torch.cuda.Stream()):
            for p, gradient in zip(params, gradients(params, step)):
                p.grad = gradient.cuda()
            optimizer.step()
            read = [p.detach().cpu() for p in params]
    assert all(map(torch.equal, read, expected))
