"""Partitions of a chain of blocks into pipeline stages: time and memory of many at once, and good initial ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardgraph.cost_models.actions import Action, Kind, Order, lay_out
from shardgraph.cost_models.schedules import StageCost

Array = NDArray[Any]

_KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")
_SECONDS, _SAVED, _KEPT, _FIXED = slice(0, 4), 4, 5, 6  # the columns of the costs of blocks
_BOUNDS = np.linspace(1.0, 1.5, 11) + 1e-9  # on the time of the slowest stage, relative to the least possible
_AT_ONCE = 4_000_000  # simulated steps that are in memory at once, 8 bytes each


class Chain:
    """``blocks`` to be partitioned into the stages of ``order``.

    Partitions are rows of ``[partitions, stages + 1]``: the first block of each stage, then the number of blocks.
    """

    def __init__(self, blocks: Sequence[StageCost], order: Order, prefetch: bool) -> None:
        self._own = [sorted({action.stage for action in actions}) for actions in order]
        self.stages = sum(map(len, self._own))
        self._steps = lay_out(order, self.stages, prefetch)
        self._held = [_held(actions, own) for actions, own in zip(order, self._own, strict=True)]
        counts = Counter((action.stage, action.kind) for actions in order for action in actions)
        self._times = np.array([[counts[stage, kind] for kind in _KINDS] for stage in range(self.stages)])
        rows = [[*map(block.seconds, _KINDS), block.saved, -block.held("W"), block.fixed] for block in blocks]
        self._before = np.concatenate([np.zeros((1, 7)), np.cumsum(rows, axis=0)])  # costs of all blocks before one
        self._output = np.array([block.send_output for block in blocks])
        self._gradient = np.array([block.send_gradient for block in blocks])

    def seconds(self, cuts: Array) -> Array:
        """The seconds of a step of each partition, as :func:`simulate_schedule` computes them."""
        parts = np.array_split(cuts, 1 + len(cuts) * len(self._steps) // _AT_ONCE)
        return np.concatenate([self._simulate(part) for part in parts])

    def memory(self, cuts: Array) -> Array:
        """The peak bytes of each partition (rows) on each rank (columns)."""
        costs = self._before[cuts[:, 1:]] - self._before[cuts[:, :-1]]
        return np.stack([_peak(costs[:, own], held) for own, held in zip(self._own, self._held, strict=True)], axis=1)

    def busiest(self, cuts: Array) -> Array:
        """The seconds of computation of the busiest rank, for each partition."""
        costs = self._before[cuts[:, 1:], _SECONDS] - self._before[cuts[:, :-1], _SECONDS]
        stages = (costs * self._times).sum(axis=2)
        return np.max([stages[:, own].sum(axis=1) for own in self._own], axis=0)

    def _simulate(self, cuts: Array) -> Array:
        costs = (self._before[cuts[:, 1:]] - self._before[cuts[:, :-1]]).T
        work = dict(zip(_KINDS, costs[_SECONDS], strict=True)) | {
            "send output": self._output[cuts[:, 1:] - 1].T,
            "send gradient": self._gradient[cuts[:, :-1]].T,
        }
        ends: list[Array] = []
        free = {step.stream: np.zeros(len(cuts)) for step in self._steps}
        for step in self._steps:
            start = free[step.stream]
            for i in step.after:
                start = np.maximum(start, ends[i])
            free[step.stream] = start + work[step.work][step.stage]
            ends.append(free[step.stream])
        return np.max(list(free.values()), axis=0)

    def smallest(self) -> Array:
        """The partition whose largest stage needs the least memory."""
        return _cheapest(self._stage_memory(), np.maximum)[1]

    def starts(self, limit: float) -> Iterator[Array]:
        """The most even partitions within ``limit`` bytes per rank, and those with the fastest messages.

        The most even partition has the least sum of squares of the stages' seconds. Since the stages of a rank share
        its ``limit``, there is one partition for each of several fractions of it that a stage may use. The time of
        messages is minimised under several bounds on the slowest stage, which makes up most of a step with many
        microbatches.
        """
        blocks, memory = self._of_blocks(), self._stage_memory()
        busy = np.stack([blocks[:, :, _SECONDS] @ times for times in self._times])
        busy[(memory > limit) | np.isinf(memory)] = np.inf
        for part in np.linspace(1 / max(map(len, self._own)), 1, 4):
            cost, cuts = _cheapest(np.where(memory <= part * limit, busy**2, np.inf), np.add)
            if cost < np.inf:
                yield cuts
        slowest, _ = _cheapest(busy, np.maximum)
        if slowest < np.inf:
            messages = np.concatenate([[0.0], self._output[:-1] + self._gradient[1:], [0.0]])[:, None]
            for bound in slowest * _BOUNDS:
                yield _cheapest(np.where(busy <= bound, messages, np.inf), np.add)[1]

    def _of_blocks(self) -> Array:
        """The costs of the blocks from one (first dimension) up to another (second), added up."""
        return self._before[None, :] - self._before[:, None]

    def _stage_memory(self) -> Array:
        """The peak bytes of each stage (first dimension) made of the blocks from one (second) up to another (third);
        infinity for an empty range."""
        blocks = self._of_blocks()
        memory = np.full((self.stages, *blocks.shape[:2]), np.inf)
        upper = np.triu_indices(len(blocks), 1)
        for own, held in zip(self._own, self._held, strict=True):
            for at, stage in enumerate(own):
                memory[stage][upper] = _peak(blocks[upper][:, None], held[:, [at, len(own) + at]])
        return memory


def _cheapest(costs: Array, combine: np.ufunc) -> tuple[float, Array]:
    """The least cost of a partition, and that partition; the cost is infinity if none is allowed.

    ``costs[s, j, i]`` is the cost of stage ``s`` made of the blocks from ``j`` up to ``i``; ``combine`` is maximum or
    add.
    """
    best = np.full(costs.shape[1], np.inf)
    best[0] = 0.0
    came_from = []
    for cost in costs:
        totals = combine(best[:, None], cost)
        came_from.append(totals.argmin(axis=0))
        best = totals.min(axis=0)
    cuts = [len(best) - 1]
    for before in reversed(came_from):
        cuts.append(int(before[cuts[-1]]))
    return float(best[-1]), np.array(cuts[::-1])


def _held(actions: Sequence[Action], stages: Sequence[int]) -> Array:
    """Each combination of microbatches in flight that occurs on a rank: those saved, then those kept, by stage."""
    saved, kept = StageCost(saved=1, kept=0), StageCost(saved=0, kept=1)
    rows = np.zeros((len(actions), 2 * len(stages)))
    for row, action in zip(rows, actions, strict=True):
        at = stages.index(action.stage)
        row[at], row[len(stages) + at] = saved.held(action.kind), kept.held(action.kind)
    return np.unique(np.cumsum(rows, axis=0), axis=0)


def _peak(costs: Array, held: Array) -> Array:
    """The peak bytes of a rank with the stages in the last but one dimension of ``costs``."""
    each = np.concatenate([costs[..., _SAVED], costs[..., _KEPT]], axis=-1)
    return costs[..., _FIXED].sum(axis=-1) + (each @ held.T).max(axis=-1)


def even_runs(costs: Sequence[float], count: int) -> list[int]:
    """Where each of ``count`` runs of neighbours begins, of which the most expensive, by the sum of its costs, costs
    least: of a chain whose order of execution does not matter."""
    until = [0, *accumulate(costs)]

    @cache
    def best(end: int, count: int) -> tuple[float, tuple[int, ...]]:
        """The cost of the most expensive of ``count`` runs of the first ``end`` costs, and where they begin."""
        if count == 1:
            return until[end], (0,)
        choices = ((best(at, count - 1), at) for at in range(count - 1, end))
        return min((max(worst, until[end] - until[at]), (*begins, at)) for (worst, begins), at in choices)

    return list(best(len(costs), count)[1])
