"""What takes the room if no plan fits, and the cheapest ways to make one fit, each of them priced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from shardgraph.capture.capture import own_loss
from shardgraph.errors import ShardGraphError
from shardgraph.plans.batch import Batch
from shardgraph.plans.offload_plan import NOTHING
from shardgraph.plans.plan import Plan
from shardgraph.report.analysis import Analysis
from shardgraph.report.names_at_peak import kinds_at_peak, place_of_peak
from shardgraph.search.exact import Priced, analysed, price
from shardgraph.search.source import Source
from shardgraph.search.ways import Way, lines_of, options_left
from shardgraph.sizes import format_bytes


def advice(source: Source, smallest: Priced, budget: int, larger: Priced | None = None) -> str:
    """Lines about the plan that takes least of all: what is live at its peak, and what would bring it within ``budget``
    bytes, the fastest first. ``larger`` is a plan that fits, for more devices."""
    source, plan = _of_calls(source, smallest.plan), smallest.plan
    changes = [*_options(source, plan), *_smaller_batches(source, plan)]
    ways = []
    if larger is None:
        changes += _twice_the_devices(source, plan)
    else:
        what = f"{larger.plan.world_size} devices, as {described(larger.plan)}"
        ways.append(Way(what, larger.memory, larger.per_sample))
    for what, of, changed in changes:
        with suppress(ShardGraphError):
            priced = price(of, changed, budget)
            ways.append(Way(what, priced.memory, priced.per_sample))
    ways = [way for way in ways if way.memory < smallest.memory]
    lines = *_at_peak(source, plan, smallest, budget), *lines_of(ways, budget, "per sample")
    return "".join(f"\n  {line}" for line in lines)


def _at_peak(source: Source, plan: Plan, smallest: Priced, budget: int) -> Iterator[str]:
    """What is live at the peak, by name where the plan has no stages."""
    analysis = analysed(source, plan, budget)
    if isinstance(analysis, Analysis):
        yield f"at its peak, {place_of_peak(analysis)}:"
        yield from (f"  {line}" for line in kinds_at_peak(smallest.live, analysis, source.question.shapes))
    else:
        largest = sorted(smallest.live.items(), key=lambda kind: -kind[1])
        yield f"at its peak: {', '.join(f'{format_bytes(nbytes)} {kind}' for kind, nbytes in largest[:4])}"


def described(plan: Plan) -> str:
    """The plan's name and mesh, and what of it is in host memory."""
    offloaded = "" if plan.offload == NOTHING else f" with {plan.offload} in host memory"
    return f"{plan.name!r} on {dict(plan.whole_mesh)}{offloaded}"


_Change = tuple[str, Source, Plan]  # in words, and what is priced: a plan for calls of a source


def _options(source: Source, plan: Plan) -> Iterator[_Change]:
    """More that is recomputed, and what the plan leaves open."""
    if isinstance(plan.recompute, str) and plan.recompute not in ("full", "budget"):
        yield "recompute='full'", source, replace(plan, recompute="full")
    for what, changed in options_left(plan, source.graph(plan)):
        if changed.offload == plan.offload or source.question.machine.device.host is not None:
            yield what, source, replace(changed, activations=None)


def _smaller_batches(source: Source, plan: Plan) -> Iterator[_Change]:
    """Twice as many calls of half as many samples."""
    call, calls = source.call, 2 * plan.calls
    if plan.pipeline is None and call.batch > 1 and call.batch % 2 == 0:
        batch = replace(_batch(source, plan), calls=calls)
        what = f"batches of {call.batch // 2}, {'two' if calls == 2 else calls} of them accumulated"
        yield what, source.resized(call.batch // 2, call.sequence), replace(plan, batch=batch)


def _twice_the_devices(source: Source, plan: Plan) -> Iterator[_Change]:
    """The same plan with twice as many ranks along its last axis of data."""
    machine = source.question.machine
    if plan.pipeline is not None or plan.data_size == 1 or machine.inter is None:
        return
    axis, _ = plan.data_mesh[-1]
    mesh = tuple((name, 2 * ranks if name == axis else ranks) for name, ranks in plan.mesh)
    twice = replace(source.question, cluster=replace(machine, nodes=2 * machine.nodes))
    batch = _batch(source, plan)
    changed = replace(plan, mesh=mesh, batch=replace(batch, samples=2 * batch.samples), activations=None)
    yield f"{2 * plan.world_size} devices", replace(source, question=twice), changed


def _batch(source: Source, plan: Plan) -> Batch:
    return plan.batch or Batch(max(1, source.call.batch) * plan.data_size)


def _of_calls(source: Source, plan: Plan) -> Source:
    """The source of the calls of which the plan has several in a step, with the loss if it has stages."""
    samples = plan.samples_per_call
    call = source.call if samples is None else source.call.resized(samples, source.call.sequence)
    if plan.pipeline is not None and call.loss_fn is None:
        call = replace(call, loss_fn=own_loss)
    return replace(source, question=replace(source.question, call=call))
