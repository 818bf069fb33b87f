"""Predicted costs of a pipeline step: operations of each stage, the simulated schedule, and memory of each rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx

from shardgraph import ir
from shardgraph.cost_models.cluster import Cluster
from shardgraph.cost_models.optimizers import optimizer_cost
from shardgraph.cost_models.schedules import SimulatedSchedule, StageCost, simulate_schedule
from shardgraph.cost_models.timeline import StepTime, simulate
from shardgraph.ir import Buffer, Input
from shardgraph.ir.attributes import ON_HOST
from shardgraph.passes.analysis.liveness import MemoryProfile, profile_memory, profile_step
from shardgraph.passes.analysis.local import on_rank, shard_bytes
from shardgraph.passes.analysis.rows import Prices, Row, rows_of
from shardgraph.passes.program import Halves, Program, StageProgram, gradients_of
from shardgraph.plans.plan import Plan
from shardgraph.report.analysis import StepCosts, tasks_of
from shardgraph.report.messages import message_seconds
from shardgraph.sizes import format_bytes, format_seconds

_STAYS = ("parameters", "buffers", "inputs", "gathered parameters")  # kinds of memory that no microbatch adds to


@dataclass(frozen=True)
class StageAnalysis:
    """One stage on one of its ranks.

    ``rows``
        The operations of one microbatch, forward and backward.
    ``cost``
        The stage's cost in the simulated schedule.
    ``once``
        Seconds of work done once per step: all-gathers of parameters that stay gathered, reductions of gradients.
    ``update``
        Seconds of the optimizer's update.
    ``state``
        Bytes that are always live, by kind: parameters, buffers, parameters gathered once, optimizer state.
    ``gradients``
        Bytes of gradients, live from the first backward on.
    ``working``
        Peak bytes of an action by its kind, in addition to those and to what other microbatches have saved.
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

    ``stages`` are in order, ``schedule`` is the simulated step. ``samples`` and ``tokens`` count one step over all
    ranks, ``inputs`` is the bytes of a rank's batch.
    """

    plan: Plan
    cluster: Cluster
    optimizer: str
    stages: tuple[StageAnalysis, ...]
    schedule: SimulatedSchedule
    samples: int
    tokens: int
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
        rank = busy.index(max(busy))
        own = [stage for stage in self.stages if stage.rank == rank]
        communication = self.plan.pipeline.parts * sum(  # type: ignore[union-attr]
            row.seconds for stage in own for row in stage.rows if row.stream
        )
        computed = self.plan.pipeline.parts * sum(  # type: ignore[union-attr]
            row.seconds for stage in own for row in stage.rows if not row.stream
        )
        once, update = sum(stage.once for stage in own), max(self._updates)
        exposed = max(0.0, busy[rank] - computed) + once
        return StepTime(
            min(computed, busy[rank]), update, communication + once, exposed, self.schedule.seconds - busy[rank]
        )

    @property
    def bubble_fraction(self) -> float:
        """The fraction of the schedule in which ranks are idle, averaged over all of them."""
        return self.schedule.bubble_fraction

    @property
    def flops(self) -> int:
        """FLOPs of one step, averaged over the ranks of the pipeline."""
        parts = self.plan.pipeline.parts  # type: ignore[union-attr]
        return parts * sum(stage.flops for stage in self.stages) // len(self.schedule.ranks)

    @property
    def _updates(self) -> list[float]:
        ranks = range(len(self.schedule.ranks))
        return [sum(stage.update for stage in self.stages if stage.rank == rank) for rank in ranks]

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
            f"  memory {format_bytes(self.peak_memory)} at most"
            f"{'' if self.fits else ', MORE THAN THE DEVICE HAS: ' + format_bytes(self.cluster.device.memory)}",
            f"  step {format_seconds(time.total)}: compute {format_seconds(time.compute)}, optimizer "
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
    program: Program, cluster: Cluster, *, optimizer: str = "adamw", fused: bool = False
) -> PipelineAnalysis:
    """Analyse a training step of a pipeline whose microbatches all have the sizes of ``program``.

    Raises:
        ClusterError: the mesh does not fit the cluster, or the device has no rate for a dtype.
    """
    plan = program.plan
    pipeline = plan.pipeline
    assert pipeline is not None
    cluster.check_mesh(plan.whole_mesh)
    costs = _Stages(program, cluster, optimizer, fused)
    stages = tuple(costs.analysis(stage) for stage in program.stages)
    schedule = simulate_schedule(program.actions, [stage.cost for stage in stages], prefetch=pipeline.prefetch)
    tensors = [n.meta["val"] for r, n in ir.placeholders(program.joint.module).items() if isinstance(r, Input)]
    rows = next((t.shape[0] for t in tensors if t.dim()), 0)
    words = next((t.numel() for t in tensors if t.dim() == 2 and not t.is_floating_point()), 0)
    batches = plan.data_size * pipeline.parts
    inputs = pipeline.parts * sum(t.nbytes for t in tensors)
    return PipelineAnalysis(plan, cluster, optimizer, stages, schedule, rows * batches, words * batches, inputs)


class _Stages:
    """Computes the costs of stages."""

    def __init__(self, program: Program, cluster: Cluster, optimizer: str, fused: bool) -> None:
        self.program, self.cluster, self.fused = program, cluster, fused
        self.optimizer = optimizer_cost(optimizer)
        self.prices = Prices(cluster, program.plan.mesh)
        self.granule = cluster.device.allocation
        assert program.plan.pipeline is not None
        self.pipeline = program.plan.pipeline

    def analysis(self, stage: StageProgram) -> StageAnalysis:
        halves = stage.again if self.pipeline.checkpoint != "never" else stage.kept
        forward, backward = on_rank(halves.forward, halves.backward, self.program.context, 0)
        memory = profile_step(forward, backward, self.granule)
        graphs = {"forward": forward} | ({} if backward is None else {"backward": backward})
        rows = tuple(rows_of(graphs, memory, self.prices, self.fused))
        saved = self._at_end_of(memory, "forward") if backward is not None else 0
        trains = sorted(stage.trained)
        shards, of_host = ([self._part(fqn) for fqn in trains if self._on_host(fqn) is host] for host in (False, True))
        state = self._state(stage, shards)
        gradients = self._gradients(stage)
        kept = self._kept(halves)
        cost = self._cost(stage, halves, rows, saved, kept, sum(state.values()) + gradients)
        once = sum(self._seconds_of(graph) for graph in (stage.gather, stage.reduce) if graph is not None)
        rate = self.cluster.device.rate("optimizer")
        assert rate is not None
        update = sum(rate.seconds(self.optimizer.moved * nbytes) for nbytes in shards)
        if of_host:
            rate = self.cluster.device.linked_host.optimizer
            update += sum(rate.seconds(self.optimizer.moved * nbytes) for nbytes in of_host)
        return StageAnalysis(
            number=stage.number,
            rank=self.pipeline.rank_of(stage.number),
            rows=rows,
            cost=cost,
            once=once,
            update=update,
            state=state,
            gradients=gradients,
            working=self._working(halves, memory, saved, kept),
        )

    # -- seconds -----------------------------------------------------------------------------------

    def _cost(
        self, stage: StageProgram, halves: Halves, rows: Sequence[Row], saved: int, kept: int, fixed: int
    ) -> StageCost:
        seconds = {half: self._simulated([row for row in rows if row.half == half]) for half in ("forward", "backward")}
        inputs, weights = None, None
        if halves.backward is not None:
            inputs, weights = (self._seconds_of(part) for part in halves.parts)
            scale = seconds["backward"] / (inputs + weights) if inputs + weights else 0.0
            inputs, weights = inputs * scale, weights * scale
        following = self.program.stages[stage.number + 1].received if stage.number + 1 < self.pipeline.count else []
        preceding = self.program.stages[stage.number - 1].returned if stage.number else []
        return StageCost(
            forward=seconds["forward"],
            backward=seconds["backward"],
            backward_input=inputs,
            backward_weight=weights,
            send_output=message_seconds(following, self.program.plan, self.cluster),
            send_gradient=message_seconds(preceding, self.program.plan, self.cluster),
            saved=saved,
            kept=kept,
            fixed=fixed,
        )

    def _simulated(self, rows: Sequence[Row]) -> float:
        return simulate(list(tasks_of(rows)), self.cluster.overlap).seconds

    def _seconds_of(self, graph: fx.GraphModule) -> float:
        memory = profile_memory(graph, self.granule)
        named = replace(memory, nodes=tuple(("graph", node) for _, node in memory.nodes))
        return self._simulated(list(rows_of({"graph": graph}, named, self.prices, self.fused)))

    # -- bytes -------------------------------------------------------------------------------------

    def _on_host(self, fqn: str) -> bool:
        return self.program.context.parameters[fqn].offload

    def _part(self, fqn: str) -> int:
        return shard_bytes(self.program.context, fqn, 0)

    def _state(self, stage: StageProgram, shards: Sequence[int]) -> dict[str, int]:
        """Bytes that are always on the device, by kind; the optimizer state on the device is that of ``shards``."""
        buffers = [n.meta["val"] for r, n in ir.placeholders(stage.kept.forward).items() if isinstance(r, Buffer)]
        gathered = [] if stage.gather is None else [v.meta["val"] for _, v in ir.outputs(stage.gather)]
        return {
            "parameters": sum(self._part(fqn) for fqn in stage.parameters if not self._on_host(fqn)),
            "buffers": sum(tensor.nbytes for tensor in buffers),
            "gathered parameters": sum(tensor.nbytes for tensor in gathered),
            "optimizer state": self.optimizer.states * sum(shards) + self.optimizer.counters * 4 * len(shards),
        }

    def _gradients(self, stage: StageProgram) -> int:
        """Bytes of the stage's unsharded gradients, which are accumulated over microbatches."""
        if stage.kept.backward is None:
            return 0
        return sum(node.meta["val"].nbytes for node in gradients_of(ir.outputs(stage.kept.backward)).values())

    def _working(self, halves: Halves, memory: MemoryProfile, saved: int, kept: int) -> dict[str, int]:
        """Peak bytes of each kind of action, without what always stays and what its own microbatch saved before."""
        peaks = {"F": self._most(memory, "forward"), "B": 0, "I": 0, "W": 0}
        if halves.backward is not None:
            peaks["B"] = self._most(memory, "backward") - saved
            for kind, part, held in zip("IW", halves.parts, (saved, kept), strict=True):
                peaks[kind] = max(0, max(profile_memory(part, self.granule).timeline, default=0) - held)
        return peaks

    def _kept(self, halves: Halves) -> int:
        """Bytes held from the first part of a split backward for the second."""
        if halves.backward is None:
            return 0
        wanted = ir.placeholders(halves.parts[1]).items()
        storages = {
            n.meta["val"].untyped_storage()._cdata: n.meta["val"].untyped_storage().nbytes()
            for role, n in wanted
            if not ON_HOST.get(n)
            if isinstance(role, (ir.Saved, ir.Returned)) and isinstance(n.meta["val"], torch.Tensor)
        }
        return sum(storages.values())

    def _most(self, memory: MemoryProfile, half: str) -> int:
        return max(self._live(memory, half), default=0)

    def _at_end_of(self, memory: MemoryProfile, half: str) -> int:
        return list(self._live(memory, half))[-1]

    def _live(self, memory: MemoryProfile, half: str) -> Iterator[int]:
        stays = [line for kind, line in memory.compositions.items() if kind in _STAYS]
        for i, (name, _) in enumerate(memory.nodes):
            if name == half:
                yield memory.timeline[i] - sum(line[i] for line in stays)
