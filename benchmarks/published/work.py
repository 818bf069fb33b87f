"""The work of an analysed step, small enough to keep, priced again on devices with other constants.

Capturing and lowering a model takes seconds; a fit prices it thousands of times. So of every operation only what its
price depends on is kept, once for equal ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardgraph.cost_models import compute
from shardgraph.cost_models.device import FLOP_KINDS, Device
from shardgraph.cost_models.schedules import StageCost, simulate_schedule
from shardgraph.cost_models.timeline import COMPUTE, COPIES, StepTime, Task, simulate
from shardgraph.plans.pipeline_plan import Pipeline


@dataclass(frozen=True)
class Operation:
    """What the seconds of an operation depend on: ``executed`` FLOPs, ``moved`` bytes; ``seconds`` on a stream."""

    kind: str
    dtype: str
    executed: float
    moved: int
    seconds: float
    stream: str

    def on(self, device: Device) -> float:
        """Seconds on a device; those of a collective are kept."""
        if self.stream or self.kind == "free":
            return self.seconds
        return compute.seconds(device, self.kind, self.dtype, self.executed, self.moved)


@dataclass(frozen=True)
class Half:
    """The operations of a graph in order, as indices of ``operations``, and the distances to what each waits for."""

    operations: tuple[Operation, ...]
    order: tuple[int, ...]
    waits: tuple[int, ...]

    @classmethod
    def of(cls, rows: Iterable[Any], device: Device) -> Half:
        """The rows of a graph that was priced on ``device``."""
        known: dict[Operation, int] = {}
        order, waits = [], []
        for row in rows:
            executed = _executed(row, device) if row.kind in FLOP_KINDS else 0.0
            moved, seconds = row.read + row.written, row.seconds if row.stream else 0.0
            operation = Operation(row.kind, row.dtype, executed, moved, seconds, row.stream)
            order.append(known.setdefault(operation, len(known)))
            waits.append(row.waits)
        return cls(tuple(known), tuple(order), tuple(waits))

    def tasks(self, device: Device, overlap: float, without: Callable[[Operation], bool] | None = None) -> list[Task]:
        """As :func:`shardgraph.report.step.tasks_of`; collectives of which ``without`` is true take no time."""
        streams = filter(lambda operation: operation.stream, self.operations)
        left_out = set() if without is None else set(filter(without, streams))
        seconds = [0.0 if each in left_out else each.on(device) for each in self.operations]
        tasks, latest = [], -1
        for i, (index, waits) in enumerate(zip(self.order, self.waits, strict=True)):
            stream = self.operations[index].stream
            if stream:
                after: tuple[int, ...] = (latest,) if latest >= 0 else ()
            else:
                after, latest = (i - waits,) if waits else (), i
            slows = (1 - overlap) * seconds[index] if stream and stream not in COPIES else 0.0
            tasks.append(Task("", stream or COMPUTE, seconds[index], after, slows=slows))
        return tasks


def _executed(row: Any, device: Device) -> float:
    """FLOPs that are executed: fewer than counted if a causal kernel skips blocks, as the row's seconds tell."""
    rate = device.rate(row.kind, row.dtype)
    assert rate is not None
    if row.kind != "attention":
        return float(row.flops)
    return min(float(row.flops), (row.seconds - rate.overhead) * rate.per_second)


@dataclass(frozen=True)
class Work:
    """A step without a pipeline; ``update`` are the bytes that its optimizer moves."""

    half: Half
    update: int
    overlap: float

    @classmethod
    def of(cls, analysis: Any) -> Work:
        rows = [row for row in analysis.rows if row.kind != "optimizer"]
        update = sum(row.read + row.written for row in analysis.rows if row.kind == "optimizer")
        return cls(Half.of(rows, analysis.cluster.device), update, analysis.cluster.overlap)

    def time(self, device: Device, without: Callable[[Operation], bool] | None = None) -> StepTime:
        """The step on a device; ``without`` some of the collectives."""
        tasks = self.half.tasks(device, self.overlap, without)
        timeline = simulate(tasks)
        compute_seconds = sum(task.seconds for task in tasks if task.stream == COMPUTE)
        sent = sum(task.seconds for task in tasks if task.stream != COMPUTE)
        return StepTime(compute_seconds, _update(self.update, device), sent, max(0.0, timeline.exposed))


@dataclass(frozen=True)
class Stage:
    """A stage: its two graphs, and its cost on the device that it was analysed for."""

    forward: Half
    backward: Half
    cost: StageCost
    was: tuple[float, float]
    once: float
    update: int
    rank: int


@dataclass(frozen=True)
class PipelineWork:
    """A step of a pipeline; equal stages are one object."""

    stages: tuple[Stage, ...]
    pipeline: Pipeline
    overlap: float

    @classmethod
    def of(cls, analysis: Any) -> PipelineWork:
        device, overlap = analysis.cluster.device, analysis.cluster.overlap
        rate = device.rate("optimizer")
        stages: list[Stage] = []
        for each in analysis.stages:
            halves = [
                Half.of([row for row in each.rows if row.half == half], device) for half in ("forward", "backward")
            ]
            was = tuple(simulate(half.tasks(device, overlap)).seconds for half in halves)
            moved = int(each.update * rate.per_second)
            stages.append(Stage(*halves, each.cost, was, each.once, moved, each.rank))  # type: ignore[arg-type]
        return cls(tuple(stages), analysis.plan.pipeline, overlap)

    def time(self, device: Device) -> StepTime:
        """The step on a device."""
        known: dict[tuple[Half, Half], tuple[float, float]] = {}
        costs = []
        for stage in self.stages:
            key = stage.forward, stage.backward
            if key not in known:
                known[key] = tuple(simulate(half.tasks(device, self.overlap)).seconds for half in key)  # type: ignore
            forward, backward = (now / was for now, was in zip(known[key], stage.was, strict=True))
            cost = stage.cost
            costs.append(
                replace(
                    cost,
                    forward=cost.forward * forward,
                    backward=cost.backward * backward,
                    backward_input=None if cost.backward_input is None else cost.backward_input * backward,
                    backward_weight=None if cost.backward_weight is None else cost.backward_weight * backward,
                )
            )
        schedule = simulate_schedule(self.pipeline.order, costs, prefetch=self.pipeline.prefetch)
        busy = [sum(ran.end - ran.start for ran in spans) for spans in schedule.ranks]
        updates = [_update(sum(s.update for s in self.stages if s.rank == rank), device) for rank in range(len(busy))]
        once = sum(stage.once for stage in self.stages if stage.rank == busy.index(max(busy)))
        return StepTime(max(busy), max(updates), once, once, schedule.seconds - max(busy))


def _update(nbytes: int, device: Device) -> float:
    rate = device.rate("optimizer")
    assert rate is not None
    return nbytes / rate.per_second


def work_of(analysis: Any) -> Work | PipelineWork:
    """The work of an analysis."""
    return PipelineWork.of(analysis) if analysis.plan.pipeline else Work.of(analysis)


def computed(work: Work | PipelineWork) -> Sequence[Half]:
    """The graphs of a step."""
    return [work.half] if isinstance(work, Work) else [half for s in work.stages for half in (s.forward, s.backward)]
