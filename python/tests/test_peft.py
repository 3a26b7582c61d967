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
import trainer  # noqa: E402


def run(out, deepspeed, *methods):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    launcher = ["-m", "penstock.run"] if deepspeed else []
    done = subprocess.run(
        [sys.executable, *launcher, adapters.__file__, json.dumps([methods, str(out), deepspeed])],
        capture_output=True, text=True, timeout=400, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return trainer.told(done.stdout)


def test_adapters_train_under_trainer_as_in_plain_torch(tmp_path):
    """Trainer makes a group with weight decay and one without; of an adapter's parameters one of them is empty."""
    methods = ["LoRA", "DoRA", "IA3", "VeRA"]
    plain = run(tmp_path / "plain", None, *methods)
    ours = run(tmp_path / "ours", trainer.config(tmp_path / "nvme"), *methods)
    assert list(plain) == [f"{method} {what}" for method in methods for what in (1, 2, 3, 4, 5, "saved")]
    assert list(ours) == list(plain)
    for what, values in plain.items():
        if what.endswith("saved"):
            assert ours[what][0] == values[0], what
            assert ours[what][1] == pytest.approx(values[1], rel=1e-5), what
        else:
            assert ours[what] == pytest.approx(values, abs=1e-5), what
