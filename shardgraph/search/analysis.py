"""From a question to the analysis of its answer, of a few of the model's equal layers where that is enough."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from shardgraph.errors import CaptureError
from shardgraph.report.analysis import Analysis, analyze_program
from shardgraph.report.folding import SHALLOW, NotPeriodicError, Stack, extend, shortened
from shardgraph.search.source import Source
from shardgraph.search.symbolic import Symbolic, symbolic


def analyze_source(source: Source) -> Analysis:
    """The analysis of one rank's step under the plan that is decided for it."""
    stack = source.stack
    if stack is not None:
        try:
            return _folded(source, stack)
        except (NotPeriodicError, CaptureError):
            pass  # layers that are counted, or indexed by number, do not fold
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
    """The analysis of all layers of a stack from those of a few.

    Raises:
        NotPeriodicError, CaptureError: that cannot be.
    """
    shallow = []
    for layers in SHALLOW:
        with shortened(source.question.model, stack, layers):
            shallow.append(_whole(source))
    rows = tuple(extend([each.rows for each in shallow], stack.layers))
    return replace(shallow[0], plan=source.plan, rows=rows, other_sizes=SizesOf(source))


@dataclass(frozen=True)
class SizesOf:
    """Other sizes of the call that an analysis is of."""

    source: Source

    def symbolic(self) -> Symbolic:
        """The costs as sympy expressions.

        Raises:
            NotSizedError: the model does other things at other sizes.
        """
        return self._symbolic

    @cached_property
    def _symbolic(self) -> Symbolic:
        return symbolic(self.source)

    def largest(self, size: str, budget: int) -> int:
        """The largest batch or sequence whose peak is within ``budget`` bytes; raises when not even 1 is."""
        found = self.symbolic().largest(size, budget)
        sizes = {"batch": self.source.call.batch, "sequence": self.source.call.sequence}

        def fits(value: int) -> bool:
            return analyze_source(self.source.resized(**(sizes | {size: value}))).peak_memory <= budget

        # The allocator rounds every tensor up, and a capacity may be a rounded part of a sequence: no expression
        # knows. What it gives is near, so less is tried in steps that grow.
        step = 1
        while found > 1 and not fits(found):
            found, step = max(1, found - step), 2 * step
        low, high = found, found + step // 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low
