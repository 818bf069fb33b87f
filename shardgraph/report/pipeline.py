"""Predicted costs of a pipeline step: operations of each stage, the simulated schedule, and memory of each rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx

from shardgraph import ir
from shardgraph.cost_models.cluster import Cluster
from shardgraph.cost_models.collectives import collective_seconds
from shardgraph.cost_models.schedules import SimulatedSchedule, StageCost, simulate_schedule
from shardgraph.cost_models.timeline import StepTime, simulate
from shardgraph.ir.attributes import ON_HOST
from shardgraph.passes.analysis.liveness import MemoryProfile, profile_memory, profile_step
from shardgraph.passes.analysis.local import on_rank, shard_bytes
from shardgraph.passes.analysis.rows import Prices, Row, rows_of
from shardgraph.passes.program import Halves, Program, StageProgram, gradients_of
from shardgraph.plans.plan import Plan
from shardgraph.report.analysis import StepCosts
from shardgraph.report.step import batch_of, tasks_of, trained_shards, update_memory, update_rows
from shardgraph.sizes import format_bytes, format_seconds

_STAYS = ("parameters", "buffers", "inputs", "gathered parameters")  # kinds of memory that no microbatch adds to


@dataclass(frozen=True)
class StageAnalysis:
    """One stage on one of its ranks.

    ``rows`` are the operations of one microbatch, ``cost`` is the stage's in the simulated schedule. ``once`` are the
    seconds of work done once per step (all-gathers of parameters that stay gathered, reductions of gradients),
    ``update`` those of the optimizer. ``state`` are the bytes that are always live, by kind; ``gradients`` those of
    gradients, live from the first backward on; ``working`` the peak bytes of an action by its kind, in addition to
    those and to what other microbatches have saved.
    """

    number: int
    rank: int
    rows: tuple[Row, ...]
    cost: StageCost
    once: float
    update: float
    state: Mapping[str, int]
    gradients: int
    working: Mapping[str, int]

    @property
    def flops(self) -> int:
        """FLOPs of one microbatch."""
        return sum(row.flops for row in self.rows)


@dataclass(frozen=True)
class PipelineAnalysis(StepCosts):
    """The predicted costs of a training step of a pipeline; see :func:`shardgraph.analyze`.

    ``stages`` are in order, ``schedule`` is the simulated step, ``inputs`` is the bytes of a rank's batch.
    """

    stages: tuple[StageAnalysis, ...]
    schedule: SimulatedSchedule
    inputs: int

    @property
    def rows(self) -> tuple[Row, ...]:
        """The operations of one microbatch, stage after stage."""
        return tuple(row for stage in self.stages for row in stage.rows)

    def peak(self, rank: int) -> int:
        """Peak bytes of the ranks at this position of the pipeline axis."""
        own = {stage.number: stage for stage in self.stages if stage.rank == rank}
        steady = self.inputs + sum(sum(stage.state.values()) for stage in own.values())
        saved, gradients, most = 0, 0, steady
        begun: set[int] = set()
        for ran in self.schedule.ranks[rank]:
            stage, kind = own[ran.action.stage], ran.action.kind
            most = max(most, steady + saved + gradients + stage.working[kind])
            saved += stage.cost.held(kind)
            if kind in "BW" and stage.number not in begun:
                begun.add(stage.number)
                gradients += stage.gradients
        return most

    @cached_property
    def peak_memory(self) -> int:
        """The largest peak of all ranks, in bytes."""
        return max(map(self.peak, range(len(self.schedule.ranks))))

    @cached_property
    def time(self) -> StepTime:
        """The seconds of the step on the busiest rank, by kind of work."""
        busy = [sum(ran.end - ran.start for ran in spans) for spans in self.schedule.ranks]
        updates = [sum(stage.update for stage in self.stages if stage.rank == rank) for rank in range(len(busy))]
        seconds = max(busy)
        own = [stage for stage in self.stages if stage.rank == busy.index(seconds)]
        computed, communication = (
            self._parts * sum(row.seconds for stage in own for row in stage.rows if bool(row.stream) is communicates)
            for communicates in (False, True)
        )
        once = sum(stage.once for stage in own)
        exposed = max(0.0, seconds - computed) + once
        bubble = self.schedule.seconds - seconds
        return StepTime(min(computed, seconds), max(updates), communication + once, exposed, bubble)

    @property
    def bubble_fraction(self) -> float:
        """The fraction of the schedule in which ranks are idle, averaged over all of them."""
        return self.schedule.bubble_fraction

    @property
    def flops(self) -> int:
        """FLOPs of one step, averaged over the ranks of the pipeline."""
        return self._parts * sum(stage.flops for stage in self.stages) // len(self.schedule.ranks)

    @property
    def _parts(self) -> int:
        assert self.plan.pipeline is not None
        return self.plan.pipeline.parts

    def summary(self) -> dict[str, Any]:
        """The totals by name, in bytes, seconds and FLOPs of one rank."""
        return {
            "plan": self.plan.name,
            "mesh": dict(self.plan.whole_mesh),
            "cluster": self.cluster.name,
            "peak_memory": self.peak_memory,
            "peaks": [self.peak(rank) for rank in range(len(self.schedule.ranks))],
            **self._totals(),
            "bubble_fraction": self.bubble_fraction,
        }

    def __str__(self) -> str:
        time, pipeline = self.time, self.plan.pipeline
        lines = [
            f"plan {self.plan.name} on {self.cluster.name}, {self.plan.world_size} ranks: {pipeline}",
            f"  memory {format_bytes(self.peak_memory)} at most{self._excess}",
            f"  step {format_seconds(time.total)}{self._between}: compute {format_seconds(time.compute)}, optimizer "
            f"{format_seconds(time.optimizer)}, waits {format_seconds(time.bubble)}; bubbles are "
            f"{self.bubble_fraction:.1%} of the schedule",
            f"  {'stage':<7}{'rank':>5}{'forward':>12}{'backward':>12}{'saved':>12}{'state':>12}{'rank peak':>13}",
        ]
        for stage in self.stages:
            cells = f"{format_seconds(stage.cost.forward):>12}{format_seconds(stage.cost.backward):>12}"
            held = f"{format_bytes(stage.cost.saved):>12}{format_bytes(sum(stage.state.values())):>12}"
            lines.append(f"  {stage.number:<7}{stage.rank:>5}{cells}{held}{format_bytes(self.peak(stage.rank)):>13}")
        return "\n".join(lines)


def analyze_pipeline(
    program: Program, cluster: Cluster, *, optimizer: str = "adamw", fused: bool = False, whole: Plan | None = None
) -> PipelineAnalysis:
    """Like :func:`shardgraph.report.analysis.analyze_program`, for microbatches that all have the program's sizes.

    ``whole`` is the plan on whose mesh messages are priced, by default the program's.
    """
    plan = program.plan
    pipeline = plan.pipeline
    assert pipeline is not None
    cluster.check_mesh(plan.whole_mesh)
    costs = _Stages(program, cluster, optimizer, fused, whole or plan)
    stages = tuple(map(costs.analysis, program.stages))
    schedule = simulate_schedule(program.actions, [stage.cost for stage in stages], prefetch=pipeline.prefetch)
    samples, tokens = (plan.data_size * pipeline.parts * count for count in batch_of(program))
    placeholders = ir.placeholders(program.joint.module).items()
    inputs = pipeline.parts * sum(node.meta["val"].nbytes for role, node in placeholders if isinstance(role, ir.Input))
    return PipelineAnalysis(plan, cluster, optimizer, samples, tokens, stages, schedule, inputs)


@dataclass(frozen=True)
class _Stages:
    program: Program
    cluster: Cluster
    optimizer: str
    fused: bool
    whole: Plan

    def analysis(self, stage: StageProgram) -> StageAnalysis:
        plan, context, device = self.program.plan, self.program.context, self.cluster.device
        assert plan.pipeline is not None
        halves = stage.again
        forward, backward = on_rank(halves.forward, halves.backward, context, 0)
        memory = profile_step(forward, backward, device.allocation)
        rows = self._rows({"forward": forward} | ({} if backward is None else {"backward": backward}), memory)
        live = _live(memory)
        saved, kept = (0, 0) if backward is None else (live["forward"][-1], _kept(halves))
        shards = trained_shards(context, stage.trained)
        gathered = [] if stage.gather is None else [value for _, value in ir.outputs(stage.gather)]
        buffers = [n for role, n in ir.placeholders(stage.kept.forward).items() if isinstance(role, ir.Buffer)]
        on_device = [fqn for fqn in stage.parameters if not context.parameters[fqn].offload]
        state = {
            "parameters": sum(shard_bytes(context, fqn, 0) for fqn in on_device),
            "buffers": _nbytes(buffers),
            "gathered parameters": _nbytes(gathered),
            "optimizer state": update_memory(shards[0], self.optimizer).state,
        }
        # Unsharded gradients, which are accumulated over microbatches.
        unsharded = {} if stage.kept.backward is None else gradients_of(ir.outputs(stage.kept.backward))
        gradients = _nbytes(unsharded.values())
        return StageAnalysis(
            number=stage.number,
            rank=plan.pipeline.rank_of(stage.number),
            rows=rows,
            cost=self._cost(stage, halves, rows, saved, kept, sum(state.values()) + gradients),
            once=sum(self._seconds_of(graph) for graph in (stage.gather, stage.reduce) if graph is not None),
            update=sum(row.seconds for row in update_rows(shards, self.optimizer, device, memory)),
            state=state,
            gradients=gradients,
            working=self._working(halves, live, saved, kept),
        )

    def _cost(
        self, stage: StageProgram, halves: Halves, rows: Sequence[Row], saved: int, kept: int, fixed: int
    ) -> StageCost:
        forward, backward = (
            self._simulated([row for row in rows if row.half == half]) for half in ("forward", "backward")
        )
        inputs, weights = None, None
        if halves.backward is not None:
            inputs, weights = map(self._seconds_of, halves.parts)
            scale = backward / (inputs + weights) if inputs + weights else 0.0
            inputs, weights = inputs * scale, weights * scale
        stages, number = self.program.stages, stage.number
        following = stages[number + 1].received if number + 1 < len(stages) else []
        preceding = stages[number - 1].returned if number else []
        return StageCost(
            forward=forward,
            backward=backward,
            backward_input=inputs,
            backward_weight=weights,
            send_output=message_seconds(following, self.whole, self.cluster),
            send_gradient=message_seconds(preceding, self.whole, self.cluster),
            saved=saved,
            kept=kept,
            fixed=fixed,
        )

    def _rows(self, graphs: Mapping[str, fx.GraphModule], memory: MemoryProfile) -> tuple[Row, ...]:
        return tuple(rows_of(graphs, memory, Prices(self.cluster, self.program.plan.mesh), self.fused))

    def _seconds_of(self, graph: fx.GraphModule) -> float:
        return self._simulated(self._rows({"graph": graph}, profile_memory(graph)))

    def _simulated(self, rows: Sequence[Row]) -> float:
        return simulate(list(tasks_of(rows)), self.cluster.overlap).seconds

    def _working(self, halves: Halves, live: Mapping[str, Sequence[int]], saved: int, kept: int) -> dict[str, int]:
        """Peak bytes of each kind of action, without what always stays and what its own microbatch saved before."""
        peaks = {"F": max(live["forward"]), "B": 0, "I": 0, "W": 0}
        if halves.backward is not None:
            peaks["B"] = max(live["backward"]) - saved
            for kind, part, held in zip("IW", halves.parts, (saved, kept), strict=True):
                timeline = profile_memory(part, self.cluster.device.allocation).timeline
                peaks[kind] = max(0, max(timeline, default=0) - held)
        return peaks


def _live(memory: MemoryProfile) -> dict[str, list[int]]:
    """Live bytes at each node of forward and of backward, without the kinds of memory that no microbatch adds to."""
    added = [line for kind, line in memory.compositions.items() if kind not in _STAYS]
    live = defaultdict(list)
    for i, (half, _) in enumerate(memory.nodes):
        live[half].append(sum(line[i] for line in added))
    return live


def _kept(halves: Halves) -> int:
    """Bytes held from the first part of a split backward for the second."""
    values = [
        node.meta["val"]
        for role, node in ir.placeholders(halves.parts[1]).items()
        if isinstance(role, (ir.Saved, ir.Returned)) and not ON_HOST.get(node)
    ]
    storages = {value.untyped_storage() for value in values if isinstance(value, torch.Tensor)}
    return sum(storage.nbytes() for storage in storages)


def _nbytes(nodes: Iterable[fx.Node]) -> int:
    return sum(node.meta["val"].nbytes for node in nodes)


def message_seconds(tensors: Iterable[torch.Tensor], plan: Plan, cluster: Cluster) -> float:
    """Seconds to send ``tensors`` to the previous or next stage; 0 if there are none."""
    assert plan.pipeline is not None
    nbytes = sum(tensor.nbytes for tensor in tensors)
    group = replace(cluster.group_of(plan.whole_mesh, plan.pipeline.axis), ranks=2)
    return collective_seconds("send", nbytes, nbytes, group, cluster.efficiency) if nbytes else 0.0
