"""What takes the room if no plan fits, and the cheapest ways to make one fit, each of them priced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from shardgraph.errors import ShardGraphError
from shardgraph.plans.plan import Plan
from shardgraph.search.exact import Priced, price
from shardgraph.search.source import Source
from shardgraph.search.ways import Way, lines_of, options_left
from shardgraph.sizes import format_bytes


def advice(source: Source, smallest: Priced, budget: int) -> str:
    """Lines about the plan that takes least of all: what is live at its peak, and what would bring it within ``budget``
    bytes, the fastest first."""
    ways = lines_of(_ways(source, smallest, budget), budget, "per sample")
    return "".join(f"\n  {line}" for line in (f"at its peak: {_kinds(smallest)}", *ways))


def _kinds(priced: Priced) -> str:
    largest = sorted(priced.live.items(), key=lambda kind: -kind[1])
    return ", ".join(f"{format_bytes(nbytes)} {kind}" for kind, nbytes in largest[:4])


def _ways(source: Source, smallest: Priced, budget: int) -> Iterator[Way]:
    """Changes of the plan, of the batch and of the number of devices."""
    plan, machine, calls = replace(smallest.plan, batch=None), source.question.machine, smallest.plan.calls
    if smallest.plan.samples_per_call is not None:
        source = source.resized(smallest.plan.samples_per_call, source.call.sequence)
    call = source.call
    tried: list[tuple[str, Source, Plan, int]] = []
    if machine.device.host is not None:
        tried += [(what, source, replace(changed, activations=None), calls) for what, changed in options_left(plan)]
    if plan.pipeline is None and call.batch > 1 and call.batch % 2 == 0:
        half = replace(source, question=replace(source.question, call=call.resized(call.batch // 2, call.sequence)))
        number = "two" if calls == 1 else f"{2 * calls}"
        tried.append((f"batches of {call.batch // 2}, {number} of them accumulated", half, plan, 2 * calls))
    if plan.pipeline is None and plan.data_size > 1:
        axis, size = plan.data_mesh[-1]
        mesh = tuple((name, 2 * size if name == axis else ranks) for name, ranks in plan.mesh)
        larger = replace(machine, nodes=2 * machine.nodes) if machine.inter else None
        if larger is not None:
            twice = replace(source, question=replace(source.question, cluster=larger))
            tried.append((f"{2 * plan.world_size} devices", twice, replace(plan, mesh=mesh, activations=None), calls))
    for what, of, changed, accumulated in tried:
        with suppress(ShardGraphError):
            priced = price(of, changed, budget, accumulated)
            yield Way(what, priced.memory, priced.per_sample)
