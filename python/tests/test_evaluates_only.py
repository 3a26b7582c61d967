"""A model of which nothing trains: weights larger than memory are evaluated, and nothing else of them is kept."""

import os
import subprocess
import sys

import pytest
import torch

import penstock

transformers = pytest.importorskip("transformers")


def small_model(dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    config = transformers.GPT2Config(
        vocab_size=2111, n_positions=64, n_embd=256, n_layer=16, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    return transformers.GPT2LMHeadModel(config).to(dtype).eval()


def bytes_of(model):  # 54 MB in fp32
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def on_disk(directory):
    return sum(os.path.getsize(os.path.join(directory, name)) for name in os.listdir(directory))


def generated(model, tokens=12):
    ids = torch.tensor([[5, 17, 1010, 3], [9, 9, 4, 2000]])
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, pad_token_id=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_generates_the_same_tokens_and_the_drive_has_its_weights_alone(tmp_path, dtype):
    model = small_model(dtype)
    weights = bytes_of(model)
    ids = torch.arange(32).reshape(2, 16)
    with torch.no_grad():
        expected, logits = generated(model), model(ids).logits
    model.requires_grad_(False)
    engine, *_ = penstock.initialize(model=model, state_dir=tmp_path / "state", host_memory=weights // 3, dtype=dtype)
    assert torch.equal(generated(engine.module), expected)
    assert torch.equal(engine(ids).logits, logits)
    assert on_disk(tmp_path / "state") < 1.2 * weights + (1 << 20)
    assert engine.plan()["peak_managed_bytes"] <= weights // 3
    engine.module.train()
    assert torch.equal(engine(ids).logits, logits)  # with gradients switched on, an evaluation all the same
    for call in (
        lambda: engine.step(),
        lambda: engine.backward(engine(ids).logits.sum()),
        lambda: engine.train_batch([ids]),
    ):
        with pytest.raises(RuntimeError, match="only evaluates"):
            call()
    with pytest.raises(Exception, match="requires a gradient, and an engine of which nothing trains"):
        engine(inputs_embeds=torch.zeros(1, 4, 256, dtype=dtype, requires_grad=True))
    state = engine.module.state_dict()
    engine.close()
    again = small_model(dtype, seed=1).requires_grad_(False)  # other values, which nobody reads
    engine, *_ = penstock.initialize(
        model=again, state_dir=tmp_path / "state", host_memory=weights // 3, dtype=dtype, resume=True, gradient_clipping=0.5
    )
    engine.client_state["read"] = True  # what is only read has nothing to commit
    assert torch.equal(generated(engine.module), expected)
    for name, value in engine.module.state_dict().items():
        assert torch.equal(value, state[name])
    # The run is another's, who may be reading it.
    for call in (
        lambda: engine.module.load_state_dict(small_model(dtype, seed=3).state_dict()),
        lambda: engine.write_state(engine.module.lm_head.weight, torch.zeros(2111, 256)),
    ):
        with pytest.raises(RuntimeError, match="only reads: the run that it goes on with"):
            call()
    engine.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", ["nvme", "none"])
def test_a_teacher_takes_new_values(tmp_path, device, dtype):
    """As a reference model that follows the trained one: of both the weights are gathered, and the teacher's are mixed with the student's."""
    import penstock.deepspeed as deepspeed
    from engine_models import batches, net

    zero = {"stage": 3, "offload_param": {"device": device, **({"nvme_path": str(tmp_path)} if device == "nvme" else {})}}
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": zero, "bf16": {"enabled": dtype == torch.bfloat16}}
    student, teacher, expected, loaded = (net(seed, layers=2, tied=False).to(dtype) for seed in (0, 1, 1, 2))
    batch, x = batches(1)[0], batches(1)[0]["x"]
    trained = deepspeed.initialize(model=student, config={**config, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}})[0]
    engine = deepspeed.initialize(model=teacher, config=config)[0]
    with torch.no_grad():
        assert torch.equal(engine(x), expected(x))
    for number in range(2):
        trained.backward(trained(**batch))
        trained.step()
        both = list(zip(teacher.parameters(), student.parameters()))
        with torch.no_grad(), deepspeed.zero.GatheredParameters([each for pair in both for each in pair], modifier_rank=0):
            for own, (mine, theirs) in zip(expected.parameters(), both):
                mine.data.mul_(0.5).add_(theirs.data, alpha=0.5)
                own.data.mul_(0.5).add_(theirs.data, alpha=0.5)
        if number:  # between forwards, one alone
            teacher.head.weight.data.mul_(0.9)
            expected.head.weight.data.mul_(0.9)
        with torch.no_grad():
            assert torch.equal(engine(x), expected(x))
    engine.module.load_state_dict(loaded.state_dict())
    with torch.no_grad():
        assert torch.equal(engine(x), loaded(x))
    trained.backward(trained(**batch))
    trained.step()
    for each in (engine, trained):
        each.destroy()
    for name, value in loaded.state_dict().items():
        assert torch.equal(teacher.state_dict()[name], value)


# An average of weights is written as often as its student makes steps, and there is no step here that makes room for more.
def test_a_teacher_takes_new_values_for_ever(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4)).requires_grad_(False)
    data = torch.randn(2, 4)
    engine = penstock.initialize(model=model, state_dir=str(tmp_path))[0]
    engine.eval()
    with torch.no_grad():
        engine(data)
    weight = model[0].weight
    for turn in range(1100):
        engine.write_state(weight, torch.full((4, 4), float(turn)))
    with torch.no_grad(), engine.gathered():
        assert torch.equal(weight.data, torch.full((4, 4), 1099.0))
    engine.close()


def test_a_teacher_whose_writer_was_killed_is_not_taken_for_whole(tmp_path, in_child):
    script = """
        import os, sys
        import torch
        import penstock
        from penstock._engine._state import State
        torch.manual_seed(0)
        model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(4)]).requires_grad_(False)
        engine = penstock.initialize(model=model, state_dir=sys.argv[1])[0]
        engine.eval()
        with torch.no_grad():
            engine(torch.ones(1, 4))
        write, left = State._write_changed, [3]
        def write_some(*arguments):
            left[0] -= 1
            if left[0] == 0:
                os._exit(9)
            return write(*arguments)
        State._write_changed = write_some
        with torch.no_grad(), engine.gathered(write_back=True):
            for parameter in model.parameters():
                parameter.data.mul_(0.5)
    """
    status, _, err = in_child(script, tmp_path / "run")
    assert status == 9, err
    model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(4)]).requires_grad_(False)
    engine = penstock.initialize(model=model, state_dir=str(tmp_path / "run"), resume=True)[0]
    engine.eval()
    with pytest.raises((RuntimeError, ValueError, OSError), match="values of two states"), torch.no_grad():
        engine(torch.ones(1, 4))


def test_memory_that_is_free_keeps_weights(tmp_path):
    def read_per_token(host_memory, directory):
        model = small_model().requires_grad_(False)
        engine, *_ = penstock.initialize(model=model, state_dir=directory, host_memory=host_memory)
        generated(engine.module, 2)

        def read():
            with open("/proc/self/io", encoding="utf-8") as file:
                return int(dict(line.split(": ") for line in file.read().splitlines())["read_bytes"])

        before = read()
        generated(engine.module, 10)
        per_token = (read() - before) / 10
        engine.close()
        return per_token

    weights = bytes_of(small_model())
    half = read_per_token(weights // 2, tmp_path / "half")
    if half == 0:
        pytest.skip("the kernel counts no bytes read from this file system")
    assert half < 0.8 * weights
    assert read_per_token(2 * weights, tmp_path / "all") < 0.02 * weights
    assert read_per_token(None, tmp_path / "whatever") < 0.02 * weights  # half of what is free


def test_what_cannot_be_is_refused(tmp_path):
    with pytest.raises(ValueError, match="only evaluates.*state_dir"):
        engine, *_ = penstock.initialize(model=small_model().requires_grad_(False), offload="cpu")
        engine(torch.arange(8).reshape(1, 8))
    engine.close()
    model = small_model().requires_grad_(False)
    engine, *_ = penstock.initialize(model=model, state_dir=tmp_path / "state")
    engine(torch.arange(8).reshape(1, 8))
    with pytest.raises(RuntimeError, match="only reads"):
        engine.save_checkpoint(tmp_path / "kept")
    engine.close()
    trains = small_model().train()
    engine, *_ = penstock.initialize(model=trains, state_dir=tmp_path / "state", resume=True)
    with pytest.raises(Exception, match="another run"):
        engine(torch.arange(8).reshape(1, 8))
    engine.close()


def test_what_is_unfrozen_too_late_is_said(tmp_path):
    model = small_model().requires_grad_(False)
    engine, *_ = penstock.initialize(
        model=model,
        config={"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}},
        model_parameters=filter(lambda parameter: parameter.requires_grad, model.parameters()),
        state_dir=tmp_path / "state",
    )
    with pytest.raises(RuntimeError, match="nothing to train"):
        engine.train_batch([torch.arange(8).reshape(1, 8)])
    model.requires_grad_(True)
    with pytest.raises(ValueError, match="before it"):
        engine(torch.arange(8).reshape(1, 8))
    assert not (tmp_path / "state").exists() or not os.listdir(tmp_path / "state")
    engine.close()


def test_weights_whose_writer_was_killed_are_there_for_any_reader(tmp_path):
    script = f"""
import os, sys, torch, penstock
sys.path.insert(0, {os.path.dirname(__file__)!r})
from test_evaluates_only import small_model
engine, *_ = penstock.initialize(model=small_model().requires_grad_(False), state_dir={str(tmp_path / 'state')!r}, host_memory="32MiB")
engine(torch.arange(8).reshape(1, 8))
os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -9
    ids = torch.arange(8).reshape(1, 8)
    with torch.no_grad():
        expected = small_model()(ids).logits
    for seed in (1, 2):  # one after the other, and neither has anything to commit
        model = small_model(seed=seed).requires_grad_(False)
        engine, *_ = penstock.initialize(model=model, state_dir=tmp_path / "state", host_memory="32MiB", resume=True)
        assert torch.equal(engine(ids).logits, expected)
        engine.close()


def test_a_block_that_is_frozen_whole_has_no_state(tmp_path):
    sizes = {}
    for frozen in (False, True):
        model = small_model().train()
        if frozen:
            model.transformer.wte.requires_grad_(False)
            for block in model.transformer.h[:14]:
                block.requires_grad_(False)
        directory = tmp_path / str(frozen)
        engine, *_ = penstock.initialize(model=model, state_dir=directory, host_memory="64MiB")
        ids = torch.arange(32).reshape(2, 16)
        engine.backward(engine(ids, labels=ids).loss)
        engine.step()
        engine.close()
        sizes[frozen] = on_disk(directory)
    # 28 bytes a parameter that trains (two versions of p, m and v, and a gradient), 8 of one that does not.
    assert sizes[True] < 0.45 * sizes[False]


def test_a_resumed_engine_may_begin_with_generate(tmp_path):
    def opened(seed, **more):
        engine, *_ = penstock.initialize(model=small_model(seed=seed), state_dir=tmp_path / "state", host_memory="64MiB", **more)
        return engine

    engine = opened(0)
    expected = generated(engine.module)
    engine.close()
    engine = opened(1, resume=True)  # what it is traced with are other values than the drive's
    assert torch.equal(generated(engine.module), expected)
    engine.close()
