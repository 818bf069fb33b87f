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
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from shardgraph.ir import Buffer, Parameter
from shardgraph.ir.attributes import ROLE
from shardgraph.passes.analysis.random_state import draws
from shardgraph.passes.sharding.layout_rules import order_of
from shardgraph.passes.sharding.legal import Value, value_of
from shardgraph.passes.sharding.options import Option, operands, results
from shardgraph.passes.sharding.placements import REPLICATE, Exchanged, Summed

aten = torch.ops.aten

Known = Mapping[Value, set[Placement]]
"""Placements found so far for each value, besides ``Replicate()``."""


def same_on_all_ranks(gm: fx.GraphModule) -> set[fx.Node]:
    """The nodes whose values depend neither on a rank's batch nor on random numbers."""
    common: set[fx.Node] = set()
    for node in gm.graph.nodes:
        stored = node.op == "get_attr" or isinstance(ROLE.get(node), (Parameter, Buffer))
        computed = node.op == "call_function" and not draws(node) and common.issuperset(node.all_input_nodes)
        if stored or computed:
            common.add(node)
    return common


def expert_options(node: fx.Node, known: Known, common: set[fx.Node]) -> Iterator[Option]:
    """Options besides the rank's own batch that match ``known``; values in ``common`` are equal on all ranks.

    Some may not divide evenly.
    """
    if node.target in (aten.bmm.default, aten.baddbmm.default):
        yield from _product(node, common)
    elif node.target in (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default):
        yield from _sum(node, known)
    elif node.target in _LAYOUTS:
        yield from _layout(node, known, _LAYOUTS[node.target](node))
    elif node.target is aten.expand.default:
        yield from _expand(node, known)
    elif node.target in _ALONG:
        yield from _along(node, known)
    else:
        elementwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
        if (elementwise and not draws(node)) or node.target in _LIKE:
            yield from _pointwise(node, known, common)


def _known(operand: fx.Node, known: Known) -> list[Placement]:
    return _sorted(known.get(value_of(operand), ()))


def _sorted(placements: Iterable[Placement]) -> list[Placement]:
    return sorted(placements, key=repr)  # ranks must agree on the order


Dims = list[tuple[int, int]]
"""Pairs of an operand dimension and a result dimension for which sharding is equivalent."""


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


def _product(node: fx.Node, common: set[fx.Node]) -> Iterator[Option]:
    """``bmm`` over experts, ``[E, rows, inner] x [E, inner, columns]``: tokens are rows, columns, or summed over."""
    weights, gradients = Shard(0), Summed(0)
    rows, columns = Exchanged(0, 1), Exchanged(0, 2)
    if node.target is aten.bmm.default:
        yield Option((rows, weights), (rows,))
        yield Option((weights, columns), (columns,))
        yield Option((columns, rows), (gradients,))
        yield Option((weights, weights), (weights,))
        yield Option((gradients, weights), (gradients,))
        yield Option((weights, gradients), (gradients,))
        return
    bias = node.args[0].meta["val"]  # of a baddbmm, added once
    if bias.dim() == 3 and bias.shape[0] != 1:
        yield Option((weights if bias.shape[1] == 1 else rows, rows, weights), (rows,))
    elif node.args[0] in common:
        yield Option((REPLICATE, rows, weights), (rows,))


_LIKE = (aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten._to_copy.default)
_LINEAR = (aten._to_copy.default, aten.neg.default, aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar)


def _pointwise(node: fx.Node, known: Known, common: set[fx.Node]) -> Iterator[Option]:
    tensors, out = operands(node), results(node)[0]
    placements = set(known.get((node, 0), ()))
    for operand in tensors:
        rank = operand.meta["val"].dim()
        dims = list(zip(range(rank), range(out.dim() - rank, out.dim()), strict=True))
        for placement in _known(operand, known):
            placements.update(_through(placement, dims))
    for placement in _sorted(placements):
        if isinstance(placement, Summed):  # a sum over ranks may be cast, scaled by numbers, and added to another
            same = len({operand.meta["val"].shape for operand in tensors}) == 1
            linear = _LINEAR if len(tensors) == 1 else (aten.add.Tensor, aten.sub.Tensor)
            if same and len(tensors) <= 2 and node.target in linear:
                yield Option((placement,) * len(tensors), (placement,))
            continue
        candidates = [list(_broadcast(operand, placement, out.shape, operand in common)) for operand in tensors]
        for chosen in itertools.product(*candidates):
            if any(type(p) is type(placement) for p in chosen):
                yield Option(chosen, (placement,))


def _broadcast(operand: fx.Node, placement: Placement, shape: torch.Size, same: bool) -> Iterator[Placement]:
    """Operand placements for a result of ``shape``, to which the operand is broadcast, to have ``placement``."""
    own = operand.meta["val"].shape
    offset = len(shape) - len(own)
    sizes = (*[1] * offset, *own)
    tokens = placement.tokens if isinstance(placement, Exchanged) else None
    experts = placement.experts if isinstance(placement, Exchanged) else placement.dim  # type: ignore[attr-defined]
    if sizes[experts] != shape[experts]:
        if same and (tokens is None or sizes[tokens] == 1):
            yield REPLICATE
    elif tokens is None:
        yield Shard(experts - offset)
    else:
        if tokens >= offset and sizes[tokens] == shape[tokens]:
            yield Exchanged(experts - offset, tokens - offset)
        if sizes[tokens] == 1:
            yield Shard(experts - offset)


def _sum(node: fx.Node, known: Known) -> Iterator[Option]:
    """Over other dimensions for each token, or over the tokens."""
    operand = operands(node)[0]
    rank = operand.meta["val"].dim()
    if len(node.args) < 2 or not node.args[1]:
        return
    summed = {dim % rank for dim in node.args[1]}
    rest = [dim for dim in range(rank) if dim not in summed]
    keep = len(node.args) > 2 and node.args[2]
    dims = {dim: dim if keep else place for place, dim in enumerate(rest)}
    for placement in _known(operand, known):
        if (out := next(_through(placement, list(dims.items())), None)) is not None:
            if not isinstance(placement, Summed) or node.target is not aten.amax.default:
                yield Option((placement,), (out,))
        elif isinstance(placement, Exchanged) and node.target is aten.sum.dim_IntList and placement.experts in dims:
            yield Option((placement,), (Summed(dims[placement.experts]),))


def _layout(node: fx.Node, known: Known, dims: Dims) -> Iterator[Option]:
    for placement in _known(operands(node)[0], known):
        for out in _through(placement, dims):
            yield Option((placement,), (out,))
    back = [(after, before) for before, after in dims]
    for placement in _known(node, known):
        for source in _through(placement, back):
            yield Option((source,), (placement,))


def _view(node: fx.Node) -> Dims:
    """Pairs of dimensions with equally many elements to their left: sharding or concatenating along one is
    equivalent to the other if runs of it are whole; divisibility is checked elsewhere."""
    values = (operands(node)[0].meta["val"], results(node)[0])
    before, after = ([value.shape[:dim].numel() for dim in range(value.dim())] for value in values)
    return [(i, j) for i, left in enumerate(before) for j, other in enumerate(after) if left == other]


def _squeeze(node: fx.Node) -> Dims:
    shape = operands(node)[0].meta["val"].shape
    dims = node.args[1] if isinstance(node.args[1], (list, tuple)) else [node.args[1]]
    gone = {dim % len(shape) for dim in dims if shape[dim] == 1}
    return [(before, after) for after, before in enumerate(dim for dim in range(len(shape)) if dim not in gone)]


def _unsqueeze(node: fx.Node) -> Dims:
    rank = results(node)[0].dim()
    return list(enumerate(dim for dim in range(rank) if dim != node.args[1] % rank))


def _permute(node: fx.Node) -> Dims:
    return [(before, after) for after, before in enumerate(order_of(node))]


def _identity(node: fx.Node) -> Dims:
    return [(dim, dim) for dim in range(results(node)[0].dim())]


_LAYOUTS: dict[Any, Callable[[fx.Node], Dims]] = {
    **dict.fromkeys((aten.view.default, aten._unsafe_view.default, aten.reshape.default), _view),
    **dict.fromkeys((aten.squeeze.dim, aten.squeeze.dims), _squeeze),
    aten.unsqueeze.default: _unsqueeze,
    **dict.fromkeys((aten.permute.default, aten.transpose.int, aten.t.default), _permute),
    **dict.fromkeys((aten.alias.default, aten.detach.default, aten.clone.default), _identity),
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
    **dict.fromkeys((aten.slice.Tensor, aten.cat.default), 1),
    **dict.fromkeys((aten.slice_backward.default, aten.split.Tensor, aten.split_with_sizes.default), 2),
}
"""Operations along one dimension, with the position of the argument that names it."""


def _along(node: fx.Node, known: Known) -> Iterator[Option]:
    """Pieces of a dimension that is neither the experts' nor the tokens'."""
    tensors, outs = operands(node), results(node)
    position = _ALONG[node.target]
    along = (node.args[position] if len(node.args) > position else 0) % outs[0].dim()
    values = [*map(value_of, tensors), *((node, index) for index in range(len(outs)))]
    for placement in _sorted(set[Placement]().union(*(known.get(value, ()) for value in values))):
        if any(_through(placement, [(dim, dim) for dim in range(outs[0].dim()) if dim != along])):
            yield Option((placement,) * len(tensors), (placement,) * len(outs))
