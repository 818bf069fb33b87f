"""Pipelines of many equal layers are analysed from short ones, whose stages have one layer each and two; of layers of
several kinds in turns, one unit of them each and two.

A stage's seconds and bytes grow by the same amount with every layer. The first stage also has what comes before the
equal layers, and the last what comes after them, so a short pipeline has a first and a last, and one or two between
them if the whole one has. Where some of a stage's layers are recomputed, one of them and one of the others take the
place of one layer, and one more of each tells what each adds.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from itertools import accumulate, groupby, pairwise
from typing import Any

from shardgraph.capture.stacks import Stack
from shardgraph.cost_models.schedules import StageCost, simulate_schedule
from shardgraph.passes.analysis.rows import Row
from shardgraph.plans.orders import find_schedule
from shardgraph.plans.pipeline_plan import Pipeline
from shardgraph.plans.plan import Plan
from shardgraph.report.folding import mark
from shardgraph.report.pipeline import PipelineAnalysis, StageAnalysis
from shardgraph.report.treatments import Treatment, Treatments

_SHORT = 3
"""Stages of a short pipeline, as most have."""

Unit = tuple[Treatment, ...]
"""The treatments of the layers of a unit."""


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


def stages_of(pipeline: Pipeline, treated: Treatments) -> list[tuple[Unit, ...]]:
    """The units of a stack that each stage of a pipeline has; empty if they are not to be analysed from a few."""
    stack, layers = treated.stack, treated.layers
    units = [layers[at : at + stack.period] for at in range(stack.head, stack.layers, stack.period)]
    ends = [0, *accumulate(units_of_stages(pipeline, stack))]
    stages = [tuple(units[start:end]) for start, end in pairwise(ends)]
    programs = {units for stage in stages for units in (_few(stage), *_one_more(stage))}
    fewer = len(programs) <= 2 or _SHORT * sum(map(len, programs)) < stack.units
    return stages if fewer else []


def short(plan: Plan, treated: Treatments, stage: Sequence[Unit]) -> tuple[Plan, int]:
    """``plan`` with as few stages as its schedule allows, three if it has as many, each with the units of ``stage``,
    and how many these are together.

    Schedules for several stages on a rank may not run three on three ranks, but four on two.
    """
    assert plan.pipeline is not None
    few = min(3, plan.pipeline.ranks)
    ranks, stages = (few, few) if find_schedule(plan.pipeline.schedule).most == 1 else (2, 4)
    units, stack = len(stage), treated.stack
    balance = (stack.up_to(units), *(stages - 1) * [units * stack.period])
    microbatches = plan.pipeline.parts
    pipeline = replace(plan.pipeline, ranks=ranks, balance=balance, stages=(), microbatches=microbatches)
    layers = [*treated.layers[: stack.head], *(layer for _ in range(stages) for unit in stage for layer in unit)]
    return replace(plan, pipeline=pipeline, annotations=treated.annotations(layers)), units * stages


def extend_stages(
    analyse: Callable[[tuple[Unit, ...]], PipelineAnalysis],
    stack: Stack,
    stages: Sequence[tuple[Unit, ...]],
    plan: Plan,
) -> PipelineAnalysis:
    """The analysis of ``plan``, whose ``stages`` have these units of ``stack``; ``analyse`` gives that of a short plan
    all of whose stages have the same units."""
    assert plan.pipeline is not None
    analyse = functools.cache(analyse)
    beginnings = tuple(stack.unit(before)[0] for before in [*accumulate(map(len, stages))][:-1])
    pipeline = replace(plan.pipeline, stages=beginnings, balance=())
    last = len(stages) - 1
    grown_stages = []
    for number, units in enumerate(stages):
        few, at = analyse(_few(units)), 0 if number == 0 else -1 if number == last else 1
        grown = few.stages[at]
        for more, count in _one_more(units).items():
            grown = _grown(grown, few.stages[at], analyse(more).stages[at], count)
        rank = pipeline.rank_of(number)
        # Messages come from another rank: which stages share one differs from the short pipelines.
        forwarded = number > 0 and pipeline.rank_of(number - 1) != rank
        returned = number < last and pipeline.rank_of(number + 1) != rank
        grown = replace(
            grown,
            number=number,
            rank=rank,
            forwarded=forwarded * max(stage.forwarded for stage in few.stages),
            returned=returned * max(stage.returned for stage in few.stages),
        )
        grown_stages.append(grown)
    schedule = simulate_schedule(pipeline.order, [stage.cost for stage in grown_stages], prefetch=pipeline.prefetch)
    whole = replace(few.plan, pipeline=pipeline, annotations=plan.annotations)
    return replace(few, plan=whole, stages=tuple(grown_stages), schedule=schedule)


def _few(stage: Sequence[Unit]) -> tuple[Unit, ...]:
    """One of each of the equal units of a stage that follow each other."""
    return tuple(unit for unit, _ in groupby(stage))


def _one_more(stage: Sequence[Unit]) -> dict[tuple[Unit, ...], int]:
    """The same with two of one of them, and how many more than one the stage has of it, if it has more."""
    few, found = list(_few(stage)), {}
    for place, (unit, equal) in enumerate(groupby(stage)):
        if (count := len(list(equal))) > 1:
            found[*few[:place], unit, *few[place:]] = count - 1
    return found


def _grown(stage: StageAnalysis, one: StageAnalysis, two: StageAnalysis, units: int) -> StageAnalysis:
    """``stage`` with so many units more, of which each adds what ``two`` has more than ``one``."""

    def line(start: Any, a: Any, b: Any) -> Any:
        if isinstance(a, StageCost):
            names = a.__dataclass_fields__
            return StageCost(**{name: line(*(getattr(each, name) for each in (start, a, b))) for name in names})
        if isinstance(a, dict):
            keys = start | a | b
            return {key: line(*(each.get(key, 0) for each in (start, a, b))) for key in keys}
        return None if a is None else start + units * (b - a)

    names = {each.name for each in fields(one)} - {"number", "rank", "rows", "forwarded", "returned"}
    values = {name: line(*(getattr(each, name) for each in (stage, one, two))) for name in names}
    return replace(stage, rows=(*stage.rows, *units * tuple(_added(one.rows, two.rows))), **values)


def _added(few: Sequence[Row], many: Sequence[Row]) -> Iterator[Row]:
    """The rows that one more unit adds."""
    known = Counter(map(mark, few))
    for row in many:
        known[mark(row)] -= 1
        if known[mark(row)] < 0:
            yield row
