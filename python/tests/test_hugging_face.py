"""Hugging Face's Trainer and accelerate on Penstock's engine: scripts that name DeepSpeed run as they are."""

import json
import os
import signal
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import trainer  # noqa: E402
from trainer import config  # noqa: E402


def run(out, deepspeed=None, status=0, **options):
    launcher = ["-m", "penstock.run"] if deepspeed else []
    return trainer.run(*launcher, out=out, deepspeed=deepspeed, status=status, **options)


def test_trainer(tmp_path):
    plain = run(tmp_path / "plain")
    nvme = tmp_path / "nvme"
    ours = run(tmp_path / "ours", config(nvme))
    assert list(ours) == list(plain) == [*range(1, 11), "eval", "loaded", "ranks"]
    for step, values in plain.items():
        assert ours[step] == pytest.approx(values, abs=1e-5), step
    assert os.listdir(nvme) == []  # what is there goes with the process
    # Killed in mid-run, and gone on with from the last checkpoint: the same bits.
    killed = run(tmp_path / "killed", config(nvme), kill=8, status=-signal.SIGKILL)
    assert [ours[step] for step in killed] == list(killed.values())
    resumed = run(tmp_path / "killed", config(nvme), resume=str(tmp_path / "killed" / "checkpoint-6"))
    assert list(resumed) == [7, 8, 9, 10, "eval", "loaded", "ranks"]
    for step, values in resumed.items():
        assert values == ours[step], step
    assert os.listdir(nvme) == []  # nor does what the killed process left stay


def test_trainer_accumulates(tmp_path):
    """Micro-batches one by one, and an epoch's end in the middle of a step: 64 texts are 16 batches, 3 a step."""
    plain = run(tmp_path / "plain", accumulate=3)
    nvme = tmp_path / "nvme"
    ours = run(tmp_path / "ours", config(nvme), accumulate=3)
    assert list(ours) == list(plain) == [*range(1, 11), "eval", "loaded", "ranks"]
    for step, values in plain.items():
        assert ours[step] == pytest.approx(values, abs=1e-5), step


@pytest.mark.parametrize("family, accumulate, smoothing", [("llama", 1, 0.0), ("gpt2", 3, 0.0), ("llama", 2, 0.1), ("gemma2", 1, 0.0)])
def test_trainer_with_logits_and_mlps_in_chunks(tmp_path, family, accumulate, smoothing):
    options = {"family": family, "accumulate": accumulate, "smoothing": smoothing, "max_steps": 5}
    plain = run(tmp_path / "plain", **options)
    chunks = {**config(tmp_path / "nvme"), "penstock": {"logits_chunk_size": 7, "chunked_modules": ["mlp"], "chunk_size": 5}}
    ours = run(tmp_path / "ours", chunks, **options)
    assert list(ours) == list(plain) == [*range(1, 6), "eval", "loaded", "ranks"]
    for step, values in plain.items():
        assert ours[step] == pytest.approx(values, abs=1e-5), step


def test_a_script_for_deepspeed_changes_one_line(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        """
import sys, pytest, torch
import penstock.deepspeed as deepspeed
sys.path.insert(0, sys.argv[1])
from engine_models import batches, net, plain_losses, all_names
model, data = net(), batches(6)
expected = plain_losses(model, [{**all_names(model)[0], "weight_decay": 0.1}], [[batch] for batch in data])[0]
config = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0,
          "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
          "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": sys.argv[2]}}}
engine, optimizer, _, _ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
for number, batch in enumerate(data):
    torch.manual_seed(number)
    loss = engine(**batch)
    engine.backward(loss)
    engine.step()
    assert abs(loss.item() - expected[number]) < 1e-5
with deepspeed.zero.GatheredParameters(list(model.norm.parameters()), modifier_rank=0):
    model.norm.weight.data.fill_(2.0)
assert deepspeed.utils.safe_get_full_fp32_param(model.norm.weight).eq(2).all()
assert deepspeed.utils.safe_get_full_optimizer_state(model.norm.weight, "exp_avg_sq").abs().sum() > 0
engine.save_checkpoint(sys.argv[2] + "/kept")
import importlib.metadata, importlib.util
import deepspeed as by_name
assert importlib.metadata.version("deepspeed") == by_name.__version__ == "0.18.9+penstock"
assert importlib.metadata.version("torch") and importlib.util.find_spec("deepspeed") is not None
assert by_name.initialize is deepspeed.initialize and by_name.DeepSpeedEngine is type(engine)
with pytest.raises(NotImplementedError, match="tensor parallelism"):
    by_name.tp_model_init()
with pytest.raises(NotImplementedError, match="block by block"):
    by_name.pipe.PipelineModule()
with pytest.raises(AttributeError, match="deepspeed.no_such_name is not served"):
    by_name.no_such_name
model, data = net(seed=1), batches(8, seed=4)
expected = plain_losses(model, [{**all_names(model)[0], "weight_decay": 0.1}], [data[:4], data[4:]])[0]
engine, _, _, _ = deepspeed.initialize(model=model, config={**config, "gradient_accumulation_steps": 4}, model_parameters=model.parameters())
total = 0.0
for number, batch in enumerate(data):
    if number % 4 == 0:
        torch.manual_seed(number // 4)
    assert engine.is_gradient_accumulation_boundary() == (number % 4 == 3) and engine.micro_steps == number % 4
    loss = engine(**batch)
    engine.backward(loss)
    engine.step()
    total += loss.item() / 4
    if number % 4 == 3:
        assert abs(total - expected[number // 4]) < 1e-5
        total = 0.0
assert engine.global_steps == 2 and engine.gradient_accumulation_steps() == 4
print("done")
"""
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), os.path.dirname(__file__), str(tmp_path / "nvme")],
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.stdout == "done\n", done.stderr[-3000:]


def test_who_inherits_the_path_finds_deepspeed_too(in_child):
    """Workers that are spawned get their parent's sys.path, and nothing else of it."""
    worker = """
    import importlib.metadata, sys
    assert any(each.endswith("_shim") for each in sys.path)
    import penstock.deepspeed, deepspeed
    print(importlib.metadata.version("deepspeed") == deepspeed.__version__)
    """
    parent = f"""
    import os, subprocess, sys, textwrap
    import penstock.deepspeed
    print(subprocess.run([sys.executable, "-c", textwrap.dedent({worker!r})], capture_output=True, text=True,
                         env={{**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}}).stdout, end="")
    """
    assert in_child(parent)[:2] == (0, "True\n")


def test_run_without_a_script(tmp_path):
    def call(*arguments, **environment):
        return subprocess.run(
            [sys.executable, "-m", "penstock.run", *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        )

    assert call().returncode == 2 and "usage" in call().stdout
    assert "no script" in call(str(tmp_path / "nowhere.py")).stderr
    assert "RANK is not" in call("x.py", WORLD_SIZE="2").stderr


def test_a_checkpoint_of_the_same_step_is_replaced_and_client_state_comes_back(tmp_path, in_child):
    """As Trainer and DeepSpeed's scripts do where they go over steps again."""
    text = """
        import sys
        sys.path.insert(0, sys.argv[2])
        import penstock.deepspeed as deepspeed
        from engine_models import batches, net

        where = sys.argv[1]
        offload = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": where + "/nvme"}}
        config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW"}, "zero_optimization": offload}
        model = net()
        engine = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())[0]
        print({} if len(sys.argv) > 3 else engine.load_checkpoint(where + "/checkpoints")[1])
        loss = engine(**batches(1)[0])
        engine.backward(loss)
        engine.step()
        if len(sys.argv) > 3:  # the same step once more, from the beginning
            engine.save_checkpoint(where + "/checkpoints", client_state={"run": sys.argv[3]})
        """
    for words, told in ((["a"], "{}"), (["b"], "{}"), ([], "{'run': 'b'}")):
        status, out, error = in_child(text, tmp_path, os.path.dirname(__file__), *words)
        assert status == 0 and out.strip() == told, error


def test_the_scratch_of_a_process_that_is_not_seen_here_stays(tmp_path):
    """One in another container has a number that means nothing here; its lock does."""
    import fcntl
    import socket

    from penstock._deepspeed import _scratch_in

    first, second = (f"penstock-swap-99999999{number}-0@{socket.gethostname()}" for number in (8, 9))
    for name in (first, second):
        (tmp_path / name).mkdir()
        (tmp_path / name / "penstock.store").write_text("")
    with open(tmp_path / first / "penstock.store") as file:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX)
        _scratch_in(str(tmp_path))
        assert [each.name for each in tmp_path.iterdir()] == [first]
    _scratch_in(str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    # What is no store is nobody's to remove, and nothing waits for it; what has none may be one that is being made.
    for name in (first, second):
        (tmp_path / name).mkdir()
    os.mkfifo(tmp_path / first / "penstock.store")
    _scratch_in(str(tmp_path))
    assert sorted(each.name for each in tmp_path.iterdir()) == [first, second]
    os.utime(tmp_path / second, (0, 0))
    _scratch_in(str(tmp_path))
    assert [each.name for each in tmp_path.iterdir()] == [first]


CYCLE = """
import json, sys, torch, transformers
sys.path.insert(0, sys.argv[1])
import trainer as tests
transformers.logging.set_verbosity_error()
out, deepspeed = sys.argv[2], json.loads(sys.argv[3])

def tell(*what):
    print("TOLD", json.dumps(what), flush=True)

torch.manual_seed(0)
model = tests.model_of(transformers, "llama")
data = [{"input_ids": torch.randint(3, 99, (16,))} for _ in range(32)]
for each in data:
    each["labels"] = each["input_ids"].clone()
args = transformers.TrainingArguments(
    output_dir=out, per_device_train_batch_size=4, max_steps=4, logging_steps=1, report_to=[], deepspeed=deepspeed, learning_rate=5e-2,
    use_cpu=True, disable_tqdm=True, eval_strategy="steps", save_strategy="steps", save_steps=1, eval_steps=1, load_best_model_at_end=True,
)
trainer = transformers.Trainer(model=model, args=args, train_dataset=data, eval_dataset=data[:8])
tell("before", trainer.evaluate()["eval_loss"])
for number in range(2):
    trainer.optimizer = None  # it would go on with its moments in plain PyTorch, and not with DeepSpeed
    trainer.train()
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    tell(f"losses {number}", losses)
    tell(f"best {number}", int(trainer.state.best_model_checkpoint.split("-")[-1]), trainer.evaluate()["eval_loss"])
    trainer.save_model(out + f"/final{number}")
    loaded = type(model).from_pretrained(out + f"/final{number}").eval()
    x = torch.stack([each["input_ids"] for each in data[:8]])
    with torch.no_grad():
        tell(f"loaded {number}", loaded(input_ids=x, labels=x).loss.item())
"""


def test_a_trainers_whole_life(tmp_path):
    """evaluate() before train(), load_best_model_at_end, train() once more: as without DeepSpeed."""
    tests = os.path.dirname(os.path.abspath(trainer.__file__))
    told = []
    for deepspeed in (None, config(tmp_path / "nvme")):
        launcher = ["-m", "penstock.run"] if deepspeed else []
        script = tmp_path / "cycle.py"
        script.write_text(CYCLE)
        done = subprocess.run(
            [sys.executable, *launcher, str(script), tests, str(tmp_path / f"out{len(told)}"), json.dumps(deepspeed)],
            capture_output=True, text=True, timeout=400, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-4000:]
        told.append(trainer.told(done.stdout))
    plain, ours = told
    assert list(ours) == list(plain)
    for name, values in plain.items():
        assert ours[name] == [pytest.approx(value, abs=1e-4) for value in values], (name, ours[name], values)
    assert os.listdir(tmp_path / "nvme") == []
