"""Orders a program so that what runs beside the computation is hidden behind it, within the memory that there is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from shardgraph.ir.copies import TO_DEVICE, TO_HOST
from shardgraph.passes.base import Context, Graphs, GraphsPass, of_kind, sibling
from shardgraph.passes.schedule.await_done import await_done
from shardgraph.passes.schedule.behind import compute_before_first, compute_behind
from shardgraph.passes.schedule.lookahead import fill_memory
from shardgraph.passes.schedule.memory import memory_of
from shardgraph.passes.schedule.times import Times
from shardgraph.passes.schedule.transfers import Chain, Lane, copies_of, gathers_of, made_ready, reductions_of, wait_of
from shardgraph.passes.schedule.windows import await_late, start_early


@dataclass(frozen=True)
class Schedule(GraphsPass):
    """Takes forward and backward graphs; reorders each so that collectives and copies run beside the computation.

    List scheduling with the cost model's times under a limit of memory. The computation keeps its order, but for what
    is done behind collectives that would be waited for at once (:mod:`shardgraph.passes.schedule.behind`). Then, first,
    as many transfers are in flight as the plan says (:mod:`shardgraph.passes.schedule.windows`): ``plan.prefetch``
    gathers ahead and reductions behind, and copies in each direction with together the bytes of the largest. The peak
    of live bytes of that order is the limit for what follows: up to twice as many transfers start earlier where there
    is room (:mod:`shardgraph.passes.schedule.lookahead`), and waits move to where they are expected to take no time
    (:mod:`shardgraph.passes.schedule.await_done`).

    The order follows from the graphs and the plan alone, which are the same on all ranks, so they issue the same
    collectives in the same order. If the plan has no ``prefetch``, nothing is reordered.

    Must not change: which nodes there are, and what each computes.
    """

    name = "schedule"
    requires = frozenset({"split"})
    provides = frozenset({"scheduled"})
    excludes = frozenset({"scheduled", "offloaded-activations"})

    def run_on(self, graphs: Graphs, context: Context) -> None:
        depth = context.plan.prefetch
        if not depth:
            return
        times = Times(context.plan)
        for step in _steps(graphs):
            compute_behind(step, times, context)
            for gm in step:
                _fill_windows(gm, depth)
            if not any(gathers_of(gm) or reductions_of(gm) for gm in step):
                continue
            memory = memory_of(step, context)
            for gm in step:
                compute_before_first(gm, times.of(gm), memory)
                fill_memory(gm, memory, depth)
                await_done(gm, memory, times, depth)


def _steps(graphs: Graphs) -> Iterator[list[fx.GraphModule]]:
    """The graphs that keep values for each other: a forward one with its backward, any other by itself."""
    kept_for = {name: sibling(name, "backward") for name in of_kind(graphs, "forward")}
    for name, gm in graphs.items():
        if name not in kept_for.values():
            yield [gm, *(graphs[each] for each in [kept_for.get(name)] if each in graphs)]


def _fill_windows(gm: fx.GraphModule, depth: int) -> None:
    if gathers := gathers_of(gm):
        start_early(Lane.counted(gathers, depth), min([gathers[0], *made_ready(gathers[0])]).prev)
    if loads := sorted(copies_of(gm, TO_DEVICE), key=wait_of):
        inputs = gm.graph.find_nodes(op="placeholder")
        start_early(Lane.weighed(loads), max(inputs, default=next(iter(gm.graph.nodes))))
    chains = reductions_of(gm)
    await_late(gm, chains, Lane.counted((chain.start for chain in chains), depth))
    stores = copies_of(gm, TO_HOST)
    await_late(gm, [Chain(start, ((wait_of(start),),)) for start in stores], Lane.weighed(stores))
