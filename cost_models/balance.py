"""Balancing pipeline stages: the cuts of a model with the shortest simulated step within a memory limit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, pairwise, product

import numpy as np

from shardgraph.cost_models.actions import Order
from shardgraph.cost_models.partitions import Array, Chain
from shardgraph.cost_models.schedules import SimulatedSchedule, StageCost, simulate_schedule
from shardgraph.errors import PlanError
from shardgraph.sizes import format_bytes

_IMPROVED = 3  # how many of the initial partitions are improved by moves
_SIMULATED = 200  # how many moves from one partition are simulated: those that leave the busiest rank the least work


@dataclass(frozen=True)
class Partition:
    """Stage ``s`` is ``blocks[cuts[s] : cuts[s + 1]]``; ``simulated`` is a step of the resulting ``stages``."""

    cuts: tuple[int, ...]
    stages: tuple[StageCost, ...]
    simulated: SimulatedSchedule


def balance(blocks: Sequence[StageCost], order: Order, *, limit: float = math.inf, prefetch: bool = True) -> Partition:
    """Partition a chain of ``blocks`` into the stages of ``order`` so that the simulated step is short.

    The cost of a block is that of a stage with only this block; ``limit`` is the memory of a rank in bytes. Dynamic
    programs provide initial partitions (:meth:`Chain.starts`). The best of them by simulated step are improved by
    local search, which moves one cut anywhere or several cuts by one or two blocks until no move shortens the step.

    Raises:
        PlanError: there are fewer blocks than stages, or no partition fits ``limit``; the message has the least memory
            that would do, which is exact with one stage per rank, and otherwise the least that local search finds.
    """
    chain = Chain(blocks, order, prefetch)
    if len(blocks) < chain.stages:
        raise PlanError(
            f"{len(blocks)} blocks cannot be divided among {chain.stages} stages, which have one each at least: fewer "
            "stages would do, or smaller blocks"
        )

    def memory(cuts: Array) -> list[Array]:
        return [chain.memory(cuts).max(axis=1)]

    def over_limit(cuts: Array) -> Array:
        return np.maximum(chain.memory(cuts) - limit, 0).sum(axis=1)

    starts = np.stack([chain.smallest(), *chain.starts(limit)])
    smallest = _best_of(starts, memory, memory)
    least = memory(smallest[None])[0][0]
    if least > limit:
        raise PlanError(
            f"{len(blocks)} blocks in {chain.stages} stages on {len(order)} ranks do not fit in {format_bytes(limit)} "
            f"per rank, however they are cut: {format_bytes(least)} ({least:.0f} bytes) is the least that would do, or "
            "more ranks, smaller microbatches, or a schedule that holds fewer of them"
        )
    best = _best_of(
        np.concatenate([starts, smallest[None]]),
        lambda cuts: [over_limit(cuts), chain.seconds(cuts)],
        lambda cuts: [over_limit(cuts), chain.busiest(cuts)],
    )
    cuts = tuple(int(cut) for cut in best)
    stages = tuple(merge(blocks[begin:end]) for begin, end in pairwise(cuts))
    return Partition(cuts, stages, simulate_schedule(order, stages, prefetch=prefetch))


def merge(blocks: Sequence[StageCost]) -> StageCost:
    """Consecutive blocks as one stage: seconds and bytes add up, messages are those of its two ends."""
    return StageCost(
        forward=sum(block.forward for block in blocks),
        backward=sum(block.backward for block in blocks),
        backward_input=sum(block.seconds("I") for block in blocks),
        backward_weight=sum(block.seconds("W") for block in blocks),
        send_output=blocks[-1].send_output,
        send_gradient=blocks[0].send_gradient,
        saved=sum(block.saved for block in blocks),
        kept=-sum(block.held("W") for block in blocks),
        fixed=sum(block.fixed for block in blocks),
    )


_Score = Callable[[Array], list[Array]]
"""For partitions (rows), the quantities to minimise, the most important first."""


def _best_of(starts: Array, score: _Score, rough: _Score) -> Array:
    """The best partition that local search reaches from the best of ``starts``."""
    initial = _sorted(np.unique(starts, axis=0), score)[:_IMPROVED]
    return _sorted(np.stack([_improve(cuts, score, rough) for cuts in initial]), score)[0]


def _improve(cuts: Array, score: _Score, rough: _Score) -> Array:
    """Make the best move until none improves ``score``; only the moves that are best by ``rough`` are scored."""
    while True:
        candidates = _sorted(_moves(cuts), rough)[:_SIMULATED]
        best = _sorted(np.concatenate([cuts[None], candidates]), score)[0]
        if (best == cuts).all():
            return cuts
        cuts = best


def _sorted(partitions: Array, score: _Score) -> Array:
    """``partitions`` by score, the best first; the sort is stable."""
    return partitions[np.lexsort(score(partitions)[::-1])]


def _moves(cuts: Array) -> Array:
    """The partitions with one cut moved anywhere, a range of cuts moved by one block, or two cuts by one or two."""
    moved = [cuts + _shifts(len(cuts))]
    for cut in range(1, len(cuts) - 1):
        positions = np.arange(cuts[cut - 1] + 1, cuts[cut + 1])
        moved.append(np.repeat(cuts[None], len(positions), axis=0))
        moved[-1][:, cut] = positions
    candidates = np.concatenate(moved)
    return candidates[(np.diff(candidates, axis=1) > 0).all(axis=1)]


@lru_cache(maxsize=8)
def _shifts(cuts: int) -> Array:
    """Rows of offsets, in blocks, for moves of several of ``cuts`` cuts at once; the first and the last never move."""
    inner = range(1, cuts - 1)
    together = [dict.fromkeys(range(a, b + 1), by) for a, b in combinations(inner, 2) for by in (-1, 1)]
    two = [{a: x, b: y} for a, b in combinations(inner, 2) for x, y in product((-2, -1, 1, 2), repeat=2)]
    rows = [[by.get(cut, 0) for cut in range(cuts)] for by in [*together, *two]]
    return np.array(rows, dtype=np.int64).reshape(-1, cuts)
