"""Own sharding rules beside DTensor's: for operations that it does not know, or whose useful shardings it lacks.

A rule is a function from an operation to its options, registered by operator. It lists shardings in one block; several
blocks follow from those (:mod:`shardgraph.passes.sharding.legal`), since no operation here depends on the order of
elements along a dimension that its rule shards. A rule adds to DTensor's strategies for the operator, or replaces them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from shardgraph import ir
from shardgraph.passes.sharding.options import Operation, Option, Rule, named_arguments, results
from shardgraph.passes.sharding.placements import PARTIAL, REPLICATE, blocks

aten = torch.ops.aten

RULES: dict[Any, Rule] = {}
ANY_BLOCKS = frozenset({"", "sized", "dropout", "nll_loss_of_rows"})
"""Lowerings that are correct for any number of blocks; "" is the operation itself."""
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
    aten._fused_rms_norm.default,
    aten._fused_rms_norm_backward.default,
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


@rule(aten.index.Tensor, aten.index_select.default, replaces=True)
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
        cuts = [
            Shard(d) if d >= 0 and tensor.shape[d] == size else REPLICATE
            for d, tensor in zip(own, indices, strict=True)
        ]
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


ATTENTION = frozenset(
    {
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
    }
)
MASKS = ("attn_mask", "attn_bias")
OF_QUERIES = ("query", "out", "logsumexp", "grad_out", "grad_out_")


@rule(
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    replaces=True,
)
def attention(operation: Operation) -> Iterator[Option]:
    """Batch and heads are independent; no dropout, which draws for all of them at once."""
    if named_arguments(operation.node).get("dropout_p"):
        return
    yield from ring_attention(operation)
    tensors = operation.tensors
    values = [*tensors, *(value for value in results(operation.node) if isinstance(value, torch.Tensor))]
    for dim in (0, 1):
        cuts = [_attention_cut(value.shape, tensors[0].shape, dim) for value in values]
        yield Option(tuple(cuts[: len(tensors)]), tuple(cuts[len(tensors) :]))


def _attention_cut(shape: torch.Size, query: torch.Size, dim: int) -> Placement:
    """The placement of one of attention's tensors for sharded batch (0) or heads (1); a mask may be broadcast."""
    if len(shape) == 4:
        return Shard(dim) if shape[dim] == query[dim] or shape[dim] > 1 else REPLICATE
    # log-sum-exp: batch, then queries and heads in an order that depends on the kernel.
    return Shard(dim) if dim == 0 or shape[1] == query[1] else Shard(2)


@rule(
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
)
def ring_attention(operation: Operation) -> Iterator[Option]:
    """Queries sharded in stripes, with keys and values in a ring; or with keys and values replicated.

    The second sends as much and holds more. It also handles queries and keys of different lengths.
    """
    named, outs = named_arguments(operation.node), results(operation.node)
    query, key = (named[name].meta["val"] for name in ("query", "key"))
    stripes, causal = query.shape[2] // operation.parts, bool(named.get("is_causal"))
    backward = "logsumexp" in named
    # The memory-efficient kernel may pad the rows of its log-sum-exp.
    efficient = "efficient" in str(operation.node.target)
    padded = efficient and (causal or query.shape[2] % (32 * operation.parts) != 0)
    of_mask = backward and len(outs) > 3 and isinstance(outs[3], torch.Tensor)
    if named.get("dropout_p") or not stripes or padded or of_mask:
        return
    cut = blocks(2, stripes)

    def option(pair: Placement, pair_gradients: Placement, name: str = "", passed: int = 0) -> Option:
        placements = dict.fromkeys(OF_QUERIES, cut) | {"key": pair, "value": pair}
        before: list[Placement] = []
        for argument, value in named.items():
            if isinstance(value, fx.Node) and isinstance(tensor := value.meta.get("val"), torch.Tensor):
                rows = tensor.dim() - 2
                mask = blocks(rows, stripes) if argument in MASKS and tensor.shape[rows] > 1 else REPLICATE
                before.append(placements.get(argument, mask))
        after = (cut, pair_gradients, pair_gradients) if backward else (cut, cut)
        rest = (REPLICATE if isinstance(value, torch.Tensor) else None for value in outs[len(after) :])
        return Option(tuple(before), (*after, *rest), name, passed=passed)

    if key.shape[2] == query.shape[2] and (stripes > 1 or not causal):
        pair = key.numel() + named["value"].meta["val"].numel()
        if backward:  # keys and values again, and their gradients
            yield option(cut, cut, "ring_attention_backward", 2 * pair)
        else:
            yield option(cut, cut, "ring_attention", pair)
    if not causal:
        yield option(REPLICATE, PARTIAL)


@rule(aten.index_put.default, replaces=True)
def index_put(operation: Operation) -> Iterator[Option]:
    """Shards dimensions that are not indexed; an accumulating write also takes partial values."""
    _, indices, values, *rest = operation.node.args
    if any(index is None for index in indices):
        return
    shape, whole = values.meta["val"].shape, [REPLICATE] * len(indices)
    offset = len(shape) - len(operation.result)  # aligned from the right, as values may lack dimensions
    for dim in range(len(indices), len(operation.result)):
        if dim + offset >= 0 and shape[dim + offset] == operation.result[dim]:
            yield Option((Shard(dim), *whole, Shard(dim + offset)), (Shard(dim),))
    if rest and rest[0] and results(operation.node)[0].is_floating_point():
        yield Option((PARTIAL, *whole, PARTIAL), (PARTIAL,))


@rule(aten.copy.default, aten.fill.Tensor)
def overwritten(operation: Operation) -> Iterator[Option]:
    """One tensor's elements overwrite those of another of its shape."""
    for cut in _cuts(operation):
        yield Option(
            tuple(cut if tensor.shape == operation.result else REPLICATE for tensor in operation.tensors), (cut,)
        )


@rule(ir.ALL_REDUCE, ir.WAIT, ir.first_only)
def collective(operation: Operation) -> Iterator[Option]:
    """Of another axis, elementwise over ranks.

    All ranks of a collective along another axis have the same shard along this one, so a dimension that the collective
    neither splits nor concatenates may be sharded, and sums may be partial.
    """
    return _along(operation, range(len(operation.result)))


@rule(ir.ALL_GATHER, ir.REDUCE_SCATTER, ir.ALL_TO_ALL)
def rows_exchanged(operation: Operation) -> Iterator[Option]:
    """Whole rows go to other ranks."""
    return _along(operation, range(1, len(operation.result)))


@rule(ir.local_part)
def part_taken(operation: Operation) -> Iterator[Option]:
    """One dimension is already sharded."""
    taken = operation.node.args[1]
    return _along(operation, (dim for dim in range(len(operation.result)) if dim != taken))


def _along(operation: Operation, dims: Iterable[int]) -> Iterator[Option]:
    for dim in dims:
        yield Option((Shard(dim),), (Shard(dim),))
    if "max" not in operation.node.args and results(operation.node)[0].is_floating_point():
        yield Option((PARTIAL,), (PARTIAL,))


def _cuts(operation: Operation) -> list[Placement]:
    """The result sharded along each of its dimensions."""
    return [Shard(dim) for dim in range(len(operation.result))]


def own_options(operation: Operation) -> Iterable[Option]:
    """Our rule's options for an operation; empty if there is no rule."""
    own = rule_of(operation.node.target)
    return own(operation) if own else ()


def rule_of(target: Any) -> Rule | None:
    """Our rule for an operator; operators of optional libraries are registered by name."""
    return RULES.get(target) or RULES.get(str(target))
