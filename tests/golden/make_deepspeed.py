#!/usr/bin/env python3
"""Makes tests/golden/deepspeed.json: checkpoints that DeepSpeed writes (in base64), and the losses with which it goes on from them.

    tests/golden/make_deepspeed.py                   needs torch, transformers and deepspeed (PyPI)
    tests/golden/make_deepspeed.py continue DIR --out FILE [--stage N] [--ranks W] [--universal] [--dtype D] [--steps N] [--save-at N]
                                               DeepSpeed goes on from DIR, a checkpoint with `latest`: its losses as JSON
    tests/golden/make_deepspeed.py make DIR [the same]   a checkpoint of such a run, its text, its config, its losses

The model is a small GPT-2 with weights of a fixed seed. A step sees the sequences that Penstock chooses for it (models/data/dataset.h).
"""

import argparse
import base64
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile

OUT = pathlib.Path(__file__).resolve().parent / "deepspeed.json"
sys.path.insert(0, str(OUT.parents[2] / "bench/peers"))
from sequence_order import SEED, sequence_start  # noqa: E402

MODEL = {
    "model_type": "gpt2", "n_layer": 1, "n_embd": 12, "n_head": 2, "n_positions": 16, "vocab_size": 29, "resid_pdrop": 0.0,
    "embd_pdrop": 0.0, "attn_pdrop": 0.0, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new",
}  # fmt: skip
BATCH, SEQ, TOKENS = 2, 16, 2048
SAVED, LAST = 4, 8
# name -> stage, ranks, type, through ds_to_universal
CASES = {
    "zero1": (1, 2, "fp32", False),
    "zero3": (3, 2, "fp32", False),
    "zero1 bf16": (1, 2, "bf16", False),
    "zero2": (2, 2, "fp32", False),
    "universal": (1, 2, "fp32", True),
}


def text():
    """Ids below the vocabulary, two bytes each, with something to learn in them."""
    return b"".join(((i * i // 7 + 3 * (i // 5)) % MODEL["vocab_size"]).to_bytes(2, "little") for i in range(TOKENS))


def config(stage, ranks, dtype):
    chosen = {
        "train_micro_batch_size_per_gpu": BATCH // ranks, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.99], "eps": 1e-8, "weight_decay": 0.05, "torch_adam": True}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 12, "warmup_max_lr": 1e-3, "warmup_num_steps": 6, "warmup_type": "linear"}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "wall_clock_breakdown": False,
    }  # fmt: skip
    if dtype == "bf16":
        chosen["bf16"] = {"enabled": True}
    return chosen


def worker(given):
    """One rank. Prints the losses of its steps from the first or the loaded one on."""
    import deepspeed
    import torch
    import torch.distributed as dist
    import transformers

    deepspeed.init_distributed("gloo")
    torch.manual_seed(SEED)
    rank, world = dist.get_rank(), dist.get_world_size()
    made = json.loads(given.model_json) if given.model_json else MODEL
    made = transformers.GPT2Config(**{key: value for key, value in made.items() if key != "model_type"})
    made.use_cache = False
    chosen = config(given.stage, world, given.dtype)
    if given.universal:
        chosen["checkpoint"] = {"load_universal": True}
    engine, *_ = deepspeed.initialize(model=transformers.GPT2LMHeadModel(made), config=chosen)
    step = 0
    if given.load:
        engine.load_checkpoint(given.load)
        step = engine.global_steps
    data = torch.frombuffer(bytearray(pathlib.Path(given.text).read_bytes()), dtype=torch.int16).long()
    losses = []
    while step < given.steps:
        step += 1
        rows = [sequence_start(step, row, len(data) - SEQ) for row in range(BATCH)]
        rows = torch.stack([data[at : at + SEQ + 1] for at in rows])[rank * BATCH // world : (rank + 1) * BATCH // world]
        logits = engine(input_ids=rows[:, :-1]).logits.float()
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), rows[:, 1:].reshape(-1))
        engine.backward(loss)
        engine.step()
        mean = loss.detach().double()
        dist.all_reduce(mean)
        losses.append({"step": step, "loss": mean.item() / world, "lr": engine.get_lr()[0]})
        if step == given.save_at:
            engine.save_checkpoint(given.save_to)
    if rank == 0:
        pathlib.Path(given.out).write_text(json.dumps(losses))
    dist.barrier()


def launch(ranks, *arguments):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {
        "WORLD_SIZE": str(ranks), "LOCAL_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    running = [
        subprocess.Popen([sys.executable, __file__, "worker", *map(str, arguments)], env={**os.environ, **common, "RANK": str(r), "LOCAL_RANK": str(r)},
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for r in range(ranks)
    ]  # fmt: skip
    outputs = [process.communicate()[0] for process in running]
    if any(process.returncode for process in running):
        raise SystemExit("tests/golden/make_deepspeed.py: DeepSpeed failed:\n" + outputs[0][-4000:])


def to_universal(directory, tag):
    folder = f"{directory}/{tag}"
    arguments = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder", folder, "--output_folder", folder + "_universal",
             "--num_extract_workers", "1", "--num_merge_workers", "1"]  # fmt: skip
    ran = subprocess.run([*arguments, "--inject_missing_state"], env={**os.environ, "DS_ACCELERATOR": "cpu"}, capture_output=True, text=True)
    if ran.returncode:
        raise SystemExit("ds_to_universal: " + ran.stderr[-2000:])
    shutil.rmtree(folder)


def make(directory, stage, ranks, dtype, universal, saved=SAVED, last=LAST):
    """A checkpoint of step `saved` in directory/checkpoint; the losses up to `last`."""
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokens.bin").write_bytes(text())
    (directory / "config.json").write_text(json.dumps(MODEL))
    (directory / "ds_config.json").write_text(json.dumps(config(stage, ranks, dtype)))
    launch(ranks, "--stage", stage, "--dtype", dtype, "--steps", last, "--save-at", saved, "--save-to", directory / "checkpoint",
           "--text", directory / "tokens.bin", "--out", directory / "losses.json")  # fmt: skip
    if universal:
        to_universal(directory / "checkpoint", f"global_step{saved}")
    return json.loads((directory / "losses.json").read_text())


def golden():
    made = {"model": MODEL, "text": base64.b64encode(text()).decode(), "batch": BATCH, "seq": SEQ, "saved": SAVED, "cases": {}}
    for name, (stage, ranks, dtype, universal) in CASES.items():
        with tempfile.TemporaryDirectory() as work:
            losses = make(work, stage, ranks, dtype, universal)
            there = pathlib.Path(work, "checkpoint")
            files = {}
            for path in sorted(there.rglob("*")):
                if path.is_file() and path.suffix != ".py":
                    files[str(path.relative_to(there))] = base64.b64encode(path.read_bytes()).decode()
            made["cases"][name] = {
                "ranks": ranks, "dtype": dtype, "stage": stage, "config": config(stage, ranks, dtype), "losses": losses, "files": files,
            }  # fmt: skip
            print(f"{name}: {sum(map(len, files.values()))} bytes", file=sys.stderr)
    OUT.write_text(json.dumps(made, indent=0) + "\n")


def main():
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("what", nargs="?", choices=["make", "continue", "worker"])
    parse.add_argument("directory", nargs="?")
    parse.add_argument("--stage", type=int, default=1)
    parse.add_argument("--ranks", type=int, default=1)
    parse.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"])
    parse.add_argument("--universal", action="store_true")
    parse.add_argument("--steps", type=int, default=LAST)
    parse.add_argument("--save-at", type=int, default=0)
    parse.add_argument("--save-to")
    parse.add_argument("--load")
    parse.add_argument("--model-json")
    parse.add_argument("--text")
    parse.add_argument("--out")
    given = parse.parse_args()
    if given.what == "worker":
        worker(given)
    elif given.what == "make":
        print(json.dumps(make(given.directory, given.stage, given.ranks, given.dtype, given.universal, given.save_at or SAVED, given.steps)))
    elif given.what == "continue":
        arguments = ["--stage", given.stage, "--dtype", given.dtype, "--steps", given.steps, "--load", given.directory, "--text", given.text,
                 "--out", given.out, "--save-at", given.save_at, "--save-to", given.save_to]  # fmt: skip
        launch(given.ranks, *arguments, *(["--universal"] if given.universal else []))
    else:
        golden()


if __name__ == "__main__":
    main()
