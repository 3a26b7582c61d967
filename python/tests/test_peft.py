"""peft's adapters under Hugging Face's Trainer, on Penstock's engine."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")
for name in ("transformers", "accelerate", "peft"):
    pytest.importorskip(name)

import adapters  # noqa: E402
import peft  # noqa: E402
import penstock  # noqa: E402
import torch  # noqa: E402
import trainer  # noqa: E402
from engine_models import Net, batches, step  # noqa: E402


def run(out, deepspeed, methods, steps=5):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    launcher = ["-m", "penstock.run"] if deepspeed else []
    done = subprocess.run(
        [sys.executable, *launcher, adapters.__file__, json.dumps([methods, steps, str(out), deepspeed])],
        capture_output=True, text=True, timeout=400, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return trainer.told(done.stdout)


def compare(tmp_path, methods, steps):
    plain = run(tmp_path / "plain", None, methods, steps)
    ours = run(tmp_path / "ours", trainer.config(tmp_path / "nvme"), methods, steps)
    told = {method: [*range(1, steps + 1), "saved", *(["merged"] if method in adapters.MERGED else [])] for method in methods}
    assert list(plain) == [f"{method} {what}" for method in methods for what in told[method]]
    assert list(ours) == list(plain)
    for what, values in plain.items():
        if what.endswith(("saved", "merged")):
            assert ours[what][0] == values[0], what
            assert ours[what][1] == pytest.approx(values[1], rel=1e-5), what
        else:
            assert ours[what] == pytest.approx(values, abs=1e-5), what


def test_adapters_train_under_trainer_as_in_plain_torch(tmp_path):
    """Trainer makes a group with weight decay and one without; of an adapter's parameters one of them is empty."""
    compare(tmp_path, ["LoRA", "DoRA", "IA3", "VeRA"], 5)


def test_prompts_and_prefixes_train_under_trainer(tmp_path):
    compare(tmp_path, ["prefix", "prompt", "P-tuning"], 20)


def test_adapters_of_parameters_of_experts_and_of_single_tokens_train_under_trainer(tmp_path):
    """Adapters of parameters are registered as parametrizations within each forward. Tokens come first: once a TrainingArguments says ZeRO-3, peft
    makes theirs on a CUDA device alone."""
    compare(tmp_path, ["tokens", "parameters", "experts"], 20)


def test_adapters_that_look_at_gradients_or_are_one_of_several_train_under_trainer(tmp_path):
    """AdaLoRA reads gradients in mid-training, and changes parameters in place by them."""
    compare(tmp_path, ["AdaLoRA", "second of two"], 20)


def test_a_step_reads_a_base_of_eight_times_the_budget_twice_and_writes_the_adapters(tmp_path):
    model = Net(layers=96, width=512).to(torch.bfloat16)
    made = peft.LoraConfig(r=4, target_modules=["up", "down"], init_lora_weights=False)
    model = peft.get_peft_model(model, made, autocast_adapter_dtype=False)
    trained = [each for each in model.parameters() if each.requires_grad]
    own = sum(each.numel() for each in trained)
    base = 2 * sum(each.numel() for each in model.parameters() if not each.requires_grad)
    options = {"state_dir": tmp_path, "host_memory": base // 8, "dtype": torch.bfloat16}
    with penstock.initialize(model=model, optimizer=torch.optim.AdamW(trained, lr=1e-3), **options)[0] as engine:
        for batch in batches(3, size=2):
            step(engine, batch)
        assert engine.plan()["peak_managed_bytes"] <= base // 8
        assert engine.plan()["state_bytes"] - base <= 1.05 * 12 * own
        for told in engine.report()["steps"][1:]:
            assert 1.8 * base < told["nvme_read_bytes"] <= 1.05 * 2 * base
            assert told["nvme_write_bytes"] <= 1.05 * 12 * own
