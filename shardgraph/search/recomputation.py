"""Recomputation under a memory budget: the fastest candidate whose simulated peak fits.

An integer program finds candidates for fewer and fewer saved bytes (:mod:`shardgraph.passes.recompute`), independent of
the budget. The resulting programs are simulated in order of their added time, and the first whose peak is within the
budget is taken. So a smaller budget, which fewer of the same candidates fit, never has a larger peak.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

import torch
from torch import fx

from shardgraph.cost_models.cluster import Cluster
from shardgraph.errors import PlanError
from shardgraph.ir import JointGraph, copy_graph
from shardgraph.ir.attributes import RECOMPUTE
from shardgraph.passes.analysis.names import names_of
from shardgraph.passes.analysis.rows import Prices
from shardgraph.passes.base import Context, run_passes
from shardgraph.passes.chunking.chunk_loss import LOSS_CHUNK, has_scores
from shardgraph.passes.lowering import WHOLE_PASSES, emit, lower
from shardgraph.passes.placing import place, placed_plan
from shardgraph.passes.program import Program
from shardgraph.passes.recompute.checkmate import backward_steps
from shardgraph.passes.recompute.checkmate import least_seconds as least_seconds_of_any
from shardgraph.passes.recompute.names import rules_for
from shardgraph.passes.recompute.problem import RecomputeProblem, problem_of
from shardgraph.passes.recompute.solve import fewest_bytes, least_seconds
from shardgraph.passes.recompute.values import Values, values_of
from shardgraph.plans.plan import Plan, Recomputation
from shardgraph.report.analysis import analyze_program, program_memory
from shardgraph.report.pipeline import PipelineAnalysis, analyze_pipeline
from shardgraph.sizes import format_bytes, format_seconds, parse_bytes

_LEVELS = 24  # byte bounds between saving all that backward reads and as little as possible
_TRACTABLE, _EXACT_LEVELS = 24, 8  # most forward operations for which the exact program is solved too, and its bounds
_STATE = ("parameters", "buffers", "inputs", "optimizer state")


@dataclass(frozen=True)
class Choice:
    """A candidate recomputation: its rules, the ``seconds`` it adds to a step, and the saved bytes that it drops.

    ``gap`` is the fraction of the seconds by which the optimum for as few saved bytes may be faster.
    """

    rules: Recomputation
    seconds: float
    dropped: int
    gap: float = field(default=0.0, compare=False)


class Recomputations:
    """The candidate recomputations for one plan of a captured model, and the program, peak and time of each."""

    def __init__(
        self,
        joint: JointGraph,
        plan: Plan,
        shapes: Mapping[str, torch.Size],
        cluster: Cluster,
        optimizer: str = "adamw",
    ) -> None:
        self.joint, self.plan, self.shapes, self.cluster, self.optimizer = joint, plan, shapes, cluster, optimizer
        self._placed, self._context = place(joint, plan.of_stage, shapes)
        self._peaks: dict[Choice, int] = {}
        self._latest: tuple[Choice, Program] | None = None

    @cached_property
    def choices(self) -> list[Choice]:
        """The candidates by increasing added time; the first recomputes nothing, or what the plan sets."""
        if self.plan.recompute != "budget" or not self.joint.differentiable:
            return [Choice("none" if self.plan.recompute == "budget" else self.plan.recompute, 0.0, 0)]
        gm = copy_graph(self._placed)
        run_passes(gm, WHOLE_PASSES, self._of_its_own("none"))  # marks what is annotated
        values = values_of(gm, self.cluster.device.allocation)
        problem = problem_of(gm, values, Prices(self.cluster, self.plan.mesh))
        seconds = {node: problem.seconds[key] for key, nodes in problem.members.items() for node in nodes}
        names = names_of(values.makes)

        def choice(again: Collection[fx.Node], gap: float = 0.0) -> Choice:
            added = sum(seconds[node] for node in again)
            return Choice(rules_for(again, names) or "none", added, values.dropped(again), gap)

        found = {choice(again, gap) for again, gap in _ladder(problem, values)}
        if len(values.makes) <= _TRACTABLE:
            free = {node: s for node, s in seconds.items() if node not in values.once and node not in RECOMPUTE}
            found |= {choice(again, gap) for again, gap in self._exact(gm, values, free, choice(()))}
        return sorted(found, key=lambda choice: (choice.rules != "none", choice.seconds, choice.dropped))

    def _exact(
        self, gm: fx.GraphModule, values: Values, seconds: Mapping[fx.Node, float], everything: Choice
    ) -> Iterator[tuple[Collection[fx.Node], float]]:
        """What the exact program recomputes, with its gap, for byte bounds between the peak of saving all and 0."""
        memory = program_memory(self.program(everything), self.optimizer, granule=self.cluster.device.allocation)
        steps = backward_steps(gm, values, self.cluster.device.allocation)
        stays = sum(memory.compositions[kind][0] for kind in memory.compositions if kind in _STATE)
        for level in range(1, _EXACT_LEVELS):
            schedule = least_seconds_of_any(
                values, steps, seconds, int((memory.peak_bytes - stays) * (1 - level / _EXACT_LEVELS))
            )
            if schedule is not None:
                yield schedule.again, schedule.gap

    def program(self, choice: Choice) -> Program:
        """The program for a candidate."""
        if self._latest is None or self._latest[0] != choice:
            context = self._of_its_own(choice.rules)
            self._latest = choice, emit(self.joint, self.shapes, copy_graph(self._placed), context)
        return self._latest[1]

    def _of_its_own(self, rules: str | Recomputation) -> Context:
        """A copy of the placed graph's context that passes may change, with these rules in the plan."""
        return self._context.copy(replace(self._context.plan, recompute=rules))

    def peak(self, choice: Choice) -> int:
        """The peak of live bytes in a step of a candidate's program."""
        if choice not in self._peaks:
            memory = program_memory(self.program(choice), self.optimizer, granule=self.cluster.device.allocation)
            self._peaks[choice] = memory.peak_bytes
        return self._peaks[choice]

    def chosen(self, choice: Choice) -> Plan:
        """The plan with a candidate's rules written into it."""
        return replace(
            placed_plan(self.joint, self.plan, self.shapes, self._placed, self._context), recompute=choice.rules
        )

    def seconds(self, choice: Choice) -> float:
        """The predicted time of a step under a choice."""
        return analyze_program(self.program(choice), self.cluster, optimizer=self.optimizer).time.total

    def fastest_within(self, budget: int) -> Choice:
        """The candidate with the least added time whose peak is at most ``budget`` bytes.

        Raises:
            PlanError: none fits; the message has the smallest peak.
        """
        choice = self.nearest(budget)
        if self.peak(choice) <= budget:
            return choice
        raise PlanError(
            f"no recomputation brings plan {self.plan.name!r} on {dict(self.plan.whole_mesh)} within "
            f"{format_bytes(budget)} per rank: the smallest peak is {format_bytes(self.peak(choice))}, with a "
            f"predicted step of {format_seconds(self.seconds(choice))}. Allow that much, or use {self._alternatives}"
        )

    @property
    def _alternatives(self) -> str:
        return "more ranks, a smaller batch, or a plan that shards more"

    def nearest(self, budget: int) -> Choice:
        """The candidate with the least added time whose peak is at most ``budget`` bytes, else the smallest peak."""
        if len(self.choices) == 1:
            return self.choices[0]
        for choice in self.choices:
            if self._least_peak(choice) <= budget and self.peak(choice) <= budget:
                return choice
        return self._smallest()

    def _smallest(self) -> Choice:
        """The candidate with the smallest peak; ties go to the fastest."""
        best = self.choices[-1]
        for choice in sorted(self.choices, key=lambda each: -each.dropped):
            if self._least_peak(choice) <= self.peak(best):
                best = min(best, choice, key=lambda each: (self.peak(each), each.seconds))
        return best

    def _least_peak(self, choice: Choice) -> int:
        """A lower bound on the peak without simulation: that of saving everything, less the dropped bytes."""
        return self.peak(self.choices[0]) - self._kept_at_once * choice.dropped

    @property
    def _kept_at_once(self) -> int:
        """The largest number of calls (microbatches) whose activations are saved at the same time."""
        return 1


class PipelineRecomputations(Recomputations):
    """The same for a pipeline, whose graph is that of one microbatch: the peak is the largest of all ranks."""

    def __init__(
        self,
        joint: JointGraph,
        plan: Plan,
        shapes: Mapping[str, torch.Size],
        cluster: Cluster,
        optimizer: str = "adamw",
    ) -> None:
        super().__init__(joint, plan, shapes, cluster, optimizer)
        self._analyses: dict[Choice, PipelineAnalysis] = {}

    def _exact(self, *_: object) -> Iterator[tuple[Collection[fx.Node], float]]:
        yield from ()  # Checkmate's program models a single call

    def peak(self, choice: Choice) -> int:
        """The peak of live bytes on any rank in a step of a candidate's program."""
        return self._analysis(choice).peak_memory

    def seconds(self, choice: Choice) -> float:
        """The predicted time of a step under a choice."""
        return self._analysis(choice).time.total

    def _analysis(self, choice: Choice) -> PipelineAnalysis:
        if choice not in self._analyses:
            program = lower(self.joint, self.chosen(choice), self.shapes)
            self._analyses[choice] = analyze_pipeline(program, self.cluster, optimizer=self.optimizer)
        return self._analyses[choice]

    @property
    def _alternatives(self) -> str:
        return "more ranks, smaller microbatches, Pipeline(checkpoint='always'), or a plan that shards more"

    @property
    def _kept_at_once(self) -> int:
        assert self.plan.pipeline is not None
        step = {"F": 1, "B": -1, "I": 0, "W": -1}
        return max(max(accumulate(step[a.kind] for a in actions)) for actions in self.plan.pipeline.order)


def _ladder(problem: RecomputeProblem, values: Values) -> Iterator[tuple[set[fx.Node], float]]:
    """Sets of operations to recompute, each with its gap: none, all that saves bytes, and levels in between."""
    fewest = fewest_bytes(problem)
    nothing, everything = problem.operations({}), problem.operations(fewest.of)
    most, least = values.kept(nothing), values.kept(everything)
    yield nothing, 0.0
    yield everything, fewest.gap
    for level in range(1, _LEVELS):
        if counts := least_seconds(problem, most - (most - least) * level / _LEVELS):
            yield problem.operations(counts.of), counts.gap


def with_recomputation(
    joint: JointGraph,
    plan: Plan,
    shapes: Mapping[str, torch.Size],
    cluster: Cluster,
    memory: int | str | None = None,
    optimizer: str = "adamw",
) -> Plan:
    """``plan`` with a recomputation for which the predicted peak of a rank is within ``memory``.

    ``memory`` is bytes or a text such as ``"12GiB"``; with ``"budget"`` the default is the device's memory. A plan with
    its own ``recompute``, including ``"none"``, is only checked against the given memory. A loss over a large
    vocabulary is computed in chunks if the plan leaves that open and it is faster or needed to fit.

    Raises:
        PlanError: no candidate fits; the message has the smallest peak.
    """
    if memory is None and plan.recompute != "budget":
        return plan
    budget = cluster.device.memory if memory is None else parse_bytes(memory)
    found, choice = nearest_to(budget, joint, plan, shapes, cluster, optimizer)
    found.fastest_within(budget)
    note = f"recomputation for {format_bytes(budget)}: predicted peak {format_bytes(found.peak(choice))}"
    note += f", time within {choice.gap:.2%} of the least" if choice.gap else ""
    return replace(found.chosen(choice), note=f"{plan.note}; {note}" if plan.note else note)


def nearest_to(
    budget: int,
    joint: JointGraph,
    plan: Plan,
    shapes: Mapping[str, torch.Size],
    cluster: Cluster,
    optimizer: str = "adamw",
) -> tuple[Recomputations, Choice]:
    """The fastest candidate whose peak is at most ``budget`` bytes, or else the one with the smallest peak.

    If ``plan`` leaves it open, a loss over a large vocabulary is computed in chunks if that is faster, or smaller.
    """
    kind = Recomputations if plan.pipeline is None else PipelineRecomputations
    found = kind(joint, plan, shapes, cluster, optimizer)
    choice = found.nearest(budget)
    fits = found.peak(choice) <= budget
    settled = plan.recompute != "budget" or plan.loss_chunk is not None or (fits and not choice.seconds)
    if settled or not has_scores(joint.module, LOSS_CHUNK):
        return found, choice
    chunked = kind(joint, replace(plan, loss_chunk=LOSS_CHUNK), shapes, cluster, optimizer)
    other = chunked.nearest(budget)
    if chunked.peak(other) > budget:
        return (found, choice) if fits or found.peak(choice) <= chunked.peak(other) else (chunked, other)
    return (found, choice) if fits and found.seconds(choice) <= chunked.seconds(other) else (chunked, other)
