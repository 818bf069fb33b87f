"""Analyses the plan decided for a question, from a few of the model's equal layers if that is sufficient."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from shardgraph.errors import CaptureError
from shardgraph.report.analysis import Analysis, analyze_program
from shardgraph.report.folding import SHALLOW, NotPeriodicError, Stack, extend, shortened
from shardgraph.search.source import Source
from shardgraph.search.symbolic import Symbolic, symbolic


def analyze_source(source: Source) -> Analysis:
    """The analysis of one rank's step under the plan that is decided for it.

    Raises:
        CaptureError, PlanError: as :func:`shardgraph.search.decide.decide`.
    """
    stack = source.stack
    if stack is not None:
        try:
            return _folded(source, stack)
        except (NotPeriodicError, CaptureError):
            pass  # models that count layers or index them by number do not fold
    return _whole(source)


def _whole(source: Source) -> Analysis:
    program, question = source.program(), source.question
    return analyze_program(
        program,
        question.machine,
        optimizer=question.optimizer,
        fused=source.fused,
        other_sizes=SizesOf(source.settled(program.plan)),
    )


def _folded(source: Source, stack: Stack) -> Analysis:
    """The analysis extrapolated from a few layers of the stack.

    Raises:
        NotPeriodicError, CaptureError: the layers are not periodic, or cannot be captured without the others.
    """
    shallow = [_whole(source.of(shortened(source.question.model, stack, layers))) for layers in SHALLOW]
    rows = tuple(extend([each.rows for each in shallow], stack.layers))
    return replace(shallow[0], plan=source.plan, rows=rows, other_sizes=SizesOf(source))


@dataclass(frozen=True)
class SizesOf:
    """Predictions for other sizes of a source's call."""

    source: Source

    def symbolic(self) -> Symbolic:
        """The costs as sympy expressions.

        Raises:
            NotSizedError: the model runs different operations at other sizes.
        """
        return self._symbolic

    @cached_property
    def _symbolic(self) -> Symbolic:
        return symbolic(self.source)

    def largest(self, size: str, budget: int) -> int:
        """The largest ``"batch"`` or ``"sequence"`` whose peak is within ``budget`` bytes.

        Raises:
            NotSizedError: the model runs different operations at other sizes.
            ShardGraphError: not even 1 fits.
        """
        estimate = self.symbolic().largest(size, budget)
        sizes = {"batch": self.source.call.batch, "sequence": self.source.call.sequence}

        def fits(value: int) -> bool:
            return analyze_source(self.source.resized(**(sizes | {size: value}))).peak_memory <= budget

        # The expression ignores the allocator's rounding of every tensor, and that a capacity may be a rounded
        # fraction of a sequence. Its estimate is close, so search down from there in growing steps.
        step = 1
        while estimate > 1 and not fits(estimate):
            estimate, step = max(1, estimate - step), 2 * step
        low, high = estimate, estimate + step // 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low
