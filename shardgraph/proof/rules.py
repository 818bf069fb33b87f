"""Operations by labels: a table of its own, which shares nothing with the rules by which passes divide operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shardgraph.ir import fused
from shardgraph.proof.held import Held
from shardgraph.proof.labels import Label, Rule, elementwise, jointly, linear
from shardgraph.proof.terms import Terms

aten = torch.ops.aten

Ruled = tuple[list[Held], Any, Rule]
"""Tensor operands, the other arguments, and their rule."""

RULES: dict[Any, Callable[..., Ruled]] = {}


def rule(*targets: Any) -> Callable[[Callable[..., Ruled]], Callable[..., Ruled]]:
    """Register a rule for operations; it is called with the arguments, with what ranks hold in place of tensors.

    An operation that another library defines is given by its name.
    """

    def register(function: Callable[..., Ruled]) -> Callable[..., Ruled]:
        RULES.update(dict.fromkeys(targets, function))
        return function

    return register


def names(held: Held, prefix: str = "d") -> list[Label]:
    """A label for each dimension."""
    return [f"{prefix}{k}" for k in range(len(held.dims))]


# -- element by element --------------------------------------------------------------------------------------

_LINEAR_IN_ONE = {
    aten.mul.Tensor: linear(0, 1),
    aten.div.Tensor: linear(0),
    aten.where.self: jointly(1, 2),
    aten.silu_backward.default: linear(0),
    aten.gelu_backward.default: linear(0),
    aten.tanh_backward.default: linear(0),
    aten.sigmoid_backward.default: linear(0),
    aten.threshold_backward.default: linear(0),
    aten.masked_fill.Scalar: (),
    aten.native_dropout_backward.default: linear(0),
}


def pointwise(terms: Terms, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Held:
    """An operation of torch that computes each element from those at its place."""
    tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Held)]
    constants = [None if isinstance(each, Held) else each for each in args]
    if target is aten.mul.Tensor:
        tensors.sort(key=lambda each: each.view.order)
    together = [each for each in _LINEAR_IN_ONE.get(target, ()) if max(each) < len(tensors)]
    return elementwise(terms, target, tensors, [constants, dict(kwargs)], together)


# -- products ------------------------------------------------------------------------------------------------


@rule(aten.mm.default)
def _mm(left: Held, right: Held) -> Ruled:
    return [left, right], None, Rule(["mk", "kn"], ["mn"], {"k": "sum"}, linear(0, 1))


@rule(aten.bmm.default)
def _bmm(left: Held, right: Held) -> Ruled:
    return [left, right], None, Rule(["bmk", "bkn"], ["bmn"], {"k": "sum"}, linear(0, 1))


# -- reductions ----------------------------------------------------------------------------------------------


def _extremum(how: str) -> Callable[..., Ruled]:
    def reduction(held: Held, dims: Any = None, keep: bool = False) -> Ruled:
        rank = len(held.dims)
        over = {dim % rank for dim in dims} if dims else set(range(rank))
        labels = names(held)
        kept: list[Label] = [1 if k in over else label for k, label in enumerate(labels) if keep or k not in over]
        return [held], [sorted(over), keep], Rule([labels], [kept], {f"d{k}": how for k in over})

    return reduction


RULES[aten.amax.default] = _extremum("max")
RULES[aten.amin.default] = _extremum("min")


@rule(aten.argmax.default, aten.argmin.default)
def _place_of_extremum(held: Held, dim: int | None = None, keep: bool = False) -> Ruled:
    rank = len(held.dims)
    over = set(range(rank)) if dim is None else {dim % rank}
    labels: list[Label] = [None if k in over else f"d{k}" for k in range(rank)]
    kept: list[Label] = [1 if k in over else f"d{k}" for k in range(rank) if keep or k not in over]
    return [held], [sorted(over), keep], Rule([labels], [kept])


@rule(aten._softmax.default, aten._safe_softmax.default)
def _softmax(held: Held, dim: int, *rest: Any) -> Ruled:
    labels = names(held)
    labels[dim] = None
    results: list[Label] = [size if label is None else label for label, size in zip(labels, held.shape, strict=True)]
    return [held], [dim % len(labels)], Rule([labels], [results])


@rule(aten._softmax_backward_data.default)
def _softmax_backward(gradient: Held, output: Held, dim: int, *rest: Any) -> Ruled:
    labels = names(gradient)
    labels[dim] = None
    results: list[Label] = [
        size if label is None else label for label, size in zip(labels, gradient.shape, strict=True)
    ]
    return [gradient, output], [dim % len(labels)], Rule([labels, labels], [results], linear=linear(0))


# -- norms ---------------------------------------------------------------------------------------------------


def _rows_and_rest(held: Held, last: int) -> tuple[list[Label], list[Label], list[Label]]:
    """Labels of an operand that is normalized over its ``last`` dimensions; those of a result; of its statistics."""
    rank = len(held.dims)
    rows: list[Label] = [f"d{k}" for k in range(rank - last)]
    sizes: list[Label] = list(held.shape[rank - last :])
    return [*rows, *[None] * last], [*rows, *sizes], [*rows, *[1] * last]


@rule(aten.native_layer_norm.default)
def _layer_norm(held: Held, shape: Sequence[int], weight: Held | None, bias: Held | None, epsilon: float) -> Ruled:
    labels, result, statistics = _rows_and_rest(held, len(shape))
    parameters = [each for each in (weight, bias) if each is not None]
    absent = [weight is None, bias is None]
    operands = [labels, *([None] * len(shape) for _ in parameters)]
    return [held, *parameters], [shape, absent, epsilon], Rule(operands, [result, statistics, statistics])


@rule(aten.native_layer_norm_backward.default)
def _layer_norm_backward(
    gradient: Held,
    held: Held,
    shape: Sequence[int],
    mean: Held,
    rstd: Held,
    weight: Held | None,
    bias: Held | None,
    *wanted: Any,
) -> Ruled:
    labels, result, _ = _rows_and_rest(held, len(shape))
    rows = [label for label in labels if label is not None]
    stats: list[Label] = [*rows, *[None] * len(shape)]
    operands = [labels, labels, stats, stats, *([[None] * len(shape)] if weight is not None else [])]
    tensors = [gradient, held, mean, rstd, *([weight] if weight is not None else [])]
    sums: list[Label] = list(held.shape[len(rows) :])
    reduced = {str(row): "sum" for row in rows}
    return tensors, [shape, weight is None], Rule(operands, [result, sums, sums], reduced, linear(0))


@rule(fused.RMS_NORM)
def _rms_norm(held: Held, shape: Sequence[int], weight: Held | None, epsilon: float) -> Ruled:
    labels, result, statistics = _rows_and_rest(held, len(shape))
    parameters = [] if weight is None else [weight]
    operands = [labels, *([None] * len(shape) for _ in parameters)]
    return [held, *parameters], [shape, epsilon], Rule(operands, [result, statistics])


@rule(fused.RMS_NORM_BACKWARD)
def _rms_norm_backward(gradient: Held, held: Held, shape: Sequence[int], rstd: Held, weight: Held | None) -> Ruled:
    labels, result, _ = _rows_and_rest(held, len(shape))
    rows = [label for label in labels if label is not None]
    stats: list[Label] = [*rows, *[None] * len(shape)]
    operands = [labels, labels, stats, *([[None] * len(shape)] if weight is not None else [])]
    tensors = [gradient, held, rstd, *([weight] if weight is not None else [])]
    sums: list[Label] = list(held.shape[len(rows) :])
    return tensors, shape, Rule(operands, [result, sums], {str(row): "sum" for row in rows}, linear(0))


@rule(aten._native_batch_norm_legit_functional.default)
def _batch_norm(held: Held, weight: Held | None, bias: Held | None, mean: Held, variance: Held, *rest: Any) -> Ruled:
    channels: list[Label] = [None, "c", *[None] * (len(held.dims) - 2)]
    tensors = [each for each in (held, weight, bias, mean, variance) if each is not None]
    operands: list[Sequence[Label]] = [channels, *["c"] * (len(tensors) - 1)]
    result: list[Label] = [held.shape[0], "c", *held.shape[2:]]
    return tensors, [weight is None, bias is None, *rest], Rule(operands, [result, "c", "c", "c", "c"])


@rule(aten.native_batch_norm_backward.default)
def _batch_norm_backward(gradient: Held, held: Held, *rest: Any) -> Ruled:
    channels: list[Label] = [None, "c", *[None] * (len(held.dims) - 2)]
    vectors = [each for each in rest if isinstance(each, Held)]
    constants = [None if isinstance(each, Held) else each for each in rest]
    result: list[Label] = [held.shape[0], "c", *held.shape[2:]]
    rule = Rule([channels, channels, *["c"] * len(vectors)], [result, "c", "c"], linear=linear(0))
    return [gradient, held, *vectors], constants, rule


# -- lookups -------------------------------------------------------------------------------------------------


@rule(aten.embedding.default)
def _embedding(table: Held, index: Held, *_: Any) -> Ruled:
    places = names(index)
    return [table, index], None, Rule([[None, "w"], places], [[*places, "w"]], linear=linear(0))


@rule(aten.embedding_dense_backward.default)
def _embedding_backward(gradient: Held, index: Held, rows: int, padding: int, by_count: bool) -> Ruled:
    places = names(index)
    reduced = {} if by_count else {str(place): "sum" for place in places}
    if by_count:
        places = [None] * len(places)
    operands = [[*places, "w"], places]
    return [gradient, index], [rows, padding, by_count], Rule(operands, [[rows, "w"]], reduced, linear(0))


@rule(aten.gather.default)
def _gather(held: Held, dim: int, index: Held, **_: Any) -> Ruled:
    labels, places = names(held), names(held)
    labels[dim], places[dim] = None, "place"
    return [held, index], dim % len(labels), Rule([labels, places], [places], linear=linear(0))


# -- pieces put back -----------------------------------------------------------------------------------------


@rule(aten.slice_scatter.default)
def _slice_scatter(held: Held, piece: Held, dim: int = 0, *bounds: Any) -> Ruled:
    dim %= len(held.dims)
    labels: list[Label] = [None if k == dim else f"d{k}" for k in range(len(held.dims))]
    results: list[Label] = [held.shape[dim] if k == dim else f"d{k}" for k in range(len(held.dims))]
    return [held, piece], [dim, *bounds], Rule([labels, labels], [results], linear=jointly(0, 1))


@rule(aten.slice_backward.default)
def _slice_backward(gradient: Held, sizes: Sequence[int], dim: int, *bounds: Any) -> Ruled:
    dim %= len(sizes)
    labels = names(gradient)
    labels[dim] = None
    results = names(gradient)
    results[dim] = sizes[dim]
    return [gradient], [dim, sizes[dim], *bounds], Rule([labels], [results], linear=linear(0))


@rule(aten.select_backward.default)
def _select_backward(gradient: Held, sizes: Sequence[int], dim: int, index: int) -> Ruled:
    dim %= len(sizes)
    labels = names(gradient)
    results = [*labels[:dim], sizes[dim], *labels[dim:]]
    return [gradient], [dim, sizes[dim], index % sizes[dim]], Rule([labels], [results], linear=linear(0))
