"""Times operations and collectives on every rank of this machine at once."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import ceil

import numpy as np
import torch
import torch.distributed as dist

from shardgraph.calibration.timings import COLLECTIVES, Measurements, Sample, Transfer
from shardgraph.calibration.workloads import WORKLOADS, Maker, rows_for
from shardgraph.compiler import resolve_mesh
from shardgraph.cost_models.cluster import BYTE_KINDS, FLOP_KINDS
from shardgraph.cost_models.detection import host_memory
from shardgraph.errors import ClusterError
from shardgraph.launch import launch
from shardgraph.progress import Progress

_TIMING = 1e-3  # seconds that one timing on a GPU lasts at least: many calls, to hide the cost of synchronizing
_QUANTILE = 0.25  # below the median: what else runs on the machine comes and goes, and only ever makes a time longer
_ROUNDS = (3, 200)  # the fewest and the most timings of an operation


def measure(
    nproc: int | None = None,
    dtypes: Sequence[str] = ("float32",),
    seconds: float = 40.0,
    progress: bool | None = None,
) -> Measurements:
    """The timings that :func:`calibrate` fits; arguments and errors are the same."""
    if dist.is_initialized() or "RANK" in os.environ:
        raise ClusterError("calibrate starts the ranks that it measures: call it from one process, without torchrun")
    for dtype in dtypes:
        found = getattr(torch, dtype, None)
        if not (isinstance(found, torch.dtype) and found.is_floating_point):
            raise ClusterError(f"calibrate cannot measure dtype {dtype!r}: give floating-point ones, such as float32")
    memory = host_memory()  # before the ranks take any
    ranks = nproc or torch.cuda.device_count() or 2
    measured = launch(_measure_rank, ranks, args=(tuple(dtypes), seconds, memory // ranks, progress))
    return _merge(measured)


def _merge(measured: Sequence[Measurements]) -> Measurements:
    """The mean of what the ranks measured; they timed the same operations in the same order."""
    first = measured[0]

    def mean(values: Iterable[float]) -> float:
        return statistics.fmean(values)

    return Measurements(
        first.device,
        first.ranks,
        first.threads,
        min(each.memory for each in measured),
        tuple(
            Sample(same[0].kind, same[0].work, mean(sample.seconds for sample in same))
            for same in zip(*(each.samples for each in measured), strict=True)
        ),
        tuple(
            Transfer(same[0].operation, same[0].given, same[0].gotten, mean(transfer.seconds for transfer in same))
            for same in zip(*(each.transfers for each in measured), strict=True)
        ),
        tuple(mean(same) for same in zip(*(each.overlaps for each in measured), strict=True)),
    )


def _measure_rank(dtypes: tuple[str, ...], seconds: float, memory: int, progress: bool | None) -> Measurements:
    ranks = dist.get_world_size()
    on_cuda = dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
    work = {f"{kind}/{dtype}": (WORKLOADS[kind], dtype) for dtype in dtypes for kind in FLOP_KINDS}
    work |= {kind: (WORKLOADS[kind], dtypes[0]) for kind in BYTE_KINDS}
    stages = len(work) + 2 * (ranks > 1)
    share = seconds / stages
    samples: list[Sample] = []
    transfers: list[Transfer] = []
    overlaps: list[float] = []
    with Progress("calibrate", stages, progress if dist.get_rank() == 0 else False) as show:
        for kind, (make, dtype) in work.items():
            show(kind)
            chosen = list(make(Maker(device, getattr(torch, dtype))))
            times = _time_all([one.run for one in chosen], share, device)
            samples += [Sample(kind, one.work, taken / one.count) for one, taken in zip(chosen, times, strict=True)]
        if ranks > 1:
            group = resolve_mesh({"dp": ranks}, "fsdp").get_group().group_name  # type: ignore[union-attr]
            show("collectives")
            transfers = _time_collectives(group, ranks, share, device)
            show("overlap")
            overlaps = _time_overlap(group, ranks, share, device)
    if on_cuda:
        memory = torch.cuda.get_device_properties(device).total_memory
    name = torch.cuda.get_device_name(device) if on_cuda else "cpu"
    return Measurements(name, ranks, torch.get_num_threads(), memory, tuple(samples), tuple(transfers), tuple(overlaps))


def _time_all(runs: Sequence[Callable[[], object]], budget: float, device: torch.device) -> list[float]:
    """Typical seconds of each of ``runs``, timed in turn, round after round, for about ``budget`` seconds.

    Every rank does the same number of everything, as collectives need.
    """
    for run in runs:
        run()
    first = _slowest([_seconds(run, 1, device) for run in runs], device)
    # On a CPU each runs once, after others of its size, as in training: repeated, its inputs would be in the cache.
    counts = [min(100, ceil(_TIMING / taken)) if device.type == "cuda" else 1 for taken in first]
    one_round = sum(count * taken for count, taken in zip(counts, first, strict=True))
    rounds = min(max(int(budget / one_round) - 2, _ROUNDS[0]), _ROUNDS[1])  # two are done
    times = [[_seconds(run, count, device) for run, count in zip(runs, counts, strict=True)] for _ in range(rounds)]
    return [float(np.quantile(taken, _QUANTILE)) for taken in zip(*times, strict=True)]


def _seconds(run: Callable[[], object], count: int, device: torch.device) -> float:
    _synchronize(device)
    start = time.perf_counter()
    for _ in range(count):
        run()
    _synchronize(device)
    return (time.perf_counter() - start) / count


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _slowest(times: list[float], device: torch.device) -> list[float]:
    """The largest of all ranks' times, one by one; also a meeting of the ranks before the timings that count."""
    shared = torch.tensor(times, dtype=torch.float32, device=device)
    dist.all_reduce(shared, dist.ReduceOp.MAX)
    return shared.tolist()


def _time_collectives(group: str, ranks: int, budget: float, device: torch.device) -> list[Transfer]:
    plain, runs = [], []
    for exponent in range(12, 25, 2):  # 4 KiB to 16 MiB in the larger of input and output
        for operation in COLLECTIVES:
            whole = 2**exponent // 4 // ranks * ranks
            given = whole // ranks if operation == "all_gather_into_tensor" else whole
            gotten = whole // ranks if operation == "reduce_scatter_tensor" else whole
            plain.append((operation, 4 * given, 4 * gotten))
            start = _starter(operation, torch.ones(given, device=device), group, ranks)
            runs.append(partial(_finish, start))
    times = _time_all(runs, budget, device)
    return [Transfer(*which, taken) for which, taken in zip(plain, times, strict=True)]


def _starter(operation: str, given: torch.Tensor, group: str, ranks: int) -> Callable[[], torch.Tensor]:
    collective = getattr(torch.ops._c10d_functional, operation)
    if operation == "all_gather_into_tensor":
        return lambda: collective(given, ranks, group)
    if operation == "reduce_scatter_tensor":
        return lambda: collective(given, "sum", ranks, group)
    return lambda: collective(given, "sum", group)


def _finish(start: Callable[[], torch.Tensor]) -> None:
    torch.ops._c10d_functional.wait_tensor(start())


def _time_overlap(group: str, ranks: int, budget: float, device: torch.device) -> list[float]:
    """What part of the shorter of a computation and a collective is hidden when both run at once."""
    x, weight = torch.ones(rows_for(device, 256), 512, device=device), torch.ones(512, 512, device=device)

    def compute(count: int) -> None:
        for _ in range(count):
            x @ weight

    def both(start: Callable[[], torch.Tensor], count: int) -> None:
        pending = start()
        compute(count)
        torch.ops._c10d_functional.wait_tensor(pending)

    runs: list[Callable[[], object]] = []
    for exponent in range(18, 23):  # 1 to 16 MiB given by each rank
        start = _starter("all_gather_into_tensor", torch.ones(2**exponent, device=device), group, ranks)
        both(start, 1)  # what runs for the first time is slow
        sending, computing = _slowest(
            [_seconds(partial(_finish, start), 3, device), _seconds(partial(compute, 3), 1, device) / 3], device
        )
        count = max(1, round(sending / computing))  # about as long as the collective
        runs += [partial(compute, count), partial(_finish, start), partial(both, start, count)]
    times = iter(_time_all(runs, budget, device))
    return [
        min(max((computing + sending - together) / min(computing, sending), 0.0), 1.0)
        for computing, sending, together in zip(times, times, times, strict=True)
    ]
