"""The processes that train one model together.

Which they are, torch.distributed's process group says: the one that the program has made, or one that is made of torchrun's
environment. There they meet, compare what they are to train, and take over rank 0's values. What they exchange while they train
goes over connections of the engine's own (zero/ranks/tcp_mesh.h), which can be given up from outside: a wait of torch's cannot
in most versions of it, and each would want Python's lock.
"""

from __future__ import annotations

import datetime
import json
import os
import secrets
import socket
from typing import Any, Callable, Dict, List, Optional, Sequence

import torch
from torch import nn

from .. import _core
from ._on_disk import give_back

_PIECE = 64 << 20  # bytes


class Alone:
    """No other process: every answer is this one's."""

    rank = 0
    world = 1
    local_rank = 0
    core: Any = None

    def texts(self, what: str, mine: str) -> List[str]:
        return [mine]

    def agree(self, what: Dict[str, Any]) -> None:
        pass

    def share(self, tensor: torch.Tensor, source: int = 0) -> None:
        pass

    def on_first(self, what: str, call: Callable[[], Any]) -> None:
        call()

    def abort(self, why: str) -> None:
        pass

    def close(self) -> None:
        pass


class Ranks(Alone):
    """Connected. All of them make the same calls, in the same order."""

    def __init__(self, core: Any, rank: int, world: int, local_rank: int) -> None:
        self.core = core
        self.rank, self.world, self.local_rank = rank, world, local_rank

    def texts(self, what: str, mine: str) -> List[str]:
        """Everybody's, by rank."""
        return list(self.core.texts(what, mine))

    def agree(self, what: Dict[str, Any]) -> None:
        """ValueError on all ranks where any has something else: it names rank, key and both values."""
        self.core.agree(json.dumps(what))

    def share(self, tensor: torch.Tensor, source: int = 0) -> None:
        """The values of rank `source` become everybody's. The tensor is contiguous."""
        self.core.share(tensor.data_ptr(), tensor.numel() * tensor.element_size(), source)

    def on_first(self, what: str, call: Callable[[], Any]) -> None:
        """`call` on rank 0. All wait for it, and where it raises, all do."""
        error: Optional[BaseException] = None
        if self.rank == 0:
            try:
                call()
            except Exception as raised:  # noqa: B902
                error = raised
        told = self.texts(what, "" if error is None else f"{type(error).__name__}: {error}")[0]
        if error is not None:
            raise error
        if told:
            raise RuntimeError(f"rank 0: {told}")

    def abort(self, why: str) -> None:
        self.core.abort(why)

    def close(self) -> None:
        self.core.close()


def _world_of_environment() -> int:
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"WORLD_SIZE={text} in the environment: the number of ranks, 1 or more")
    return int(text)


_used_in = 0  # the process whose process group of torch's is used here; 0: none


def make_group(timeout: Any = None) -> None:
    """torch.distributed's process group, as RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say, where there is none. timeout: torch's; None: its default."""
    global _used_in
    import torch.distributed as dist

    if dist.is_available() and not dist.is_initialized():
        dist.init_process_group(backend="gloo", **({} if timeout is None else {"timeout": timeout}))
        _used_in = os.getpid()


def end_group() -> None:
    """Its threads end before the interpreter does: torch aborts one process in twenty or so where nobody does that."""
    global _used_in
    used_in, _used_in = _used_in, 0
    if used_in == os.getpid():
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()


def world_size(wanted: Optional[bool]) -> int:
    """Of the process group, which is made of the environment where there is none. 1: this process trains by itself.

    wanted: False: it does, whatever there is.
    """
    if wanted is False:
        return 1
    import torch.distributed as dist

    if not dist.is_available():
        if _world_of_environment() > 1:
            raise RuntimeError(f"WORLD_SIZE is {_world_of_environment()}, and this torch has no torch.distributed: start one process")
        return 1
    if not dist.is_initialized():
        if _world_of_environment() == 1:
            return 1
        make_group()
    world = int(dist.get_world_size())
    if world > 1:
        global _used_in
        _used_in = os.getpid()
    return world


def _host() -> str:
    """The same for processes that reach each other at 127.0.0.1."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return socket.gethostname()


def _described(model: nn.Module) -> List[str]:
    parameters = [
        f"parameter {name}: {tuple(each.shape)} {each.dtype}{'' if each.requires_grad else ', frozen'}"
        for name, each in model.named_parameters()
    ]
    return parameters + [f"buffer {name}: {tuple(each.shape)} {each.dtype}" for name, each in model.named_buffers()]


class Meeting:
    """Of all ranks, when the model has been seen: a group of torch's, on the processor, for as long as that takes."""

    def __init__(self, timeout: float) -> None:
        """timeout: seconds without a sign of life (penstock.initialize's rank_timeout)."""
        import torch.distributed as dist

        self._dist = dist
        self._timeout = timeout
        self.rank, self.world = int(dist.get_rank()), int(dist.get_world_size())
        # Others may still look at their first batch.
        patience = datetime.timedelta(seconds=10 * timeout)
        try:
            self._group = dist.new_group(backend="gloo", timeout=patience)
        except RuntimeError as error:
            raise ConnectionError(
                f"rank {self.rank} of {self.world}: not all ranks came to their first forward within {patience.total_seconds():g} s "
                f"(rank_timeout is {timeout:g}): {error}"
            ) from error

    def _all(self, mine: Any) -> List[Any]:
        every: List[Any] = [None] * self.world
        self._dist.all_gather_object(every, mine, group=self._group)
        return every

    def check_model(self, model: nn.Module) -> None:
        """ValueError on all ranks where their models differ in more than values."""
        every = self._all(_described(model))
        for rank, theirs in enumerate(every):
            if theirs == every[0]:
                continue
            number = next((i for i, (a, b) in enumerate(zip(theirs, every[0])) if a != b), min(len(theirs), len(every[0])))
            first, other = ((of[number] if number < len(of) else "nothing more") for of in (every[0], theirs))
            raise ValueError(f"rank {rank} of {self.world} has another model than rank 0: {other} there, {first} on rank 0")

    def connect(self) -> Ranks:
        hosts = self._all(_host())
        here = [rank for rank, host in enumerate(hosts) if host == hosts[self.rank]]
        local_rank = here.index(self.rank)
        own = os.environ.get("PENSTOCK_RANKS_SECRET", "")
        if len(set(self._all(bool(own)))) > 1:
            raise ValueError("PENSTOCK_RANKS_SECRET is set for some ranks and not for others: give the same one to all, or to none")
        place, mine = None, None
        if self.rank == 0:
            address = "127.0.0.1" if len(set(hosts)) == 1 else os.environ.get("MASTER_ADDR") or socket.gethostname()
            # Over torch's group, where nobody has said one that need not be sent.
            made = "" if own else secrets.token_hex(32)
            try:
                place = _core.MeetingPlace(address, own or made)
                mine = (address, place.port, secrets.token_hex(8), made, "")
            except Exception as error:  # noqa: B902
                mine = (address, 0, "", "", str(error))
        address, port, session, made, failure = self._all(mine)[0]
        if failure:
            raise ConnectionError(f"rank 0 cannot wait for the other ranks at {address} (MASTER_ADDR): {failure}")
        core = _core.Ranks(self.rank, self.world, local_rank, len(here), address, port, session, own or made, self._timeout, place)
        return Ranks(core, self.rank, self.world, local_rank)

    def share_values(self, model: nn.Module) -> None:
        """Rank 0's parameters and buffers on all: models that were built with other random numbers, or loaded by rank 0 alone."""
        self._share([*(each for _, each in model.named_parameters()), *(each for _, each in model.named_buffers())])

    def share_buffers(self, model: nn.Module) -> None:
        """Rank 0's buffers on all, where the parameters are the engine's."""
        self._share([each for _, each in model.named_buffers()])

    def _share(self, tensors: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            for tensor in tensors:
                values = tensor.detach()
                if values.device.type == "meta" or values.numel() == 0:
                    continue
                whole = values.cpu().contiguous()
                for part in whole.view(-1).view(torch.uint8).split(_PIECE):  # bytes: gloo does not know every type
                    self._dist.broadcast(part, 0, group=self._group)
                if self.rank > 0 and whole.data_ptr() != values.data_ptr():
                    values.copy_(whole)
                give_back(values)

    def close(self) -> None:
        self._dist.destroy_process_group(self._group)

