"""What the engine's front end costs a stage: a step of many tiny blocks, beside the same step in plain PyTorch.

    python bench/python_front_end.py DIRECTORY [--layers 64] [--width 32] [--rounds 7] [--most MS] [--profile FILE]

Prints the medians of rounds in turns, in ms: a plain step (forward, backward, AdamW), the same with torch.utils.checkpoint around each block, an
engine's step with its state in memory (--offload cpu) and on the drive, evaluations of both, and what is left for each stage and direction. The
processor's time of all threads is beside that of the clock, since other work disturbs it less. With --most it ends with 1 where a stage costs more.
"""

import argparse
import cProfile
import json
import statistics
import sys
import time

import penstock
import torch
import torch.utils.checkpoint
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.more = nn.Linear(width, width, bias=False)

    def forward(self, x):
        return x + self.more(self.down(torch.relu(self.up(self.norm(x)))))


class Model(nn.Module):
    def __init__(self, layers, width, checkpoints=False):
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.checkpoints = checkpoints

    def forward(self, x):
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)
        return x.square().mean()


def plain(layers, width, checkpoints):
    torch.manual_seed(0)
    model = Model(layers, width, checkpoints)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step(x):
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def engine(layers, width, **options):
    torch.manual_seed(0)
    model = Model(layers, width)
    made = penstock.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters()), host_memory="1GiB", overwrite=True, progress=False, **options
    )[0]

    def step(x):
        made.backward(made(x))
        made.step()

    return model, step


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--most", type=float, help="ms by the clock that a stage and direction may cost beside plain PyTorch, training")
    parser.add_argument("--profile", help="cProfile's statistics of engine steps in memory go there")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    x = torch.randn(4, arguments.width)
    kinds = {
        "plain": plain(arguments.layers, arguments.width, False),
        "checkpointed": plain(arguments.layers, arguments.width, True),
        "engine, memory": engine(arguments.layers, arguments.width, offload="cpu"),
        "engine, drive": engine(arguments.layers, arguments.width, state_dir=arguments.directory),
    }
    steps = 5
    taken, busy = ({name: [] for name in kinds} for _ in range(2))
    evaluations = {name: [] for name in kinds}
    for _, step in kinds.values():
        for _ in range(5):  # in the first ones blocks are compared with what they gave before
            step(x)
    for _ in range(arguments.rounds):
        for name, (model, step) in kinds.items():
            begun, used = time.perf_counter(), time.process_time()
            for _ in range(steps):
                step(x)
            taken[name].append((time.perf_counter() - begun) / steps * 1e3)
            busy[name].append((time.process_time() - used) / steps * 1e3)
            model.eval()
            begun = time.perf_counter()
            with torch.no_grad():
                for _ in range(steps):
                    model(x)
            evaluations[name].append((time.perf_counter() - begun) / steps * 1e3)
            model.train()
    told = {"stages": arguments.layers, "step ms": {}, "step ms of the processor": {}, "evaluation ms": {}, "front end, ms a stage and direction": {}}
    of = {name: statistics.median(values) for name, values in taken.items()}
    of_processor = {name: statistics.median(values) for name, values in busy.items()}
    of_evaluation = {name: statistics.median(values) for name, values in evaluations.items()}
    for name in kinds:
        told["step ms"][name] = [round(each, 2) for each in (of[name], min(taken[name]), max(taken[name]))]
        told["step ms of the processor"][name] = [round(each, 2) for each in (of_processor[name], min(busy[name]), max(busy[name]))]
        told["evaluation ms"][name] = [round(each, 2) for each in (of_evaluation[name], min(evaluations[name]), max(evaluations[name]))]
        if name.startswith("engine"):
            told["front end, ms a stage and direction"][name] = {
                "training, beside plain": round((of[name] - of["plain"]) / arguments.layers / 2, 3),
                "training, beside checkpointed": round((of[name] - of["checkpointed"]) / arguments.layers / 2, 3),
                "training, of the processor, beside plain": round((of_processor[name] - of_processor["plain"]) / arguments.layers / 2, 3),
                "training, of the processor, beside checkpointed": round((of_processor[name] - of_processor["checkpointed"]) / arguments.layers / 2, 3),
                "evaluation": round((of_evaluation[name] - of_evaluation["plain"]) / arguments.layers, 3),
            }
    print(json.dumps(told, indent=1))
    if arguments.profile:
        profiler = cProfile.Profile()
        profiler.enable()
        for _ in range(20):
            kinds["engine, memory"][1](x)
        profiler.disable()
        profiler.dump_stats(arguments.profile)
    costs = {name: each["training, beside plain"] for name, each in told["front end, ms a stage and direction"].items()}
    if arguments.most is not None and max(costs.values()) > arguments.most:
        print(f"a stage costs more than {arguments.most} ms: {costs}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
