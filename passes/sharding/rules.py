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

from shardgraph.passes.sharding.options import Operation, Option, Rule, named_arguments, operands, results
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
        for target in targets:
            RULES[target] = function
            if replaces:
                REPLACES.add(target)
        return function

    return register


# -- constants ---------------------------------------------------------------------------------------------


@rule(aten.full.default, aten.zeros.default, aten.ones.default, aten.empty.memory_format, replaces=True)
def constant(operation: Operation) -> Iterator[Option]:
    """Equal elements: any shard can be created where it is needed."""
    for dim in range(len(operation.result)):
        yield Option((), (Shard(dim),), "sized")


@rule(aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, replaces=True)
def constant_like(operation: Operation) -> Iterator[Option]:
    """Equal elements in another tensor's shape."""
    for dim in range(len(operation.result)):
        yield Option((Shard(dim),), (Shard(dim),))


@rule(aten.arange.default, aten.arange.start, aten.arange.start_step)
def positions(operation: Operation) -> Iterator[Option]:
    """Small enough to be computed on every rank, which then takes its shard."""
    yield Option((), (REPLICATE,))


# -- vocabulary --------------------------------------------------------------------------------------------


@rule(aten.embedding.default)
def embedding(operation: Operation) -> Iterator[Option]:
    """Sharded vocabulary: each rank looks up its rows, and the result is partial (Megatron-LM, section 3)."""
    yield Option((Shard(0), REPLICATE), (PARTIAL,), "embedding")


@rule(aten.embedding_dense_backward.default)
def embedding_backward(operation: Operation) -> Iterator[Option]:
    """Each rank accumulates the gradients of its rows."""
    yield Option((REPLICATE, REPLICATE), (Shard(0),), "embedding_backward")


@rule(aten._log_softmax.default)
def log_softmax(operation: Operation) -> Iterator[Option]:
    """Over a sharded dimension: its maximum and the sum of exponentials are all-reduced."""
    dim = operation.args[1] % len(operation.result)
    rows = operation.result.numel() // operation.result[dim]
    yield Option((Shard(dim),), (Shard(dim),), "log_softmax", sent=2 * rows)


@rule(aten._log_softmax_backward_data.default)
def log_softmax_backward(operation: Operation) -> Iterator[Option]:
    """Over a sharded dimension: the sum of the gradients is all-reduced."""
    dim = operation.args[2] % len(operation.result)
    rows = operation.result.numel() // operation.result[dim]
    yield Option((Shard(dim), Shard(dim)), (Shard(dim),), "log_softmax_backward", sent=rows)


@rule(aten.nll_loss_forward.default, replaces=True)
def nll_loss(operation: Operation) -> Iterator[Option]:
    """Classes or rows are sharded: each rank adds up its targets.

    The total weight of the targets is replicated; with sharded rows it is a sum over ranks, which DTensor omits.
    """
    if len(operation.shape(0)) != 2 or operation.args[2] is not None:
        return
    if operation.args[3] == 0:  # one loss per row
        yield Option((Shard(0), Shard(0)), (Shard(0), REPLICATE))
    else:
        yield Option((Shard(1), REPLICATE), (PARTIAL, REPLICATE), "nll_loss")
        yield Option((Shard(0), Shard(0)), (PARTIAL, REPLICATE), "nll_loss_of_rows", sent=1)


@rule(aten.nll_loss_backward.default)
def nll_loss_backward(operation: Operation) -> Iterator[Option]:
    """Classes or rows are sharded: each rank writes the gradients of its targets."""
    if len(operation.shape(1)) == 2 and operation.args[3] is None and operation.args[4] != 0:
        yield Option((REPLICATE, Shard(1), REPLICATE, REPLICATE), (Shard(1),), "nll_loss_backward")
        yield Option((REPLICATE, Shard(0), Shard(0), REPLICATE), (Shard(0),))


# -- normalization -----------------------------------------------------------------------------------------


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
    normalized = named_arguments(operation.node)["normalized_shape"]
    tensors, made = [operand.meta["val"] for operand in operands(operation.node)], results(operation.node)
    rank = tensors[0].dim()
    for dim in range(rank - len(normalized)):
        given = (Shard(dim) if tensor.dim() == rank else REPLICATE for tensor in tensors)
        gives = (value if value is None else Shard(dim) if value.dim() == rank else PARTIAL for value in made)
        yield Option(tuple(given), tuple(gives))


# -- indices -----------------------------------------------------------------------------------------------


@rule(aten.index.Tensor, aten.index_select.default, replaces=True)
def index(operation: Operation) -> Iterator[Option]:
    """Shards dimensions that are not indexed, or the indices; partial values are indexed term by term."""
    values, *indices = (operand.meta["val"] for operand in operands(operation.node))
    if operation.target is aten.index_select.default:
        at = [operation.args[1] % values.dim()]
    else:
        at = [dim for dim, given in enumerate(operation.args[1]) if given is not None]
    picked = max(given.dim() for given in indices)
    # Adjacent indexed dimensions keep their position in the result, others move to the front.
    start = at[0] if at == list(range(at[0], at[-1] + 1)) else 0
    whole = [REPLICATE] * len(indices)
    if values.is_floating_point():
        yield Option((PARTIAL, *whole), (PARTIAL,))
    rest = [dim for dim in range(values.dim()) if dim not in at]
    for place, dim in enumerate(rest):
        yield Option((Shard(dim), *whole), (Shard(place if place < start else place + picked),))
    for dim in range(picked):
        size = operation.result[start + dim]
        own = [dim - picked + given.dim() for given in indices]
        cuts = [
            Shard(d) if d >= 0 and given.shape[d] == size else REPLICATE for d, given in zip(own, indices, strict=True)
        ]
        yield Option((REPLICATE, *cuts), (Shard(start + dim),))


# -- random ------------------------------------------------------------------------------------------------


@rule(aten.native_dropout.default, replaces=True)
def dropout(operation: Operation) -> Iterator[Option]:
    """Each rank draws for the whole tensor and keeps its shard, so that it drops what the whole model drops."""
    for dim in range(len(operation.result)):
        yield Option((Shard(dim),), (Shard(dim), Shard(dim)), "dropout")


@rule(aten.native_dropout_backward.default, replaces=True)
def dropout_backward(operation: Operation) -> Iterator[Option]:
    """Elementwise."""
    for dim in range(len(operation.result)):
        yield Option((Shard(dim), Shard(dim)), (Shard(dim),))
    yield Option((PARTIAL, REPLICATE), (PARTIAL,))


# -- attention ---------------------------------------------------------------------------------------------

ATTENTION = frozenset(
    {
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
    }
)


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
    query = operands(operation.node)[0].meta["val"].shape
    for dim in (0, 1):
        tensors = [operand.meta["val"] for operand in operands(operation.node)]
        outs = [value for value in results(operation.node) if isinstance(value, torch.Tensor)]
        cuts = [_attention_cut(tensor.shape, query, dim) for tensor in (*tensors, *outs)]
        yield Option(tuple(cuts[: len(tensors)]), tuple(cuts[len(tensors) :]))


def _attention_cut(shape: torch.Size, query: torch.Size, dim: int) -> Any:
    """The placement of one of attention's tensors for sharded batch (0) or heads (1); a mask may be broadcast."""
    if len(shape) == 4:
        return Shard(dim) if shape[dim] == query[dim] or shape[dim] > 1 else REPLICATE
    # log-sum-exp: batch, then queries and heads in an order that depends on the kernel.
    if dim == 0:
        return Shard(0)
    return Shard(1) if shape[1] == query[1] else Shard(2)


# -- attention over a sharded sequence -----------------------------------------------------------------


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
    named = named_arguments(operation.node)
    produced = results(operation.node)
    query, key = (named[name].meta["val"] for name in ("query", "key"))
    stripes = query.shape[2] // operation.parts
    backward = "logsumexp" in named
    if named.get("dropout_p") or not stripes or _padded(operation, query.shape[2]):
        return
    if len(produced) > 3 and backward and isinstance(produced[3], torch.Tensor):  # the gradient of a mask
        return

    def placed(keys: Any) -> tuple[Any, ...]:
        found = []
        for name, argument in named.items():
            value = argument.meta.get("val") if isinstance(argument, fx.Node) else None
            if name in ("key", "value"):
                found.append(keys)
            elif name in ("attn_mask", "attn_bias") and value is not None:
                rows = value.dim() - 2
                found.append(blocks(rows, stripes) if value.shape[rows] > 1 else REPLICATE)
            elif isinstance(value, torch.Tensor):
                found.append(cut if name in ("query", "out", "logsumexp", "grad_out", "grad_out_") else REPLICATE)
        return tuple(found)

    def made(keys: Any) -> tuple[Any, ...]:
        first = (cut, keys, keys) if backward else (cut, cut)
        rest = (REPLICATE if isinstance(value, torch.Tensor) else None for value in produced[len(first) :])
        return (*first, *rest)

    cut = blocks(2, stripes)
    if key.shape[2] == query.shape[2] and (stripes > 1 or not named.get("is_causal")):
        pair = key.numel() + named["value"].meta["val"].numel()
        if backward:  # keys and values again, and their gradients
            yield Option(placed(cut), made(cut), "ring_attention_backward", passed=2 * pair)
        else:
            yield Option(placed(cut), made(cut), "ring_attention", passed=pair)
    if not named.get("is_causal"):
        yield Option(placed(REPLICATE), made(PARTIAL))


def _padded(operation: Operation, rows: int) -> bool:
    """Whether the kernel's log-sum-exp has other rows than its queries, as the memory-efficient one's may."""
    if "efficient" not in str(operation.target):
        return False
    return rows % (32 * operation.parts) != 0 or bool(named_arguments(operation.node).get("is_causal"))


# -- functional forms of in-place operations -----------------------------------------------------------


@rule(aten.index_put.default, replaces=True)
def index_put(operation: Operation) -> Iterator[Option]:
    """Shards dimensions that are not indexed; an accumulating write also takes partial values."""
    indices = operation.args[1]
    if any(index is None for index in indices):
        return
    values, first = operation.shape(2), len(indices)
    offset = len(values) - len(operation.result)  # aligned from the right, as values may lack dimensions
    for dim in range(first, len(operation.result)):
        if dim + offset >= 0 and values[dim + offset] == operation.result[dim]:
            yield Option((Shard(dim), *(REPLICATE for _ in indices), Shard(dim + offset)), (Shard(dim),))
    accumulates = len(operation.args) > 3 and operation.args[3]
    if accumulates and results(operation.node)[0].is_floating_point():
        yield Option((PARTIAL, *(REPLICATE for _ in indices), PARTIAL), (PARTIAL,))


@rule(aten.copy.default, aten.fill.Tensor)
def overwritten(operation: Operation) -> Iterator[Option]:
    """One tensor's elements overwrite those of another of its shape."""
    shapes = [operand.meta["val"].shape for operand in operands(operation.node)]
    for dim in range(len(operation.result)):
        yield Option(tuple(Shard(dim) if shape == operation.result else REPLICATE for shape in shapes), (Shard(dim),))


def own_options(operation: Operation) -> Iterable[Option]:
    """Our rule's options for an operation; empty if there is no rule."""
    found = rule_of(operation.target)
    return [] if found is None else found(operation)


def rule_of(target: Any) -> Rule | None:
    """Our rule for an operator; operators of optional libraries are registered by name."""
    return RULES.get(target) or RULES.get(str(target))
