"""From a model, a plan and a cluster to the analysis, of a few of its equal layers where that is enough."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from torch import nn

from shardgraph.errors import CaptureError
from shardgraph.report.analysis import Analysis, analyze_program
from shardgraph.report.folding import SHALLOW, NotPeriodicError, Stack, extend, shortened
from shardgraph.report.source import Source
from shardgraph.report.symbolic import Symbolic, symbolic


def analyze_source(source: Source) -> Analysis:
    """The analysis of a call of a model under a plan on a cluster."""
    _ = source.parameters  # a plan that does not fit is told before the long work

    def whole(model: nn.Module = source.model) -> Analysis:
        return analyze_program(
            replace(source, model=model).program(),
            source.cluster,
            optimizer=source.optimizer,
            fused=source.fused,
            other_sizes=SizesOf(source),
        )

    return whole() if source.stack is None else _folded(source, source.stack, whole)


def _folded(source: Source, stack: Stack, whole: Callable[..., Analysis]) -> Analysis:
    """The analysis of all layers of a stack from those of a few, or of all where that cannot be."""
    try:
        shallow = [whole(shortened(source.model, stack, layers)) for layers in SHALLOW]
        return replace(shallow[0], rows=tuple(extend([each.rows for each in shallow], stack.layers)))
    except (NotPeriodicError, CaptureError):
        return whole()  # layers that are counted, or indexed by number, do not fold


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
        sizes = {"batch": self.source.batch, "sequence": self.source.sequence}

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
