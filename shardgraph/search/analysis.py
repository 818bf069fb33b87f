"""Analyses the plan decided for a question, from a few of the model's equal layers if that is sufficient."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

from shardgraph.errors import CaptureError, PlanError
from shardgraph.plans.plan import Plan
from shardgraph.report.analysis import Analysis, analyze_program
from shardgraph.report.folding import NotPeriodicError, check_insertion, extend, merges_layers, numbers_for
from shardgraph.report.pipeline import PipelineAnalysis, analyze_pipeline
from shardgraph.report.pipeline_folding import Unit, extend_stages, short, stages_of
from shardgraph.report.treatments import treatments
from shardgraph.search.source import Source
from shardgraph.search.symbolic import Symbolic, symbolic


def analyze_source(source: Source) -> Analysis:
    """The analysis of one rank's step under the plan that :func:`shardgraph.search.decide.decide` decides for it."""
    return replace(folded(source) or unfolded(source), call=source.call)


def folded(source: Source) -> Analysis | None:
    """The same from a few of the model's equal layers; None if there are not enough, or they are not done alike."""
    if (stack := source.stack) is not None and not merges_layers(source.plan, source.question.model, stack):
        depths = source.depths_of(stack)
        for numbers in numbers_for(stack):
            with suppress(NotPeriodicError, CaptureError):  # models that count layers do not fold
                few = list(_analyses(source.shallow(depths, numbers[1:])))
                check_insertion(few[0].rows, few[1].rows)
                if not depths.repeats(source.call, source.plan, numbers[-1]):  # they were traced one by one
                    few[:0] = _analyses(source.shallow(depths, numbers[:1]))
                whole = _extended(few, numbers[-1] + 1 - len(few), stack.units)
                return replace(whole, plan=source.plan, other_sizes=SizesOf(source))
    return None


def _analyses(sources: Iterable[Source]) -> Iterator[Analysis]:
    """Those of copies of a model with few units of a stack, from few of a further one where that tells of them all."""
    tells = True
    for source in sources:
        analysis = folded(source) if tells else None
        tells = analysis is not None
        yield analysis or unfolded(source)


def _extended(few: Sequence[Analysis], first: int, units: int) -> Analysis:
    """The analysis of so many units of a stack, of those of ``first`` and more of them."""
    whole = replace(few[0], rows=tuple(extend([each.rows for each in few], first, units)))
    earlier = [each.earlier for each in few if each.earlier is not None]
    return replace(whole, earlier=_extended(earlier, first, units)) if earlier else whole


def analyze_pipeline_source(source: Source) -> PipelineAnalysis:
    """The analysis of a pipeline's step, likewise."""
    return replace(_of_pipeline(source), call=source.call)


def _of_pipeline(source: Source) -> PipelineAnalysis:
    plan, stack = source.plan, source.stack_but_for_annotations
    assert plan.pipeline is not None
    treated = treatments(plan, source.question.model, stack) if stack is not None else None
    stages = stages_of(plan.pipeline, treated) if treated is not None else []
    if stack is None or treated is None or not stages:
        return _stages(source, plan)
    depths = source.depths_of(stack)

    def analyse(units: tuple[Unit, ...]) -> PipelineAnalysis:
        shorter, few = short(plan, treated, units)
        return _stages(source.at(depths, few, shorter), plan)

    try:
        return extend_stages(analyse, stack, stages, plan)
    except (PlanError, CaptureError):  # its schedule cannot run fewer stages, or the model does not fold
        return _stages(source, plan)


def _stages(source: Source, whole: Plan) -> PipelineAnalysis:
    machine, optimizer = source.question.machine, source.question.optimizer
    return analyze_pipeline(source.program(), machine, optimizer=optimizer, fused=source.fused, whole=whole)


def unfolded(source: Source) -> Analysis:
    """The same from all of the model's layers."""
    program, question = source.program(), source.question
    sizes = SizesOf(replace(source, question=question.settled(program.plan)))
    return analyze_program(
        program, question.machine, optimizer=question.optimizer, fused=source.fused, other_sizes=sizes
    )


@dataclass(frozen=True)
class SizesOf:
    """Predictions for other sizes of a source's call; see :class:`shardgraph.report.analysis.OtherSizes`."""

    source: Source

    @cached_property
    def symbolic(self) -> Symbolic:
        return symbolic(self.source)

    def largest(self, size: str, budget: int) -> int:
        # By batch alone, since a capacity, say, may be a rounded fraction of the sequence.
        expressions = symbolic(self.source, by_sequence=False) if size == "batch" else self.symbolic
        estimate = expressions.largest(size, budget)
        present = {"batch": self.source.call.batch, "sequence": self.source.call.sequence}

        def peak(value: int) -> int:
            try:
                return analyze_source(self.source.resized(**(present | {size: value}))).peak_memory
            except CaptureError:
                if value <= present[size]:
                    raise
                return sys.maxsize  # beyond what forward itself takes, such as the positions that it has embeddings of

        if peak(estimate) == sys.maxsize:
            return present[size] + bisect_right(range(present[size] + 1, estimate), budget, key=peak)

        # The expression ignores the allocator's rounding of every tensor, and that a capacity may be a rounded
        # fraction of a sequence. Its estimate is close, so search down from there in growing steps.
        step = 1
        while estimate > 1 and peak(estimate) > budget:
            estimate, step = max(1, estimate - step), 2 * step
        return estimate + bisect_right(range(estimate + 1, estimate + step // 2), budget, key=peak)
