"""Loss over a large vocabulary without its full logits: forward and backward in chunks of rows."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass

from torch import fx

from shardgraph.ir.attributes import SCORES, SOURCE
from shardgraph.passes.base import Context, Pass
from shardgraph.passes.chunking.region import NotByRowsError, described, find_region
from shardgraph.passes.chunking.slice_before_scores import normalizations
from shardgraph.passes.chunking.write_chunks import write_chunks

LOSS_CHUNKS = (512 * 2**20, 64 * 2**20)
"""Bytes of scores per chunk that are tried if a memory budget asks for chunks. The large one has a thousand rows of a
vocabulary of 128,000: products of fewer wait for its weight, and for the sum of its gradients. The small one is little
compared to layers."""

_MOST = 64
"""Chunks of a loss at most, where their size is open: each is as many operations as the whole."""


@dataclass(frozen=True)
class MarkScores(Pass):
    """Takes a joint graph; marks the log-softmax of every cross-entropy, so that :class:`ChunkLoss` finds it after
    operator sharding. Must not change: anything else."""

    name = "mark-scores"
    provides = frozenset({"marked-scores"})
    excludes = frozenset({"sharded-operators", "split"})

    def run(self, gm: fx.GraphModule, context: Context) -> None:
        for number, node in enumerate(normalizations(gm)):
            SCORES.set(node, number)


def scores_of(gm: fx.GraphModule) -> int:
    """Bytes of the largest scores of a captured graph's cross-entropies that can be computed in chunks; 0 if none."""
    scores = 0
    for node in normalizations(gm):
        with suppress(NotByRowsError):
            region = find_region(gm, node)
            scores = max(scores, region.row_bytes * region.rows)
    return scores


def chunks_of(scores: float) -> list[int]:
    """Bytes of chunks to try for scores of so many bytes, the largest first: those of :data:`LOSS_CHUNKS` that are
    less, or a power of two if these would be too many chunks."""
    least = max(1, math.ceil(scores / _MOST))
    few = [nbytes for nbytes in LOSS_CHUNKS if nbytes >= least] or [1 << (least - 1).bit_length()]
    return [nbytes for nbytes in few if nbytes < scores]


@dataclass(frozen=True)
class ChunkLoss(Pass):
    """Takes a joint graph, sharded or not; at most ``context.plan.loss_chunk`` bytes of scores exist at a time.

    The limit holds for each dtype. The product of hidden states and vocabulary, the cross-entropy and the backward of
    both are computed in chunks of rows; backward recomputes the scores, at the cost of one more product. So do Wijmans
    et al., 2024 (https://arxiv.org/abs/2411.09009) and Luo et al., 2024 (https://arxiv.org/abs/2407.15892); here it is
    found in the graph (:mod:`shardgraph.passes.chunking`). Losses left unchanged are noted with the reason.

    Must not change: the results, except for the order of summation over rows.
    """

    name = "chunk-loss"
    provides = frozenset({"chunked-loss"})
    excludes = frozenset({"sharded-parameters", "recomputed", "split"})

    def run(self, gm: fx.GraphModule, context: Context) -> None:
        if context.plan.loss_chunk is None:
            return
        losses = {SCORES.of(node) for node in gm.graph.nodes if node in SCORES}
        if not losses:
            context.notes.append("loss_chunk: no cross-entropy is in the graph, so nothing is computed in chunks")
        for number in sorted(losses):
            left = [node for node in gm.graph.nodes if SCORES.get(node) == number]
            if left:  # not already chunked together with another loss of the same scores
                context.notes.append(_chunk(gm, left[0], context.plan.loss_chunk, context))


def _chunk(gm: fx.GraphModule, scores: fx.Node, nbytes: int, context: Context) -> str:
    """Compute the scores in chunks; returns a note of what was done."""
    try:
        region = find_region(gm, scores)
        size = max(1, nbytes // region.row_bytes)
        count = math.ceil(region.rows / size)
        if count == 1:
            return f"{described(region)} are within a chunk of the loss"
        size = math.ceil(region.rows / count)
        bounds = [(start, min(start + size, region.rows)) for start in range(0, region.rows, size)]
        write_chunks(gm, region, bounds, context.values)
    except NotByRowsError as error:
        where = SOURCE.get(scores) or scores.name
        return f"the scores of the loss at {where} are not computed in chunks: {error}"
    return f"{described(region)} are computed {size} rows at a time, in {len(bounds)} chunks"
