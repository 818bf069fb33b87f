"""Rules for images ``[batch, channels, ...]``: channels are sharded like the rows and columns of a matrix product."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from shardgraph.passes.sharding.options import Operation, Option, results
from shardgraph.passes.sharding.placements import PARTIAL, REPLICATE
from shardgraph.passes.sharding.rules import rule

aten = torch.ops.aten

CHANNELS = Shard(1)


@rule(aten.convolution.default, replaces=True)
def convolution(operation: Operation) -> Iterator[Option]:
    """By output channels, or by input channels with a partial result (once the bias is a separate operation)."""
    biased, transposed, groups = operation.node.args[2] is not None, operation.node.args[6], operation.node.args[8]
    yield Option((Shard(0), REPLICATE, *[REPLICATE] * biased), (Shard(0),))
    if groups != 1:
        return
    into, out = (0, 1) if transposed else (1, 0)
    yield Option((REPLICATE, Shard(out), *[Shard(0)] * biased), (CHANNELS,))
    if not biased:
        yield Option((CHANNELS, Shard(into)), (PARTIAL,))


@rule(aten.convolution_backward.default, replaces=True)
def convolution_backward(operation: Operation) -> Iterator[Option]:
    """The gradients for the same two shardings; gradients not requested are None."""
    transposed, groups, mask = operation.node.args[7], operation.node.args[9], operation.node.args[10]

    def masked(*placements: Placement) -> tuple[Placement | None, ...]:
        return tuple(placement if computed else None for placement, computed in zip(placements, mask, strict=True))

    yield Option((Shard(0), Shard(0), REPLICATE), masked(Shard(0), PARTIAL, PARTIAL))
    if groups != 1:
        return
    into, out = (0, 1) if transposed else (1, 0)
    yield Option((CHANNELS, REPLICATE, Shard(out)), masked(PARTIAL, Shard(out), Shard(0)), "convolution_backward")
    yield Option((REPLICATE, CHANNELS, Shard(into)), masked(CHANNELS, Shard(into), REPLICATE))


@rule(
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit_no_training.default,
    aten.native_batch_norm_backward.default,
    replaces=True,
)
def batch_norm(operation: Operation) -> Iterator[Option]:
    """Channels are normalized independently: all per-channel vectors are sharded like the images."""
    yield _by_channel(operation)


@rule(
    aten.max_pool2d_with_indices.default,
    aten.max_pool2d_with_indices_backward.default,
    aten.avg_pool2d.default,
    aten.avg_pool2d_backward.default,
    aten._adaptive_avg_pool2d.default,
    aten._adaptive_avg_pool2d_backward.default,
    aten.upsample_nearest2d.vec,
    aten.upsample_bilinear2d.vec,
)
def planes(operation: Operation) -> Iterator[Option]:
    """Images and channels are independent."""
    if len(operation.result) == 4:
        before = tuple(Shard(0) if tensor.dim() == 4 else REPLICATE for tensor in operation.tensors)
        yield Option(before, (Shard(0),) * len(results(operation.node)))
        yield _by_channel(operation)


def _by_channel(operation: Operation) -> Option:
    before = (Shard(0) if tensor.dim() == 1 else CHANNELS for tensor in operation.tensors)
    after = (v if v is None else Shard(0) if v.dim() == 1 else CHANNELS for v in results(operation.node))
    return Option(tuple(before), tuple(after))
