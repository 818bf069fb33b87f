"""Pipelines of many equal layers are analysed from two short ones, whose stages have one layer each and two; of layers
of several kinds in turns, one unit of them each and two.

A stage's seconds and bytes grow by the same amount with every layer. The first stage also has what comes before the
equal layers, and the last what comes after them, so a short pipeline has a first and a last, and one or two between
them if the whole one has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from itertools import accumulate, pairwise
from typing import Any

from shardgraph.capture.stacks import Stack
from shardgraph.cost_models.schedules import StageCost, simulate_schedule
from shardgraph.passes.analysis.rows import Row
from shardgraph.plans.orders import find_schedule
from shardgraph.plans.pipeline_plan import Pipeline
from shardgraph.plans.plan import Plan
from shardgraph.report.folding import mark
from shardgraph.report.pipeline import PipelineAnalysis, StageAnalysis


def units_of_stages(pipeline: Pipeline, stack: Stack) -> tuple[int, ...]:
    """How many units of a stack each stage has; empty if stages begin elsewhere than with one, or one has none."""
    counts = pipeline.balance
    if pipeline.stages:
        beginnings = [name.removeprefix(f"{stack.path}.") for name in pipeline.stages]
        if not all(each.isdecimal() for each in beginnings):
            return ()
        counts = tuple(after - before for before, after in pairwise([0, *map(int, beginnings), stack.layers]))
    if len(counts) < 2 or sum(counts) != stack.layers:
        return ()
    layers = [counts[0] - stack.head, *counts[1:]]
    whole = all(count > 0 and count % stack.period == 0 for count in layers)
    return tuple(count // stack.period for count in layers) if whole else ()


def short(plan: Plan, stack: Stack, units: int) -> tuple[Plan, int]:
    """``plan`` with as few stages as its schedule allows, three if it has as many, each of so many units, and how many
    these are together.

    Schedules for several stages on a rank may not run three on three ranks, but four on two.
    """
    assert plan.pipeline is not None
    few = min(3, plan.pipeline.ranks)
    ranks, stages = (few, few) if find_schedule(plan.pipeline.schedule).most == 1 else (2, 4)
    balance = (stack.up_to(units), *(stages - 1) * [units * stack.period])
    microbatches = plan.pipeline.parts
    pipeline = replace(plan.pipeline, ranks=ranks, balance=balance, stages=(), microbatches=microbatches)
    return replace(plan, pipeline=pipeline), units * stages


def extend_stages(
    one: PipelineAnalysis, two: PipelineAnalysis, stack: Stack, units: Sequence[int], pipeline: Pipeline
) -> PipelineAnalysis:
    """The analysis of ``pipeline``, whose stages have ``units`` of ``stack``, from those of the short plans."""
    beginnings = tuple(stack.unit(before)[0] for before in [*accumulate(units)][:-1])
    pipeline = replace(pipeline, stages=beginnings, balance=())
    last = len(units) - 1
    stages = []
    for number, count in enumerate(units):
        at = 0 if number == 0 else -1 if number == last else 1
        grown = _grown(one.stages[at], two.stages[at], count)
        rank = pipeline.rank_of(number)
        # Messages come from another rank: which stages share one differs from the short pipelines.
        forwarded = number > 0 and pipeline.rank_of(number - 1) != rank
        returned = number < last and pipeline.rank_of(number + 1) != rank
        grown = replace(
            grown,
            number=number,
            rank=rank,
            forwarded=forwarded * max(stage.forwarded for stage in one.stages),
            returned=returned * max(stage.returned for stage in one.stages),
        )
        stages.append(grown)
    schedule = simulate_schedule(pipeline.order, [stage.cost for stage in stages], prefetch=pipeline.prefetch)
    return replace(one, plan=replace(one.plan, pipeline=pipeline), stages=tuple(stages), schedule=schedule)


def _grown(one: StageAnalysis, two: StageAnalysis, units: int) -> StageAnalysis:
    def line(a: Any, b: Any) -> Any:
        if isinstance(a, StageCost):
            return StageCost(**{name: line(getattr(a, name), getattr(b, name)) for name in a.__dataclass_fields__})
        if isinstance(a, dict):
            return {key: line(a.get(key, 0), b.get(key, 0)) for key in a | b}
        return None if a is None else a + (units - 1) * (b - a)

    names = {each.name for each in fields(one)} - {"number", "rank", "rows", "forwarded", "returned"}
    values = {name: line(getattr(one, name), getattr(two, name)) for name in names}
    return replace(one, rows=(*one.rows, *(units - 1) * tuple(_added(one.rows, two.rows))), **values)


def _added(few: Sequence[Row], many: Sequence[Row]) -> Iterator[Row]:
    """The rows that one more unit adds."""
    known = Counter(map(mark, few))
    for row in many:
        known[mark(row)] -= 1
        if known[mark(row)] < 0:
            yield row
