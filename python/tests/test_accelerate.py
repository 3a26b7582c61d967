"""accelerate without a Trainer: a loop that names DeepSpeed by a plugin, or by the file of `accelerate config`, on Penstock's engine."""

import json
import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("accelerate")

LOOP = """
import json, sys, torch
from accelerate import Accelerator, DeepSpeedPlugin, skip_first_batches
from engine_models import batches, net
config, where, first = sys.argv[1], sys.argv[2], int(sys.argv[3])
options = {"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=config)} if config.endswith(".json") else {"cpu": config == "plain"}
accelerator = Accelerator(gradient_accumulation_steps=2, **options)
assert str(accelerator.distributed_type).endswith("NO" if config == "plain" else "DEEPSPEED")
def tell(*what):
    print("TOLD", json.dumps(what), flush=True)

model = net()
data = [{name: value[row] for name, value in batch.items()} for batch in batches(12) for row in range(4)]
loader = torch.utils.data.DataLoader(data, batch_size=4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
if first:
    accelerator.load_state(where + "/kept")
    loader = skip_first_batches(loader, 2 * first)
model.train()
step = first
for batch in loader:
    with accelerator.accumulate(model):
        loss = model(**batch)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    tell("loss", loss.item())
    if accelerator.sync_gradients:
        step += 1
        tell("step", step, float(norm), scheduler.get_last_lr()[0])
        if step == 3 and not first and config != "plain":
            accelerator.save_state(where + "/kept")
model.eval()
with torch.no_grad():
    tell("evaluated", accelerator.gather(model(**batch)).mean().item())
state = accelerator.get_state_dict(model)
tell("state", {name: value.double().sum().item() for name, value in state.items()})
assert type(accelerator.unwrap_model(model)).__name__ == "Net"
accelerator.end_training()
"""


def run(directory, *launcher, config, first=0):
    script = directory / "loop.py"
    script.write_text(LOOP)
    paths = [*sys.path, os.path.dirname(__file__)]
    here = directory / "here"
    here.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, *launcher, str(script), str(config), str(directory), str(first)],
        capture_output=True, text=True, timeout=300, cwd=here,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert os.listdir(here) == [], "nothing is left where a program is started"
    return [json.loads(line[len("TOLD ") :]) for line in done.stdout.splitlines() if line.startswith("TOLD ")]


def alike(found, expected):
    assert [each[0] for each in found] == [each[0] for each in expected]
    for ours, theirs in zip(found, expected):
        if ours[0] == "state":
            assert ours[1] == pytest.approx(theirs[1], abs=2e-3)
        else:
            assert ours[1:] == pytest.approx(theirs[1:], abs=1e-5), ours[0]


def test_a_loop_of_accelerate(tmp_path):
    plain = run(tmp_path, config="plain")
    assert [each[0] for each in plain].count("step") == 6
    offload = {"device": "nvme", "nvme_path": str(tmp_path / "nvme")}
    settings = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3, "offload_param": offload, "offload_optimizer": offload},
    }
    config = tmp_path / "ds.json"
    config.write_text(json.dumps(settings))
    ours = run(tmp_path, "-m", "penstock.run", config=config)
    alike(ours, plain)
    again = run(tmp_path, "-m", "penstock.run", config=config, first=3)
    assert again == ours[-len(again) :] and sum(each[0] == "step" for each in again) == 3

    # By the file that `accelerate config` writes, and `accelerate launch` reads.
    written = tmp_path / "accelerate.yaml"
    written.write_text(
        f"""
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config:
  gradient_accumulation_steps: 2
  gradient_clipping: 1.0
  offload_optimizer_device: nvme
  offload_optimizer_nvme_path: {tmp_path}/of-file
  offload_param_device: nvme
  offload_param_nvme_path: {tmp_path}/of-file
  zero3_init_flag: false
  zero3_save_16bit_model: true
  zero_stage: 3
machine_rank: 0
mixed_precision: 'no'
num_machines: 1
num_processes: 1
use_cpu: false
"""
    )
    launch = ["-m", "penstock.run", "-m", "accelerate.commands.launch", "--config_file", str(written), "--main_process_port", "0"]
    launched = run(tmp_path, *launch, "-m", "penstock.run", config="launched")
    assert launched == ours
    assert os.path.isdir(tmp_path / "of-file"), "the paths of the file are used"


def test_a_plugin_without_a_path_is_refused(in_child, tmp_path):
    """In a process of its own: from its import on, deepspeed is Penstock."""
    text = """
    import os
    import penstock.deepspeed, pytest, torch

    offload = {"device": "nvme", "nvme_path": "none"}  # as DeepSpeedPlugin fills it in
    with pytest.raises(ValueError, match="ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH"):
        penstock.deepspeed.initialize(model=torch.nn.Linear(2, 2), config={"zero_optimization": {"stage": 3, "offload_optimizer": offload}})
    with pytest.raises(ValueError, match="ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH"):
        penstock.deepspeed.zero.Init(config_dict_or_path={"zero_optimization": {"stage": 3, "offload_param": offload}})
    assert not os.path.exists("none")
    print("refused")
    """
    assert in_child(text, cwd=tmp_path)[:2] == (0, "refused\n")
