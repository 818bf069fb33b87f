"""Ways to make a plan fit that it leaves open, and the words for what each comes to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from torch import fx

from shardgraph.passes.chunking.chunk_loss import chunks_of, scores_of
from shardgraph.plans.offload_plan import NOTHING, Offload
from shardgraph.plans.plan import Plan
from shardgraph.sizes import format_bytes, format_seconds

OFFLOADS = ("activations", "parameters", "all")
"""What may be in host memory."""


@dataclass(frozen=True)
class Way:
    """A change, in words, with the ``memory`` in bytes and the ``seconds`` that it comes to."""

    what: str
    memory: int
    seconds: float

    def fits(self, budget: int) -> bool:
        """Whether it is within ``budget`` bytes."""
        return self.memory <= budget


def options_left(plan: Plan, gm: fx.GraphModule | None = None) -> Iterator[tuple[str, Plan]]:
    """Options that take less memory and that ``plan`` leaves open, in words, with the plan that has each.

    With ``gm``, the captured graph, chunks of its loss are among them if it has large scores.
    """
    for nbytes in chunks_of(scores_of(gm)) if gm is not None and plan.loss_chunk is None else ():
        yield f"loss_chunk='{nbytes >> 20}MiB'", replace(plan, loss_chunk=nbytes)
    if plan.offload == NOTHING and plan.pipeline is None:
        for name in OFFLOADS:
            yield f"offload={name!r}", replace(plan, offload=Offload.of(name))


def lines_of(ways: Iterable[Way], budget: int, step: str) -> Iterator[str]:
    """A line for each, those within ``budget`` bytes first, and of these the fastest; ``step`` is what takes the
    seconds."""
    for way in sorted(ways, key=lambda way: (not way.fits(budget), way.seconds)):
        over = "" if way.fits(budget) else ", which is still too much"
        yield f"{way.what}: {format_bytes(way.memory)}, {format_seconds(way.seconds)} {step}{over}"
