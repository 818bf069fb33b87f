"""Deferred batch norm: running statistics as if a stage had seen all microbatches at once.

A microbatch updates the statistics with its own mean and variance. FairScale's ``DeferredBatchNorm`` (after Kim et al.,
2020, "torchgpipe", https://arxiv.org/abs/2004.09910) waits for the last microbatch and updates once, with those of the
whole batch. The same result is computed here from what each microbatch would have written.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from shardgraph.ir import Buffer, Mutation, outputs

aten = torch.ops.aten
_BATCH_NORM = aten._native_batch_norm_legit_functional.default
_WITH_UPDATE = aten._batch_norm_with_update_functional.default


@dataclass(frozen=True)
class BatchNorm:
    """A batch norm updating the buffers ``mean`` and ``variance`` with ``momentum``; a channel has ``count`` values."""

    mean: str
    variance: str
    momentum: float
    count: int


def batch_norms(gm: fx.GraphModule) -> Iterator[BatchNorm]:
    """The batch norms whose running statistics the graph writes."""
    written: dict[tuple[fx.Node, int], str] = {}
    for role, value in outputs(gm):
        buffer = isinstance(role, Mutation) and isinstance(role.of, Buffer) and isinstance(value, fx.Node)
        if buffer and value.target is operator.getitem and value.args[0].target in (_BATCH_NORM, _WITH_UPDATE):
            written[value.args[0], value.args[1]] = role.of.fqn
    for node in dict.fromkeys(node for node, _ in written):
        mean, variance = (fqn for (of, _), fqn in sorted(written.items(), key=lambda item: item[0][1]) if of is node)
        shape = node.args[0].meta["val"].shape
        momentum = node.args[6 if node.target is _BATCH_NORM else 5]
        yield BatchNorm(mean, variance, float(momentum), shape.numel() // shape[1])


def whole_batch(
    norm: BatchNorm,
    start: tuple[torch.Tensor, torch.Tensor],
    written: Sequence[tuple[torch.Tensor, torch.Tensor]],
    counts: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """The running mean and variance after all microbatches, from those before the step.

    ``written`` is what each microbatch, of ``counts`` values per channel, would have written from ``start``.
    """
    kept, moved = 1 - norm.momentum, norm.momentum
    total = sum(counts)
    means = [(mean.double() - kept * start[0].double()) / moved for mean, _ in written]
    # Running variances use the unbiased estimate; moments add up in the biased one.
    squares = [
        (variance.double() - kept * start[1].double()) / moved * (count - 1) / count + mean**2
        for (_, variance), mean, count in zip(written, means, counts, strict=True)
    ]
    shares = [count / total for count in counts]
    mean = torch.stack([share * each for share, each in zip(shares, means, strict=True)]).sum(0)
    square = torch.stack([share * each for share, each in zip(shares, squares, strict=True)]).sum(0)
    variance = (square - mean**2) * total / max(total - 1, 1)
    return (
        (kept * start[0].double() + moved * mean).to(start[0].dtype),
        (kept * start[1].double() + moved * variance).to(start[1].dtype),
    )
