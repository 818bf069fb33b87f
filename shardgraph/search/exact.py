"""The exact price of a layout: its plan is lowered, followed in memory and simulated, as ``analyze`` does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from shardgraph.errors import PlanError
from shardgraph.garbage import collect_if_many
from shardgraph.plans.annotations.kinds import recompute
from shardgraph.plans.batch import Batch
from shardgraph.plans.candidate import Candidate
from shardgraph.plans.plan import Plan
from shardgraph.report.analysis import Analysis, analyze_program
from shardgraph.report.folding import is_deep
from shardgraph.report.parts import exposed_over, held_at_peak, recomputed
from shardgraph.report.pipeline import PipelineAnalysis, analyze_pipeline
from shardgraph.search.analysis import SizesOf, analyze_pipeline_source, folded, unfolded
from shardgraph.search.buckets import bucket_bytes, largest_bucket
from shardgraph.search.depths import Depths
from shardgraph.search.limit import UNLIMITED, Limit
from shardgraph.search.recomputation import Recomputations, nearest_to
from shardgraph.search.source import Source
from shardgraph.search.stages import place_stages
from shardgraph.sizes import format_bytes

FEW = 40
"""Layers of a model that is analysed whole, in a few seconds, if its layers are not done alike."""


class UnlikeError(PlanError):
    """A few of a deep model's layers do not tell what a plan costs, since it does not treat all alike."""


@dataclass(frozen=True)
class Priced:
    """A plan and its prediction. ``samples`` are those of a step over all ranks, ``live`` the bytes at the peak by
    kind, ``over`` the exposed seconds by what they are spent on, ``gap`` the part of what is recomputed by which an
    optimum for as few saved bytes may be faster."""

    plan: Plan
    memory: int
    seconds: float
    parts: Mapping[str, float]
    samples: int
    microbatches: int = 1
    live: Mapping[str, int] = field(default_factory=dict)
    over: Mapping[str, float] = field(default_factory=dict)
    gap: float = 0.0

    @property
    def per_sample(self) -> float:
        """Seconds per sample, by which plans are compared."""
        return self.seconds / max(1, self.samples)

    def rank(self, budget: int) -> tuple[bool, float, float]:
        """Sorts what is within ``budget`` bytes first, and of that the fastest; of the rest the smallest."""
        over = self.memory > budget
        return over, self.memory if over else self.per_sample, self.per_sample if over else self.memory

    def of_batch(self, samples: int) -> Priced:
        """The same with a plan that says how a step of so many samples is divided."""
        return replace(self, plan=replace(self.plan, batch=self.plan.batch or Batch(samples)))

    def candidate(self, budget: int, full: bool) -> Candidate:
        """Its line in the plan that is chosen, with the whole plan if ``full``."""
        plan, parts = self.plan, self.parts
        some = any(isinstance(annotation, recompute) for _, annotation in plan.annotations)
        return Candidate(
            plan.name,
            plan.whole_mesh,
            self.memory,
            self.seconds,
            self.memory <= budget,
            max(1, plan.data_size) * self.microbatches,
            self.samples,
            compute=parts["compute"],
            exposed=parts["exposed"],
            bubble=parts["bubble"],
            calls=parts["calls"],
            again=parts["again"],
            over=tuple(self.over.items()),
            recompute=plan.recompute if isinstance(plan.recompute, str) and not some else "some",
            plan=replace(plan, considered=(), note="") if full else None,
        )


def analysed(source: Source, plan: Plan, budget: int) -> Analysis | PipelineAnalysis:
    """The analysis that the price of a plan is from; arguments and errors are those of :func:`price`."""
    _, analysis, _ = _analysed(source, plan, budget, True)
    return analysis


def price(source: Source, plan: Plan, budget: int, *, whole: bool = True) -> Priced:
    """The price of ``plan`` for the call of ``source``, of which a step has as many on each rank as the plan says.

    If the plan's recomputation is ``"budget"``, it is the fastest whose peak is within ``budget`` bytes, else the one
    with the smallest peak. Without ``whole``, deep models that cannot be analysed from a few of their layers are not.

    Raises:
        PlanError: the plan does not fit the model, or what it offloads the host.
    """
    collect_if_many()
    plan, analysis, gap = _analysed(source, plan, budget, whole)
    if isinstance(analysis, Analysis):
        _check_host(analysis)
    parts = {kind: getattr(analysis.time, kind) for kind in ("compute", "optimizer", "exposed", "bubble")}
    seconds = sum(parts.values())
    parts["calls"] = analysis.calls if isinstance(analysis, Analysis) else 0.0
    parts["again"] = recomputed(analysis)
    microbatches = plan.pipeline.parts if plan.pipeline else plan.calls
    live, over = held_at_peak(analysis), exposed_over(analysis)
    return Priced(plan, sum(live.values()), seconds, parts, analysis.samples, microbatches, live, over, gap)


def _check_host(analysis: Analysis) -> None:
    host, used = analysis.cluster.device.host, analysis.host_memory
    if host is not None and used > host.memory and not analysis.cluster.device.is_cpu:
        raise PlanError(
            f"it keeps {format_bytes(used)} in host memory, of which each device has {format_bytes(int(host.memory))}"
        )


def cheapest(source: Source, plan: Plan, budget: int) -> Priced:
    """The best price of ``plan`` with collectives in buckets as the cluster asks for, or without buckets.

    Arguments and errors are those of :func:`price`.
    """
    alone = price(source, replace(plan, bucket=0), budget)
    if not (size := bucket_bytes(plan, source.question.machine, source.question.parameter_bytes)):
        return alone
    if alone.plan.recompute == "none":
        merged = price(source, replace(alone.plan, bucket=size), budget)
    else:  # buckets change what has to be recomputed
        merged = price(source, replace(plan, bucket=size), budget)
    return min(alone, merged, key=lambda each: each.rank(budget))


def in_other_buckets(source: Source, best: Priced, budget: int, limit: Limit = UNLIMITED) -> Iterator[Priced]:
    """Prices of a plan in larger buckets and, if none is better, in smaller ones, as long as they become better."""
    total, machine = source.question.parameter_bytes, source.question.machine
    start, fastest = best.plan.bucket or bucket_bytes(best.plan, machine, total), best
    for factor in (2.0, 0.5):
        size = int(start * factor)
        while 0 < size < 2 * total and size <= largest_bucket(machine) and not limit.over:
            try:
                other = price(source, replace(best.plan, bucket=size), budget)
            except PlanError:
                return
            if other.rank(budget) >= fastest.rank(budget):
                break
            yield other
            fastest, size = other, int(size * factor)
        if fastest is not best:
            return


def _analysed(source: Source, plan: Plan, budget: int, whole: bool) -> tuple[Plan, Analysis | PipelineAnalysis, float]:
    if source.depths is not None and plan.recompute != "budget":
        return *_deep(source, source.depths, plan, whole), 0.0
    question = source.question
    shapes, machine = question.shapes, question.machine
    joint = source.captures.joint(question.settled(plan).captured, plan)
    if plan.pipeline is not None:
        plan = place_stages(joint, plan, shapes, machine)
    recomputations, choice = nearest_to(budget, Recomputations(joint, plan, shapes, machine, question.optimizer))
    program = recomputations.program(choice)
    analyze = analyze_program if plan.pipeline is None else analyze_pipeline
    priced = analyze(program, machine, optimizer=question.optimizer, fused=source.fused)
    return recomputations.chosen(choice), priced, choice.gap


def _deep(source: Source, depths: Depths, plan: Plan, whole: bool) -> tuple[Plan, Analysis | PipelineAnalysis]:
    """A plan with its analysis, from a few equal layers; from all where that is no more work, or they are few.

    Of many layers that are not done alike because a bucket holds several of them, it is the plan without buckets.
    """
    settled = replace(source, question=source.question.settled(plan))
    if plan.pipeline is not None:
        return plan, analyze_pipeline_source(settled)
    stack = depths.stack
    if is_deep(stack) and (analysis := folded(settled)) is not None:
        return plan, analysis
    if stack.layers <= FEW or whole:
        analysis = unfolded(settled.at(depths, stack.units, plan))
        return plan, replace(analysis, plan=plan, other_sizes=SizesOf(settled))
    if plan.bucket:
        return _deep(source, depths, replace(plan, bucket=0), whole)
    raise UnlikeError(
        "not priced: its equal layers are not scheduled alike, which takes an analysis of all of them; "
        "shardgraph.analyze makes one"
    )
