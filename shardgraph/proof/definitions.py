"""Operations that are written in terms of others, the same on both sides of a proof."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import fx

from shardgraph.ir.attributes import EQUALS, MADE_BY
from shardgraph.proof.aligned import aligned
from shardgraph.proof.held import Held, MixedError, UntypedError, divided, of_term, patterns, through, whole_size
from shardgraph.proof.labels import (
    Label,
    Pattern,
    Rule,
    Whole,
    apply,
    check_summands,
    elementwise,
    jointly,
    linear,
    result,
)
from shardgraph.proof.moves import expand, unsqueeze
from shardgraph.proof.reordered import reorderings
from shardgraph.proof.rules import RULES, pointwise
from shardgraph.proof.shards import unpadded
from shardgraph.proof.terms import Dims, Terms, View, joined, regrouped, repeated, whole


class Typing(Protocol):
    """What definitions take from :class:`shardgraph.proof.typing.Typing`."""

    terms: Terms
    data: frozenset[str]
    drawn: int
    ranks: Callable[[str], int]


aten = torch.ops.aten

Defined = Callable[..., Any]
DEFINED: dict[Any, Defined] = {}
"""By operation: its result for the typing, the node and the arguments."""


def define(*targets: Any) -> Callable[[Defined], Defined]:
    """Register a definition for operations."""

    def register(function: Defined) -> Defined:
        DEFINED.update(dict.fromkeys(targets, function))
        return function

    return register


def captured(node: fx.Node) -> str:
    """The name that a node's value had in the captured graph, if a pass or its name says so; it is not trusted."""
    return EQUALS.get(node) or ("" if node in MADE_BY else node.name)


# -- numbers and sums ------------------------------------------------------------------------------------------


def _floating(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _pointwise(typing: Typing, node: fx.Node, *args: Any, **kwargs: Any) -> Held:
    return pointwise(typing.terms, node.target, args, kwargs)


@define(aten.mul.Tensor, aten.mul.Scalar)
def _mul(typing: Typing, node: fx.Node, one: Any, other: Any) -> Held:
    if isinstance(other, Held) and isinstance(one, Held):
        return _pointwise(typing, node, one, other)
    held, number = (one, other) if isinstance(one, Held) else (other, one)
    scales = _floating(node) and math.isfinite(number)
    return held.scaled(number) if scales else _pointwise(typing, node, held, number)


@define(aten.div.Tensor, aten.div.Scalar)
def _div(typing: Typing, node: fx.Node, one: Held, other: Any) -> Held:
    if isinstance(other, Held) or not other:
        return _pointwise(typing, node, one, other)
    return one.scaled(1 / other)


@define(aten.neg.default)
def _neg(typing: Typing, node: fx.Node, held: Held) -> Held:
    return held.scaled(-1) if _floating(node) else _pointwise(typing, node, held)


@define(aten._to_copy.default)
def _cast(typing: Typing, node: fx.Node, held: Held, **kwargs: Any) -> Held:
    """A cast among floating dtypes is numeric, which is not what is proved."""
    dtype, before = kwargs.get("dtype"), node.args[0].meta["val"].dtype
    if dtype is None or dtype == before or (dtype.is_floating_point and before.is_floating_point):
        return held
    return _pointwise(typing, node, held, "floating" if dtype.is_floating_point else str(dtype))


@define(aten.add.Tensor, aten.add_.Tensor, aten.sub.Tensor)
def _add(typing: Typing, node: fx.Node, one: Any, other: Any, alpha: float = 1) -> Held:
    if isinstance(other, int) and other == 0:
        return one
    if not (isinstance(one, Held) and isinstance(other, Held)) or not _floating(node):
        return _pointwise(typing, node, one, other, alpha)
    sign = -alpha if node.target is aten.sub.Tensor else alpha
    return added(typing, one, other.scaled(sign))


Collect = Callable[[Terms, list[View]], list[View]]
COLLECTING: list[Collect] = []
"""What the summands of a sum are together."""


def collecting(function: Collect) -> Collect:
    """Register a lemma on summands."""
    COLLECTING.append(function)
    return function


class HasTerms(Protocol):
    """What sums take from :class:`shardgraph.proof.typing.Typing`."""

    @property
    def terms(self) -> Terms:
        """All terms."""


def added(typing: HasTerms, one: Held, other: Held) -> Held:
    """The sum of two values: sums of the same values in any order are one term."""
    if _is_zero(one) or _is_zero(other):
        zero, rest = (one, other) if _is_zero(one) else (other, one)
        if rest.shape[max(len(rest.dims) - len(zero.dims), 0) :] == zero.shape:
            return rest
    if one.summed != other.summed:
        raise UntypedError("one is summed over batches and the other is not")
    rank = max(len(one.dims), len(other.dims))
    one, other = aligned([each.with_dims([*[()] * (rank - len(each.dims)), *each.dims]) for each in (one, other)])
    labels = [f"d{k}" for k in range(rank)]
    orders = reorderings([one, other], [labels, labels], [labels])
    for order in orders:
        one, other = order.of(one, labels), order.of(other, labels)
    both = _shared(one, other)
    sizes = both.view.shape
    summands = collected(typing.terms, [*addends(one, sizes), *addends(other, sizes)])
    total = sum_of(typing.terms, summands, sizes)
    dims = through(both.dims, total.dims)
    for order in orders:
        dims = order.back(dims, labels)
    result = replace(both, term=total.term, factor=total.factor, dims=dims)
    check_summands(result, {*both.marks, *both.batches})
    return result


def _is_zero(held: Held) -> bool:
    """Whether every rank has zeros; summands of zero are other numbers."""
    return not held.factor and not held.partial


def _shared(one: Held, other: Held) -> Held:
    """How ranks have a sum of two values, whatever it is."""
    values = [Terms().make("any", [], each.term.shape, each.term.varies - each.summed) for each in (one, other)]
    plain = [replace(one, term=values[0], factor=1.0, summed=frozenset())]
    plain += [replace(other, term=values[1], factor=1.0, summed=frozenset())]
    both = elementwise(Terms(), "any", plain, None, jointly(0, 1))
    return replace(both, summed=both.summed | one.summed)


def addends(held: Held, sizes: Sequence[int]) -> list[View]:
    """What a value is the sum of, if it is one in the order of its term's elements; else the value."""
    view = held.view
    own = [dim for dim in view.dims if any(atom.source is not None for atom in dim)]
    if view.term.operation != ("sum", 0) or own != [dim for dim in whole(view.term.shape) if dim]:
        return [_broadcast(view, sizes)]
    sources = [
        next((atom.source for atom in dim), None) for dim in view.dims
    ]  # among which dimensions of size 1 may be
    views, factors = view.term.operands
    return [
        _broadcast(View(part.term, part.factor * factor * view.factor, _at(part.dims, sources)), sizes)
        for part, factor in zip(views, factors, strict=True)
    ]


def _at(dims: Dims, sources: Sequence[Any]) -> Dims:
    return tuple(() if source is None else dims[source] for source in sources)


def _broadcast(view: View, sizes: Sequence[int]) -> View:
    repeats = [all(atom.source is None for atom in dim) for dim in view.dims]
    wide = [repeated(size) if again else dim for dim, size, again in zip(view.dims, sizes, repeats, strict=True)]
    return replace(view, dims=tuple(wide))


def collected(terms: Terms, summands: Sequence[View]) -> list[View]:
    """Summands in a fixed order: equal ones as one, without those that cancel; if all do, one of them as zero."""
    equal: dict[tuple[int, Any], View] = {}
    for view in summands:
        key = view.term.number, view.dims
        before = equal[key].factor if key in equal else 0.0
        equal[key] = replace(view, factor=before + view.factor)  # rounded where it is compared, and only there
    left = [view for view in equal.values() if view.factor] or list(equal.values())[:1]
    for collect in COLLECTING:
        left = collect(terms, left)
    return sorted(left, key=lambda view: view.order)


def sum_of(terms: Terms, summands: Sequence[View], sizes: Sequence[int]) -> View:
    """The sum of values of these sizes."""
    if len(summands) == 1:
        return summands[0]
    scale = summands[0].factor
    ratios = [view.factor / scale for view in summands]
    labels: list[Label] = [f"d{k}" for k in range(len(sizes))]
    rule = Rule([labels] * len(summands), [labels], linear=jointly(*range(len(summands))))
    plain = [replace(view, factor=1.0) for view in summands]
    total = result(terms, Whole("sum", 0, plain, ratios, rule, sizes))
    return replace(total, factor=total.factor * scale)


def _like(view: Any, dim: Any) -> Any:
    """The whole dimension of a summand, divided as that of the sum is."""
    pattern = patterns(dim)
    if all(atom.source is None for atom in view):
        return repeated(_local_size(pattern))
    pieces = regrouped(view, [size for kind, size, _ in pattern if kind != "batch"])
    if pieces is None:
        raise UntypedError("a sum is divided where its summands are not")
    result, rest = [], iter(pieces)
    for kind, size, axis in pattern:
        if kind == "batch":
            result += list(divided(0, [(kind, size, axis)]))
            continue
        piece = next(rest)
        if kind == "mark" and len(piece) != 1:
            raise UntypedError("a sum is divided where its summands are not")
        if kind == "mark" and piece[0].source is None:
            continue
        result += [atom._replace(axis=axis) if kind == "mark" else atom for atom in piece]
    return joined(result)


@define(aten.mean.dim, aten.mean.default)
def _mean(typing: Typing, node: fx.Node, held: Held, dims: Any = None, keep: bool = False, **_: Any) -> Held:
    """A sum over the number of elements."""
    count = math.prod(held.shape[dim] for dim in _reduced(held, dims))
    return summed(typing, held, dims, keep).scaled(1 / count)


@define(aten.sum.default, aten.sum.dim_IntList)
def _sum(typing: Typing, node: fx.Node, held: Held, dims: Any = None, keep: bool = False, **_: Any) -> Held:
    return summed(typing, held, dims, keep)


def summed(typing: HasTerms, held: Held, dims: Any = None, keep: bool = False) -> Held:
    """A sum of elements: over those that repeat it is a multiple; sums of summands over batches are too."""
    over = _reduced(held, dims)
    again = {dim for dim in over if held.dims[dim] and all(atom.source is None for atom in held.dims[dim])}
    factor = math.prod(held.shape[dim] for dim in again)
    held = held.with_dims([() if k in again else dim for k, dim in enumerate(held.dims)])
    if held.view.term.operation == "piece":  # of one element it is a part of the sum over all
        for one in [dim for dim in sorted(over - again) if not held.dims[dim]]:
            part = _summed(typing, held, over, keep, factor, one)
            if part.term.operation == "part of a sum":
                return part
    return _summed(typing, held, over, keep, factor)


def _summed(typing: HasTerms, held: Held, over: set[int], keep: bool, factor: float, one: int | None = None) -> Held:
    """The sum over dimensions that have elements to be added up, and over ``one`` that has a single one."""
    labels: list[Label] = [f"d{k}" if dim or k not in over or k == one else None for k, dim in enumerate(held.dims)]
    results: list[Label] = [
        1 if label is None or k in over else label for k, label in enumerate(labels) if keep or k not in over
    ]
    reduced = {f"d{k}": "sum" for k in over if labels[k] is not None}
    rule = Rule([labels], [results], reduced, jointly(0))
    if not reduced:
        return held.scaled(factor).with_dims([dim for k, dim in enumerate(held.dims) if keep or k not in over])
    (result,) = apply(
        typing.terms, "sum of elements", [replace(held, summed=frozenset())], [sorted(reduced), keep], rule
    )
    return replace(result, summed=result.summed | held.summed).scaled(factor)


def _reduced(held: Held, dims: Any) -> set[int]:
    rank = len(held.dims)
    every = range(rank) if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims
    return {dim % rank for dim in every} if rank else set()


@define(aten.addmm.default, aten.addmm_.default)
def _addmm(typing: Typing, node: fx.Node, bias: Held, left: Held, right: Held, **kwargs: Any) -> Held:
    (product,) = apply(typing.terms, aten.mm.default, *RULES[aten.mm.default](left, right))
    return added(typing, product.scaled(kwargs.get("alpha", 1)), bias.scaled(kwargs.get("beta", 1)))


# -- tensors without operands ----------------------------------------------------------------------------------


def filled(typing: HasTerms, shape: Sequence[int], value: Any) -> Held:
    """A tensor of one number."""
    factor = float(value) if math.isfinite(value) else 1.0
    term = typing.terms.make("one", [] if math.isfinite(value) else [str(value)], ())
    return Held(term, factor, tuple(map(repeated, shape)))


@define(aten.full.default)
def _full(typing: Typing, node: fx.Node, shape: Sequence[int], value: Any, **_: Any) -> Held:
    return filled(typing, shape, value)


@define(aten.scalar_tensor.default)
def _scalar(typing: Typing, node: fx.Node, value: Any, **_: Any) -> Held:
    return filled(typing, (), value)


@define(aten.full_like.default)
def _full_like(typing: Typing, node: fx.Node, held: Held, value: Any, **_: Any) -> Held:
    return filled(typing, held.shape, value)


@define(aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)
def _zeros(typing: Typing, node: fx.Node, *_: Any, **__: Any) -> Held:
    return filled(typing, node.meta["val"].shape, 0)


@define(aten.ones.default, aten.ones_like.default, aten.new_ones.default)
def _ones(typing: Typing, node: fx.Node, *_: Any, **__: Any) -> Held:
    return filled(typing, node.meta["val"].shape, 1)


# -- pieces ----------------------------------------------------------------------------------------------------


@define(aten.slice.Tensor)
def _slice(
    typing: Typing,
    node: fx.Node,
    held: Held,
    dim: int = 0,
    start: int | None = 0,
    end: int | None = None,
    step: int = 1,
) -> Held:
    size = held.shape[dim]
    first, last = (
        min(max(each + size if each < 0 else each, 0), size) for each in (start or 0, size if end is None else end)
    )
    if (first, last, step) == (0, size, 1):
        return held
    if dim == 0 and (first, step) == (0, 1) and (rows := unpadded(held, last)) is not None:
        return rows
    return _piece(typing, held, dim % len(held.dims), first, max(-(-(last - first) // step), 0), step)


@define(aten.slice_backward.default)
def _slice_backward(typing: Typing, node: fx.Node, gradient: Held, *rest: Any) -> Held:
    if 0 in gradient.shape:
        return filled(typing, node.meta["val"].shape, 0)
    (result,) = apply(typing.terms, node.target, *RULES[aten.slice_backward.default](gradient, *rest))
    return result


@define(aten.select.int)
def _select(typing: Typing, node: fx.Node, held: Held, dim: int, index: int) -> Held:
    dim %= len(held.dims)
    piece = _piece(typing, held, dim, index % held.shape[dim], 1, 1)
    return piece.with_dims([own for k, own in enumerate(piece.dims) if k != dim])


@define(aten.split.Tensor)
def _split(typing: Typing, node: fx.Node, held: Held, size: int, dim: int = 0) -> list[Held]:
    dim, total = dim % len(held.dims), held.shape[dim]
    return [_piece(typing, held, dim, at, min(size, total - at), 1) for at in range(0, total, size)]


@define(aten.split_with_sizes.default)
def _split_with_sizes(typing: Typing, node: fx.Node, held: Held, sizes: Sequence[int], dim: int = 0) -> list[Held]:
    dim, starts = dim % len(held.dims), [sum(sizes[:k]) for k in range(len(sizes))]
    return [_piece(typing, held, dim, at, size, 1) for at, size in zip(starts, sizes, strict=True)]


def _piece(typing: Typing, held: Held, dim: int, start: int, size: int, step: int) -> Held:
    """Elements of a dimension; of one that ranks share, if each has its part of them."""
    pattern = patterns(held.dims[dim])
    begin, length = start, size
    kept: Pattern = (("own", size, None),)
    if any(kind != "own" for kind, _, _ in pattern):
        below, inner = _local_size(pattern[1:]), whole_size(pattern[1:])
        in_blocks = pattern[0][0] == "own" and step == 1 and start % below == size % below == 0
        if not in_blocks or any(kind == "batch" for kind, _, _ in pattern):
            raise MixedError(f"elements {start} to {start + size} are taken of a dimension that ranks share")
        begin, length = start // below * inner, size // below * inner
        kept = (("own", size // below, None), *pattern[1:])
    labels: list[Label] = [f"d{k}" for k in range(len(held.dims))]
    own: list[Label] = ["kept" if k == dim else label for k, label in enumerate(labels)]
    rule = Rule([labels], [own], linear=jointly(0), divisions={"kept": kept})
    constants = [dim, begin, length, step]
    (piece,) = apply(typing.terms, "piece", [replace(held, summed=frozenset())], constants, rule)
    return replace(piece, summed=piece.summed | held.summed)


def _local_size(pattern: Any) -> int:
    return whole_size([each for each in pattern if each[0] == "own"])


@define(aten.cat.default)
def _cat(typing: Typing, node: fx.Node, tensors: Sequence[Held], dim: int = 0) -> Held:
    tensors = [each for each in tensors if 0 not in each.shape] or list(tensors)
    if len(tensors) == 1:
        return tensors[0]
    dim %= len(tensors[0].dims)
    labels: list[Label] = [f"d{k}" for k in range(len(tensors[0].dims))]
    if len({patterns(each.dims[dim]) for each in tensors}) > 1:
        tensors = [_ranks_first(each, dim) for each in tensors]
    divisions = [patterns(each.dims[dim]) for each in tensors]
    total: Any = (("own", sum(map(_local_size, divisions)), None),)
    if any(kind != "own" for pattern in divisions for kind, _, _ in pattern):
        if len(set(divisions)) > 1 or any(kind == "batch" for kind, _, _ in divisions[0]):
            raise UntypedError("pieces are joined that ranks share unlike")
        total = (("own", len(tensors), None), *divisions[0])
    operands = [
        [f"piece{i}" if k == dim else label if each.dims[k] else None for k, label in enumerate(labels)]
        for i, each in enumerate(tensors)
    ]
    results: list[Label] = [
        "joined" if k == dim else label if any(label in each for each in operands) else 1
        for k, label in enumerate(labels)
    ]
    rule = Rule(operands, [results], linear=jointly(*range(len(tensors))), divisions={"joined": total})
    (result,) = apply(typing.terms, "cat", list(tensors), dim, rule)
    return result


def _ranks_first(held: Held, dim: int) -> Held:
    """The ranks' coordinates in front of the digits of a dimension: where they stand moves no element."""
    digits = sorted(held.dims[dim], key=lambda atom: (atom.axis is None, atom.axis or ""))
    return held.with_dims([*held.dims[:dim], digits, *held.dims[dim + 1 :]])


@define(aten.stack.default)
def _stack(typing: Typing, node: fx.Node, tensors: Sequence[Held], dim: int = 0) -> Held:
    return _cat(typing, node, [unsqueeze(each, dim) for each in tensors], dim)


@define(aten.copy.default)
def _copy(typing: Typing, node: fx.Node, over: Held, held: Held, *_: Any) -> Held:
    """The second, as often as the first has elements."""
    return expand(held, over.shape)


@define(aten.constant_pad_nd.default)
def _pad(typing: Typing, node: fx.Node, held: Held, widths: Sequence[int], value: float = 0) -> Held:
    """Elements before and after; the widths of the last dimension are first."""
    rank, size = len(held.dims), node.meta["val"].shape
    padded = {rank - 1 - k // 2 for k, width in enumerate(widths) if width}
    operand = [None if k in padded else f"d{k}" for k in range(rank)]
    result = [size[k] if k in padded else f"d{k}" for k in range(rank)]
    constants, by_zeros = [list(widths), value], linear(0) if not value else ()
    (padding,) = apply(typing.terms, node.target, [held], constants, Rule([operand], [result], linear=by_zeros))
    return padding


# -- random numbers --------------------------------------------------------------------------------------------


@define(aten.native_dropout.default)
def _dropout(typing: Typing, node: fx.Node, held: Held, probability: float, training: bool | None) -> list[Held]:
    """A mask, drawn in the order of memory for all elements, and the product with it."""
    if held.marks or held.partial or any(isinstance(atom.source, str) for dim in held.dims for atom in dim):
        raise UntypedError("random numbers are drawn for a part, or a summand, of a value")
    if training is False:
        raise UntypedError("dropout that is not in training")
    strides = node.args[0].meta["val"].stride()
    order = sorted(range(len(strides)), key=strides.__getitem__, reverse=True)
    typing.drawn += 1
    sizes = [held.shape[dim] for dim in order]
    drawn = of_term(typing.terms.make("dropout mask", [typing.drawn, probability], sizes, typing.data))
    mask = drawn.with_dims([drawn.dims[order.index(dim)] for dim in range(len(order))])
    product = pointwise(typing.terms, aten.mul.Tensor, (held, mask), {})
    return [product.scaled(0.0 if probability == 1 else 1 / (1 - probability)), mask]


# -- images ----------------------------------------------------------------------------------------------------


def _channels(groups: int, transposed: bool) -> tuple[list[Label], list[Label]]:
    """Labels of the first two dimensions of images, and of weights."""
    if groups != 1:
        return ["n", None], [None, None]
    return ["n", "c"], ["c", "o"] if transposed else ["o", "c"]


@define(aten.convolution.default)
def _convolution(typing: Typing, node: fx.Node, images: Held, weight: Held, bias: Held | None, *rest: Any) -> Held:
    *_, transposed, _, groups = rest
    places, size = [None] * (len(images.dims) - 2), node.meta["val"].shape
    of_images, of_weight = _channels(groups, transposed)
    outs: Label = "o" if groups == 1 else size[1]
    rule = Rule(
        [[*of_images, *places], [*of_weight, *places]],
        [["n", outs, *size[2:]]],
        {"c": "sum"} if groups == 1 else {},
        linear(0, 1),
    )
    (result,) = apply(typing.terms, aten.convolution.default, [images, weight], rest, rule)
    if bias is None:
        return result
    return added(typing, result, bias.with_dims([bias.dims[0], *[()] * len(places)]))


@define(aten.convolution_backward.default)
def _convolution_backward(
    typing: Typing, node: fx.Node, gradient: Held, images: Held, weight: Held, _sizes: Any, *rest: Any
) -> list[Held | None]:
    *options, transposed, padding, groups, wanted = rest
    constants = [*options, transposed, padding, groups]
    places = [None] * (len(images.dims) - 2)
    of_images, of_weight = _channels(groups, transposed)
    outs: Label = "o" if groups == 1 else None
    results: list[Held | None] = [None, None, None]
    if wanted[0]:
        ins: Label = "c" if groups == 1 else images.shape[1]
        rule = Rule(
            [["n", outs, *places], [*of_weight, *places]],
            [["n", ins, *images.shape[2:]]],
            {"o": "sum"} if groups == 1 else {},
            linear(0, 1),
        )
        shape = [*images.shape[2:]]
        (results[0],) = apply(typing.terms, "gradient of images", [gradient, weight], [constants, shape], rule)
    if wanted[1]:
        sizes: list[Label] = list(of_weight) if groups == 1 else list(weight.shape[:2])
        rule = Rule(
            [["n", outs, *places], [*of_images, *places]], [[*sizes, *weight.shape[2:]]], {"n": "sum"}, linear(0, 1)
        )
        shape = [*weight.shape[2:]]
        (results[1],) = apply(typing.terms, "gradient of filters", [gradient, images], [constants, shape], rule)
    if wanted[2]:
        results[2] = summed(typing, gradient, [0, *range(2, len(gradient.dims))])
    return results
