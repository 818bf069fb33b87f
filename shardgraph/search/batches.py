"""The batches with which layouts are compared: of each data rank, or of all together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardgraph.search.layouts import Layout

_MOST = 512  # microbatches of a pipeline


@dataclass(frozen=True)
class Batches:
    """Every data rank has a call of ``each`` samples per step; or a step has ``total`` samples, of all ranks."""

    each: int
    total: int | None = None

    def of(self, layout: Layout) -> Iterator[Layout]:
        """The layout with its microbatches, if there are as many samples as it needs.

        Microbatches have powers of two of samples, or all of a rank's. Without stages, several of them are calls one
        after the other, whose gradients are added up: before they are reduced, which sends less, or after, which may
        hold less.
        """
        samples, rest = (self.each, 0) if self.total is None else divmod(self.total, layout.data_ranks)
        if rest or not samples:
            return
        sizes = {2**i for i in range(samples.bit_length()) if samples % 2**i == 0} | {samples}
        for size in sorted(sizes):
            if self._may_be(layout, samples // size):
                divided = replace(layout, batch=size, microbatches=samples // size)
                reduced = divided.accumulated > 1 and layout.data_ranks > 1
                if not reduced or layout.data != "ddp":  # whose gradients are whole in any case
                    yield divided
                if reduced and not layout.offloads_parameters:  # with which gradients are in host memory
                    yield replace(divided, once=True)

    def _may_be(self, layout: Layout, microbatches: int) -> bool:
        if layout.stages == 1:
            return microbatches == 1 or self.total is not None
        rounds = layout.schedule in ("1f1b", "zbv") or microbatches % layout.stages == 0
        return layout.stages <= microbatches <= _MOST and rounds
