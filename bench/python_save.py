"""penstock.save beside torch.save with fsync, in turns.

    python bench/python_save.py DIRECTORY [--size 1GiB] [--rounds 7]

Prints the median seconds and GiB/s of each, with the least and the most, and the ratio. The `drive` line writes the same bytes from locked memory through the engine and syncs.
"""

import argparse
import os
import statistics
import time

import torch

import penstock
from penstock._buffers import byte_size
from penstock.ops.aio import aio_handle


def synced(path):
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def main():
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("directory")
    parse.add_argument("--size", default="1GiB")
    parse.add_argument("--rounds", type=int, default=7)
    given = parse.parse_args()
    nbytes = byte_size(given.size, "size")
    tensors = {f"layer.{i}": torch.randn(4 << 20) for i in range(nbytes >> 24)}
    ours, theirs, bare = (os.path.join(given.directory, name) for name in ("ours.pt", "torch.pt", "bare"))
    handle = aio_handle(block_size=2 << 20, queue_depth=16)
    piece = handle.new_cpu_locked_tensor(32 << 20, torch.empty(0, dtype=torch.uint8))
    piece.fill_(1)

    def drive():
        if os.path.exists(bare):
            os.unlink(bare)
        with open(bare, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)
        for at in range(0, nbytes, piece.numel()):
            handle.sync_pwrite(piece, bare, at)
        synced(bare)

    def save():
        torch.save(tensors, theirs)
        synced(theirs)

    ways = {
        "torch.save and fsync": save, "penstock.save": lambda: penstock.save(tensors, ours),
        "penstock.save, no crc": lambda: penstock.save(tensors, ours, crc32=False), "drive alone, written": drive,
    }  # fmt: skip
    seconds = {name: [] for name in ways}
    for turn in range(given.rounds + 1):
        for name, way in ways.items():
            at = time.perf_counter()
            way()
            if turn:
                seconds[name].append(time.perf_counter() - at)
    for path in (ours, theirs, bare):
        os.unlink(path)
    print(f"{nbytes >> 20} MiB, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}")
    for name, found in seconds.items():
        median = statistics.median(found)
        base = statistics.median(seconds["torch.save and fsync"])
        print(f"{name:24} {median:7.3f} s [{min(found):.3f}, {max(found):.3f}]  {nbytes / median / 2**30:5.2f} GiB/s  x{base / median:.2f}")


if __name__ == "__main__":
    main()
