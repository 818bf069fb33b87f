"""Timings of programs and collectives on all ranks of this machine at once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from shardgraph.calibration.collectives import time_collectives
from shardgraph.calibration.programs import Step, reference_steps
from shardgraph.calibration.timing import LEAST_ROUNDS, MOST_ROUNDS, of_all_ranks, slowest, synchronize, time_all
from shardgraph.calibration.timings import Measurements, Sample, Transfer
from shardgraph.cost_models.detection import machine_memory
from shardgraph.cost_models.device import FLOP_KINDS
from shardgraph.cost_models.optimizers import optimizer_cost
from shardgraph.errors import ClusterError
from shardgraph.ir.copies import TO_DEVICE, WAIT_COPY
from shardgraph.progress import Progress
from shardgraph.runtime.device import current_device, group_device_type
from shardgraph.runtime.host import empty_on_host
from shardgraph.runtime.launch import is_rank, launch
from shardgraph.runtime.mesh import IN_NODE, OVER_NODES, node_mesh
from shardgraph.runtime.nodes import nodes_of_run

T = TypeVar("T")
Timing = TypeVar("Timing", Sample, Transfer)

_WARM_UP = 2  # rounds that are discarded
_QUICK = 10.0  # seconds of measuring below which fewer programs and sizes are timed


def measure(
    nproc: int | None = None, dtypes: Sequence[str] = ("float32",), seconds: float = 40.0, progress: bool | None = None
) -> Measurements:
    """The timings that :func:`calibrate` fits; arguments and errors are the same."""
    for dtype in dtypes:
        known = getattr(torch, dtype, None)
        if not (isinstance(known, torch.dtype) and known.is_floating_point):
            raise ClusterError(f"calibrate cannot measure dtype {dtype!r}: give floating-point ones, such as float32")
    given = tuple(dtypes), seconds, progress
    if nproc is not None and (dist.is_initialized() or is_rank()):
        raise ClusterError(
            f"calibrate was asked for {nproc} new ranks by a rank of a run, all of whose ranks it measures: leave "
            "nproc out, or call it from one process, without torchrun"
        )
    if dist.is_initialized():
        return _measure_rank(*given)
    measured: Measurements = launch(_measure_rank, nproc or torch.cuda.device_count() or 2, args=given)[0]
    return measured


def _together(by_rank: Sequence[Measurements]) -> Measurements:
    """The timings of all ranks, which timed the same operations."""
    return replace(
        by_rank[0],
        memory=min(measured.memory for measured in by_rank),
        samples=mean_of_ranks([measured.samples for measured in by_rank], "seconds"),
        transfers=mean_of_ranks([measured.transfers for measured in by_rank], "seconds", "added", "awaited"),
        host=mean_of_ranks([measured.host for measured in by_rank], "seconds"),
        between=mean_of_ranks([measured.between for measured in by_rank], "seconds", "added", "awaited"),
    )


def mean_of_ranks(by_rank: Sequence[tuple[Timing, ...]], *times: str) -> tuple[Timing, ...]:
    """The means of ``times`` over ranks, which timed the same operations in the same order."""
    return tuple(
        replace(same[0], **{name: statistics.fmean(getattr(timing, name) for timing in same) for name in times})
        for same in zip(*by_rank, strict=True)
    )


def _measure_rank(dtypes: tuple[str, ...], seconds: float, progress: bool | None) -> Measurements:
    """What all ranks have measured, on every one of them."""
    device = current_device(group_device_type())
    nodes = nodes_of_run()
    ranks = dist.get_world_size() // nodes
    memory = machine_memory() // ranks
    mesh = node_mesh() if dist.get_world_size() > 1 else None
    share, quick = seconds / (len(dtypes) + (ranks > 1) + (nodes > 1)), seconds < _QUICK
    samples: list[Sample] = []
    transfers: list[Transfer] = []
    between: list[Transfer] = []
    steps = 2 * len(dtypes) + (ranks > 1) + (nodes > 1) + 1
    with Progress("calibrate", steps, progress if dist.get_rank() == 0 else False) as show:
        for dtype in dtypes:
            show(f"capture {dtype}")
            trainings = [Training(step) for step in reference_steps(device, getattr(torch, dtype), quick)]
            show(dtype)
            timed = _time_programs(trainings, share, device)
            # Memory traffic is measured in the first dtype.
            samples += [sample for sample in timed if dtype == dtypes[0] or "/" in sample.kind]
        sizes = {"exponents": (12, 17, 22)} if quick else {}
        if mesh is not None and ranks > 1:
            show("collectives")
            transfers = time_collectives(mesh.get_group(IN_NODE).group_name, ranks, share, device, **sizes)
        if mesh is not None and nodes > 1:
            show("network")
            between = time_collectives(mesh.get_group(OVER_NODES).group_name, nodes, share, device)
        show("host")
        host = _time_host(share / 10, device)
    name = "cpu"
    if device.type == "cuda":
        name, memory = torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory
    here = tuple(samples), tuple(transfers), tuple(host), nodes, tuple(between)
    return _together(of_all_ranks(Measurements(name, ranks, torch.get_num_threads(), memory, *here)))


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
                flops = cost.executed(self.step.args[0].device.type == "cpu")
                yield Sample(f"{cost.kind}/{cost.dtype}", flops, taken, cost.moved)
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
    rounds, started = _WARM_UP + LEAST_ROUNDS, time.perf_counter()
    while len(times) < rounds:
        times.append([])
        for training in trainings:
            dist.barrier()
            readings = training.run(clock)
            synchronize(device)
            times[-1].append([between(start, end) for start, end in readings])
        if len(times) == _WARM_UP:  # the first rounds are slower than the others
            (one,) = slowest([(time.perf_counter() - started) / _WARM_UP], device)
            rounds = _WARM_UP + min(max(int(budget / one) - _WARM_UP, LEAST_ROUNDS), MOST_ROUNDS)
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
    times = time_all(runs, budget, device)
    return [Sample(kind, nbytes, taken) for (kind, nbytes), taken in zip(work, times, strict=True)]
