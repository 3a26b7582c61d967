"""penstock.optim and penstock.ops.adam beside torch.optim.AdamW and, where it is installed, DeepSpeed's CPU Adam.

    python bench/python_optim.py DIRECTORY [--elements 64M] [--rounds 7] [--host-memory 64MiB] [--deepspeed EXTENSION.so]

Prints a line for each: the median seconds of a step, elements/s, GiB/s of states on the drive, its ratio to the median of
torch's fused AdamW, and the processor's seconds. All are measured in turns, round by round. The `drive` line is a bound: the
bytes of the step's states read and written through the I/O engine with nothing computed.
"""

import argparse
import importlib.util
import os
import statistics
import time

import torch

import penstock.optim
from penstock._buffers import byte_size
from penstock.ops.adam import DeepSpeedCPUAdam
from penstock.ops.aio import aio_handle


def parameter(elements, dtype):
    p = torch.nn.Parameter(torch.full((elements,), 0.5, dtype=dtype))
    p.grad = torch.full((elements,), 0.01, dtype=dtype)
    return p


def deepspeeds(path, elements):
    """DeepSpeed's kernel, called as its DeepSpeedCPUAdam calls it."""
    spec = importlib.util.spec_from_file_location("cpu_adam", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.create_adam(0, 1e-3, 0.9, 0.999, 1e-8, 0.01, True, False)
    p = parameter(elements, torch.float32)
    m, v, count = torch.zeros(elements), torch.zeros(elements), [0]

    def step():
        count[0] += 1
        module.adam_update(0, count[0], 1e-3, 0.9, 0.999, 1e-8, 0.01, True, p.data, p.grad, m, v)

    return step


class Drive:
    """As many bytes as the states have, 64 MiB at once each way."""

    def __init__(self, directory, nbytes):
        self.path = os.path.join(directory, "penstock-bench")
        self.handle = aio_handle(block_size=1 << 20, queue_depth=64)
        piece = 32 << 20
        self.out = self.handle.new_cpu_locked_tensor(piece, torch.empty(0, dtype=torch.uint8))
        self.into = self.handle.new_cpu_locked_tensor(piece, torch.empty(0, dtype=torch.uint8))
        self.out.fill_(1)
        self.pieces = -(-nbytes // piece)
        for i in range(self.pieces):
            self.handle.sync_pwrite(self.out, self.path, i * piece)

    def step(self):
        piece = self.out.numel()
        for i in range(self.pieces):
            self.handle.async_pread(self.into, self.path, i * piece)
            self.handle.async_pwrite(self.out, self.path, (i - 1) % self.pieces * piece)
            self.handle.wait()

    def close(self):
        os.unlink(self.path)


def main():
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("directory")
    parse.add_argument("--elements", default="64M")
    parse.add_argument("--rounds", type=int, default=7)
    parse.add_argument("--host-memory", default="64MiB")
    parse.add_argument("--deepspeed", help="DeepSpeed's cpu_adam, built")
    given = parse.parse_args()
    n = byte_size(given.elements, "elements")
    drive = Drive(given.directory, 8 * n)
    steps, on_drive = {}, {"drive, states of fp32 moved alone": 8}

    def add(name, make, dtype=torch.float32, bytes_on_drive=0, **arguments):
        steps[name] = make([parameter(n, dtype)], lr=1e-3, weight_decay=0.01, **arguments).step
        on_drive[name] = bytes_on_drive

    add("torch.optim.AdamW(fused), fp32", torch.optim.AdamW, fused=True)
    add("torch.optim.AdamW(), fp32", torch.optim.AdamW)
    add("penstock.ops.adam, fp32", DeepSpeedCPUAdam)
    if given.deepspeed:
        steps["DeepSpeed's kernel, fp32"] = deepspeeds(given.deepspeed, n)
    places = dict(state_dir=given.directory, host_memory=given.host_memory)
    add("penstock.optim.AdamW, fp32 on the drive", penstock.optim.AdamW, torch.float32, 8, **places)
    add("penstock.optim.AdamW, bf16 on the drive", penstock.optim.AdamW, torch.bfloat16, 10, **places)
    add("penstock.optim.AdamW, fp32 in memory", penstock.optim.AdamW, nvme_offload_fraction=0.0, state_dir=given.directory)
    steps["drive, states of fp32 moved alone"] = drive.step
    seconds = {name: [] for name in steps}
    processor = {name: [] for name in steps}
    for step in steps.values():
        step()
    try:
        for _ in range(given.rounds):
            for name, step in steps.items():
                at, used = time.perf_counter(), time.process_time()
                step()
                seconds[name].append(time.perf_counter() - at)
                processor[name].append(time.process_time() - used)
    finally:
        drive.close()
    base = statistics.median(seconds["torch.optim.AdamW(fused), fp32"])
    print(f"{n} elements, {torch.get_num_threads()} threads, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}")
    for name in steps:
        median = statistics.median(seconds[name])
        moved = 2 * on_drive.get(name, 0) * n / median / 2**30
        print(
            f"{name:42} {median:7.3f} s [{min(seconds[name]):.3f}, {max(seconds[name]):.3f}]  {n / median / 1e9:6.3f} G/s  "
            f"{moved:5.2f} GiB/s  x{median / base:.2f}  cpu {statistics.median(processor[name]):.3f} s"
        )


if __name__ == "__main__":
    main()
