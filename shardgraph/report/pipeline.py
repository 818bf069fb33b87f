"""Predicted costs of a pipeline step: operations of each stage, the simulated schedule, and memory of each rank."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import fx

from shardgraph import ir
from shardgraph.capture.captures import Call
from shardgraph.cost_models.actions import Action
from shardgraph.cost_models.cluster import Cluster
from shardgraph.cost_models.collectives import collective_seconds
from shardgraph.cost_models.group import Group
from shardgraph.cost_models.schedules import SimulatedSchedule, StageCost, simulate_schedule
from shardgraph.cost_models.timeline import StepTime
from shardgraph.ir.attributes import ON_HOST
from shardgraph.passes.analysis.liveness import MemoryProfile, Storage, profile_memory, profile_step, storages_of
from shardgraph.passes.analysis.local import on_rank, shard_bytes
from shardgraph.passes.analysis.rows import Prices, Row, rows_of
from shardgraph.passes.parameters.accumulate_gradients import adding_to_earlier
from shardgraph.passes.program import Halves, Program, StageProgram, gradients_of
from shardgraph.plans.plan import Plan
from shardgraph.report.accumulation import accumulation_rows
from shardgraph.report.analysis import StepCosts
from shardgraph.report.step import batch_of, timeline_of
from shardgraph.report.update import trained_shards, update_memory, update_rows
from shardgraph.sizes import format_bytes, format_seconds

_ROUNDING = 1e-9  # of a sum of seconds
_STAYS = ("parameters", "buffers", "inputs", "gathered parameters")  # kinds of memory that no microbatch adds to


@dataclass(frozen=True)
class StageAnalysis:
    """One stage on one of its ranks.

    ``rows`` are the operations of one microbatch, ``cost`` is the stage's in the simulated schedule; both count that
    its gradients are added to those of the microbatches before, in the mean over all of them. ``once`` are the
    seconds of work done once per step (all-gathers of parameters that stay gathered, reductions of gradients),
    ``update`` those of the optimizer.

    ``state`` are the bytes that are always live, by kind; ``gradients`` those of gradients, live from the first
    backward on; ``working`` the peak bytes of an action by its kind, in addition to those and to what other
    microbatches have saved, and ``adding`` those of backward once there are gradients that it adds to. ``written``
    are the bytes of buffers that each microbatch would write, held until all of them have run; ``forwarded`` and
    ``returned`` those of the messages that one gets from other ranks, in forward and in backward. After the last
    action, ``reducing`` bytes are needed beside the gradients until ``reduced`` bytes of them are left, and
    ``updating`` are the optimizer's temporaries.
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
    adding: Mapping[str, int]
    written: int
    forwarded: int
    returned: int
    reducing: int
    reduced: int
    updating: int

    @property
    def between_steps(self) -> int:
        """Bytes that are live between two steps."""
        return sum(nbytes for kind, nbytes in self.state.items() if kind != "gathered parameters")

    @property
    def flops(self) -> int:
        """FLOPs of one microbatch."""
        return sum(row.flops for row in self.rows)


class _Moment(NamedTuple):
    """The bytes that a rank holds at some time beside its state and inputs; those of gathered parameters are part of
    the state until it is ``updating``."""

    written: int = 0
    saved: int = 0
    gradients: int = 0
    messages: int = 0
    working: int = 0
    ended: bool = False
    updating: bool = False

    @property
    def nbytes(self) -> int:
        return self.written + self.saved + self.gradients + self.messages + self.working


@dataclass(frozen=True, repr=False)
class PipelineAnalysis(StepCosts):
    """The predicted costs of a training step of a pipeline; see :func:`shardgraph.analyze`.

    ``stages`` are in order, ``schedule`` is the simulated step, ``inputs`` is the bytes of a rank's batch. ``call`` is
    the analysed call, of the whole batch; None if the program was compiled before.
    """

    stages: tuple[StageAnalysis, ...]
    schedule: SimulatedSchedule
    inputs: int
    call: Call | None = field(default=None, repr=False, compare=False)

    @property
    def rows(self) -> tuple[Row, ...]:
        """The operations of one microbatch, stage after stage."""
        return tuple(row for stage in self.stages for row in stage.rows)

    def peak(self, rank: int) -> int:
        """Peak bytes of the ranks at this position of the pipeline axis."""
        return self._fullest_moment(rank)[0]

    def at_peak(self, rank: int) -> dict[str, int]:
        """The bytes of :meth:`peak` by kind."""
        _, moment = self._fullest_moment(rank)
        held: Counter[str] = Counter({"inputs": self.inputs})
        for stage in self.stages:
            held.update(stage.state if stage.rank == rank else {})
        if moment.updating:
            del held["gathered parameters"]
        held["buffers"] += moment.written
        held["saved"] += moment.saved + min(0, moment.working)  # an action may hold less than what it was given
        held["gradients"] += moment.gradients
        held["communication buffers"] += moment.messages
        held["temporaries" if moment.ended else "activations"] += max(0, moment.working)
        return {kind: nbytes for kind, nbytes in held.items() if nbytes}

    def _fullest_moment(self, rank: int) -> tuple[int, _Moment]:
        """The moment of the step at which most is live, with its bytes."""
        own = [stage for stage in self.stages if stage.rank == rank]
        between = self.inputs + sum(stage.between_steps for stage in own)
        gathered = sum(stage.state.get("gathered parameters", 0) for stage in own)
        sizes = ((between + (0 if each.updating else gathered) + each.nbytes, each) for each in self._moments(rank))
        return max(sizes, key=lambda size: size[0])

    def _moments(self, rank: int) -> Iterator[_Moment]:
        """Each action of a rank, and the end of its step."""
        own = {stage.number: stage for stage in self.stages if stage.rank == rank}
        written, saved, gradients = 0, 0, 0
        yield _Moment()
        begun: set[int] = set()
        for ran, messages in zip(self.schedule.ranks[rank], self._messages(rank), strict=True):
            stage, kind = own[ran.action.stage], ran.action.kind
            adds = kind in "BW" and stage.number in begun
            working = stage.adding[kind] if adds else stage.working[kind]
            yield _Moment(written, saved, gradients, messages, working)
            saved += stage.cost.held(kind)
            written += stage.written if kind == "F" else 0
            if kind in "BW" and stage.number not in begun:
                begun.add(stage.number)
                gradients += stage.gradients
        for stage in own.values():
            yield _Moment(written, 0, gradients, 0, stage.reducing, ended=True)
            gradients += stage.reduced - stage.gradients
        temporaries = max(stage.updating for stage in own.values())
        yield _Moment(0, 0, gradients, 0, temporaries, ended=True, updating=True)

    def _messages(self, rank: int) -> list[int]:
        """Bytes of messages that a rank holds during each of its actions, beside those that the action uses.

        Those are the last that it sent, held until it sends the next, and what has arrived for later actions, if the
        schedule posts its receives ahead.
        """
        assert self.plan.pipeline is not None
        spans = self.schedule.ranks[rank]
        here = {stage.number for stage in self.stages if stage.rank == rank}
        sent = sum(stage.forwarded for stage in self.stages if stage.number - 1 in here)
        sent += sum(stage.returned for stage in self.stages if stage.number + 1 in here)
        if not self.plan.pipeline.prefetch:
            return [sent] * len(spans)
        ended = {_sender(ran.action): ran.end for each in self.schedule.ranks for ran in each if ran.action.kind != "W"}
        arrived: list[tuple[float, int, int]] = []
        for place, ran in enumerate(spans):
            stage, kind, microbatch = self.stages[ran.action.stage], ran.action.kind, ran.action.microbatch
            if kind == "F" and stage.forwarded:
                arrived.append((ended[stage.number - 1, True, microbatch], place, stage.forwarded))
            elif kind in "BI" and stage.returned:
                arrived.append((ended[stage.number + 1, False, microbatch], place, stage.returned))
        return [
            sent + sum(nbytes for end, used, nbytes in arrived if end <= ran.end and place < used)
            for place, ran in enumerate(spans)
        ]

    @cached_property
    def peak_memory(self) -> int:
        """The largest peak of all ranks, in bytes."""
        return max(map(self.peak, range(len(self.schedule.ranks))))

    @cached_property
    def fullest(self) -> int:
        """The position along the pipeline axis of the ranks with the largest peak."""
        return max(range(len(self.schedule.ranks)), key=self.peak)

    @cached_property
    def busiest(self) -> tuple[StageAnalysis, ...]:
        """The stages of the rank that computes and communicates longest, whose seconds :attr:`time` are."""
        busy = [sum(ran.end - ran.start for ran in spans) for spans in self.schedule.ranks]
        return tuple(stage for stage in self.stages if stage.rank == busy.index(max(busy)))

    @cached_property
    def time(self) -> StepTime:
        """The seconds of the step on the busiest rank, by kind of work."""
        busy = [sum(ran.end - ran.start for ran in spans) for spans in self.schedule.ranks]
        updates = [sum(stage.update for stage in self.stages if stage.rank == rank) for rank in range(len(busy))]
        seconds, own = max(busy), self.busiest
        computed, communication = (
            self._parts * sum(row.seconds for stage in own for row in stage.rows if bool(row.stream) is communicates)
            for communicates in (False, True)
        )
        once = sum(stage.once for stage in own)
        exposed = seconds - computed if seconds - computed > _ROUNDING * seconds else 0.0
        exposed += once
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


def _sender(action: Action) -> tuple[int, bool, int]:
    """What a message is of: a stage's forward, or else its backward, of a microbatch."""
    return action.stage, action.kind == "F", action.microbatch


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
    given = (node.meta.get("val") for role, node in placeholders if isinstance(role, ir.Input))
    inputs = pipeline.parts * sum(value.nbytes for value in given if isinstance(value, torch.Tensor))
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
        memory = profile_step(forward, backward, device.allocation, workspaces=device.is_cpu, gloo=device.is_cpu)
        rows = self._rows({"forward": forward} | ({} if backward is None else {"backward": backward}), memory)
        live = _live(memory)
        saved = kept = 0
        if backward is not None:
            saved = live["forward"][-1] - _unsaved_messages(forward)
            kept = _given(halves, halves.parts[1], (ir.Saved, ir.Returned))
        rank = plan.pipeline.rank_of(stage.number)
        earlier = (each for each in self.program.stages[: stage.number] if plan.pipeline.rank_of(each.number) == rank)
        counted = {fqn for each in earlier for fqn in each.parameters}  # tied weights are once on a rank
        shards = trained_shards(context, stage.trained - counted)
        reducing = stage.kept.backward if stage.reduce is None else stage.reduce
        graphs = [graph for graph in (stage.gather, stage.kept.forward, reducing) if graph is not None]
        optimizer, _ = update_memory(graphs, shards, self.optimizer, self.whole)
        gathered = [] if stage.gather is None else [value for _, value in ir.outputs(stage.gather)]
        buffers = [n for role, n in ir.placeholders(stage.kept.forward).items() if isinstance(role, ir.Buffer)]
        on_device = [fqn for fqn in stage.parameters if fqn not in counted and not context.parameters[fqn].offload]
        state = {
            "parameters": sum(shard_bytes(context, fqn, 0) for fqn in on_device),
            "buffers": _nbytes(buffers),
            "gathered parameters": _nbytes(gathered),
            "optimizer state": optimizer.state,
        }
        gradients = _gradients(stage.kept.backward)  # unsharded, accumulated over microbatches
        reduced = gradients if stage.reduce is None else gradients | _gradients(stage.reduce)
        fixed = sum(state.values()) + sum(gradients.values())
        working, adding = self._working(stage, halves, live, saved, sum(gradients.values()))
        added = tuple(accumulation_rows(gradients, plan.pipeline.parts, device, memory))
        return StageAnalysis(
            number=stage.number,
            rank=rank,
            rows=rows + added,
            cost=self._cost(stage, halves, rows, added, StageCost(saved=saved, kept=kept, fixed=fixed)),
            once=sum(self._seconds_of(graph) for graph in (stage.gather, stage.reduce) if graph is not None),
            update=sum(row.seconds for row in update_rows(shards, self.optimizer, device, memory, self.whole)),
            state=state,
            gradients=sum(gradients.values()),
            working=working,
            adding=adding,
            written=_written(stage),
            forwarded=self._received(stage, stage.received, -1),
            returned=self._received(stage, stage.returned, 1),
            reducing=self._reducing(stage),
            reduced=sum(nbytes for fqn, nbytes in reduced.items() if fqn not in counted),
            updating=optimizer.temporaries,
        )

    def _cost(
        self, stage: StageProgram, halves: Halves, rows: Sequence[Row], added: Sequence[Row], held: StageCost
    ) -> StageCost:
        """The bytes of ``held`` with the seconds of ``rows`` and of what ``added`` gradients up."""
        forward, backward = (
            self._simulated([row for row in rows if row.half == half]) for half in ("forward", "backward")
        )
        adding = self._simulated(added)
        inputs, weights = None, None
        following, preceding = self._sent(stage)
        if halves.backward is not None:
            inputs, weights = map(self._seconds_of, halves.parts)
            scale = backward / (inputs + weights) if inputs + weights else 0.0
            inputs, weights = inputs * scale, weights * scale + adding
        return replace(
            held,
            forward=forward,
            backward=backward + adding,
            backward_input=inputs,
            backward_weight=weights,
            send_output=message_seconds(following, self.whole, self.cluster),
            send_gradient=message_seconds(preceding, self.whole, self.cluster),
        )

    def _sent(self, stage: StageProgram) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """What a microbatch sends to the next stage, and to the previous one."""
        stages, number = self.program.stages, stage.number
        following = stages[number + 1].received if number + 1 < len(stages) else []
        return following, stages[number - 1].returned if number else []

    def _received(self, stage: StageProgram, tensors: Sequence[torch.Tensor], step: int) -> int:
        """Bytes that a microbatch receives from the stage that is ``step`` away, if that is on another rank."""
        pipeline = self.program.plan.pipeline
        assert pipeline is not None
        if not tensors or pipeline.rank_of(stage.number + step) == pipeline.rank_of(stage.number):
            return 0
        return sum(tensor.nbytes for tensor in tensors)

    def _reducing(self, stage: StageProgram) -> int:
        """Bytes needed at the end of a step beside the gradients: to reduce them, or one's copy in another layout."""
        if stage.reduce is not None:
            own = sum(node.meta["val"].nbytes for node in ir.placeholders(stage.reduce).values())
            return self._profile(stage.reduce).peak_bytes - own
        if stage.kept.backward is None:
            return 0
        parameters = ir.placeholders(stage.kept.forward)
        pairs = [
            (parameters[ir.Parameter(fqn)].meta["val"], node.meta["val"])
            for fqn, node in gradients_of(ir.outputs(stage.kept.backward)).items()
            if ir.Parameter(fqn) in parameters
        ]
        return max((value.nbytes for local, value in pairs if value.stride() != local.stride()), default=0)

    def _rows(self, graphs: Mapping[str, fx.GraphModule], memory: MemoryProfile) -> tuple[Row, ...]:
        return tuple(rows_of(graphs, memory, Prices(self.cluster, self.program.plan.mesh), self.fused))

    def _seconds_of(self, graph: fx.GraphModule) -> float:
        return self._simulated(self._rows({"graph": graph}, self._profile(graph)))

    def _profile(self, graph: fx.GraphModule) -> MemoryProfile:
        device = self.cluster.device
        return profile_memory(graph, device.allocation, workspaces=device.is_cpu, gloo=device.is_cpu)

    def _simulated(self, rows: Sequence[Row]) -> float:
        return timeline_of(rows, self.cluster, self.cluster.device.call).seconds

    def _working(
        self, stage: StageProgram, halves: Halves, live: Mapping[str, Sequence[int]], saved: int, gradients: int
    ) -> tuple[dict[str, int], dict[str, int]]:
        """Peak bytes of each kind of action, without what always stays and what its own microbatch saved before; and
        of backward that adds its gradients to those of so many bytes that are there, without those.

        The last messages received are included, which the schedule holds until the next ones.
        """
        returned = sum(tensor.nbytes for tensor in stage.returned)
        peaks = {"F": max(live["forward"]) + returned + _written(stage), "B": 0, "I": 0, "W": 0}
        if halves.backward is None:
            return peaks, {"B": 0, "W": 0}
        forwarded, (inputs, weights) = _unsaved_messages(halves.forward), halves.parts
        before = {
            "B": saved,
            "I": _given(halves, inputs, ir.Saved),
            "W": _given(halves, weights, (ir.Saved, ir.Returned)),
        }
        most = {"B": max(live["backward"]), "I": self._most(halves, inputs), "W": self._most(halves, weights)}
        peaks |= {kind: most[kind] - before[kind] + forwarded for kind in most}
        adding = {
            kind: self._most(halves, adding_to_earlier(part)) - before[kind] - gradients + forwarded
            for kind, part in {"B": halves.backward, "W": weights}.items()
        }
        return peaks, adding

    def _most(self, halves: Halves, part: fx.GraphModule) -> int:
        """The most bytes that are live in a graph after forward, but for kinds that no microbatch adds to."""
        device = self.cluster.device
        memory = profile_step(halves.forward, part, device.allocation, workspaces=device.is_cpu, gloo=device.is_cpu)
        return max(_live(memory)["backward"])


def _written(stage: StageProgram) -> int:
    """Bytes of the buffers that a microbatch would write."""
    written = (value for role, value in ir.outputs(stage.kept.forward) if isinstance(role, ir.Mutation))
    return _nbytes(value for value in written if isinstance(value, fx.Node))


def _unsaved_messages(forward: fx.GraphModule) -> int:
    """Bytes that a stage receives for its forward and does not save for backward."""
    held = storages_of(forward)
    saved = [held.get(value, ()) for role, value in ir.outputs(forward) if isinstance(role, ir.Saved)]
    given = [held[node] for role, node in ir.placeholders(forward).items() if isinstance(role, ir.Forwarded)]
    return sum(storage.nbytes for storage in {*chain(*given)} - {*chain(*saved)})


def _live(memory: MemoryProfile) -> dict[str, list[int]]:
    """Live bytes at each node of forward and of backward, without the kinds of memory that no microbatch adds to."""
    added = [line for kind, line in memory.compositions.items() if kind not in _STAYS]
    live = defaultdict(list)
    for i, (half, _) in enumerate(memory.nodes):
        live[half].append(sum(line[i] for line in added))
    return live


def _given(halves: Halves, part: fx.GraphModule, kinds: Any) -> int:
    """Bytes that one of the two parts of a split backward is given in inputs of these kinds, of those that are freed
    after their last use."""
    held = storages_of(halves.forward)
    stay = {
        storage
        for role, node in ir.placeholders(halves.forward).items()
        if isinstance(role, (ir.Parameter, ir.Buffer, ir.Input, ir.Gathered))
        for storage in held[node]
    }
    lasting = {role for role, value in ir.outputs(halves.forward) if stay & {*held.get(value, ())}}
    values = {
        role: node.meta["val"]
        for role, node in ir.placeholders(part).items()
        if isinstance(role, kinds) and role not in lasting and not ON_HOST.get(node)
    }
    # By the graphs that give them: values of equal layers may be one fake tensor.
    memory: dict[Any, Any] = dict(_memory(halves.parts[0])) | dict(_memory(halves.forward))
    sizes = {
        memory.get(role, role): value.untyped_storage().nbytes()
        for role, value in values.items()
        if isinstance(value, torch.Tensor)
    }
    return sum(sizes.values())


def _memory(gm: fx.GraphModule) -> Iterator[tuple[ir.Role, Storage]]:
    """The storage of each result of a graph that is one tensor."""
    held = storages_of(gm)
    for role, value in ir.outputs(gm):
        storages = held[value] if isinstance(value, fx.Node) else []
        if role is not None and len(storages) == 1:
            yield role, storages[0]


def _gradients(graph: fx.GraphModule | None) -> dict[str, int]:
    """Bytes of the gradients that are results of a graph, by parameter."""
    found = {} if graph is None else gradients_of(ir.outputs(graph))
    return {fqn: node.meta["val"].nbytes for fqn, node in found.items()}


def _nbytes(nodes: Iterable[fx.Node]) -> int:
    return sum(node.meta["val"].nbytes for node in nodes)


def message_seconds(tensors: Iterable[torch.Tensor], plan: Plan, cluster: Cluster) -> float:
    """Seconds to send ``tensors`` to the previous or next stage; 0 if there are none."""
    assert plan.pipeline is not None
    nbytes = sum(tensor.nbytes for tensor in tensors)
    return seconds_between(cluster.group_of(plan.whole_mesh, plan.pipeline.axis), nbytes, cluster) if nbytes else 0.0


def seconds_between(stages: Group, nbytes: int, cluster: Cluster) -> float:
    """Seconds to send so many bytes from one of the ranks of ``stages`` to the next, which waits for them."""
    return collective_seconds("send", nbytes, nbytes, replace(stages, ranks=2), cluster.efficiency) + cluster.sync
