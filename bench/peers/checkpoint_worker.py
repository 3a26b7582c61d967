"""One contestant of bench/peers/checkpoint: writes the same tensors to a file, durably, so many times.

    checkpoint_worker.py torch|safetensors|penstock FILE BYTES LOOPS

Prints a line of JSON: seconds of each save, CPU seconds of all, peak RSS, whether what is read back is equal.
"""

import json
import os
import sys
import time

import torch

import peers


def synced(path):
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def ways(who):
    """save(tensors, path), durable when it returns; load(path)."""
    if who == "safetensors":
        from safetensors.torch import load_file, save_file

        return lambda tensors, path: (save_file(tensors, path), synced(path)), load_file
    if who == "penstock":
        import penstock

        return penstock.save, torch.load
    return lambda tensors, path: (torch.save(tensors, path), synced(path)), torch.load


def main():
    who, path, size, loops = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    torch.manual_seed(1)
    tensors = {f"layer.{i}": torch.randn(1 << 22) for i in range(size >> 24)}
    save, load = ways(who)
    save(tensors, path)  # warm-up
    seconds, before = [], peers.own_usage()["cpu"]
    for _ in range(loops):
        at = time.perf_counter()
        save(tensors, path)
        seconds.append(time.perf_counter() - at)
    usage = peers.own_usage()
    found = load(path)
    equal = found.keys() == tensors.keys() and all(torch.equal(found[name], tensors[name]) for name in tensors)
    print(json.dumps({"seconds": seconds, "cpu": usage["cpu"] - before, "rss": usage["rss"], "equal": equal}))


if __name__ == "__main__":
    main()
