"""``plan="auto"``: the layout of ranks, recomputation and microbatches with the least predicted time per sample.

The outer storey estimates every layout in closed form (:mod:`.estimate`) from the costs of the model's layers
(:mod:`.layer_costs`); the inner one is the placement of operators by an integer program and, for models that are
captured whole, the recomputation of operations by another. The layouts with the best estimates are priced exactly, as
``analyze`` does, in their order, until the next one is estimated to be slower than the fastest that fits by more than
estimates have been wrong. So what is returned was priced exactly.

Nothing here grows with the number of devices, or of layers: a few layers are captured, and never a whole deep model.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from shardgraph.capture.capture import own_loss
from shardgraph.errors import CaptureError, PlanError
from shardgraph.plans.plan import Plan
from shardgraph.search.batches import Batches
from shardgraph.search.buckets import bucket_bytes
from shardgraph.search.depths import Depths
from shardgraph.search.estimate import stage_layers
from shardgraph.search.estimates import Estimated, Estimates
from shardgraph.search.exact import Priced, cheapest, price
from shardgraph.search.layouts import Layout
from shardgraph.search.source import Source
from shardgraph.search.what_if import what_if
from shardgraph.sizes import format_seconds

_DOUBT = 1.03
"""How far estimates of seconds have been from exact prices: layouts that are estimated at more than this times the best
price are not priced. ``benchmarks/search.py`` prints the ratios."""

_MEMORY_DOUBT = 1.25
"""Likewise of memory: estimates were at most so much above the exact peaks."""

_FINALISTS = 3
"""Layouts that are priced exactly at most if one of them fits, beside the plain ones of a small model."""

_TRIES = 12
"""Layouts that are priced exactly before those with the least memory are, if none of them fits."""


@dataclass(frozen=True)
class Found:
    """The answer of a search: exactly priced plans, those that fit first, and of these the fastest.

    ``estimated`` is the number of layouts with an estimate. ``remarks`` are what was not searched and why, how far
    estimates were from exact prices, and what other devices would do.
    """

    priced: Sequence[Priced]
    estimated: int
    remarks: Sequence[str]


def search(
    source: Source,
    batches: Batches,
    budget: int,
    *,
    pipelines: bool,
    own_batches: bool = False,
    limit: float | None = None,
    show: Callable[[str], None] = lambda stage: None,
) -> Found:
    """Search all layouts of the question's ranks.

    ``budget`` are the bytes that a rank may use. With ``pipelines``, layouts may have stages. If ``own_batches``, ranks
    share a batch only where nothing else fits. After ``limit`` seconds no more layouts are priced. ``show`` is called
    with the name of each step as it begins.

    Raises:
        CaptureError: the model cannot be traced into one graph.
    """
    deadline = math.inf if limit is None else time.monotonic() + limit
    stack = source.stack_of_equal_layers
    if stack is not None:
        source = replace(source, depths=Depths(source.question.model, stack))
    show("what a layer costs")
    question = source.question
    estimates = Estimates(source, budget, pipelines, own_batches)
    ranks, machine = question.plan.world_size, question.machine
    estimated = estimates.all(ranks, machine, batches)
    show("the best layouts")
    finals = Finals(source, estimates, budget, deadline)
    finals.price_best(estimated)
    remarks = [*estimates.remarks, *finals.remarks, *finals.compared(estimated)]
    if finals.cut:
        remarks.append(f"the limit of {format_seconds(limit or 0.0)} ended the search: other layouts may be faster")
    else:
        remarks += what_if(estimates, estimated, budget, machine, batches)
    return Found(finals.ranked(), len(estimated), remarks)


class Finals:
    """The exact prices of the layouts with the best estimates."""

    def __init__(self, source: Source, estimates: Estimates, budget: int, deadline: float) -> None:
        self._source, self._estimates, self._budget = source, estimates, budget
        self._question, self._machine = source.question, source.question.machine
        self._deep = source.depths is not None
        self._deadline = deadline
        self._priced: dict[Layout, Priced | None] = {}
        self._refined: list[Priced] = []
        self.remarks: dict[str, None] = {}
        self.cut = False

    def price_best(self, estimated: Sequence[Estimated]) -> None:
        """Price the layouts with the best estimates."""
        if not self._deep:  # few operations, of which estimates know less, and which are priced in no time
            for layout, _ in estimated:
                if layout.stages == layout.tp == 1 and layout.microbatches == 1:
                    self._price(layout)
        fitting = [pair for pair in estimated if pair[1].memory <= self._budget * _MEMORY_DOUBT]
        for count, (layout, guess) in enumerate(fitting):
            if (best := self._best) is not None:
                slower = guess.seconds / layout.samples > best.per_sample * _DOUBT
                if self._late() or slower or count >= _FINALISTS:
                    break
            elif count >= _TRIES:
                break
            self._price(layout)
        if self._best is None and fitting and not any(self._priced.values()):
            self._price(fitting[0][0], whole=True)
        if self._best is None:  # for the message, what takes least
            for layout, _ in sorted(estimated, key=lambda pair: pair[1].memory)[:2]:
                self._price(layout, whole=True)
        elif self._deep and not self.cut:
            self._refine(self._best)

    def price_all(self, layouts: Iterable[Layout]) -> None:
        """Price these layouts, as far as the time allows."""
        for layout in layouts:
            if self._late():
                break
            self._price(layout)

    def compared(self, estimated: Sequence[Estimated]) -> Iterator[str]:
        """How far estimates were from exact prices, and the best estimate of what was not priced."""
        guesses = {layout: guess.seconds / layout.samples for layout, guess in estimated}
        ratios = [guesses[each] / priced.per_sample for each, priced in self._priced.items() if priced is not None]
        if ratios:
            yield f"estimates were {min(ratios):.3f} to {max(ratios):.3f} of the exact prices"
        left = [guess for layout, guess in guesses.items() if layout not in self._priced]
        if left:
            yield (
                f"{len(left)} layouts were not priced exactly: the best of them is estimated at "
                f"{format_seconds(min(left))} per sample, if it fits"
            )

    def _price(self, layout: Layout, whole: bool = False) -> None:
        if self._priced.get(layout) is not None or (layout in self._priced and not whole):
            return
        try:
            asked = self._source_of(layout), self._plan(layout), self._budget, layout.accumulated
            self._priced[layout] = price(*asked, whole=whole) if self._deep else cheapest(*asked)
        except (PlanError, CaptureError) as error:
            self._priced[layout] = None
            self.remarks[f"{layout.name} on {dict(layout.mesh)}: {error}"] = None

    def _source_of(self, layout: Layout) -> Source:
        """The source of the layout's batch, whose call has the loss if stages need it."""
        call = self._source.call
        if layout.stages > 1 and call.loss_fn is None:
            call = replace(call, loss_fn=own_loss)
        batch = layout.batch * (layout.microbatches if layout.stages > 1 else 1)
        if batch != call.batch:
            call = call.resized(batch, call.sequence)
        return replace(self._source, question=replace(self._question, call=call))

    def _plan(self, layout: Layout) -> Plan:
        balance: tuple[int, ...] = ()
        if layout.stages > 1 and self._deep:
            balance = stage_layers(self._estimates.costs(layout), layout.stages * layout.chunks)
        plan = self._question.with_options(layout.plan(balance=balance))
        return replace(plan, recompute=layout.recompute)

    def _refine(self, best: Priced) -> None:
        """Price the best plan with collectives merged to the size that the cluster asks for."""
        layout = next(layout for layout, priced in self._priced.items() if priced is best)
        if (size := bucket_bytes(best.plan, self._machine)) != best.plan.bucket:
            plan = replace(self._plan(layout), bucket=size)
            with suppress(PlanError):
                source = self._source_of(layout)
                self._refined.append(price(source, plan, self._budget, layout.accumulated, whole=False))

    def _late(self) -> bool:
        self.cut = self.cut or time.monotonic() > self._deadline
        return self.cut

    @property
    def _best(self) -> Priced | None:
        fitting = (priced for priced in self._priced.values() if priced is not None and priced.memory <= self._budget)
        return min(fitting, key=lambda priced: priced.rank(self._budget), default=None)

    def ranked(self) -> list[Priced]:
        """What was priced: the fastest that fit, then the smallest."""
        every = [priced for priced in self._priced.values() if priced is not None] + self._refined
        return sorted(every, key=lambda each: each.rank(self._budget))
