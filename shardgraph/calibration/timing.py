"""Seconds of operations that all ranks run at once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from math import ceil
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

LEAST_ROUNDS, MOST_ROUNDS = 3, 200
"""Timings of an operation."""

_TIMING = 1e-3  # minimum seconds of one timing on a GPU: many calls, to hide the cost of synchronizing


def time_all(runs: Sequence[Callable[[], object]], budget: float, device: torch.device) -> list[float]:
    """Median seconds of each of ``runs``, timed in turn, round after round, for about ``budget`` seconds.

    Every rank runs everything equally often, as collectives require.
    """
    for run in runs:
        run()
    first = slowest([seconds_of(run, 1, device) for run in runs], device)
    # On a CPU each runs once, after others of its size, as in training: repeated, its inputs would be in the cache.
    counts = [min(100, ceil(_TIMING / taken)) if device.type == "cuda" else 1 for taken in first]
    one_round = sum(count * taken for count, taken in zip(counts, first, strict=True))
    rounds = min(max(int(budget / one_round) - 2, LEAST_ROUNDS), MOST_ROUNDS)  # two rounds have run already
    times = [[seconds_of(run, count, device) for run, count in zip(runs, counts, strict=True)] for _ in range(rounds)]
    return [statistics.median(taken) for taken in zip(*times, strict=True)]


def seconds_of(run: Callable[[], object], count: int, device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    for _ in range(count):
        run()
    synchronize(device)
    return (time.perf_counter() - start) / count


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def of_all_ranks(value: T) -> list[T]:
    """The values of all ranks, on each of them."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def slowest(times: list[float], device: torch.device) -> list[float]:
    """The elementwise maximum of all ranks' times; also synchronizes the ranks before the timings that count."""
    shared = torch.tensor(times, dtype=torch.float32, device=device)
    dist.all_reduce(shared, dist.ReduceOp.MAX)
    return shared.tolist()
