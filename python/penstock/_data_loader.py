"""DeepSpeed's loader of training data: micro-batches of a dataset, of which each rank has its part."""

from __future__ import annotations

from typing import Any, Callable, Iterator, Optional

import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from ._engine._ranks import world_size

#: Of DeepSpeed's, which reads a batch ahead in processes of their own.
_WORKERS = 2


def sampler_of(dataset: Any, world: Optional[int] = None, rank: Optional[int] = None, shuffle: bool = True) -> "DistributedSampler[Any]":
    """Of a rank's part of the dataset. None: world and rank are those of torch.distributed's process group, or of one process."""
    if world is None:
        world = world_size(None)
    if rank is None:
        rank = torch.distributed.get_rank() if world > 1 else 0
    return DistributedSampler(dataset, world, rank, shuffle=shuffle)


class DeepSpeedDataLoader:
    """Iterated over again and again, it shuffles alike each time, as torch's DistributedSampler without ``set_epoch`` (``data_sampler`` has it)."""

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        pin_memory: bool = False,
        local_rank: int = 0,
        tput_timer: Any = None,
        collate_fn: Optional[Callable[[Any], Any]] = None,
        num_local_io_workers: Optional[int] = None,
        data_sampler: Any = None,
        data_parallel_world_size: Optional[int] = None,
        data_parallel_rank: Optional[int] = None,
        dataloader_drop_last: bool = False,
    ) -> None:
        """dataset: with a length and items. data_parallel_world_size, data_parallel_rank: None are those of torch.distributed.

        local_rank and tput_timer change nothing. TypeError: the dataset has no length, or no items.
        """
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise TypeError(f"training_data is a {type(dataset).__name__}, without a length or items: give it to a torch.utils.data.DataLoader yourself")
        if data_sampler is None:
            data_sampler = sampler_of(dataset, data_parallel_world_size, data_parallel_rank)
        self.dataset = dataset
        self.batch_size = batch_size
        self.data_sampler = data_sampler
        self.dataloader: DataLoader[Any] = DataLoader(
            dataset, batch_size, sampler=data_sampler, collate_fn=collate_fn, pin_memory=pin_memory and torch.cuda.is_available(),
            num_workers=_WORKERS if num_local_io_workers is None else num_local_io_workers, drop_last=dataloader_drop_last,
        )  # fmt: skip
        self._batches: Optional[Iterator[Any]] = None

    def __len__(self) -> int:
        return len(self.dataloader)

    def __iter__(self) -> "DeepSpeedDataLoader":
        self._batches = iter(self.dataloader)
        return self

    def __next__(self) -> Any:
        if self._batches is None:
            raise TypeError("iter(loader) comes before next(loader)")
        return next(self._batches)


class RepeatingLoader:
    """A loader that begins again when it is over."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._batches = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(self.loader)
            return next(self._batches)
