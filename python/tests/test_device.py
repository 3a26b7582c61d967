"""A model that is computed on a device: blocks are copied there, gradients come back, and the losses are plain PyTorch's there.

Without a GPU the device is memory of the processor apart from the engine's, which goes the same ways; and once more with a stand-in for
CUDA's streams and events that does everything as late as it may (late_cuda.py).
"""

import pytest

torch = pytest.importorskip("torch")

import penstock  # noqa: E402
from engine_models import all_names, batches, make, net, plain_losses, step  # noqa: E402
from late_cuda import CheckedCore, Late, checked  # noqa: E402
from penstock._engine import _device, _preparation, _weights  # noqa: E402
from penstock._engine._device import DeviceMemory, choose_device  # noqa: E402

# Products of a GPU have other last bits than those that plain PyTorch makes there with whole batches of kernels.
BOUND = 2e-5


@pytest.fixture
def cuda(monkeypatch):
    """A stand-in that finds out what is not in order."""
    late = Late(monkeypatch)
    core = _preparation._core.TrainingEngine
    monkeypatch.setattr(_device, "cuda_of", lambda device: late)
    monkeypatch.setattr(_preparation, "has_own_memory", lambda device: True)
    monkeypatch.setattr(_weights, "DeviceMemory", checked(DeviceMemory, late))
    monkeypatch.setattr(_preparation._core, "TrainingEngine", lambda *arguments: CheckedCore(core(*arguments), late))
    yield late
    late.synchronize()
    assert late.wrong == []
    assert late.registered == {}


@pytest.fixture(params=["apart", "late", "cuda"])
def device(request, monkeypatch):
    if request.param == "late":
        request.getfixturevalue("cuda")
        return torch.device("cpu")
    if request.param == "apart":
        monkeypatch.setattr(_preparation, "has_own_memory", lambda device: True)
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU here")
    return torch.device("cuda", torch.cuda.current_device())


class Blocks:
    """Weights of some blocks in "the engine's memory", and a DeviceMemory that brings them; what computes is late too."""

    def __init__(self, cuda, count=3, size=64):
        cuda.computes_at_once = False
        self.cuda = cuda
        self.size = size
        self.arena = torch.zeros(count * size, dtype=torch.uint8)
        for block in range(count):
            self.place(block).fill_(block + 1)
        self.memory = DeviceMemory(torch.device("cpu"), size, (self.arena.data_ptr(), self.arena.numel()))

    def place(self, block):
        return self.arena[block * self.size : (block + 1) * self.size]

    def bring(self, block):
        return self.memory.bring(block, self.place(block).data_ptr(), self.size)

    def kernel(self, memory):
        """Reads the memory on the current stream; returns a list that has its values when the kernel is over."""
        read = []
        self.cuda.current_stream().enqueue(lambda: read.extend(memory.tolist()))
        return read

    def close(self):
        self.memory.close()


@pytest.fixture
def of_blocks(cuda):
    made = Blocks(cuda)
    yield made
    made.close()


def on(device, steps):
    return [[{name: value.to(device) for name, value in batch.items()} for batch in each] for each in steps]


def trained(engine, steps):
    losses = []
    for number, each in enumerate(steps):
        torch.manual_seed(number)
        losses.append(step(engine, each[0]) if len(each) == 1 else engine.train_batch(each).item())
    return losses


def undisturbed(directory, device, data):
    """Losses of a run to which nothing happens."""
    with make(net(), directory, device=device) as engine:
        return [step(engine, batch) for batch in data]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_losses_are_plain_pytorchs(tmp_path, device, tied, dropout):
    model = net(tied=tied, dropout=dropout)
    steps = [[batch] for batch in batches(12)]
    expected, plain = plain_losses(net(tied=tied, dropout=dropout).to(device), all_names(model), on(device, steps))
    with make(model, tmp_path, device=device) as engine:
        assert trained(engine, steps) == pytest.approx(expected, abs=BOUND)
        state = engine.state_dict()
        for name, value in plain.state_dict().items():
            assert state[name].device.type == "cpu"
            torch.testing.assert_close(state[name], value.cpu(), atol=2e-4, rtol=0)


def test_inputs_of_any_device_and_outputs_on_it(tmp_path, device):
    data = batches(3)
    with make(net(), tmp_path, device=device) as engine:
        assert engine.device == device
        for batch in (data[0], on(device, [data[1:2]])[0][0]):
            loss = engine(**batch)
            assert loss.device == device
            engine.backward(loss)
            engine.step()
        assert all(parameter.device == device for parameter in engine.module.parameters())
        engine.eval()
        with torch.no_grad():
            assert engine(data[2]["x"]).device == device


# Micro-batches wait for each other within their backwards.
@pytest.mark.parametrize("one_by_one", [False, True])
def test_micro_batches(tmp_path, device, one_by_one):
    model, data = net(), batches(12)
    steps = [data[at : at + 3] for at in range(0, 12, 3)]
    expected, _ = plain_losses(net().to(device), all_names(model), on(device, steps))
    with make(model, tmp_path, device=device, gradient_accumulation_steps=3) as engine:
        if not one_by_one:
            assert trained(engine, steps) == pytest.approx(expected, abs=BOUND)
            return
        for each, loss in zip(steps, expected):
            for batch in each:
                engine.backward(engine(**batch))
                engine.step()
            assert engine.last_step["loss"] == pytest.approx(loss, abs=BOUND)


def test_dropout_is_the_same_in_backward_and_after_a_resume(tmp_path, device):
    data = batches(8)

    def engine_of(directory, **options):
        return make(net(dropout=0.3), tmp_path / directory, device=device, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2), **options)

    with engine_of("whole") as engine:
        torch.manual_seed(3)
        expected = [step(engine, batch) for batch in data]
    with engine_of("parts") as engine:
        torch.manual_seed(3)
        losses = [step(engine, batch) for batch in data[:5]]
    torch.manual_seed(99)
    with engine_of("parts", resume=True) as engine:
        losses += [step(engine, batch) for batch in data[5:]]
    assert losses == expected


def test_a_model_that_was_closed_goes_on_in_another_engine(tmp_path, device):
    data = batches(4)
    model = net()
    with make(model, tmp_path, device=device) as engine:
        losses = [step(engine, batch) for batch in data[:2]]
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())
    with pytest.raises(RuntimeError, match="closed"):
        model.norm.weight.isnan()
    with make(model, tmp_path, device=device, resume=True) as engine:
        losses += [step(engine, batch) for batch in data[2:]]
    assert undisturbed(tmp_path / "whole", device, data) == losses


def test_what_is_written_in_gathered_is_trained_on(tmp_path, device):
    data = batches(2)
    with make(net(), tmp_path, device=device) as engine:
        step(engine, data[0])
        with engine.gathered(write_back=True):
            for parameter in engine.module.parameters():
                parameter.data.mul_(0.5)
        halved = {name: value.clone() for name, value in engine.state_dict().items()}
        engine.eval()
        with torch.no_grad():
            given = engine(**data[1]).item()
    plain = net()
    plain.load_state_dict(halved)
    assert plain(**data[1]).item() == pytest.approx(given, abs=BOUND)


def test_an_error_in_a_block_gives_up_its_step(tmp_path, device):
    data = batches(3)
    model = net()
    expected = undisturbed(tmp_path / "whole", device, data)
    with make(model, tmp_path / "broken", device=device) as engine:
        losses = [step(engine, data[0])]
        hook = model.layers[2].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine(**data[1])
        hook.remove()
        losses += [step(engine, batch) for batch in data[1:]]
    assert losses == expected


def test_a_device_without_room_leaves_the_engine_as_it_was(tmp_path, device, monkeypatch):
    data = batches(3)
    expected = undisturbed(tmp_path / "whole", device, data)

    def full(*_):
        raise RuntimeError("out of memory")

    with make(net(), tmp_path / "tried", device=device) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(_weights, "DeviceMemory", full)
            with pytest.raises(RuntimeError, match="out of memory"):
                engine(**data[0])
        assert [step(engine, batch) for batch in data] == expected


# As after an assertion on a GPU: every call of the device fails from then on.
def test_a_device_that_fails_gives_the_run_back(tmp_path, device, monkeypatch):
    data = batches(4)
    expected = undisturbed(tmp_path / "whole", device, data)

    def broken(*_):
        raise RuntimeError("device-side assert")

    close = _weights.DeviceMemory.close

    def close_and_tell(memory):
        close(memory)
        broken()

    engine = make(net(), tmp_path / "broken", device=device)
    losses = [step(engine, batch) for batch in data[:2]]
    engine.flush()
    with monkeypatch.context() as patch:
        for name, replaced in (("bring", broken), ("leave", broken), ("close", close_and_tell)):
            patch.setattr(_weights.DeviceMemory, name, replaced)
        with pytest.raises(RuntimeError, match="device-side assert"):
            engine(**data[2])
        with pytest.raises(RuntimeError, match="device-side assert"):
            engine.close()
    with make(net(), tmp_path / "broken", device=device, resume=True) as engine:
        assert losses + [step(engine, batch) for batch in data[2:]] == expected


# A kernel of the buffers' former owner, which the allocator knows to be before everything that this stream is given.
def test_the_first_copy_waits_for_the_former_owner_of_its_buffer(cuda, monkeypatch):
    given_back = [torch.zeros(64, dtype=torch.uint8) for _ in range(2)]
    empty = torch.empty
    for each in given_back:
        cuda.default.enqueue(lambda each=each: each.fill_(0xEE))
    monkeypatch.setattr(torch, "empty", lambda *shape, **how: given_back.pop() if given_back and how.get("device") != "cpu" else empty(*shape, **how))
    blocks = Blocks(cuda)
    assert given_back == []
    read = blocks.kernel(blocks.bring(1))
    blocks.memory.leave()
    cuda.synchronize()
    assert read == [2] * blocks.size
    blocks.close()


def test_a_copy_waits_for_all_that_was_computed_with_its_buffer_on_any_stream(cuda, of_blocks):
    streams = [cuda.Stream() for _ in range(3)]
    reads = []
    for number, stream in enumerate(streams):
        with cuda.stream(stream):
            reads.append(of_blocks.kernel(of_blocks.bring(0)))
            if number == 2:
                reads.append(reads[-1])
                continue  # entered on one stream, left on another
            of_blocks.memory.leave()
    of_blocks.memory.leave()
    for block in (1, 2):
        of_blocks.bring(block)
        of_blocks.memory.leave()
    cuda.synchronize()
    assert reads == [[1] * of_blocks.size] * 4


def test_a_stream_that_brings_what_is_there_waits_for_its_copy(cuda, of_blocks):
    of_blocks.bring(1)
    other = cuda.Stream()
    with cuda.stream(other):
        read = of_blocks.kernel(of_blocks.bring(1))
    other.synchronize()
    assert read == [2] * of_blocks.size


def test_the_engines_memory_is_its_own_again_when_a_use_is_left(cuda, of_blocks):
    read = of_blocks.kernel(of_blocks.bring(1))
    of_blocks.memory.leave()
    of_blocks.place(1).fill_(0xFF)
    cuda.synchronize()
    assert read == [2] * of_blocks.size


# step() on another stream than backward, and both on others than forward.
def test_gradients_are_taken_behind_all_streams_of_their_use(cuda, of_blocks):
    gradients = [torch.zeros(4) for _ in range(3)]
    forward, backward, step_of = (cuda.Stream() for _ in range(3))
    with cuda.stream(forward):
        of_blocks.bring(0)
    for stream, gradient in zip((forward, backward, step_of), gradients):
        stream.enqueue(lambda gradient=gradient: gradient.fill_(7.0))
    with cuda.stream(backward):
        of_blocks.memory.computed()
    with cuda.stream(step_of):
        taken = of_blocks.memory.take(gradients)
        assert [each.tolist() for each in taken] == [[7.0] * 4] * 3
        of_blocks.memory.leave()


def test_forward_backward_and_step_on_streams_of_their_own(tmp_path, cuda):
    data = batches(4)
    expected = undisturbed(tmp_path / "one", "cpu", data)
    losses = []
    with make(net(), tmp_path / "each", device="cpu") as engine:
        for batch in data:
            with cuda.stream(cuda.Stream()):
                loss = engine(**batch)
            with cuda.stream(cuda.Stream()):
                engine.backward(loss)
            with cuda.stream(cuda.Stream()):
                engine.step()
            losses.append(loss.item())
    assert losses == expected


# What was enqueued before a call failed still moves bytes: whose memory it is must not have it back before that is over.
@pytest.mark.parametrize("fails", ["wait", "record"])
def test_after_a_call_that_fails_no_copy_is_under_way(cuda, of_blocks, fails):
    of_blocks.bring(0)
    if fails == "wait":
        cuda.fails = fails
        with pytest.raises(RuntimeError, match="wait was made to fail"):
            of_blocks.bring(0)
    else:
        of_blocks.memory.leave()
        cuda.fails = fails
        with pytest.raises(RuntimeError, match="record was made to fail"):
            of_blocks.bring(1)
    cuda.fails = ""
    of_blocks.memory.leave()
    assert cuda.pending_copies() == []


def test_a_use_whose_end_cannot_be_told_is_waited_for(cuda, of_blocks):
    read = of_blocks.kernel(of_blocks.bring(0))
    cuda.fails = "record"
    with pytest.raises(RuntimeError, match="record was made to fail"):
        of_blocks.memory.leave()
    cuda.fails = ""
    assert cuda.pending_copies() == []
    assert read == [1] * of_blocks.size


def test_gradients_that_fail_midway_are_not_under_way(cuda, of_blocks):
    of_blocks.bring(0)
    with pytest.raises(RuntimeError):
        of_blocks.memory.take([torch.ones(4), torch.ones(2).view(1, 2).expand(2, 2).to_sparse()])
    assert cuda.pending_copies() == []
    of_blocks.memory.leave()


def test_memory_that_could_not_all_be_registered_is_not_left_registered(cuda):
    cuda.fails = "register 1"
    with pytest.raises(RuntimeError, match="register 1 was made to fail"):
        Blocks(cuda)
    assert cuda.registered == {}


# CheckedCore asserts the order.
@pytest.mark.parametrize("fails", ["write", "Runtime"])
def test_memory_is_unregistered_before_an_engine_that_came_to_nothing_unmaps_it(tmp_path, cuda, monkeypatch, fails):
    data = batches(3)
    expected = undisturbed(tmp_path / "whole", "cpu", data)

    def full(*_):
        raise OSError("no space left")

    with make(net(), tmp_path / "tried", device="cpu") as engine:
        with monkeypatch.context() as patch:
            patch.setattr(*((_preparation._parameters, "write") if fails == "write" else (_preparation, "Runtime")), full)
            with pytest.raises(OSError, match="no space left"):
                engine(**data[0])
        assert cuda.registered == {}
        assert [step(engine, batch) for batch in data] == expected
        assert len(cuda.registered) == 2


def test_memory_that_cuda_does_not_pin_is_told(tmp_path, cuda):
    data = batches(2)
    with make(net(), tmp_path / "pinned", device="cpu") as engine:
        expected = [step(engine, batch) for batch in data]
        pinned = engine.report()
        assert pinned["pinned_for_device_bytes"] > pinned["peak_pinned_bytes"] > 0
    cuda.refuses_to_register = True
    with make(net(), tmp_path / "pageable", device="cpu") as engine:
        with pytest.warns(UserWarning, match=r"CUDA does not pin \d+ bytes of host memory \(cudaHostRegister: error 2\)"):
            losses = [step(engine, data[0])]
        losses.append(step(engine, data[1]))
        assert engine.report()["pinned_for_device_bytes"] == 0
    assert losses == expected


# Of an engine with blocks in the device's memory: what it enqueues with a use comes behind every stream that took part in it.
def test_all_streams_of_a_use_are_told_the_current_one_first(cuda):
    streams = _device.Streams(torch.device("cpu"))
    forward, backward, step_of = (cuda.Stream() for _ in range(3))
    numbers = {id(stream): number for number, stream in enumerate((forward, backward, step_of), 1)}
    for stream in (forward, backward, step_of):
        stream.cuda_stream = numbers[id(stream)]
    recorded = []

    class Gradient:
        def record_stream(self, stream):
            recorded.append(stream.cuda_stream)

    with cuda.stream(forward):
        assert streams.here() == 1
        streams.entered("a use")
    with cuda.stream(backward):
        streams.entered("a use")  # of another micro-batch
        streams.computed()
    with cuda.stream(step_of):
        assert streams.left([Gradient()]) == [3, 1, 2]
    assert recorded == [3], "its memory is another stream's, which may give it to somebody else"
    with cuda.stream(backward):
        streams.entered("the next one")
        assert streams.left([Gradient()]) == [2]
    assert recorded == [3]


def test_on_another_stream(tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU here")
    data = batches(6)
    losses = []
    for name, stream in (("first", torch.cuda.current_stream()), ("other", torch.cuda.Stream())):
        with make(net(dropout=0.3), tmp_path / name, device="cuda", gradient_accumulation_steps=2) as engine, torch.cuda.stream(stream):
            torch.manual_seed(3)
            losses.append([engine.train_batch(data[at : at + 2]).item() for at in (0, 2, 4)])
    assert losses[0] == losses[1]


def test_a_default_device_of_torchs_is_not_where_states_are_read(tmp_path, device):
    with make(net(), tmp_path, device=device) as engine:
        step(engine, batches(1)[0])
        expected = engine.state_dict()
        before = torch.get_default_device() if hasattr(torch, "get_default_device") else None
        if before is None:
            pytest.skip("this torch has no default device")
        torch.set_default_device("meta")
        try:
            value = engine.read_state(engine.module.norm.weight)
        finally:
            torch.set_default_device(before)
        assert torch.equal(value, expected["norm.weight"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(tmp_path, device, dtype):
    try:
        torch.nn.functional.layer_norm(torch.zeros(1, 2, dtype=dtype, device=device), (2,))
    except RuntimeError:  # torch 1.13 on the processor
        pytest.skip("this torch does not compute in this type here")
    data = batches(10)
    with make(net(), tmp_path, device=device, dtype=dtype) as engine:
        losses = [step(engine, batch) for batch in data]
        assert engine.report()["totals"]["h2d_bytes"] > 0
    assert losses[-1] < losses[0] - 0.3


def test_bytes_that_are_copied(tmp_path, device):
    data = batches(3)
    model = net()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    with make(model, tmp_path, device=device) as engine:
        step(engine, data[0])
        before = engine._run.runtime.device_report()
        step(engine, data[1])
        after = engine._run.runtime.device_report()
        report = engine.report()
    assert report["device"] == device.type
    # Forward and backward of each block; the tied one has two uses in each. Padding between parameters comes on top.
    copied = after["h2d_bytes"] - before["h2d_bytes"]
    assert 2 * 4 * parameters <= copied <= 3 * 4 * parameters
    assert 4 * parameters <= after["d2h_bytes"] - before["d2h_bytes"] <= 2 * 4 * parameters


def test_a_model_on_the_gpu_is_taken_from_there(tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU here")
    model = net().to("cuda")
    with make(model, tmp_path) as engine:
        assert engine.device.type == "cuda"
        assert all(parameter.device.type == "cpu" for parameter in model.parameters())
        step(engine, batches(1)[0])


def test_devices_that_are_not_there(tmp_path, monkeypatch):
    for wrong in ("tpu", "meta", 3.5):
        with pytest.raises(ValueError, match="device is .*: 'cpu', 'cuda' or 'cuda:N'"):
            make(net(), tmp_path, device=wrong)
    if not torch.cuda.is_available():
        assert choose_device(None) == torch.device("cpu")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        with pytest.raises(ValueError, match="finds no GPU: use device='cpu'"):
            penstock.initialize(model=net(), state_dir=str(tmp_path), device="cuda")
        with monkeypatch.context() as patch, pytest.raises(ValueError, match="finds no GPU, and CUDA_VISIBLE_DEVICES='' hides those that are there: "):
            patch.setenv("CUDA_VISIBLE_DEVICES", "")
            penstock.initialize(model=net(), state_dir=str(tmp_path), device="cuda")
    else:
        with pytest.raises(ValueError, match="and there are"):
            make(net(), tmp_path, device=f"cuda:{torch.cuda.device_count()}")


@pytest.mark.parametrize("accumulate", [1, 3])
def test_trainer_with_deepspeeds_configuration(tmp_path, accumulate):
    pytest.importorskip("accelerate")
    trainer = pytest.importorskip("trainer")
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU here")
    plain = trainer.run(out=tmp_path / "plain", accumulate=accumulate, use_cpu=False)
    ours = trainer.run(
        "-m", "penstock.run", out=tmp_path / "ours", deepspeed=trainer.config(tmp_path / "nvme"), accumulate=accumulate, use_cpu=False
    )
    assert list(ours) == list(plain)
    for number, values in plain.items():
        assert ours[number] == pytest.approx(values, abs=1e-4), number
