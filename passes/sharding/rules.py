"""Own sharding rules beside DTensor's: for operations that it does not know, or whose useful shardings it lacks.

A rule is a function from an operation to its options, registered by operator. It lists shardings in one block; several
blocks follow from those (:mod:`shardgraph.passes.sharding.legal`), since no operation here depends on the order of
elements along a dimension that its rule shards. A rule adds to DTensor's strategies for the operator, or replaces them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from shardgraph import ir
from shardgraph.capture.scaled_products import MULTIPLE
from shardgraph.passes.sharding.options import Operation, Option, Rule, named_arguments, results
from shardgraph.passes.sharding.placements import PARTIAL, REPLICATE, blocks

aten = torch.ops.aten

RULES: dict[Any, Rule] = {}
ANY_BLOCKS = frozenset({"", "largest", "sized", "dropout", "drawn", "nll_loss_of_rows"})
"""Lowerings that are correct for any number of blocks; "" is the operation itself."""
RINGS = frozenset({"ring_attention", "ring_attention_backward"})
"""Lowerings of :mod:`shardgraph.passes.sharding.ring_attention`."""
REPLACES: set[Any] = set()
"""Operators whose rule replaces DTensor's strategies instead of adding to them."""


def rule(*targets: Any, replaces: bool = False) -> Callable[[Rule], Rule]:
    """Register a rule for operators, given as objects or by name."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(targets, function))
        REPLACES.update(targets if replaces else ())
        return function

    return register


@rule(aten.full.default, aten.zeros.default, aten.ones.default, aten.empty.memory_format, replaces=True)
def constant(operation: Operation) -> Iterator[Option]:
    """Equal elements: any shard can be created where it is needed."""
    return (Option((), (cut,), "sized") for cut in _cuts(operation))


@rule(aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, replaces=True)
def constant_like(operation: Operation) -> Iterator[Option]:
    """Equal elements in another tensor's shape."""
    return (Option((cut,), (cut,)) for cut in _cuts(operation))


@rule(aten.flip.default)
def flip(operation: Operation) -> Iterator[Option]:
    """Of whole rows: the other dimensions stay sharded, which DTensor has from torch 2.12 on."""
    flipped = {dim % len(operation.result) for dim in operation.node.args[1]}
    yield Option((PARTIAL,), (PARTIAL,))
    for dim, cut in enumerate(_cuts(operation)):
        if dim not in flipped:
            yield Option((cut,), (cut,))


@rule(aten.arange.default, aten.arange.start, aten.arange.start_step)
def positions(operation: Operation) -> Iterator[Option]:
    """Small enough to be computed on every rank, which then takes its shard."""
    yield Option((), (REPLICATE,))


@rule(aten.embedding.default)
def embedding(operation: Operation) -> Iterator[Option]:
    """Sharded vocabulary: each rank looks up its rows, and the result is partial (Megatron-LM, section 3)."""
    yield Option((Shard(0), REPLICATE), (PARTIAL,), "embedding")


@rule(aten.embedding_dense_backward.default)
def embedding_backward(operation: Operation) -> Iterator[Option]:
    """Each rank accumulates the gradients of its rows."""
    yield Option((REPLICATE, REPLICATE), (Shard(0),), "embedding_backward")


@rule(aten._log_softmax.default, aten._log_softmax_backward_data.default)
def log_softmax(operation: Operation) -> Iterator[Option]:
    """Over a sharded dimension: its maximum and the sum of exponentials are all-reduced, in backward one sum."""
    backward = operation.node.target is aten._log_softmax_backward_data.default
    cut = Shard(operation.node.args[2 if backward else 1] % len(operation.result))
    rows = operation.result.numel() // operation.result[cut.dim]
    if backward:
        yield Option((cut, cut), (cut,), "log_softmax_backward", sent=rows)
    else:
        yield Option((cut,), (cut,), "log_softmax", sent=2 * rows)


@rule(aten.nll_loss_forward.default, replaces=True)
def nll_loss(operation: Operation) -> Iterator[Option]:
    """Classes or rows are sharded: each rank adds up its targets.

    The total weight of the targets is replicated; with sharded rows it is a sum over ranks, which DTensor omits.
    """
    _, _, weight, reduction, _ = operation.node.args
    if operation.tensors[0].dim() != 2 or weight is not None:
        return
    if reduction == 0:  # one loss per row
        yield Option((Shard(0), Shard(0)), (Shard(0), REPLICATE))
    else:
        yield Option((Shard(1), REPLICATE), (PARTIAL, REPLICATE), "nll_loss")
        yield Option((Shard(0), Shard(0)), (PARTIAL, REPLICATE), "nll_loss_of_rows", sent=1)


@rule(aten.nll_loss_backward.default)
def nll_loss_backward(operation: Operation) -> Iterator[Option]:
    """Classes or rows are sharded: each rank writes the gradients of its targets."""
    _, _, _, weight, reduction, *_ = operation.node.args
    if operation.tensors[1].dim() == 2 and weight is None and reduction != 0:
        yield Option((REPLICATE, Shard(1), REPLICATE, REPLICATE), (Shard(1),), "nll_loss_backward")
        yield Option((REPLICATE, Shard(0), Shard(0), REPLICATE), (Shard(0),))


@rule(
    aten.native_layer_norm.default,
    aten.native_layer_norm_backward.default,
    ir.fused.RMS_NORM,
    ir.fused.RMS_NORM_BACKWARD,
    replaces=True,
)
def norm(operation: Operation) -> Iterator[Option]:
    """Rows are normalized independently; gradients of weights are partial.

    DTensor's strategy for the backward (torch 2.11) accepts means and weights in their current placement, even where it
    does not match.
    """
    tensors, outs = operation.tensors, results(operation.node)
    rank = tensors[0].dim()
    for dim in range(rank - len(named_arguments(operation.node)["normalized_shape"])):
        before = (Shard(dim) if tensor.dim() == rank else REPLICATE for tensor in tensors)
        after = (value if value is None else Shard(dim) if value.dim() == rank else PARTIAL for value in outs)
        yield Option(tuple(before), tuple(after))


@rule(aten.index.Tensor, aten._unsafe_index.Tensor, aten.index_select.default, replaces=True)
def index(operation: Operation) -> Iterator[Option]:
    """Shards dimensions that are not indexed, or the indices; partial values are indexed term by term."""
    values, *indices = operation.tensors
    if operation.node.target is aten.index_select.default:
        indexed = [operation.node.args[1] % values.dim()]
    else:
        indexed = [dim for dim, tensor in enumerate(operation.node.args[1]) if tensor is not None]
    rank = max(tensor.dim() for tensor in indices)
    # Adjacent indexed dimensions keep their position in the result, others move to the front.
    start = indexed[0] if indexed == list(range(indexed[0], indexed[-1] + 1)) else 0
    whole = [REPLICATE] * len(indices)
    if values.is_floating_point():
        yield Option((PARTIAL, *whole), (PARTIAL,))
    for place, dim in enumerate(dim for dim in range(values.dim()) if dim not in indexed):
        yield Option((Shard(dim), *whole), (Shard(place if place < start else place + rank),))
    for dim in range(rank):
        size = operation.result[start + dim]
        own = [dim - rank + tensor.dim() for tensor in indices]
        cuts = [Shard(d) if d >= 0 and t.shape[d] == size else REPLICATE for d, t in zip(own, indices, strict=True)]
        yield Option((REPLICATE, *cuts), (Shard(start + dim),))


@rule(aten.native_dropout.default, replaces=True)
def dropout(operation: Operation) -> Iterator[Option]:
    """Each rank draws for the whole tensor and keeps its shard, so that it drops what the whole model drops."""
    return (Option((cut,), (cut, cut), "dropout") for cut in _cuts(operation))


@rule(aten.native_dropout_backward.default, replaces=True)
def dropout_backward(operation: Operation) -> Iterator[Option]:
    """Elementwise."""
    yield from (Option((cut, cut), (cut,)) for cut in _cuts(operation))
    yield Option((PARTIAL, REPLICATE), (PARTIAL,))


OF_QUERIES = ("query", "out", "logsumexp", "grad_out")


@rule(ir.fused.ATTENTION, ir.fused.ATTENTION_BACKWARD)
def attention(operation: Operation) -> Iterator[Option]:
    """Batch and heads are independent. Positions are sharded in stripes, with keys and values in a ring or replicated.

    Replicated keys and values hold more and send as much, and may be of another length. One head of keys and values
    serves all heads of queries.
    """
    named = named_arguments(operation.node)
    query, key, value = (named[name].meta["val"] for name in ("query", "key", "value"))
    backward, causal, stripes = "grad_out" in named, named["is_causal"], query.shape[2] // operation.parts

    def option(
        cut: Callable[[int], Placement], dim: int, pair: Placement, gradient: Placement, ring: str = "", passed: int = 0
    ) -> Option:
        """Queries sharded along ``dim``; keys and values, and their gradients, as given."""
        placements = dict.fromkeys(OF_QUERIES, cut(dim)) | {"key": pair, "value": pair}
        if named["attn_mask"] is not None:
            shape = named["attn_mask"].meta["val"].shape  # of scores [batch, heads, queries, keys], may be broadcast
            own = dim - 4 + len(shape)
            placements["attn_mask"] = cut(own) if own >= 0 and shape[own] > 1 else REPLICATE
        before = tuple(placements[name] for name, operand in named.items() if isinstance(operand, fx.Node))
        after = (cut(dim), gradient, gradient) if backward else (cut(dim), cut(dim))
        return Option(before, after, ring, passed=passed)

    yield option(Shard, 0, Shard(0), Shard(0))
    if key.shape[1] == 1:
        yield option(Shard, 1, REPLICATE, PARTIAL)
    else:
        yield option(Shard, 1, Shard(1), Shard(1))
    if not stripes:
        return
    in_stripes = functools.partial(blocks, count=stripes)
    if key.shape[2] == query.shape[2] and (stripes > 1 or not causal):
        pair, passed = in_stripes(2), key.numel() + value.numel()
        if backward:  # keys and values again, and their gradients
            yield option(in_stripes, 2, pair, pair, "ring_attention_backward", 2 * passed)
        else:
            yield option(in_stripes, 2, pair, pair, "ring_attention", passed)
    if not causal:
        yield option(in_stripes, 2, REPLICATE, PARTIAL)


@rule(aten.index_put.default, aten._unsafe_index_put.default, replaces=True)
def index_put(operation: Operation) -> Iterator[Option]:
    """Shards dimensions that are not indexed; an accumulating write also takes partial values."""
    _, indices, values, *rest = operation.node.args
    given = [dim for dim, index in enumerate(indices) if index is not None]
    rank = max(indices[dim].meta["val"].dim() for dim in given)
    start = given[0] if given == list(range(given[0], given[-1] + 1)) else 0  # as for index
    shape, whole = values.meta["val"].shape, [REPLICATE] * len(given)
    offset = len(shape) - (len(operation.result) - len(given) + rank)  # from the right, as values may lack dimensions
    for place, dim in enumerate(dim for dim in range(len(operation.result)) if dim not in given):
        at = (place if place < start else place + rank) + offset
        if at >= 0 and shape[at] == operation.result[dim]:
            yield Option((Shard(dim), *whole, Shard(at)), (Shard(dim),))
    if rest and rest[0] and results(operation.node)[0].is_floating_point():
        yield Option((PARTIAL, *whole, PARTIAL), (PARTIAL,))


@rule(aten.gather.default)
def gather(operation: Operation) -> Iterator[Option]:
    """Shards the other dimensions, or the indices; partial values are gathered term by term."""
    values = operation.tensors[0]
    dim = operation.node.args[1] % values.dim()
    if values.is_floating_point():
        yield Option((PARTIAL, REPLICATE), (PARTIAL,))
    yield Option((REPLICATE, Shard(dim)), (Shard(dim),))
    yield from _beside(operation, dim)


@rule(aten.scatter.src, aten.scatter_add.default)
def scatter(operation: Operation) -> Iterator[Option]:
    """Shards the other dimensions; what is added may be partial, or of some of the indices."""
    into, dim = operation.tensors[0], operation.node.args[1] % operation.tensors[0].dim()
    if operation.node.target is aten.scatter_add.default and into.is_floating_point():
        yield Option((PARTIAL, REPLICATE, PARTIAL), (PARTIAL,))
        yield Option((PARTIAL, Shard(dim), Shard(dim)), (PARTIAL,))
    yield from _beside(operation, dim)


def _beside(operation: Operation, dim: int) -> Iterator[Option]:
    """All tensors cut along another dimension than ``dim``, if they are alike there."""
    for other in range(len(operation.result)):
        if other != dim and len({tensor.shape[other] for tensor in operation.tensors}) == 1:
            yield Option((Shard(other),) * len(operation.tensors), (Shard(other),))


_OF_ROWS = (ir.ALL_GATHER, ir.REDUCE_SCATTER, ir.ALL_TO_ALL)


@rule(ir.ALL_REDUCE, ir.WAIT, ir.first_only, *_OF_ROWS)
def collective(operation: Operation) -> Iterator[Option]:
    """Of another axis, elementwise over ranks.

    All ranks of a collective along another axis have the same shard along this one, so a dimension that the collective
    neither splits nor concatenates may be sharded, and sums may be partial.
    """
    node = operation.node
    for dim in range(1 if node.target in _OF_ROWS else 0, len(operation.result)):
        yield Option((Shard(dim),), (Shard(dim),))
    if "max" not in node.args and results(node)[0].is_floating_point():
        yield Option((PARTIAL,), (PARTIAL,))


@rule(aten._scaled_mm.default, replaces=True)
def scaled_product(operation: Operation) -> Iterator[Option]:
    """As a product, as long as each rank's part has the sizes that kernels need; scales are of whole factors."""
    left, right = operation.tensors[:2]
    scales = (REPLICATE,) * (len(operation.tensors) - 2)
    options = [
        (left.shape[0], Shard(0), REPLICATE, Shard(0)),
        (right.shape[1], REPLICATE, Shard(1), Shard(1)),
        (left.shape[1], Shard(1), Shard(0), PARTIAL),
    ]
    for size, one, other, result in options:
        if size % (operation.parts * MULTIPLE) == 0:
            yield Option((one, other, *scales), (result,))


@rule(aten.amax.default)
def largest(operation: Operation) -> Iterator[Option]:
    """Of all elements, wherever they are: each rank's, then the largest over ranks."""
    if not operation.result:
        for dim in range(operation.tensors[0].dim()):
            yield Option((Shard(dim),), (REPLICATE,), "largest", sent=1)


def _cuts(operation: Operation) -> list[Placement]:
    """The result sharded along each of its dimensions."""
    return [Shard(dim) for dim in range(len(operation.result))]


def rule_of(target: Any) -> Rule | None:
    """Our rule for an operator; operators of optional libraries are registered by name."""
    return RULES.get(target) or RULES.get(str(target))
