"""How the samples of a step are divided: over data ranks, calls of each, and a pipeline's microbatches."""

from __future__ import annotations

from dataclasses import dataclass

from shardgraph.errors import expect
from shardgraph.sizes import is_whole

REDUCED_IN = ("each", "last")
"""The calls of a step that reduce gradients."""


@dataclass(frozen=True)
class Batch:
    """The global batch that a :class:`shardgraph.Plan` was chosen for.

    ``samples``
        Samples of one step, over all ranks.
    ``calls``
        Calls of a rank in one step, whose gradients are added up before the optimizer's step.
    ``reduce``
        Which of the calls reduce gradients over data ranks: ``"each"``; or ``"last"``, the others being under
        ``no_sync()``, so that less is sent and each rank holds whole gradients between them.

    Raises:
        PlanError: a field has a value that is not allowed.
    """

    samples: int
    calls: int = 1
    reduce: str = "each"

    def __post_init__(self) -> None:
        expect(is_whole(self.samples, 1), "batch.samples", self.samples, "a whole number from 1")
        expect(is_whole(self.calls, 1), "batch.calls", self.calls, "a whole number from 1")
        known = isinstance(self.reduce, str) and self.reduce in REDUCED_IN
        expect(known, "batch.reduce", self.reduce, " or ".join(map(repr, REDUCED_IN)))

    @property
    def once(self) -> bool:
        """Whether calls before the last keep their gradients."""
        return self.calls > 1 and self.reduce == "last"


def divided(batch: Batch, data_ranks: int, microbatches: int) -> str:
    """``"128 samples a step: 8 data ranks x 4 calls, whose gradients are added up, x 4 samples"``."""
    per_call = batch.samples // data_ranks // batch.calls
    factors = [f"{data_ranks} data rank{'s' * (data_ranks > 1)}"]
    if batch.calls > 1:
        reduced = " and reduced in the last" if batch.once else ""
        factors.append(f"{batch.calls} calls, whose gradients are added up{reduced},")
    if microbatches > 1:
        factors.append(f"{microbatches} microbatches")
    even = per_call % microbatches == 0
    factors.append(f"{per_call // microbatches if even else f'{per_call / microbatches:.1f}'} samples")
    return f"{batch.samples} samples a step: {' x '.join(factors)}"
