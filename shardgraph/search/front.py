"""The Pareto front of a job: the plans that no other one beats in devices, memory and time together."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from shardgraph.errors import PlanError
from shardgraph.garbage import collected_later
from shardgraph.plans.candidate import Candidate
from shardgraph.search.auto import Finals
from shardgraph.search.batches import Batches
from shardgraph.search.estimates import Estimated, Estimates
from shardgraph.search.layouts import Layout
from shardgraph.search.limit import Limit
from shardgraph.search.machine import with_devices
from shardgraph.search.source import Source
from shardgraph.sizes import aligned, format_bytes, format_seconds

_PRICED = 5
"""Layouts that are priced exactly for each number of devices, beside those that a search for the fastest prices."""


@dataclass(frozen=True)
class Front:
    """Plans of one job on several numbers of devices, priced exactly; see :func:`shardgraph.front`.

    ``considered`` are all that were priced, ``budget`` the bytes that a rank may use and ``cluster`` the name of what
    they were priced on. ``remarks`` are what was left out, and why.
    """

    considered: tuple[Candidate, ...]
    budget: int
    cluster: str
    remarks: tuple[str, ...] = ()

    @property
    def points(self) -> tuple[Candidate, ...]:
        """The plans that no other one beats: no fewer devices, no less memory and no less time per sample. By devices,
        then the fastest first; ``.plan`` of each runs."""
        kept = [each for each in self.considered if not any(_beats(other, each) for other in self.considered)]
        return tuple(sorted(kept, key=lambda each: (each.devices, each.per_sample)))

    def __str__(self) -> str:
        rows = [("devices", "plan", "mesh", "microbatches", "recomputed", "memory", "step", "sample", "device time")]
        for each in self.points:
            rows.append(
                (
                    str(each.devices),
                    each.name,
                    " x ".join(f"{axis}={size}" for axis, size in each.mesh) or "one process",
                    f"{each.microbatches}{' reduced once' if each.reduces_once else ''}",
                    each.recompute,
                    format_bytes(each.memory),
                    format_seconds(each.seconds),
                    format_seconds(each.per_sample),
                    format_seconds(each.devices * each.per_sample) + ("" if each.fits else "  too large"),
                )
            )
        count = f"{len(rows) - 1} of the {len(self.considered)} plans that were priced"
        title = f"on {self.cluster}, {format_bytes(self.budget)} for each rank: {count} are beaten by no other"
        return "\n".join([title, *(f"  {line}" for line in aligned(rows)), *(f"  {each}" for each in self.remarks)])


def _beats(one: Candidate, other: Candidate) -> bool:
    """Whether one is better in something, and worse in nothing; of equals the first in order stays."""
    own, others = ((each.devices, each.memory, each.per_sample) for each in (one, other))
    return own != others and all(mine <= theirs for mine, theirs in zip(own, others, strict=True))


@collected_later()
def front(
    source: Source,
    counts: Sequence[int],
    batches: Batches,
    *,
    pipelines: bool,
    limit: float | None = None,
    show: Callable[[str], None] = lambda stage: None,
) -> Front:
    """The front of the job of ``source`` on each of these numbers of devices; other arguments as :func:`.auto.search`.

    Costs of layers are found once for all of them. For each number of devices the fastest plan is searched as by
    :func:`.auto.search`, and a few of the layouts that no other estimate beats are priced, down to the smallest.

    Raises:
        CaptureError: the model cannot be traced into one graph.
        PlanError: nothing could be priced; the message says why.
    """
    within = Limit(limit)
    question, source = source.question, source.of_few_layers
    show("what a layer costs")
    estimates = Estimates(source, question.budget, pipelines, limit=within)
    found: list[Candidate] = []
    remarks: dict[str, None] = {}
    for ranks in counts:
        show(f"{ranks} devices")
        machine = with_devices(question.machine, ranks)
        machine.check_mesh((("dp", ranks),))
        estimated = estimates.all(ranks, machine, batches)
        here = replace(source, question=replace(question, cluster=machine))
        finals = Finals(here, estimates, question.budget, within)
        finals.price_best(estimated)
        finals.finish(estimated)
        finals.price_all(_spread(estimated))
        priced = finals.ranked()
        if batches.total is not None:
            priced = [each.of_batch(batches.total) for each in priced]
        found += [each.candidate(question.budget, full=True) for each in priced]
        remarks |= {
            f"on {ranks} device{'s' * (ranks > 1)}: {remark}": None for remark in (*estimates.remarks, *finals.remarks)
        }
        estimates.remarks.clear()
        if within.cut:
            remarks[f"the limit of {format_seconds(limit or 0.0)} ended the search at {ranks} devices"] = None
            break
    if not found:
        raise PlanError("".join(["no plan could be priced:", *(f"\n  {remark}" for remark in remarks)]))
    return Front(tuple(found), question.budget, question.machine.name, tuple(remarks))


def _spread(estimated: Sequence[Estimated]) -> list[Layout]:
    """A few of the layouts that no other estimate beats in memory and time, evenly from the fastest to the smallest."""
    optimal: list[Layout] = []
    least = math.inf
    for layout, guess in estimated:  # the fastest first
        if guess.memory < least:
            optimal.append(layout)
            least = guess.memory
    if len(optimal) <= _PRICED:
        return optimal
    places = {round(i * (len(optimal) - 1) / (_PRICED - 1)) for i in range(_PRICED)}
    return [optimal[place] for place in sorted(places)]
