"""Lookups in a table, or among scores, whose rows ranks share, and the loss of such scores.

An index belongs to exactly one rank, the one that has its row. What a rank looks up is right if the index is its own;
with zeros for all others, ranks have summands (Shoeybi et al., 2019, https://arxiv.org/abs/1909.08053, section 3, on
the embedding and the cross-entropy). A gradient of rows goes the other way: each rank places those of its own indices.

The loss is written in terms of lookups here, so that it is one term however it is computed. That an index of the
captured graph is within its table is taken for granted: the graph could not run otherwise. An index that a loss ignores
may be any number: what is looked up there is multiplied by zero, and a zero that is placed there leaves no trace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from shardgraph import ir
from shardgraph.proof.definitions import DEFINED, Typing, added, define, filled, summed
from shardgraph.proof.held import Held, UntypedError, patterns, whole_size
from shardgraph.proof.labels import Label, Rule, apply, linear
from shardgraph.proof.moves import MOVES
from shardgraph.proof.of_rank import OfRank, known
from shardgraph.proof.rules import RULES, names, pointwise
from shardgraph.proof.shards import part
from shardgraph.proof.terms import joined

aten = torch.ops.aten


# -- losses in terms of lookups --------------------------------------------------------------------------------


@define(aten._log_softmax.default)
def _log_softmax(typing: Typing, node: fx.Node, scores: Held, dim: int, _: bool) -> Held:
    """``x - log(sum(exp(x)))``; that a number is subtracted of ``x`` first is a lemma of its own."""
    exponentials = pointwise(typing.terms, aten.exp.default, (scores,), {})
    total = summed(typing, exponentials, [dim], keep=True)
    return added(typing, scores, pointwise(typing.terms, aten.log.default, (total,), {}).scaled(-1))


@define(aten._log_softmax_backward_data.default)
def _log_softmax_backward(typing: Typing, node: fx.Node, gradient: Held, output: Held, dim: int, _: Any) -> Held:
    """``gradient - exp(output) * sum(gradient)``."""
    exponentials = pointwise(typing.terms, aten.exp.default, (output,), {})
    total = summed(typing, gradient, [dim], keep=True)
    return added(typing, gradient, pointwise(typing.terms, aten.mul.Tensor, (exponentials, total), {}).scaled(-1))


@define(aten.nll_loss_forward.default)
def _nll(
    typing: Typing, node: fx.Node, scores: Held, target: Held, weight: Held | None, reduction: int, ignored: int
) -> list[Held]:
    """The scores of targets that count, negated and weighted: each, or their sum or mean; and the sum of weights."""
    _of_rows(scores)
    terms, column = typing.terms, target.with_dims([target.dims[0], ()])
    (picked,) = apply(terms, aten.gather.default, *RULES[aten.gather.default](scores, 1, column))
    kept = _weights(typing, target, weight, ignored)
    loss = pointwise(terms, aten.mul.Tensor, (picked.with_dims(picked.dims[:1]), kept), {}).scaled(-1)
    if reduction == 0:
        return [loss, filled(typing, (), 0)]
    count = summed(typing, pointwise(terms, aten._to_copy.default, (kept, "floating"), {}) if weight is None else kept)
    loss = summed(typing, loss)
    if reduction == 1:
        loss = pointwise(terms, aten.div.Tensor, (loss, count), {})
    return [loss, count]


@define(aten.nll_loss_backward.default)
def _nll_backward(
    typing: Typing,
    node: fx.Node,
    gradient: Held,
    scores: Held,
    target: Held,
    weight: Held | None,
    reduction: int,
    ignored: int,
    count: Held,
) -> Held:
    """The gradient, negated and weighted, at the targets that count; over the sum of weights if the loss is a mean."""
    _of_rows(scores)
    terms, gradient = typing.terms, gradient.scaled(-1)
    if reduction == 1:
        gradient = pointwise(terms, aten.div.Tensor, (gradient, count), {})
    of_rows = pointwise(terms, aten.mul.Tensor, (_weights(typing, target, weight, ignored), gradient), {})
    column = target.with_dims([target.dims[0], ()])
    classes = patterns(scores.dims[1])
    if any(kind != "own" for kind, _, _ in classes):
        raise UntypedError("a loss of scores whose classes ranks share")
    return _placed(typing, column, of_rows.with_dims([of_rows.dims[0], ()]), 1, classes)


def _of_rows(scores: Held) -> None:
    if len(scores.dims) != 2:
        raise UntypedError("a loss of scores that are not in rows")


def _weights(typing: Typing, target: Held, weight: Held | None, ignored: int) -> Held:
    """What each target counts for: nothing where it is ignored."""
    kept = pointwise(typing.terms, aten.ne.Scalar, (target, ignored), {})
    if weight is None:
        return kept
    table = weight.with_dims([*weight.dims, ()])
    (of_target,) = apply(typing.terms, aten.embedding.default, *RULES[aten.embedding.default](table, target))
    return pointwise(typing.terms, aten.mul.Tensor, (of_target.with_dims(of_target.dims[:1]), kept), {})


def _placed(typing: Typing, index: Held, values: Held, dim: int, classes: Any) -> Held:
    """Zeros, with values at one index each along a dimension."""
    labels = names(index)
    labels[dim] = None
    results: list[Label] = ["classes" if label is None else label for label in labels]
    rule = Rule([labels, labels], [results], linear=linear(1), divisions={"classes": classes})
    (result,) = apply(typing.terms, "placed", [index, values], [dim, whole_size(classes)], rule)
    return result


# -- which rank has a row --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FirstRow(OfRank):
    """The number of a rank's first row, of ``rows`` on every rank along ``axis``."""

    rows: int
    axis: str


@dataclass(frozen=True)
class Bound(OfRank):
    """Whether an index is not before the first, or not after the last, of a rank's rows."""

    index: Held
    own: FirstRow
    first: bool


class _Row:
    """The number that the index's row has among those of its rank."""


ROW = _Row()


@dataclass(frozen=True)
class Owned(OfRank):
    """``inside`` on the rank that has the index, ``outside`` on all others.

    ``inside`` is a number, :data:`ROW`, or a value; ``outside`` a number, or None if it may be anything.
    """

    index: Held
    own: FirstRow
    inside: Any
    outside: float | None

    def held(self) -> Held:
        """Summands, all but one of which are zero."""
        if not isinstance(self.inside, Held) or self.outside != 0:
            raise UntypedError("what a rank has for the indices of others is used")
        if self.inside.on(self.own.axis):
            raise UntypedError(f"ranks along {self.own.axis!r} look up what they do not all have")
        return replace(self.inside, partial=self.inside.partial | {(self.own.axis, "sum")})


@define(ir.first_row)
def _first_row(typing: Typing, node: fx.Node, rows: int, axis: str) -> FirstRow:
    return FirstRow(rows, axis)


@known(aten.sub.Tensor)
def _below(typing: Typing, node: fx.Node, index: Any, own: Any) -> Owned | None:
    """An index from the first row on; it is the same on all ranks along the axis."""
    if not isinstance(index, Held) or not isinstance(own, FirstRow) or node.meta["val"].is_floating_point():
        return None
    if index.on(own.axis) or index.partial or index.factor != 1:
        raise UntypedError(f"ranks along {own.axis!r} do not all have the index")
    return Owned(index, own, ROW, None)


@known(aten.ge.Scalar, aten.lt.Scalar)
def _bound(typing: Typing, node: fx.Node, row: Any, number: Any) -> Bound | None:
    first = node.target is aten.ge.Scalar
    if not isinstance(row, Owned) or row.inside is not ROW or row.outside is not None:
        return None
    return Bound(row.index, row.own, first) if number == (0 if first else row.own.rows) else None


@known(aten.logical_and.default)
def _and(typing: Typing, node: fx.Node, one: Any, other: Any) -> Owned | None:
    if isinstance(one, Bound) and isinstance(other, Bound):
        both = (one.index, one.own) == (other.index, other.own) and one.first != other.first
        return Owned(one.index, one.own, 1, 0) if both else None
    mask, kept = (one, other) if isinstance(one, Owned) else (other, one)
    if not isinstance(kept, Held) or not isinstance(mask, Owned) or (mask.inside, mask.outside) != (1, 0):
        return None
    return replace(mask, inside=kept) if kept.shape == mask.index.shape else None


@known(aten.logical_not.default)
def _not(typing: Typing, node: fx.Node, mask: Any) -> Owned | None:
    if not isinstance(mask, Owned) or (mask.inside, mask.outside) != (1, 0):
        return None
    return replace(mask, inside=0, outside=1)


@known(aten.mul.Tensor, aten.mul.Scalar)
def _mul(typing: Typing, node: fx.Node, one: Any, other: Any) -> Owned | None:
    return _both(node, one, other, lambda a, b: _product(typing, a, b))


@known(aten.add.Tensor)
def _add(typing: Typing, node: fx.Node, one: Any, other: Any) -> Owned | None:
    return _both(node, one, other, _sum) if isinstance(one, Owned) and isinstance(other, Owned) else None


def _both(node: fx.Node, one: Any, other: Any, operation: Callable[[Any, Any], Any]) -> Owned | None:
    """An operation where the index is the rank's own, and where it is not."""
    owned, rest = (one, other) if isinstance(one, Owned) else (other, one)
    if isinstance(rest, Owned):
        if (owned.index, owned.own) != (rest.index, rest.own):
            return None
    elif isinstance(rest, OfRank):
        return None
    else:
        rest = replace(owned, inside=rest, outside=rest if isinstance(rest, (int, float)) else None)
    inside = operation(owned.inside, rest.inside)
    if inside is None or (isinstance(inside, Held) and inside.shape != tuple(node.meta["val"].shape)):
        return None
    return replace(owned, inside=inside, outside=operation(owned.outside, rest.outside))


def _product(typing: Typing, one: Any, other: Any) -> Any:
    """None if it may be anything."""
    for number, value in ((one, other), (other, one)):
        if isinstance(number, (int, float)):
            if number in (0, 1):
                return value if number else 0
            return number * value if isinstance(value, (int, float)) else None
    if isinstance(one, Held) and isinstance(other, Held):
        return pointwise(typing.terms, aten.mul.Tensor, (one, other), {})
    return None


def _sum(one: Any, other: Any) -> Any:
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return one + other
    if 0 in (number for number in (one, other) if isinstance(number, (int, float))):
        return other if isinstance(one, (int, float)) else one
    return None


_MOVES = (aten.unsqueeze.default, aten.squeeze.dim, aten.clone.default, aten.detach.default, aten.alias.default)
_ALIKE = (aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.slice.Tensor)


@known(*_MOVES, *_ALIKE)
def _moved(typing: Typing, node: fx.Node, owned: Any, *rest: Any, **kwargs: Any) -> Owned | None:
    """The same elements of the index and of what it has."""
    if not isinstance(owned, Owned):
        return None
    inside, index = owned.inside, owned.index
    if isinstance(inside, Held):
        alike = inside.shape == index.shape if node.target in _ALIKE else len(inside.dims) == len(index.dims)
        inside = _move(typing, node, inside, *rest, **kwargs) if alike else None
    return None if inside is None else replace(owned, index=_move(typing, node, index, *rest, **kwargs), inside=inside)


@known(aten.cat.default)
def _joined(typing: Typing, node: fx.Node, pieces: Sequence[Any], dim: int = 0) -> Owned | None:
    """Pieces of an index, with what belongs to each."""
    first = pieces[0]
    if not all(isinstance(each, Owned) and isinstance(each.inside, Held) for each in pieces):
        return None
    alike = all((each.own, each.outside) == (first.own, first.outside) for each in pieces)
    if not alike or any(each.inside.shape != each.index.shape for each in pieces):
        return None
    index = _move(typing, node, [each.index for each in pieces], dim)
    return replace(first, index=index, inside=_move(typing, node, [each.inside for each in pieces], dim))


def _move(typing: Typing, node: fx.Node, held: Any, *rest: Any, **kwargs: Any) -> Any:
    if node.target in DEFINED:
        return DEFINED[node.target](typing, node, held, *rest, **kwargs)
    return MOVES[node.target](held, *rest, **kwargs)


# -- lookups ---------------------------------------------------------------------------------------------------


def _undivided(held: Held, dim: int, own: FirstRow, parts: int) -> Held:
    """The value with all of a dimension that ranks have in consecutive parts of ``own.rows``.

    Raises:
        UntypedError: they have it otherwise.
    """
    if parts == 1 and patterns(held.dims[dim]) == (("own", own.rows, None),):
        return held
    if patterns(held.dims[dim]) != (("mark", parts, own.axis), ("own", own.rows, None)):
        raise UntypedError(f"ranks along {own.axis!r} do not have {own.rows} rows each, one rank's after another's")
    whole = joined(atom._replace(axis=None) for atom in held.dims[dim])
    return held.with_dims([*held.dims[:dim], whole, *held.dims[dim + 1 :]])


def _is_row(index: Any) -> bool:
    """Whether an index is the row's where it is the rank's own, and another of its rows elsewhere."""
    return (
        isinstance(index, Owned)
        and index.inside is ROW
        and index.outside is not None
        and 0 <= index.outside < index.own.rows
    )


@known(aten.embedding.default)
def _embedding(typing: Typing, node: fx.Node, table: Any, index: Any, *_: Any) -> Owned | None:
    if not isinstance(table, Held) or not _is_row(index):
        return None
    whole = _undivided(table, 0, index.own, typing.ranks(index.own.axis))
    (rows,) = apply(typing.terms, aten.embedding.default, *RULES[aten.embedding.default](whole, index.index))
    return replace(index, index=index.index.with_dims([*index.index.dims, ()]), inside=rows, outside=None)


@known(aten.gather.default)
def _gather(typing: Typing, node: fx.Node, scores: Any, dim: int, index: Any) -> Owned | None:
    if not isinstance(scores, Held) or not _is_row(index):
        return None
    dim %= len(scores.dims)
    whole = _undivided(scores, dim, index.own, typing.ranks(index.own.axis))
    (picked,) = apply(typing.terms, aten.gather.default, *RULES[aten.gather.default](whole, dim, index.index))
    return replace(index, inside=picked, outside=None)


@known(aten.scatter.src)
def _scatter(typing: Typing, node: fx.Node, zeros: Any, dim: int, index: Any, values: Any) -> Held | None:
    """Each rank places the values of its own indices among its rows, and zeros elsewhere."""
    if not isinstance(zeros, Held) or not _is_row(index) or not isinstance(values, Owned):
        return None
    own, placed, dim = index.own, values.inside, dim % len(zeros.dims)
    one = index.index.shape[dim] == 1 and len(index.index.dims) == len(zeros.dims)
    same = (index.index, own) == (values.index, values.own) and values.outside == 0
    if zeros.factor or not one or not same or not isinstance(placed, Held):
        return None
    if zeros.shape[dim] != own.rows or placed.shape != index.index.shape:
        return None
    if any(k != dim and size != index.index.shape[k] for k, size in enumerate(zeros.shape)) or placed.on(own.axis):
        return None
    classes = (("mark", typing.ranks(own.axis), own.axis), ("own", own.rows, None))
    return _placed(typing, index.index, placed, dim, classes)


@dataclass(frozen=True)
class WithExtraRow(OfRank):
    """A rank's rows, and one more for what belongs to none of them."""

    rows: Held


@define(aten.embedding_dense_backward.default)
def _embedding_backward(
    typing: Typing, node: fx.Node, gradient: Held, index: Held, rows: int, padding: int, by_count: bool
) -> Held:
    """Summed by index; one of padding has no gradient."""
    if padding >= 0:
        kept = pointwise(typing.terms, aten.ne.Scalar, (index, padding), {})
        gradient = pointwise(typing.terms, aten.mul.Tensor, (gradient, kept.with_dims([*kept.dims, ()])), {})
    rule = RULES[aten.embedding_dense_backward.default](gradient, index, rows, -1, by_count)
    (result,) = apply(typing.terms, aten.embedding_dense_backward.default, *rule)
    return result


@known(aten.embedding_dense_backward.default)
def _embedding_backward_of_rows(
    typing: Typing, node: fx.Node, gradient: Any, index: Any, rows: int, padding: int, by_count: bool
) -> WithExtraRow | None:
    """Each rank sums the gradients of its own indices; the others' are in its last row."""
    if not isinstance(gradient, Held) or not isinstance(index, Owned) or index.inside is not ROW or padding >= 0:
        return None
    own, parts = index.own, typing.ranks(index.own.axis)
    if index.outside != own.rows or rows != own.rows + 1 or gradient.on(own.axis):
        return None
    whole = _embedding_backward(typing, node, gradient, index.index, own.rows * parts, padding, by_count)
    return WithExtraRow(part(whole, 0, 1, own.axis, parts))


@known(aten.slice.Tensor)
def _own_rows(
    typing: Typing, node: fx.Node, made: Any, dim: int = 0, start: int = 0, end: int = 2**63 - 1, step: int = 1
) -> Held | None:
    """The rank's rows, without the one that is not its own."""
    if not isinstance(made, WithExtraRow) or (dim, start, end, step) != (0, 0, made.rows.shape[0], 1):
        return None
    return made.rows
