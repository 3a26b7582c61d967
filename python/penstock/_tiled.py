"""DeepSpeed's tiled computations: linear layers in tiles of features, and functions of tokens in shards, whose forwards backward computes again."""

from __future__ import annotations

import math
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch
from torch import nn

from ._engine._autograd_settings import AutogradSettings
from ._engine._random import RandomState


def _bounds(items: int, parts: int) -> List[int]:
    size, larger = divmod(items, parts)
    return [part * size + min(part, larger) for part in range(parts + 1)]


class TiledLinear(nn.Module):
    """A linear layer as a grid of smaller ones: ``out_splits`` rows of ``in_splits``. ``linears[row][column]`` are modules of ``linear_cls``."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Callable[..., nn.Module] = nn.Linear,
        init_linear: Optional[nn.Module] = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        for name, splits, features in (("in", in_splits, in_features), ("out", out_splits, out_features)):
            if not 1 <= splits <= features:
                raise RuntimeError(f"{name}_splits is {splits}: from 1 to the {features} features that are split")
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split, self.combine_out_splits = input_is_already_split, combine_out_splits
        self.in_parts, self.out_parts = _bounds(in_features, in_splits), _bounds(out_features, out_splits)
        # A bias is added once.
        self.linears = nn.ModuleList(
            nn.ModuleList(
                linear_cls(width, height, bias=bias and column == in_splits - 1, **kwargs) for column, width in enumerate(_sizes(self.in_parts))
            )
            for height in _sizes(self.out_parts)
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: Any) -> Any:
        inputs: Any = [input_]
        if self.in_splits > 1:
            inputs = input_ if self.input_is_already_split else self._split_global_input(input_, _sizes(self.in_parts))
            if len(inputs) != self.in_splits:
                raise ValueError(f"the input is in {len(inputs)} parts, and in_splits is {self.in_splits}")
        outputs = []
        for row, linears in enumerate(self.linears):
            made: Any = None
            for column, linear in enumerate(linears):  # type: ignore[arg-type]
                made = self._reduce_local_output(column, row, made, linear(inputs[column]))
            outputs.append(made)
        return self._combine_output_splits(outputs) if self.combine_out_splits else outputs

    def _split_global_input(self, input: torch.Tensor, split_sizes: Sequence[int]) -> Sequence[torch.Tensor]:  # noqa: A002
        return input.split(list(split_sizes), dim=-1)

    def _reduce_local_output(self, in_id: int, out_id: int, current_out: Any, new_out: Any) -> Any:
        return new_out.clone() if current_out is None else current_out + new_out

    def _combine_output_splits(self, outputs: Sequence[Any]) -> Any:
        return torch.cat(list(outputs), dim=-1)

    @torch.no_grad()
    def copy_params_from(self, other: Any) -> None:
        """The layers have the parameters of this one, an ``nn.Linear`` of the same features."""
        bias: Any = getattr(other, "bias", None)
        if tuple(other.weight.shape) != (self.out_features, self.in_features) or (bias is not None) != self.use_bias:
            raise ValueError(
                f"a weight of {tuple(other.weight.shape)} {'without' if bias is None else 'with'} a bias is copied to one of "
                f"({self.out_features}, {self.in_features}) {'with' if self.use_bias else 'without'}"
            )
        for row, linears in zip(_slices(self.out_parts), self.linears):
            for column, linear in zip(_slices(self.in_parts), linears):  # type: ignore[call-overload]
                linear.weight.copy_(other.weight[row, column])
                if linear.bias is not None:
                    linear.bias.copy_(bias[row])


def _sizes(bounds: Sequence[int]) -> List[int]:
    return [end - begin for begin, end in zip(bounds, bounds[1:])]


def _slices(bounds: Sequence[int]) -> List[slice]:
    return [slice(begin, end) for begin, end in zip(bounds, bounds[1:])]


class TiledLinearReturnBias(TiledLinear):
    """Of layers that return (output, bias), as Megatron's do; so does this one."""

    def _reduce_local_output(self, in_id: int, out_id: int, current_out: Any, new_out: Any) -> Any:
        before, known = (None, None) if current_out is None else current_out
        made, bias = new_out
        return super()._reduce_local_output(in_id, out_id, before, made), known if bias is None else bias

    def _combine_output_splits(self, outputs: Sequence[Any]) -> Any:
        biases = [bias for _, bias in outputs if bias is not None]
        made = super()._combine_output_splits([each for each, _ in outputs])
        return made, super()._combine_output_splits(biases) if biases else None


# --- functions of tokens, shard by shard


class _Again:
    """torch's settings and random numbers of a forward, for when its shards are computed again in the same order."""

    def __init__(self) -> None:
        self._settings, self._random = AutogradSettings(), RandomState.now()

    def each(self, compute: Callable[[int], None], count: int) -> None:
        now = RandomState.now()
        self._random.restore()
        try:
            with self._settings.applied():
                for number in range(count):
                    compute(number)
        finally:
            now.restore()


# Gradients of weights go to the weights, wherever the function has them from, and the one of the leaf is returned.
def _backward(made: torch.Tensor, gradient: torch.Tensor, leaf: torch.Tensor) -> Optional[torch.Tensor]:
    if made.requires_grad:
        torch.autograd.backward(made, gradient)
    return leaf.grad


def _leaf(shard: torch.Tensor, wanted: bool) -> torch.Tensor:
    return shard.detach().requires_grad_(wanted)


class SequenceTiledCompute(torch.autograd.Function):
    """See ``sequence_tiled_compute``."""

    @staticmethod
    def forward(
        ctx: Any,
        fn: Callable[..., torch.Tensor],
        seqlen: int,
        shards: int,
        keys_to_shard: Sequence[str],
        keys_to_pass: Sequence[str],
        grad_requiring_tensor_key: str,
        compute_params: Any,
        output_unshard_dimension: int,
        output_reduction: Optional[str],
        *args: Any,
    ) -> torch.Tensor:
        if output_reduction not in (None, "mean", "sum"):
            raise ValueError(f"output_reduction is {output_reduction!r}: None, 'mean' or 'sum'")
        keys = [*keys_to_shard, *keys_to_pass]
        if grad_requiring_tensor_key not in keys_to_shard:
            raise ValueError(f"grad_requiring_tensor_key is {grad_requiring_tensor_key!r}: one of kwargs_to_shard")
        ctx.fn, ctx.keys, ctx.split, ctx.again = fn, keys, len(keys_to_shard), _Again()
        ctx.at, ctx.dimension, ctx.reduction = keys.index(grad_requiring_tensor_key), output_unshard_dimension, output_reduction
        ctx.step = math.ceil(seqlen / shards)
        ctx.begins = list(range(0, seqlen, ctx.step))
        ctx.others = [None if isinstance(each, torch.Tensor) else each for each in args]
        ctx.save_for_backward(*(each if isinstance(each, torch.Tensor) else None for each in args))
        made = [fn(**_given(ctx, args, begin)) for begin in ctx.begins]
        ctx.sizes = [1 if output_unshard_dimension == 0 else each.shape[output_unshard_dimension] for each in made]
        whole = torch.stack(made) if output_unshard_dimension == 0 else torch.cat(made, dim=output_unshard_dimension)
        ctx.shape = whole.shape
        return whole if output_reduction is None else whole.mean() if output_reduction == "mean" else whole.sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        args = [other if saved is None else saved for saved, other in zip(ctx.saved_tensors, ctx.others)]
        of_output = gradient
        if ctx.reduction is not None:
            of_output = (gradient / math.prod(ctx.shape) if ctx.reduction == "mean" else gradient).expand(ctx.shape)
        parts = of_output.split(ctx.sizes, dim=ctx.dimension)
        key, wanted = ctx.keys[ctx.at], ctx.needs_input_grad[9 + ctx.at]
        found: List[torch.Tensor] = []

        def compute(number: int) -> None:
            given = _given(ctx, args, ctx.begins[number])
            given[key] = leaf = _leaf(given[key], wanted)
            made = ctx.fn(**given)
            came = _backward(made, parts[number].reshape(made.shape), leaf)
            if wanted:
                found.append(torch.zeros_like(leaf) if came is None else came)

        ctx.again.each(compute, len(ctx.begins))
        results: List[Optional[torch.Tensor]] = [None] * (9 + len(args))
        results[9 + ctx.at] = torch.cat(found, dim=1) if wanted else None
        return tuple(results)


def _given(ctx: Any, args: Sequence[Any], begin: int) -> Dict[str, Any]:
    sharded = {key: each[:, begin : begin + ctx.step] for key, each in zip(ctx.keys[: ctx.split], args)}
    return {**sharded, **dict(zip(ctx.keys[ctx.split :], args[ctx.split :]))}


def sequence_tiled_compute(
    fn: Callable[..., torch.Tensor],
    seqlen: int,
    shards: int,
    kwargs_to_shard: Dict[str, Any],
    kwargs_to_pass: Dict[str, Any],
    grad_requiring_tensor_key: str,
    compute_params: Any = None,
    output_unshard_dimension: int = 1,
    output_reduction: Optional[str] = "mean",
) -> torch.Tensor:
    """``fn`` of each of ``shards`` parts of a sequence, one at a time, and once more in backward.

    kwargs_to_shard: tensors of [batch, seqlen, ...], cut in the sequence. kwargs_to_pass: given as they are. grad_requiring_tensor_key: that of
    kwargs_to_shard which a gradient is wanted of; gradients of weights come to the weights. compute_params: not needed. The outputs are
    concatenated in output_unshard_dimension (0: they are losses), and output_reduction is None, "mean" or "sum".
    """
    keys_to_shard, keys_to_pass = list(kwargs_to_shard), list(kwargs_to_pass)
    return SequenceTiledCompute.apply(  # type: ignore[no-any-return]
        fn, seqlen, shards, keys_to_shard, keys_to_pass, grad_requiring_tensor_key, compute_params, output_unshard_dimension, output_reduction,
        *kwargs_to_shard.values(), *kwargs_to_pass.values(),
    )  # fmt: skip


class TiledMLP(torch.autograd.Function):
    """``fn(self, x)`` in ``shards`` parts of the tokens of x ([..., tokens, features]), one at a time, and once more in backward."""

    @staticmethod
    def forward(ctx: Any, fn: Callable[[Any, torch.Tensor], torch.Tensor], self: Any, x: torch.Tensor, shards: int, compute_params: Any) -> torch.Tensor:
        ctx.fn, ctx.self, ctx.shards, ctx.again = fn, self, shards, _Again()
        ctx.save_for_backward(x)
        return torch.cat([fn(self, each) for each in x.chunk(shards, dim=-2)], dim=-2)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        parts, came = x.chunk(ctx.shards, dim=-2), gradients[0].chunk(ctx.shards, dim=-2)
        found: List[torch.Tensor] = []

        def compute(number: int) -> None:
            leaf = _leaf(parts[number], ctx.needs_input_grad[2])
            of_leaf = _backward(ctx.fn(ctx.self, leaf), came[number], leaf)
            if ctx.needs_input_grad[2]:
                found.append(torch.zeros_like(leaf) if of_leaf is None else of_leaf)

        ctx.again.each(compute, len(parts))
        return None, None, torch.cat(found, dim=-2) if found else None, None, None


class TiledFusedLogitsLoss(torch.autograd.Function):
    """The mean or sum of ``fn(self, x, y)`` (``fn(self, x, y, mask)``) over ``shards`` parts of all tokens: logits are a part's.

    Here backward computes the parts again, with the gradient that comes to the loss, where DeepSpeed's forward has computed all gradients as if
    that were one.
    """

    @staticmethod
    def forward(
        ctx: Any,
        fn: Callable[..., torch.Tensor],
        self: Any,
        x: torch.Tensor,
        y: torch.Tensor,
        mask: Optional[torch.Tensor],
        shards: int,
        compute_params: Any,
        output_reduction: str,
    ) -> torch.Tensor:
        if output_reduction not in ("mean", "sum"):
            raise ValueError(f"output_reduction is {output_reduction!r}: 'mean' or 'sum'")
        if x.dim() < 2 or y.dim() < 2 or x.shape[:2] != y.shape[:2] or (mask is not None and mask.shape != x.shape[:2]):
            shapes = ", ".join(str(tuple(each.shape)) for each in (x, y, mask) if each is not None)
            raise ValueError(f"x, y and mask have the shapes {shapes}: each begins with [batch, tokens], and mask has no more")
        ctx.fn, ctx.self, ctx.shards, ctx.again = fn, self, shards, _Again()
        ctx.save_for_backward(x, y, *([] if mask is None else [mask]))
        made = torch.stack([fn(self, *each) for each in _shards([x, y, mask], shards)])
        ctx.share = 1 / made.shape[0] if output_reduction == "mean" else 1.0
        return made.mean() if output_reduction == "mean" else made.sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x = ctx.saved_tensors[0]
        parts = _shards(ctx.saved_tensors, ctx.shards)
        found: List[torch.Tensor] = []

        def compute(number: int) -> None:
            leaf = _leaf(parts[number][0], ctx.needs_input_grad[2])
            made = ctx.fn(ctx.self, leaf, *parts[number][1:])
            came = _backward(made, (gradients[0] * ctx.share).to(made.dtype), leaf)
            if ctx.needs_input_grad[2]:
                found.append(torch.zeros_like(leaf) if came is None else came)

        ctx.again.each(compute, len(parts))
        return None, None, torch.cat(found).reshape(x.shape) if found else None, None, None, None, None, None


# Parts of all tokens of each of these tensors, side by side.
def _shards(tensors: Sequence[Optional[torch.Tensor]], count: int) -> List[Tuple[torch.Tensor, ...]]:
    return list(zip(*(each.reshape(-1, *each.shape[2:]).chunk(count) for each in tensors if each is not None)))
