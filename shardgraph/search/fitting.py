"""What takes the room if no plan fits, and the cheapest ways to make one fit, each of them priced."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from torch import fx

from shardgraph.capture.capture import own_loss
from shardgraph.errors import ShardGraphError
from shardgraph.mesh import Mesh
from shardgraph.plans.offload_plan import NOTHING
from shardgraph.plans.plan import Plan
from shardgraph.search.depths import PLACED
from shardgraph.search.exact import Priced, price
from shardgraph.search.source import Source
from shardgraph.search.ways import Way, lines_of, options_left
from shardgraph.sizes import format_bytes


def advice(source: Source, smallest: Priced, budget: int, larger: Priced | None = None) -> str:
    """Lines about the plan that takes least of all: what is live at its peak, and what would bring it within ``budget``
    bytes, the fastest first. ``larger`` is a plan that fits, for more devices."""
    ways = [*_options(source, smallest, budget), *_smaller_batches(source, smallest, budget)]
    if larger is None:
        ways += _twice_the_devices(source, smallest, budget)
    else:
        what = f"{larger.plan.world_size} devices, as {described(larger.plan)}"
        ways.append(Way(what, larger.memory, larger.per_sample))
    ways = [way for way in ways if way.memory < smallest.memory]
    lines = f"at its peak: {_kinds(smallest)}", *lines_of(ways, budget, "per sample")
    return "".join(f"\n  {line}" for line in lines)


def _kinds(priced: Priced) -> str:
    largest = sorted(priced.live.items(), key=lambda kind: -kind[1])
    return ", ".join(f"{format_bytes(nbytes)} {kind}" for kind, nbytes in largest[:4])


def described(plan: Plan) -> str:
    """The plan's name and mesh, and what of it is in host memory."""
    offloaded = "" if plan.offload == NOTHING else f" with {plan.offload} in host memory"
    return f"{plan.name!r} on {dict(plan.whole_mesh)}{offloaded}"


def _options(source: Source, smallest: Priced, budget: int) -> Iterator[Way]:
    """Options that the plan leaves open, and less that is held for backward than the call asks for."""
    plan, source = replace(smallest.plan, batch=None), _of_calls(source, smallest)
    if isinstance(plan.recompute, str) and plan.recompute not in ("full", "budget"):
        yield from _priced("recompute='full'", source, replace(plan, recompute="full"), budget, smallest.plan.calls)
    for what, changed in options_left(plan, _graph(source, plan)):
        if changed.offload == plan.offload or source.question.machine.device.host is not None:
            yield from _priced(what, source, replace(changed, activations=None), budget, smallest.plan.calls)


def _smaller_batches(source: Source, smallest: Priced, budget: int) -> Iterator[Way]:
    """Twice as many calls of half as many samples."""
    plan, calls = smallest.plan, smallest.plan.calls
    call = _of_calls(source, smallest).call
    if plan.pipeline is None and call.batch > 1 and call.batch % 2 == 0:
        half = replace(source, question=replace(source.question, call=call.resized(call.batch // 2, call.sequence)))
        number = "two" if calls == 1 else f"{2 * calls}"
        what = f"batches of {call.batch // 2}, {number} of them accumulated"
        yield from _priced(what, half, replace(plan, batch=None), budget, 2 * calls)


def _twice_the_devices(source: Source, smallest: Priced, budget: int) -> Iterator[Way]:
    """The same plan with twice as many ranks along its last axis of data."""
    plan, machine = smallest.plan, source.question.machine
    if plan.pipeline is not None or plan.data_size == 1 or machine.inter is None:
        return
    axis, _ = plan.data_mesh[-1]
    mesh: Mesh = tuple((name, 2 * ranks if name == axis else ranks) for name, ranks in plan.mesh)
    twice = replace(source.question, cluster=replace(machine, nodes=2 * machine.nodes))
    changed = replace(plan, batch=None, mesh=mesh, activations=None)
    source = _of_calls(replace(source, question=twice), smallest)
    yield from _priced(f"{2 * plan.world_size} devices", source, changed, budget, plan.calls)


def _of_calls(source: Source, smallest: Priced) -> Source:
    """The source of the calls of which the plan has several in a step, with the loss if it has stages."""
    samples = smallest.plan.samples_per_call
    call = source.call if samples is None else source.call.resized(samples, source.call.sequence)
    if smallest.plan.pipeline is not None and call.loss_fn is None:
        call = replace(call, loss_fn=own_loss)
    return replace(source, question=replace(source.question, call=call))


def _graph(source: Source, plan: Plan) -> fx.GraphModule | None:
    """The captured graph under a plan, of a few layers if the model is deep; None if it cannot be captured."""
    with suppress(ShardGraphError):
        few = source if source.depths is None else source.at(source.depths, PLACED, plan)
        return few.captures.joint(few.question.captured, plan).module
    return None


def _priced(what: str, source: Source, plan: Plan, budget: int, accumulated: int) -> Sequence[Way]:
    """The change with its price, if it has one."""
    with suppress(ShardGraphError):
        priced = price(source, plan, budget, accumulated)
        return [Way(what, priced.memory, priced.per_sample)]
    return []
