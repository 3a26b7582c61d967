"""Functions of a linear head's outputs, row by row, of which only a chunk of rows is in memory at one time; backward computes each again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, List, Optional, Sequence, Tuple

import torch
from torch.nn import functional

from ._autograd_settings import AutogradSettings


@dataclass(frozen=True)
class Step:
    """A function of logits, each of whose rows depends on one row; with torch's settings of the time that it was called at."""

    function: Callable[[torch.Tensor], torch.Tensor]
    settings: AutogradSettings

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        with self.settings.autocast(cache_enabled=False):
            return self.function(rows)


@dataclass(frozen=True)
class RowFunction:
    """What is computed of ``hidden @ weight.T + bias``.

    of: of the rows of a chunk, and of the same rows of each of `along`, to tensors with as many rows.
    """

    chunk: int  # rows
    settings: AutogradSettings  # of the head's own forward
    of: Callable[..., Tuple[torch.Tensor, ...]]
    along: Sequence[torch.Tensor] = ()

    def head(self, hidden: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor]) -> torch.Tensor:
        with self.settings.autocast(cache_enabled=False):
            return functional.linear(hidden, weight, bias)

    def chunks(self, rows: int) -> List[slice]:
        return [slice(begin, min(begin + self.chunk, rows)) for begin in range(0, max(rows, 1), self.chunk)]

    def at(self, logits: torch.Tensor, chunk: slice) -> Tuple[torch.Tensor, ...]:
        return self.of(logits, *(each[chunk] for each in self.along))

    def values(self, hidden: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor]) -> Tuple[torch.Tensor, ...]:
        """Without a graph."""
        with torch.no_grad():
            chunks = self.chunks(hidden.shape[0])
            made = [self.at(self.head(hidden[chunk], weight, bias), chunk) for chunk in chunks]
            return tuple(each[0] if len(made) == 1 else torch.cat(each) for each in zip(*made))

    def __call__(self, hidden: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor]) -> Tuple[torch.Tensor, ...]:
        """With a graph that leads to hidden, weight and bias."""
        return _Rows.apply(self, hidden, weight, bias)  # type: ignore[no-any-return]


# Sums of 16-bit parts in 16 bits would lose what each part adds.
def _sum_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros(tensor.shape, dtype=torch.promote_types(tensor.dtype, torch.float32), device=tensor.device)


class Gradients:
    """Of hidden, weight and bias, chunk by chunk. Those that are not wanted are None."""

    def __init__(self, hidden: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor], wanted: Sequence[bool]) -> None:
        self._weight, self._own = weight, (hidden, weight, bias)
        self._cast: Optional[torch.Tensor] = None  # the weight, in the type of logits
        self._hidden = torch.zeros_like(hidden) if wanted[0] else None
        self._of_weight = _sum_like(weight) if wanted[1] else None
        self._of_bias = _sum_like(bias) if bias is not None and wanted[2] else None

    def add(self, chunk: slice, hidden: torch.Tensor, of_logits: torch.Tensor) -> None:
        """hidden: of the chunk. of_logits: the gradient that has come to its logits."""
        if self._hidden is not None:
            if self._cast is None:
                self._cast = self._weight.to(of_logits.dtype)
            self._hidden[chunk] = of_logits @ self._cast
        if self._of_weight is not None:
            given = hidden.to(of_logits.dtype)
            if self._of_weight.dtype == of_logits.dtype:
                self._of_weight.addmm_(of_logits.t(), given)
            else:
                self._of_weight += of_logits.t() @ given
        if self._of_bias is not None:
            self._of_bias += of_logits.sum(0, dtype=self._of_bias.dtype)

    def all(self) -> Tuple[Optional[torch.Tensor], ...]:
        made = (self._hidden, self._of_weight, self._of_bias)
        return tuple(None if each is None else each.to(own.dtype) for each, own in zip(made, self._own))  # type: ignore[union-attr]


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: RowFunction, hidden: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor]) -> Any:
        ctx.function = function
        ctx.save_for_backward(hidden, weight, bias)
        made = function.values(hidden, weight, bias)
        ctx.mark_non_differentiable(*(each for each in made if not each.is_floating_point()))
        ctx.set_materialize_grads(False)
        return made

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Optional[torch.Tensor]) -> Any:
        return backward_of(ctx, ctx.function, gradients)


def backward_of(ctx: Any, function: RowFunction, gradients: Sequence[Optional[torch.Tensor]]) -> Tuple[Optional[torch.Tensor], ...]:
    """Of a Function of (function, hidden, weight, bias), which has saved the last three: what its backward returns."""
    if all(each is None for each in gradients):
        return None, None, None, None
    hidden, weight, bias = ctx.saved_tensors
    sums = Gradients(hidden, weight, bias, ctx.needs_input_grad[1:])
    for chunk in function.chunks(hidden.shape[0]):
        with torch.no_grad():
            logits = function.head(hidden[chunk], weight, bias)
        with torch.enable_grad():
            logits.requires_grad_()
            made = [(each, given[chunk]) for each, given in zip(function.at(logits, chunk), gradients) if given is not None and each.requires_grad]
        if made:
            (of_logits,) = torch.autograd.grad([each for each, _ in made], [logits], [given for _, given in made])
            del made
            sums.add(chunk, hidden[chunk], of_logits)
            del of_logits
        del logits
    return (None, *sums.all())
