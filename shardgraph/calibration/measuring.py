"""Timings of programs and collectives on all ranks of this machine at once."""

from __future__ import annotations

import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import ceil
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from shardgraph import torch_api
from shardgraph.calibration.programs import Step, reference_steps
from shardgraph.calibration.timings import COLLECTIVES, Measurements, Sample, Transfer
from shardgraph.cost_models.detection import machine_memory
from shardgraph.cost_models.device import FLOP_KINDS
from shardgraph.cost_models.optimizers import optimizer_cost
from shardgraph.errors import ClusterError
from shardgraph.ir.copies import TO_DEVICE, WAIT_COPY
from shardgraph.progress import Progress
from shardgraph.runtime.backends.gloo import add_parts
from shardgraph.runtime.device import current_device, group_device_type
from shardgraph.runtime.host import empty_on_host
from shardgraph.runtime.launch import launch
from shardgraph.runtime.mesh import run_mesh

T = TypeVar("T")
Timing = TypeVar("Timing", Sample, Transfer)

_TIMING = 1e-3  # minimum seconds of one timing on a GPU: many calls, to hide the cost of synchronizing
_ROUNDS = (3, 200)  # minimum and maximum number of timings of an operation
_WARM_UP = 2  # rounds that are discarded
_QUICK = 10.0  # seconds of measuring below which fewer programs and sizes are timed
_STARTED = 6  # collectives in one timing
_AHEAD = 4  # how many of them are in flight at once, as in the presets


def measure(
    nproc: int | None = None, dtypes: Sequence[str] = ("float32",), seconds: float = 40.0, progress: bool | None = None
) -> Measurements:
    """The timings that :func:`calibrate` fits; arguments and errors are the same."""
    if dist.is_initialized() or "RANK" in os.environ:
        raise ClusterError("calibrate starts the ranks that it measures: call it from one process, without torchrun")
    for dtype in dtypes:
        known = getattr(torch, dtype, None)
        if not (isinstance(known, torch.dtype) and known.is_floating_point):
            raise ClusterError(f"calibrate cannot measure dtype {dtype!r}: give floating-point ones, such as float32")
    memory = machine_memory()
    ranks = nproc or torch.cuda.device_count() or 2
    by_rank = launch(_measure_rank, ranks, args=(tuple(dtypes), seconds, memory // ranks, progress))
    return replace(
        by_rank[0],
        memory=min(measured.memory for measured in by_rank),
        samples=_mean([measured.samples for measured in by_rank], "seconds"),
        transfers=_mean([measured.transfers for measured in by_rank], "seconds", "added", "awaited"),
        host=_mean([measured.host for measured in by_rank], "seconds"),
    )


def _mean(by_rank: Sequence[tuple[Timing, ...]], *times: str) -> tuple[Timing, ...]:
    """The mean of ``times`` over ranks, which timed the same operations in the same order."""
    return tuple(
        replace(same[0], **{name: statistics.fmean(getattr(timing, name) for timing in same) for name in times})
        for same in zip(*by_rank, strict=True)
    )


def _measure_rank(dtypes: tuple[str, ...], seconds: float, memory: int, progress: bool | None) -> Measurements:
    ranks = dist.get_world_size()
    device = current_device(group_device_type())
    mesh = run_mesh(None, (("dp", ranks),)) if ranks > 1 else None
    share, quick = seconds / (len(dtypes) + (ranks > 1)), seconds < _QUICK
    samples: list[Sample] = []
    transfers: list[Transfer] = []
    with Progress("calibrate", 2 * len(dtypes) + (ranks > 1) + 1, progress if dist.get_rank() == 0 else False) as show:
        for dtype in dtypes:
            show(f"capture {dtype}")
            trainings = [Training(step) for step in reference_steps(device, getattr(torch, dtype), quick)]
            show(dtype)
            timed = _time_programs(trainings, share, device)
            # Memory traffic is measured in the first dtype.
            samples += [sample for sample in timed if dtype == dtypes[0] or "/" in sample.kind]
        if mesh is not None:
            show("collectives")
            transfers = _time_collectives(mesh.get_group().group_name, ranks, share, device, quick)
        show("host")
        host = _time_host(share / 10, device)
    name = "cpu"
    if device.type == "cuda":
        name, memory = torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory
    return Measurements(name, ranks, torch.get_num_threads(), memory, tuple(samples), tuple(transfers), tuple(host))


class Training:
    """A reference step with its optimizer, which has plain parameters, as that of a compiled module steps on shards."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.parameters = {name: nn.Parameter(p.detach()) for name, p in step.model.named_parameters()}
        self.optimizer = torch.optim.AdamW(self.parameters.values(), lr=1e-5)

    def run(self, clock: Callable[[], T]) -> list[tuple[T, T]]:
        """The readings of ``clock`` before and after each operation; the last pair is the optimizer's update."""
        readings, gradients = self.step.run(clock)
        for name, gradient in gradients.items():
            self.parameters[name].grad = gradient
        start = clock()
        self.optimizer.step()
        readings.append((start, clock()))
        self.optimizer.zero_grad()
        return readings

    def samples(self, seconds: Sequence[float]) -> Iterator[Sample]:
        """The work of each operation and of a parameter's update, with their ``seconds``."""
        *operations, update = seconds
        for cost, taken in zip(self.step.costs, operations, strict=True):
            if cost.kind in FLOP_KINDS:
                yield Sample(f"{cost.kind}/{cost.dtype}", cost.executed, taken, cost.moved)
            elif cost.kind != "free":
                yield Sample(cost.kind, cost.moved, taken)
        count = len(self.parameters)
        nbytes = sum(parameter.nbytes for parameter in self.step.model.parameters())
        yield Sample("optimizer", optimizer_cost("adamw").moved * nbytes / count, update / count)


def _time_programs(trainings: Sequence[Training], budget: float, device: torch.device) -> list[Sample]:
    """Median seconds of each operation of ``trainings``, run in turn, round after round, for about ``budget`` seconds.

    Every rank runs the same number of rounds.
    """
    clock, between = _clock(device)
    times: list[list[list[float]]] = []
    rounds, started = _WARM_UP + _ROUNDS[0], time.perf_counter()
    while len(times) < rounds:
        times.append([])
        for training in trainings:
            dist.barrier()
            readings = training.run(clock)
            _synchronize(device)
            times[-1].append([between(start, end) for start, end in readings])
        if len(times) == _WARM_UP:  # the first rounds are slower than the others
            (one,) = _slowest([(time.perf_counter() - started) / _WARM_UP], device)
            rounds = _WARM_UP + min(max(int(budget / one) - _WARM_UP, _ROUNDS[0]), _ROUNDS[1])
    samples: list[Sample] = []
    for training, runs in zip(trainings, zip(*times[_WARM_UP:], strict=True), strict=True):
        samples += training.samples([statistics.median(taken) for taken in zip(*runs, strict=True)])
    return samples


def _clock(device: torch.device) -> tuple[Callable[[], Any], Callable[[Any, Any], float]]:
    """A clock that is read without waiting for the device, and the seconds between two readings."""
    if device.type == "cpu":
        return time.perf_counter, lambda start, end: end - start

    def read() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    return read, lambda start, end: start.elapsed_time(end) / 1e3


def _time_all(runs: Sequence[Callable[[], object]], budget: float, device: torch.device) -> list[float]:
    """Median seconds of each of ``runs``, timed in turn, round after round, for about ``budget`` seconds.

    Every rank runs everything equally often, as collectives require.
    """
    for run in runs:
        run()
    first = _slowest([_seconds(run, 1, device) for run in runs], device)
    # On a CPU each runs once, after others of its size, as in training: repeated, its inputs would be in the cache.
    counts = [min(100, ceil(_TIMING / taken)) if device.type == "cuda" else 1 for taken in first]
    one_round = sum(count * taken for count, taken in zip(counts, first, strict=True))
    rounds = min(max(int(budget / one_round) - 2, _ROUNDS[0]), _ROUNDS[1])  # two rounds have run already
    times = [[_seconds(run, count, device) for run, count in zip(runs, counts, strict=True)] for _ in range(rounds)]
    return [statistics.median(taken) for taken in zip(*times, strict=True)]


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
    """The elementwise maximum of all ranks' times; also synchronizes the ranks before the timings that count."""
    shared = torch.tensor(times, dtype=torch.float32, device=device)
    dist.all_reduce(shared, dist.ReduceOp.MAX)
    return shared.tolist()


def _time_host(budget: float, device: torch.device) -> list[Sample]:
    """Copies of 16 KiB to 16 MiB from host memory to the device, and updates of parameters of those sizes there."""
    work: list[tuple[str, int]] = []
    runs: list[Callable[[], object]] = []

    def copy(source: torch.Tensor) -> torch.Tensor:
        return WAIT_COPY(TO_DEVICE(source, device), source)

    for exponent in range(14, 25, 2):
        source = empty_on_host((2**exponent // 4,), torch.float32, device).fill_(1.0)
        parameter = nn.Parameter(source)
        parameter.grad = torch.ones_like(source)
        work += [("copy", source.nbytes), ("optimizer", optimizer_cost("adamw").moved * source.nbytes)]
        runs += [partial(copy, source), torch.optim.AdamW([parameter], lr=1e-5, fused=True).step]
    times = _time_all(runs, budget, device)
    return [Sample(kind, nbytes, taken) for (kind, nbytes), taken in zip(work, times, strict=True)]


def _time_collectives(group: str, ranks: int, budget: float, device: torch.device, quick: bool) -> list[Transfer]:
    """Timings of collectives alone, and as in a step: several in flight, overlapped with as long a computation, and
    each awaited at once after a short one, where a rank waits for the others."""
    calls: list[tuple[str, int, int]] = []
    rows = 256 if device.type == "cpu" else 2048
    x, weight = torch.ones(rows, 512, device=device), torch.ones(512, 512, device=device)

    def compute(count: int) -> None:
        for _ in range(count):
            x @ weight

    runs: list[Callable[[], object]] = [partial(compute, _STARTED)]
    # From 4 KiB to 16 MiB in the larger of input and output; the largest takes most of the time.
    for exponent in (12, 17, 22) if quick else (12, 15, 18, 21, 24):
        for operation in COLLECTIVES:
            whole = 2**exponent // 4 // ranks * ranks
            operand = whole // ranks if operation == "all_gather_into_tensor" else whole
            result = whole // ranks if operation == "reduce_scatter_tensor" else whole
            calls.append((operation, 4 * operand, 4 * result))
            start, finish = _collective(operation, torch.ones(operand, device=device), group, ranks)
            _in_flight(start, finish, partial(compute, 1))  # the first run is slow
            alone = partial(_awaited, start, finish, lambda: None)
            times = [_seconds(alone, 1, device) / _STARTED, _seconds(partial(compute, 3), 1, device) / 3]
            sending, computing = _slowest(times, device)
            count = max(1, round(sending / computing))  # about as long as the collective
            runs += [
                alone,
                partial(compute, _STARTED * count),
                partial(_in_flight, start, finish, partial(compute, count)),
                partial(_awaited, start, finish, partial(compute, 1)),
            ]
    short, *others = _time_all(runs, budget, device)
    taken = iter(others)
    return [
        Transfer(*call, sending / _STARTED, (together - computing) / _STARTED, (awaited - short) / _STARTED)
        for call, sending, computing, together, awaited in zip(calls, taken, taken, taken, taken, strict=True)
    ]


def _collective(
    operation: str, tensor: torch.Tensor, group: str, ranks: int
) -> tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], object]]:
    """What starts an operation and what waits for it, as programs do (:mod:`shardgraph.runtime.backends.gloo`)."""
    functional: Any = torch.ops._c10d_functional
    wait: Callable[[torch.Tensor], torch.Tensor] = functional.wait_tensor
    if operation == "all_reduce":
        return partial(functional.all_reduce, tensor, "sum", group), wait
    on_gloo = tensor.device.type == "cpu" and torch_api.is_gloo(group)
    if operation == "reduce_scatter_tensor" and on_gloo:
        rows = [len(tensor) // ranks] * ranks
        exchange = partial(functional.all_to_all_single, tensor, rows, rows, group)
        return exchange, lambda started: add_parts(wait(started), ranks)
    if operation == "reduce_scatter_tensor":
        return partial(functional.reduce_scatter_tensor, tensor, "sum", ranks, group), wait
    if on_gloo:
        gather = functional.all_gather_into_tensor_out
        return lambda: gather(tensor, ranks, group, out=tensor.new_empty(len(tensor) * ranks)), wait
    return partial(functional.all_gather_into_tensor, tensor, ranks, group), wait


def _awaited(
    start: Callable[[], torch.Tensor], finish: Callable[[torch.Tensor], object], compute: Callable[[], None]
) -> None:
    for _ in range(_STARTED):
        compute()
        finish(start())


def _in_flight(
    start: Callable[[], torch.Tensor], finish: Callable[[torch.Tensor], object], compute: Callable[[], None]
) -> None:
    in_flight: deque[torch.Tensor] = deque()
    for _ in range(_STARTED):
        in_flight.append(start())
        compute()
        if len(in_flight) > _AHEAD:
            finish(in_flight.popleft())
    for pending in in_flight:
        finish(pending)
