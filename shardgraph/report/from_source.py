"""The analysis of a model under a plan on a cluster, from a few of its equal layers if that is sufficient."""

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
    """The analysis of a call of a model under a plan on a cluster.

    Raises:
        PlanError: the plan does not fit the model.
    """
    _ = source.parameters  # a plan that does not fit is refused before the long work

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
    """The analysis extrapolated from a few layers of the stack, or of the whole model if it is not periodic."""
    try:
        shallow = [whole(shortened(source.model, stack, layers)) for layers in SHALLOW]
        return replace(shallow[0], rows=tuple(extend([each.rows for each in shallow], stack.layers)))
    except (NotPeriodicError, CaptureError):
        return whole()  # layers that are counted, or indexed by number, do not fold


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
        sizes = {"batch": self.source.batch, "sequence": self.source.sequence}

        def fits(value: int) -> bool:
            return analyze_source(self.source.resized(**(sizes | {size: value}))).peak_memory <= budget

        # The expression ignores that the allocator rounds every tensor up, and that a capacity may be a rounded
        # fraction of a sequence. Its estimate is close, so the search goes down from there in growing steps.
        step = 1
        while estimate > 1 and not fits(estimate):
            estimate, step = max(1, estimate - step), 2 * step
        low, high = estimate, estimate + step // 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low
