"""Recomputation under a memory budget: the fastest candidate whose simulated peak fits.

An integer program finds candidates (:mod:`shardgraph.passes.recompute`) independent of the budget, and the first by
added time that fits is taken. So a smaller budget, which fewer of them fit, never has a larger peak.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import fx

from shardgraph.cost_models.cluster import Cluster
from shardgraph.cost_models.schedules import most_in_flight
from shardgraph.errors import PlanError, ShardGraphError
from shardgraph.garbage import collect_if_many
from shardgraph.ir import JointGraph
from shardgraph.ir.attributes import RECOMPUTE
from shardgraph.passes.analysis.liveness import MemoryProfile
from shardgraph.passes.analysis.names import names_of
from shardgraph.passes.analysis.rows import Prices
from shardgraph.passes.base import run_passes
from shardgraph.passes.chunking.chunk_loss import chunks_of, scores_of
from shardgraph.passes.lowering import WHOLE_PASSES, lower
from shardgraph.passes.placing import place, place_operators
from shardgraph.passes.program import Program
from shardgraph.passes.recompute import checkmate
from shardgraph.passes.recompute.names import rules_for
from shardgraph.passes.recompute.problem import RecomputeProblem, problem_of
from shardgraph.passes.recompute.solve import fewest_bytes, least_seconds
from shardgraph.passes.recompute.values import Values, values_of
from shardgraph.plans.plan import Plan, Recomputation
from shardgraph.report.analysis import Analysis, analyze_program
from shardgraph.report.pipeline import PipelineAnalysis, analyze_pipeline
from shardgraph.report.step import program_memory
from shardgraph.search.ways import Way, lines_of, options_left
from shardgraph.sizes import format_bytes, format_seconds

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


@dataclass(eq=False)
class Recomputations:
    """The candidate recomputations for one plan of a captured model, and the program, peak and time of each.

    With a pipeline the graph is that of one microbatch, and a peak is the largest of all ranks.
    """

    joint: JointGraph
    plan: Plan
    shapes: Mapping[str, torch.Size]
    cluster: Cluster
    optimizer: str = "adamw"
    _peaks: dict[Choice, int] = field(default_factory=dict, init=False)
    _latest: tuple[Choice, Program] | None = field(default=None, init=False)

    @cached_property
    def placed(self) -> Plan:
        """The plan by :func:`with_placements`."""
        return with_placements(self.joint, self.plan, self.shapes)

    @property
    def first(self) -> Choice:
        """The candidate that adds no time: it recomputes nothing, or what the plan sets."""
        return Choice("none" if self.plan.recompute == "budget" else self.plan.recompute, 0.0, 0)

    @cached_property
    def choices(self) -> list[Choice]:
        """The candidates by increasing added time, from :attr:`first` on."""
        if self.plan.recompute != "budget" or not self.joint.differentiable:
            return [self.first]
        gm, context = place(self.joint, replace(self.placed.of_stage, recompute="none"), self.shapes)
        run_passes(gm, WHOLE_PASSES, context)  # marks what is annotated
        values = values_of(gm, self.cluster.device.allocation)
        problem = problem_of(gm, values, Prices(self.cluster, self.plan.mesh))
        seconds, names = problem.seconds_of, names_of(values.makes)

        def choice(again: Collection[fx.Node], gap: float = 0.0) -> Choice:
            added = problem.total(again)
            return Choice(rules_for(again, names) or "none", added, values.dropped(again), gap)

        choices = {choice(again, gap) for again, gap in _ladder(problem, values)}
        # Checkmate's program models a single call, not the microbatches of a pipeline.
        if self.plan.pipeline is None and len(values.makes) <= _TRACTABLE:
            free = {node: s for node, s in seconds.items() if node not in values.once and node not in RECOMPUTE}
            choices |= {choice(again, gap) for again, gap in self._exact(gm, values, free, choice(()))}
        return sorted(choices, key=lambda choice: (choice.rules != "none", choice.seconds, choice.dropped))

    def _exact(
        self, gm: fx.GraphModule, values: Values, seconds: Mapping[fx.Node, float], everything: Choice
    ) -> Iterator[tuple[Collection[fx.Node], float]]:
        """What the exact program recomputes, with its gap, for byte bounds between the peak of saving all and 0."""
        memory = self._memory(everything)
        steps = checkmate.backward_steps(gm, values, self.cluster.device.allocation)
        stays = sum(memory.compositions[kind][0] for kind in memory.compositions if kind in _STATE)
        for level in range(1, _EXACT_LEVELS):
            bound = int((memory.peak_bytes - stays) * (1 - level / _EXACT_LEVELS))
            if (schedule := checkmate.least_seconds(values, steps, seconds, bound)) is not None:
                yield schedule.again, schedule.gap

    def program(self, choice: Choice) -> Program:
        """The program for a candidate."""
        if self._latest is None or self._latest[0] != choice:
            self._latest = None
            collect_if_many()
            self._latest = choice, lower(self.joint, self.chosen(choice), self.shapes)
        return self._latest[1]

    def chosen(self, choice: Choice) -> Plan:
        """The plan with a candidate's rules written into it."""
        return replace(self.placed, recompute=choice.rules)

    def peak(self, choice: Choice) -> int:
        """The peak of live bytes in a step of a candidate's program."""
        if choice not in self._peaks:
            alone = self.plan.pipeline is None and self.plan.calls == 1
            self._peaks[choice] = self._memory(choice).peak_bytes if alone else self._analysis(choice).peak_memory
        return self._peaks[choice]

    def seconds(self, choice: Choice) -> float:
        """The predicted time of a step under a choice."""
        return self._analysis(choice).time.total

    def _memory(self, choice: Choice) -> MemoryProfile:
        device, program = self.cluster.device, self.program(choice)
        on_cpu = device.is_cpu
        return program_memory(program, self.optimizer, granule=device.allocation, workspaces=on_cpu, gloo=on_cpu)

    def _analysis(self, choice: Choice) -> Analysis | PipelineAnalysis:
        analyze = analyze_program if self.plan.pipeline is None else analyze_pipeline
        return analyze(self.program(choice), self.cluster, optimizer=self.optimizer)

    def fastest_within(self, budget: int) -> Choice:
        """The candidate with the least added time whose peak is at most ``budget`` bytes.

        Raises:
            PlanError: none fits; the message has the smallest peak.
        """
        choice = self.nearest(budget)
        if self.peak(choice) > budget:
            raise PlanError(_beyond(self, choice, budget))
        return choice

    def nearest(self, budget: int) -> Choice:
        """The candidate with the least added time whose peak is at most ``budget`` bytes, else the smallest peak."""
        if self.plan.recompute != "budget" or self.peak(self.first) <= budget:
            return self.first  # the others, which take integer programs, are not looked for
        for choice in self.choices:
            if self._least_peak(choice) <= budget and self.peak(choice) <= budget:
                return choice
        best = self.choices[-1]
        for choice in sorted(self.choices, key=lambda each: -each.dropped):
            if self._least_peak(choice) <= self.peak(best):
                best = min(best, choice, key=lambda each: (self.peak(each), each.seconds))
        return best

    def _least_peak(self, choice: Choice) -> int:
        """A lower bound on the peak without simulation: that of saving everything, less the dropped bytes."""
        pipeline = self.plan.pipeline
        in_flight = 1 if pipeline is None else max(most_in_flight(pipeline.order))
        return self.peak(self.first) - in_flight * choice.dropped


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
    # What forward computes last backward reads first: it is there again before anything has been freed, so that to
    # recompute it hardly lowers the peak.
    in_order, last = [node for node in values.makes if node in everything], 1
    while last < len(in_order):
        again = {*in_order[:-last]}
        if counts := least_seconds(problem, values.kept(again)):
            optimum, own = problem.total(problem.operations(counts.of)), problem.total(again)
            yield again, max(counts.gap, 1 - optimum / own if own else 0.0)
        last *= 2


def with_recomputation(candidates: Recomputations, budget: int) -> Plan:
    """The plan of ``candidates`` with a recomputation for which the predicted peak is within ``budget`` bytes.

    A plan with its own ``recompute``, including ``"none"``, is only checked. A loss over a large vocabulary is computed
    in chunks if the plan leaves that open and it is faster or needed to fit. Raises as :meth:`fastest_within`.
    """
    candidates, choice = nearest_to(budget, candidates)
    candidates.fastest_within(budget)
    plan, peak = candidates.chosen(choice), candidates.peak(choice)
    note = f"recomputation for {format_bytes(budget)}: predicted peak {format_bytes(peak)}"
    note += f", time within {choice.gap:.2%} of the least" if choice.gap else ""
    return replace(plan, note=f"{plan.note}; {note}" if plan.note else note)


def _beyond(candidates: Recomputations, nearest: Choice, budget: int) -> str:
    """The message where no candidate is within ``budget``: by how much, and what other options would come to."""
    plan, peak = candidates.plan, candidates.peak(nearest)
    pipelined = "smaller microbatches, Pipeline(checkpoint='always')"
    smaller = "a smaller batch" if plan.pipeline is None else pipelined
    lines = [
        f"no recomputation brings plan {plan.name!r} on {dict(plan.whole_mesh)} within {format_bytes(budget)} per rank:"
        f" the smallest peak is {format_bytes(peak)}, with a predicted step of "
        f"{format_seconds(candidates.seconds(nearest))}. Allow that much, or use more ranks, {smaller}, or a plan that "
        "shards more",
        *(f"  {line}" for line in lines_of(_other_options(candidates, peak), budget, "a step")),
    ]
    return "\n".join(lines)


def _other_options(candidates: Recomputations, least: int) -> Iterator[Way]:
    """Options that the plan leaves open and whose peak is below ``least`` bytes."""
    plan = candidates.plan
    # Another search of what to recompute would take as long again.
    again = ", recompute='full'" if plan.recompute == "budget" else ""
    plan = replace(plan, recompute="full") if again else plan
    for option, other in options_left(plan, candidates.joint.module):
        with suppress(ShardGraphError):  # the host of a described device may be unknown
            tried = replace(candidates, plan=other)
            choice = tried.first
            if (peak := tried.peak(choice)) < least:
                yield Way(f"{option}{again}", peak, tried.seconds(choice))


def nearest_to(budget: int, whole: Recomputations) -> tuple[Recomputations, Choice]:
    """The fastest candidate whose peak is at most ``budget`` bytes, or else the one with the smallest peak.

    If the plan leaves it open, a loss over a large vocabulary is computed in chunks if that is faster, or smaller.
    """
    plan, choice = whole.plan, whole.nearest(budget)
    fits = whole.peak(choice) <= budget
    if plan.recompute != "budget" or plan.loss_chunk is not None or (fits and not choice.seconds):
        return whole, choice
    best = whole, choice
    for nbytes in chunks_of(scores_of(whole.joint.module)):
        chunked = replace(whole, plan=replace(plan, loss_chunk=nbytes))
        other = chunked.nearest(budget)
        if chunked.peak(other) <= budget:  # smaller chunks take longer
            better = not fits or chunked.seconds(other) < whole.seconds(choice)
            return (chunked, other) if better else best
        if not fits and chunked.peak(other) < best[0].peak(best[1]):
            best = chunked, other
    return best


def with_placements(joint: JointGraph, plan: Plan, shapes: Mapping[str, torch.Size]) -> Plan:
    """``plan`` with placements assigned to every parameter and operation, if it fits the model."""
    return replace(place_operators(joint, plan.of_stage, shapes), pipeline=plan.pipeline)
