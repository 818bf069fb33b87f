"""Whether layouts of one model, on the same devices and with the same batch, are put in the published order."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from benchmarks.published.runs import Run

LEAST = 0.10
"""By how much the published steps of a pair differ at least."""

Predicted = tuple[Run, float]
"""A run with the seconds that are predicted for its step."""


@dataclass(frozen=True)
class Ranking:
    """``right`` of ``pairs`` are in the published order; ``ceiling`` is the fraction that repeating the published
    measurements would put in that order, given how far they are from each other where they were repeated."""

    right: int
    pairs: int
    ceiling: float


def rank(predictions: Sequence[Predicted]) -> Ranking:
    """The pairs of different layouts whose published steps differ by ``LEAST`` or more."""
    noise = repeatability([run for run, _ in predictions])
    right, repeated = [], []
    for (run, seconds), (other, others) in _pairs(predictions):
        published = math.log(other.seconds / run.seconds)
        if abs(published) >= math.log1p(LEAST):
            right.append((others > seconds) == (published > 0))
            repeated.append(0.5 * (1 + math.erf(abs(published) / (2 * noise))) if noise else 1.0)
    return Ranking(sum(right), len(right), statistics.fmean(repeated) if repeated else 1.0)


def repeatability(runs: Sequence[Run]) -> float:
    """The standard deviation of ``log(seconds)`` of one configuration, where it was published more than once."""
    names = ("source", "framework", "precision", "compile", "optimizer", "task", "recompute", "sharding")
    same: dict[tuple[object, ...], list[float]] = defaultdict(list)
    for run in runs:
        program = tuple(run.row[name] for name in names)
        same[(*program, *_told(run), run.accumulated, *run.question)].append(math.log(run.seconds))
    several = [values for values in same.values() if len(values) > 1]
    freedom = sum(len(values) - 1 for values in several)
    return math.sqrt(sum(statistics.variance(v) * (len(v) - 1) for v in several) / freedom) if freedom else 0.0


def _told(run: Run) -> tuple[bool, ...]:
    """What only the notes of a row tell of its program and its machine: BigScience's nodes had another topology until
    a fix, torchtitan's collectives of tensor parallelism may be divided with the products that they overlap."""
    notes = run.row["notes"].lower()
    return "before pcie/numa fix" in notes, "async" in notes


def _pairs(predictions: Sequence[Predicted]) -> Iterator[tuple[Predicted, Predicted]]:
    jobs: dict[tuple[object, ...], list[Predicted]] = defaultdict(list)
    for run, seconds in predictions:
        names = ("source", "model", "gpu", "n_gpus", "precision", "seq_len", "gbs_seqs")
        jobs[(*(run.row[name] for name in names), run.shape, *_told(run))].append((run, seconds))
    for job in jobs.values():
        for one, two in combinations(job, 2):
            if (one[0].question, one[0].accumulated) != (two[0].question, two[0].accumulated):
                yield one, two
