#!/usr/bin/env python3
"""Keeps what a build of `penstock` leaves on disk: tests/golden/make_state.py PROGRAM NAME writes tests/golden/state-NAME.json.

Smallest models, trained in four ways, with all that a later version is asked about them: what PROGRAM's `inspect` says,
a hash of the fp32 weights that it exports (FNV-1a), and the losses of the steps that it makes from there. tools_penstock_old_state_test holds the
later ones against every such file. Made once for a version, by its program; NAME is the version or the commit.
"""
import base64
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile

MODEL = {"n_layer": 1, "n_embd": 4, "n_head": 2, "n_positions": 8, "vocab_size": 16}
STEPS, KEPT, MORE = 24, 16, 6  # trained; where the checkpoint is; trained from there
TRAIN = ["train", "--model", "model.json", "--vocab", "16", "--data", "data.bin", "--seq", "8", "--threads", "1", "--lr", "0.05",
         "--warmup", "2", "--weight-decay", "0.1", "--clip", "1", "--host-memory", "16MiB", "--quiet"]
# (name, flags of the run, number of ranks, state directories, checkpoints, flags of a run that goes on from a checkpoint)
RUNS = (
    ("bf16, fp32 states", ["--dtype", "bf16", "--batch", "4"], 1, ["state"], True, []),
    ("8-bit states in two directories", ["--dtype", "bf16", "--optimizer-states", "8bit", "--batch", "2", "--accumulate", "2"], 1,
     ["first", "second"], False, []),
    ("fp16 without a drive", ["--dtype", "fp16", "--offload", "none", "--batch", "4"], 1, [], True, []),
    ("fp32 of two ranks", ["--dtype", "fp32", "--batch", "2"], 2, ["state"], True, ["--batch", "4"]),
)


def run(program, directory, arguments, ranks=1):
    environments = [{}]
    if ranks > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            meeting = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        environments = [{**meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    started = [subprocess.Popen([program, *arguments], cwd=directory, env={**os.environ, **more}, stdout=subprocess.PIPE)
               for more in environments]
    out = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        sys.exit(f"tests/golden/make_state.py: failed: {' '.join(arguments)}")
    return out[0].decode()


def parts_of(path):
    """{offset: base64} of what is not zeros, by sectors."""
    with open(path, "rb") as file:
        content = file.read()
    parts = {}
    for sector in range(0, len(content), 4096):
        for found in re.finditer(rb"[^\0](?:\0{0,15}[^\0])*", content[sector:sector + 4096]):
            parts[str(sector + found.start())] = base64.b64encode(found.group()).decode()
    return {"length": len(content), "parts": parts}


def fnv1a(content):
    value = 0xcbf29ce484222325
    for byte in content:
        value = (value ^ byte) * 0x100000001b3 % 2**64
    return f"{value:016x}"


def files_below(directory):
    return {os.path.relpath(os.path.join(folder, name), directory): parts_of(os.path.join(folder, name))
            for folder, _, names in os.walk(directory) for name in names}


def only(directory, names):
    for name in os.listdir(directory):
        if name not in names:
            path = os.path.join(directory, name)
            shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)


def asked(program, made, opened, arguments):
    """What a version is asked about `opened` (state directories or a checkpoint), and PROGRAM's answers."""
    with tempfile.TemporaryDirectory() as elsewhere:
        there = shutil.copytree(made, f"{elsewhere}/there")
        inspected = json.loads(run(program, there, ["inspect", *opened, "--json"]))
        run(program, there, ["export", *opened, "weights", "--quiet"])
        with open(f"{there}/weights", "rb") as file:
            exported = file.read()
        arguments = [*arguments, "--resume", "--steps", str(inspected["step"] + MORE), "--log", "more.log"]
        run(program, there, arguments)
        with open(f"{there}/more.log") as file:
            steps = [json.loads(line) for line in file]
    return {"open": opened, "inspect": inspected, "weights": fnv1a(exported[8 + int.from_bytes(exported[:8], "little"):]),
            "resume": arguments,
            "steps": [{key: step[key] for key in ("step", "loss", "grad_norm", "lr", "loss_scale")} for step in steps]}


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    program = os.path.abspath(sys.argv[1])
    tokens, x = [], 1
    for _ in range(600):  # each follows from the one before, but for a quarter
        x = (x * 1664525 + 1013904223) % 2**32
        tokens.append((3 * (tokens[-1] if tokens else 0) + 1 + ((x >> 20) % 16 if (x >> 28) < 4 else 0)) % 16)
    runs = []
    for name, flags, ranks, states, keeps, from_checkpoint in RUNS:
        with tempfile.TemporaryDirectory(prefix="penstock-") as made:
            with open(f"{made}/model.json", "w") as file:
                json.dump(MODEL, file)
            with open(f"{made}/data.bin", "wb") as file:
                file.write(b"".join(token.to_bytes(2, "little") for token in tokens))
            kept = ["--checkpoint-dir", "kept"] if keeps else []
            # Their full names, so that the files hold names that are not there later.
            places = [word for state in states or ["none"] for word in ("--state-dir", f"{made}/{state}")]
            run(program, made, [*TRAIN, *flags, *places, *kept, *(["--checkpoint-every", str(KEPT)] if keeps else []),
                                "--steps", str(STEPS), "--log", "log"], ranks)
            with open(f"{made}/log") as file:
                losses = [json.loads(line)["loss"] for line in file]
            only(made, ["model.json", "data.bin", "kept", *states])
            answers = []
            if states:
                if ranks == 1:
                    places = [word for state in states for word in ("--state-dir", state)]
                    answers.append(asked(program, made, states, [*TRAIN, *flags, *places]))
                else:
                    shutil.rmtree(f"{made}/{states[0]}")
            if keeps:
                fresh = [*TRAIN, *flags, *from_checkpoint, "--state-dir", "fresh", *kept]
                checkpoints = sorted(entry for entry in os.listdir(f"{made}/kept") if entry.startswith("step-"))
                answers.append(asked(program, made, [f"kept/{checkpoints[-1]}"], fresh))
            runs.append({"name": name, "losses": losses, "files": files_below(made), "asked": answers})
    path = f"{os.path.dirname(os.path.abspath(__file__))}/state-{sys.argv[2]}.json"
    with open(path, "w") as file:
        json.dump({"made_with": run(program, ".", ["--version"]).strip() + ", " + sys.argv[2], "runs": runs}, file, indent=1)
        file.write("\n")


if __name__ == "__main__":
    main()
