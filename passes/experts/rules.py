"""Options of operations on the ranks' own experts instead of on the rank's own batch.

Along an expert axis a tensor has one of four placements:

* ``Replicate()``: as captured, what each rank computes on its own batch;
* ``Exchanged(e, t)``: the rank's shard of the experts, dim ``e``, for all ranks' tokens, concatenated along dim ``t``;
* ``Shard(e)``: the rank's shard of a tensor that is equal on all ranks, such as the experts' weights;
* ``Summed(e)``: the rank's shard of the sum over all ranks, such as the gradient of a weight.

An operation is legal on exchanged operands if it treats experts and tokens independently, or sums over tokens to
produce a gradient. Its other operands must be equal on all ranks: a rank's own values do not apply to other ranks'
tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from shardgraph.ir import Buffer, Parameter
from shardgraph.ir.attributes import ROLE
from shardgraph.passes.sharding.layout_rules import order_of
from shardgraph.passes.sharding.legal import Value, value_of
from shardgraph.passes.sharding.options import Option, operands, results
from shardgraph.passes.sharding.placements import REPLICATE, Exchanged, Summed

aten = torch.ops.aten

Known = Mapping[Value, set[Placement]]
"""Placements found so far for each value, besides ``Replicate()``."""


def same_on_all_ranks(gm: fx.GraphModule) -> set[fx.Node]:
    """The nodes whose values depend neither on a rank's batch nor on random numbers."""
    found: set[fx.Node] = set()
    for node in gm.graph.nodes:
        if node.op == "call_function":
            random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
            same = not random and found.issuperset(node.all_input_nodes)
        else:
            same = node.op == "get_attr" or isinstance(ROLE.get(node), (Parameter, Buffer))
        if same:
            found.add(node)
    return found


def expert_options(node: fx.Node, known: Known, common: set[fx.Node]) -> Iterator[Option]:
    """Options besides the rank's own batch that match ``known``; values in ``common`` are equal on all ranks.

    Some may not divide evenly.
    """
    if node.target in _PRODUCTS:
        yield from _product(node, common)
    elif node.target in _SUMS:
        yield from _sum(node, known)
    elif node.target in _LAYOUTS:
        yield from _layout(node, known, _LAYOUTS[node.target](node))
    elif node.target is aten.expand.default:
        yield from _expand(node, known)
    elif node.target in _ALONG:
        yield from _along(node, known)
    elif _elementwise(node.target):
        yield from _pointwise(node, known, common)


def _seen(placement: Placement, dims: Callable[[int], int | None]) -> Placement | None:
    """The placement with its dimensions mapped by ``dims``; None if one that it refers to is gone."""
    if isinstance(placement, Exchanged):
        experts, tokens = dims(placement.experts), dims(placement.tokens)
        return None if experts is None or tokens is None else Exchanged(experts, tokens)
    dim = dims(placement.dim)  # type: ignore[attr-defined]
    return None if dim is None else type(placement)(dim)  # type: ignore[call-arg]


def _known(node: fx.Node, known: Known) -> list[Placement]:
    return sorted(known.get(value_of(node), ()), key=repr)  # ranks must agree on the order


# -- products ----------------------------------------------------------------------------------------------

_PRODUCTS = (aten.bmm.default, aten.baddbmm.default)


def _product(node: fx.Node, common: set[fx.Node]) -> Iterator[Option]:
    """``bmm`` over experts, ``[E, rows, inner] x [E, inner, columns]``: tokens are rows, columns, or summed over."""
    weights, gradients = Shard(0), Summed(0)
    rows, columns = Exchanged(0, 1), Exchanged(0, 2)
    for left, right, out in (
        (rows, weights, rows),
        (weights, columns, columns),
        (columns, rows, gradients),
        (weights, weights, weights),
        (gradients, weights, gradients),
        (weights, gradients, gradients),
    ):
        if node.target is aten.bmm.default:
            yield Option((left, right), (out,))
        elif out == rows:  # a bias, which is added once
            bias = node.args[0].meta["val"]
            whole = bias.dim() < 3 or bias.shape[0] == 1
            yield from (Option((bias_as, left, right), (out,)) for bias_as in _biases(node, whole, common))


def _biases(node: fx.Node, whole: bool, common: set[fx.Node]) -> Iterator[Placement]:
    if not whole and node.args[0].meta["val"].shape[1] == 1:
        yield Shard(0)
    elif not whole:
        yield Exchanged(0, 1)
    elif node.args[0] in common:
        yield REPLICATE


# -- elementwise -------------------------------------------------------------------------------------------

_LIKE = (aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten._to_copy.default)
_LINEAR = (aten._to_copy.default, aten.neg.default, aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar)


def _elementwise(target: Any) -> bool:
    tags = getattr(target, "tags", ())
    return (torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags) or target in _LIKE


def _pointwise(node: fx.Node, known: Known, common: set[fx.Node]) -> Iterator[Option]:
    given, (out, *_) = operands(node), results(node)
    offsets = [out.dim() - operand.meta["val"].dim() for operand in given]
    wanted: set[Placement] = set(known.get((node, 0), ()))
    for operand, offset in zip(given, offsets, strict=True):
        for placement in _known(operand, known):
            if (above := _seen(placement, lambda dim, offset=offset: dim + offset)) is not None:
                wanted.add(above)
    for placement in sorted(wanted, key=repr):
        if isinstance(placement, Summed):
            yield from _linear(node, placement)
            continue
        each = [
            list(_under(operand, offset, placement, out.shape, operand in common))
            for operand, offset in zip(given, offsets, strict=True)
        ]
        for chosen in itertools.product(*each):
            if any(type(p) is type(placement) for p in chosen):
                yield Option(chosen, (placement,))


def _under(operand: fx.Node, offset: int, placement: Placement, shape: torch.Size, same: bool) -> Iterator[Placement]:
    """Operand placements for a result of ``shape``, to which the operand is broadcast, to have ``placement``."""
    own = operand.meta["val"].shape

    def size(dim: int) -> int:
        return own[dim - offset] if dim >= offset else 1

    experts = placement.experts if isinstance(placement, Exchanged) else placement.dim  # type: ignore[attr-defined]
    if size(experts) != shape[experts]:
        tokens = placement.tokens if isinstance(placement, Exchanged) else None
        if same and (tokens is None or size(tokens) == 1):
            yield REPLICATE
    elif isinstance(placement, Exchanged):
        if placement.tokens >= offset and size(placement.tokens) == shape[placement.tokens]:
            yield Exchanged(experts - offset, placement.tokens - offset)
        if size(placement.tokens) == 1:
            yield Shard(experts - offset)
    else:
        yield Shard(experts - offset)


def _linear(node: fx.Node, placement: Summed) -> Iterator[Option]:
    """A sum over ranks may be cast, scaled by numbers, and added to another."""
    given = operands(node)
    if len(given) == 1 and node.target in _LINEAR:
        yield Option((placement,), (placement,))
    shapes = {operand.meta["val"].shape for operand in given}
    if len(given) == 2 and len(shapes) == 1 and node.target in (aten.add.Tensor, aten.sub.Tensor):
        yield Option((placement, placement), (placement,))


# -- sums --------------------------------------------------------------------------------------------------

_SUMS = (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default)


def _sum(node: fx.Node, known: Known) -> Iterator[Option]:
    """Over other dimensions for each token, or over the tokens."""
    operand = operands(node)[0]
    rank = operand.meta["val"].dim()
    if len(node.args) < 2 or not node.args[1]:
        return
    gone = {dim % rank for dim in node.args[1]}
    keep = len(node.args) > 2 and node.args[2]

    def left(dim: int) -> int | None:
        return None if dim in gone else dim if keep else dim - sum(each < dim for each in gone)

    for placement in _known(operand, known):
        if (out := _seen(placement, left)) is not None:
            if not isinstance(placement, Summed) or node.target is not aten.amax.default:
                yield Option((placement,), (out,))
        elif isinstance(placement, Exchanged) and node.target is aten.sum.dim_IntList:
            experts = left(placement.experts)
            yield from () if experts is None else [Option((placement,), (Summed(experts),))]


# -- layout ------------------------------------------------------------------------------------------------

Dims = list[tuple[int, int]]
"""Pairs of an operand dimension and a result dimension for which sharding is equivalent."""


def _layout(node: fx.Node, known: Known, dims: Dims) -> Iterator[Option]:
    for placement in _known(operands(node)[0], known):
        for out in _through(placement, dims):
            yield Option((placement,), (out,))
    back = [(after, before) for before, after in dims]
    for placement in sorted(known.get((node, 0), ()), key=repr):
        for source in _through(placement, back):
            yield Option((source,), (placement,))


def _through(placement: Placement, dims: Dims) -> Iterator[Placement]:
    """Placements mapped through ``dims``: tokens may be the first of several dimensions, or one merged dimension."""
    if isinstance(placement, Exchanged):
        for experts, tokens in itertools.product(dims, dims):
            if (experts[0], tokens[0]) == (placement.experts, placement.tokens):
                yield Exchanged(experts[1], tokens[1])
    else:
        for before, after in dims:
            if before == placement.dim:  # type: ignore[attr-defined]
                yield type(placement)(after)  # type: ignore[call-arg]


def _view(node: fx.Node) -> Dims:
    """Pairs of dimensions with equally many elements to their left: sharding or concatenating along one is
    equivalent to the other if runs of it are whole; divisibility is checked elsewhere."""
    before, after = _lefts(operands(node)[0].meta["val"].shape), _lefts(results(node)[0].shape)
    return [(i, j) for i, left in enumerate(before) for j, other in enumerate(after) if left == other]


def _lefts(shape: torch.Size) -> list[int]:
    return [shape[:dim].numel() for dim in range(len(shape))]


def _squeeze(node: fx.Node) -> Dims:
    rank = operands(node)[0].meta["val"].dim()
    chosen = node.args[1] if isinstance(node.args[1], (list, tuple)) else [node.args[1]]
    shape = operands(node)[0].meta["val"].shape
    gone = {dim % rank for dim in chosen if shape[dim % rank] == 1}
    return list(zip([dim for dim in range(rank) if dim not in gone], range(rank), strict=False))


def _unsqueeze(node: fx.Node) -> Dims:
    rank = results(node)[0].dim()
    return list(zip(range(rank - 1), [dim for dim in range(rank) if dim != node.args[1] % rank], strict=True))


def _permute(node: fx.Node) -> Dims:
    return [(before, after) for after, before in enumerate(order_of(node))]


_LAYOUTS: dict[Any, Callable[[fx.Node], Dims]] = {
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.reshape.default: _view,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.unsqueeze.default: _unsqueeze,
    aten.permute.default: _permute,
    aten.transpose.int: _permute,
    aten.t.default: _permute,
    aten.alias.default: lambda node: [(dim, dim) for dim in range(results(node)[0].dim())],
    aten.detach.default: lambda node: [(dim, dim) for dim in range(results(node)[0].dim())],
    aten.clone.default: lambda node: [(dim, dim) for dim in range(results(node)[0].dim())],
}


def _expand(node: fx.Node, known: Known) -> Iterator[Option]:
    """A per-expert weight expanded to its tokens, or an exchanged tensor expanded along other dimensions."""
    operand, out = operands(node)[0], results(node)[0]
    shape = operand.meta["val"].shape
    offset = out.dim() - len(shape)
    for placement in _known(operand, known):
        if isinstance(placement, Shard):
            yield Option((placement,), (Shard(placement.dim + offset),))
            for dim in range(out.dim()):
                if dim - offset != placement.dim and (dim < offset or shape[dim - offset] == 1):
                    yield Option((placement,), (Exchanged(placement.dim + offset, dim),))
        elif isinstance(placement, Exchanged):
            experts, tokens = placement.experts + offset, placement.tokens + offset
            if out.shape[tokens] == shape[placement.tokens]:
                yield Option((placement,), (Exchanged(experts, tokens),))


_ALONG: dict[Any, int] = {
    aten.slice.Tensor: 1,
    aten.slice_backward.default: 2,
    aten.split.Tensor: 2,
    aten.split_with_sizes.default: 2,
    aten.cat.default: 1,
}
"""Operations along one dimension, with the position of the argument that names it."""


def _along(node: fx.Node, known: Known) -> Iterator[Option]:
    """Pieces of a dimension that is neither the experts' nor the tokens'."""
    given, outs = operands(node), results(node)
    position = _ALONG[node.target]
    along = (node.args[position] if len(node.args) > position else 0) % outs[0].dim()
    wanted = {placement for operand in given for placement in _known(operand, known)}
    for index in range(len(outs)):
        wanted |= known.get((node, index), set())
    for placement in sorted(wanted, key=repr):
        if _seen(placement, lambda dim: None if dim == along else dim) is not None:
            yield Option((placement,) * len(given), (placement,) * len(outs))
