"""What a checkpoint costs the steps that it is copied beside: steps with one and without, in turns within one run.

python bench/python_checkpoint.py DIRECTORY [--turns 6] [--steps 24] [--alone 12] [--versions 3] [--host-memory 200MiB]

A GPT of 12 blocks of width 512 and random tokens; each turn is `alone` steps without a copy, then a save and `steps` steps. Each turn's steps stand
over the median of those of its own without a copy, since drives drift.
"""

import argparse
import os
import shutil
import statistics
import time

import penstock
import torch
from torch import nn

WIDTH, BLOCKS, TOKENS = 512, 12, 128


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--alone", type=int, default=12)
    parser.add_argument("--versions", type=int)
    parser.add_argument("--host-memory", default="64MiB")
    options = parser.parse_args()
    directory = os.path.join(options.directory, "python_checkpoint")
    shutil.rmtree(directory, ignore_errors=True)
    torch.manual_seed(0)
    config = {"penstock": {} if options.versions is None else {"versions": options.versions}}
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    engine, *_ = penstock.initialize(
        model=model, optimizer=optimizer, config=config, state_dir=os.path.join(directory, "run"), host_memory=options.host_memory, progress=False
    )
    x = torch.randn(1, TOKENS, WIDTH)

    def step():
        begin = time.perf_counter()
        loss = engine(x)
        engine.backward(loss)
        engine.step()
        return time.perf_counter() - begin

    for _ in range(6):
        step()
    beside, alone = [], []
    for turn in range(options.turns):
        base = [step() for _ in range(options.alone)]
        middle = statistics.median(base)
        alone += [each / middle for each in base]
        begin = time.perf_counter()
        engine.save_checkpoint(os.path.join(directory, "kept"))
        times = [time.perf_counter() - begin]
        while engine.report()["checkpoints"]["under_way"]:
            times.append(step())
        beside.append((len(times) - 1, sum(times) / middle / max(1, len(times) - 1)))
        engine.wait_for_checkpoint()
        for _ in range(max(0, options.steps - len(times))):
            step()
        shutil.rmtree(os.path.join(directory, "kept"))
    report = engine.report()
    print(f"{report['params']} parameters, {report['versions']} versions, step without a copy {middle:.3f} s, alone {statistics.mean(alone):.3f} of their median")
    print("| turn | steps beside the copy | each, with the call, over one without |")
    print("|---|---|---|")
    for turn, (steps, over) in enumerate(beside, 1):
        print(f"| {turn} | {steps} | {over:.3f} |")
    print(f"median {statistics.median(over for _, over in beside):.3f}; waited {report['checkpoints']['waited_seconds']:.2f} s in all")
    engine.close()
    shutil.rmtree(directory)


if __name__ == "__main__":
    main()
