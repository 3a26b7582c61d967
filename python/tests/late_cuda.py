"""A stand-in for torch.cuda, on the processor, that does everything as late as CUDA may.

A stream is a queue, of which nothing is done until somebody has to wait for it: a synchronisation, or another stream through an event. So
an order that the code does not ask for is not there, in every run, whatever the machine does.

Where torch itself computes, it does so at once (``computes_at_once``). What it has read is read again by a late kernel (``reads``), which
is enqueued in its place and finds out if the memory was written in between. Copies with ``non_blocking`` are enqueued, of memory that is
registered or not.
"""

import contextlib
import types

import torch


class Late:
    """The functions of torch.cuda that _device.py calls."""

    def __init__(self, monkeypatch):
        self.default = Stream(self)
        self._current = [self.default]
        self._streams = [self.default]
        self.computes_at_once = True
        self.registered = {}  # bytes, by address
        self.refuses_to_register = False
        self.fails = ""  # the call that raises
        self.wrong = []  # what late kernels found
        self.copy = torch.Tensor.copy_
        monkeypatch.setattr(torch.Tensor, "copy_", lambda to, source, non_blocking=False: self._copy(to, source, non_blocking))

    def _copy(self, to, source, non_blocking):
        if not non_blocking:
            return self.copy(to, source)
        self.check("copy")
        work = lambda: self.copy(to, source.detach())  # noqa: E731
        work.reads = source
        self.current_stream().enqueue(work)
        return to

    def check(self, call):
        if call == self.fails:
            raise RuntimeError(f"{call} was made to fail")

    def Event(self, blocking=False):  # noqa: N802
        return Event(self)

    def Stream(self, device=None):  # noqa: N802
        self._streams.append(Stream(self))
        return self._streams[-1]

    def current_stream(self, device=None):
        return self._current[-1]

    @contextlib.contextmanager
    def stream(self, stream):
        self._current.append(stream)
        try:
            yield
        finally:
            self._current.pop()

    def synchronize(self, device=None):
        for stream in self._streams:
            stream.synchronize()

    def max_memory_allocated(self, device=None):
        return 0

    def cudart(self):
        return types.SimpleNamespace(cudaHostRegister=self._register, cudaHostUnregister=self._unregister)

    def _register(self, address, size, flags):
        self.check(f"register {len(self.registered)}")
        if self.refuses_to_register:
            return 2
        assert not any(at < address + size and address < at + its for at, its in self.registered.items())
        self.registered[address] = size
        return 0

    def _unregister(self, address):
        assert address in self.registered
        assert not self.pending_copies(), "a copy is under way from or to memory that is given back"
        del self.registered[address]
        return 0

    def reads(self, memory, stream=None):
        """A kernel that has the memory as it is now, and reads it when its turn is."""
        seen = memory.clone()

        def kernel():
            if not torch.equal(memory, seen):
                self.wrong.append("a late kernel reads other bytes than it was given")

        (stream or self.current_stream()).enqueue(kernel)

    def pending_copies(self):
        """Tensors that copies will read that were not done yet."""
        return [work.reads for stream in self._streams for work in stream.queue if hasattr(work, "reads")]


class Stream:
    def __init__(self, cuda):
        self._cuda = cuda
        self.queue = []

    def enqueue(self, work):
        """work: called when it must be over, behind all that was enqueued before."""
        self.queue.append(work)

    # Up to the first `count` of what is enqueued.
    def _do(self, count):
        for _ in range(count):
            self.queue.pop(0)()

    def do_until(self, work):
        if work in self.queue:
            self._do(self.queue.index(work) + 1)

    def wait_event(self, event):
        self._cuda.check("wait")
        awaited = event.mark
        self.enqueue(lambda: event.do(awaited))
        if self._cuda.computes_at_once and self is self._cuda.current_stream():
            event.do(awaited)

    def wait_stream(self, stream):
        event = Event(self._cuda)
        event.record(stream)
        self.wait_event(event)

    def synchronize(self):
        self._cuda.check("synchronize")
        self._do(len(self.queue))


class Event:
    def __init__(self, cuda):
        self._cuda = cuda
        self.mark = None  # stream and place in it; None: never recorded, which nobody waits for

    def record(self, stream=None):
        self._cuda.check("record")
        stream = stream or self._cuda.current_stream()
        mark = lambda: None  # noqa: E731
        stream.enqueue(mark)
        self.mark = (stream, mark)

    def do(self, mark):
        if mark is not None:
            mark[0].do_until(mark[1])

    def synchronize(self):
        self.do(self.mark)


def checked(memory, cuda):
    """The class `memory` (DeviceMemory) with late kernels that read what a use was given, and poison in what is new or given back."""

    class Checked(memory):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            for each in self._all():
                each.fill_(0xFF)  # NaN

        def _all(self):
            return [*(buffer.memory for buffer in self._buffers), self._gradients]

        def leave(self):
            if self._inside is not None:
                cuda.reads(self._inside.memory)
            super().leave()

        def close(self):
            given_back = self._all() if self._buffers else []
            try:
                super().close()
            finally:
                for each in given_back:
                    each.fill_(0xFF)

    return Checked


class CheckedCore:
    """An engine's core that refuses to have its memory back while a device may still read it, or knows it."""

    def __init__(self, core, cuda):
        self._core = core
        self._cuda = cuda

    def __getattr__(self, name):
        return getattr(self._core, name)

    def leave(self, *arguments):
        assert not self._cuda.pending_copies(), "a use is left, and a copy of its weights or gradients is not over"
        return self._core.leave(*arguments)

    def close(self):
        assert not self._cuda.registered, "memory is unmapped that CUDA knows"
        self._core.close()
