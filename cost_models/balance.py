"""Which blocks of a model make which pipeline stage: the cuts with the shortest step within a memory limit."""

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

_IMPROVED = 3  # of the partitions to begin with
_SIMULATED = 200  # of the moves from one partition, those that leave the busiest rank the least to do


@dataclass(frozen=True)
class Partition:
    """Stage ``s`` is ``blocks[cuts[s] : cuts[s + 1]]``; ``simulated`` is a step of the ``stages`` that come of it."""

    cuts: tuple[int, ...]
    stages: tuple[StageCost, ...]
    simulated: SimulatedSchedule


def balance(blocks: Sequence[StageCost], order: Order, *, limit: float = math.inf, prefetch: bool = True) -> Partition:
    """Divide a chain of ``blocks`` among the stages of ``order`` so that the simulated step is short.

    A block costs what a stage of it alone would; ``limit`` are the bytes that a rank has. Dynamic programs give the
    partitions to begin with (:meth:`Chain.starts`). The best of them by the simulated step are improved by moving one
    cut anywhere, or several by a block or two, until no move shortens the step.

    Raises:
        PlanError: there are fewer blocks than stages, or no partition fits ``limit``; the message has the least memory
            that would do, which is exact with one stage per rank, and otherwise the least that such moves lead to.
    """
    chain = Chain(blocks, order, prefetch)
    if len(blocks) < chain.stages:
        raise PlanError(
            f"{len(blocks)} blocks cannot be divided among {chain.stages} stages, which have one each at least: fewer "
            "stages would do, or smaller blocks"
        )

    def memory(cuts: Array) -> list[Array]:
        return [chain.memory(cuts).max(axis=1)]

    def over(cuts: Array) -> Array:
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
        lambda cuts: [over(cuts), chain.seconds(cuts)],
        lambda cuts: [over(cuts), chain.busiest(cuts)],
    )
    cuts = tuple(int(cut) for cut in best)
    stages = tuple(merge(blocks[begin:end]) for begin, end in pairwise(cuts))
    return Partition(cuts, stages, simulate_schedule(order, stages, prefetch=prefetch))


def merge(blocks: Sequence[StageCost]) -> StageCost:
    """Consecutive blocks as one: together they take what each takes, and send what their ends send."""
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


# -- search ----------------------------------------------------------------------------------------

_Score = Callable[[Array], list[Array]]
"""Of partitions, in rows, what is to be small; the more important first."""


def _best_of(starts: Array, score: _Score, rough: _Score) -> Array:
    """The best partition that the best of ``starts`` lead to."""
    begin = _sorted(np.unique(starts, axis=0), score)[:_IMPROVED]
    return _sorted(np.stack([_improve(cuts, score, rough) for cuts in begin]), score)[0]


def _improve(cuts: Array, score: _Score, rough: _Score) -> Array:
    """What the best move leads to, again until none is better; those that ``rough`` thinks well of are compared."""
    while True:
        tried = _sorted(_moves(cuts), rough)[:_SIMULATED]
        best = _sorted(np.concatenate([cuts[None], tried]), score)[0]
        if (best == cuts).all():
            return cuts
        cuts = best


def _sorted(partitions: Array, score: _Score) -> Array:
    """The best first; of equals, the first."""
    return partitions[np.lexsort(score(partitions)[::-1])]


def _moves(cuts: Array) -> Array:
    """Partitions with one cut elsewhere, neighbouring cuts further by a block, or two cuts by one or two."""
    moved = [cuts + _shifts(len(cuts))]
    for cut in range(1, len(cuts) - 1):
        to = np.arange(cuts[cut - 1] + 1, cuts[cut + 1])
        one = np.repeat(cuts[None], len(to), axis=0)
        one[:, cut] = to
        moved.append(one)
    every = np.concatenate(moved)
    return every[(np.diff(every, axis=1) > 0).all(axis=1)]


@lru_cache(maxsize=8)
def _shifts(cuts: int) -> Array:
    """By how many blocks each of so many cuts moves when several move together; the first and the last never do."""
    inner = range(1, cuts - 1)
    together = [dict.fromkeys(range(a, b + 1), by) for a, b in combinations(inner, 2) for by in (-1, 1)]
    two = [{a: x, b: y} for a, b in combinations(inner, 2) for x, y in product((-2, -1, 1, 2), repeat=2)]
    rows = [[by.get(cut, 0) for cut in range(cuts)] for by in [*together, *two]]
    return np.array(rows, dtype=np.int64).reshape(-1, cuts)
