"""One contestant of bench/peers/io: reads or writes a file past the page cache, so many times.

    io_worker.py bare|deepspeed read|write FILE BYTES BLOCK DEPTH LOOPS

Prints a line of JSON: seconds of each loop, CPU seconds of all, SHA-256 of what was moved (not timed).
"""

import hashlib
import json
import mmap
import os
import pathlib
import sys
import threading
import time

import peers


class Bare:
    """So many threads, each with a system call in flight: what the drive gives, and nothing else."""

    def __init__(self, path, size, block, depth, writes):
        self.block, self.depth, self.writes = block, depth, writes
        self.memory = mmap.mmap(-1, size)
        if writes:
            self.memory[:] = pathlib.Path(path + ".pattern").read_bytes()
        flags = (os.O_WRONLY | os.O_CREAT if writes else os.O_RDONLY) | os.O_DIRECT
        self.file = os.open(path, flags, 0o600)
        self.offsets = list(range(0, size, block))

    def thread(self, mine):
        view = memoryview(self.memory)
        for at in mine:
            piece = view[at : at + self.block]
            moved = os.pwritev(self.file, [piece], at) if self.writes else os.preadv(self.file, [piece], at)
            if moved != len(piece):
                os._exit(3)  # a short transfer: this is no measurement

    def run(self):
        threads = [threading.Thread(target=self.thread, args=(self.offsets[k :: self.depth],)) for k in range(self.depth)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()

    def contents(self):
        return memoryview(self.memory)


class DeepSpeed:
    def __init__(self, path, size, block, depth, writes):
        import torch
        from deepspeed.ops.op_builder import AsyncIOBuilder

        self.path, self.writes = path, writes
        self.handle = AsyncIOBuilder().load(verbose=False).aio_handle(block, depth, False, True, 1)
        self.buffer = self.handle.new_cpu_locked_tensor(size, torch.empty(0, dtype=torch.uint8))
        if writes:
            self.buffer.copy_(torch.frombuffer(bytearray(pathlib.Path(path + ".pattern").read_bytes()), dtype=torch.uint8))

    def run(self):
        (self.handle.sync_pwrite if self.writes else self.handle.sync_pread)(self.buffer, self.path)

    def contents(self):
        return self.buffer.numpy()


def main():
    who, what, path, *numbers = sys.argv[1:]
    size, block, depth, loops = map(int, numbers)
    runner = {"bare": Bare, "deepspeed": DeepSpeed}[who](path, size, block, depth, what == "write")
    runner.run()  # warm-up
    seconds, before = [], peers.own_usage()["cpu"]
    for _ in range(loops):
        at = time.perf_counter()
        runner.run()
        seconds.append(time.perf_counter() - at)
    cpu = peers.own_usage()["cpu"] - before
    if what == "write":
        digest = hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()
    else:
        digest = hashlib.sha256(runner.contents()).hexdigest()
    print(json.dumps({"seconds": seconds, "cpu": cpu, "sha256": digest}))


if __name__ == "__main__":
    main()
