"""Overlaps communication with computation by reordering the graph."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from shardgraph.ir import WAIT, collectives
from shardgraph.ir.attributes import MEMORY_KIND, REDUCES
from shardgraph.passes.base import Context, Pass


@dataclass(frozen=True)
class OverlapCollectives(Pass):
    """Takes a forward or backward graph; reorders it so that collectives start early and are awaited late.

    A parameter's gather starts when the gather ``plan.prefetch`` before it is awaited, so that as many gathers are in
    flight during computation. A gradient's reduction is awaited once ``plan.prefetch`` later ones have started. All
    ranks have the same graph, so they still issue the same collectives in the same order.

    Must not change: which nodes there are, and what each computes.
    """

    name = "overlap-collectives"
    requires = frozenset({"split"})
    provides = frozenset({"overlapped"})

    def run(self, gm: fx.GraphModule, context: Context) -> None:
        depth = context.plan.prefetch
        if depth:
            _start_gathers_early(gm, depth)
            _await_reductions_late(gm, depth)


def _start_gathers_early(gm: fx.GraphModule, depth: int) -> None:
    starts = [node for node in collectives(gm) if MEMORY_KIND.get(node) == "gathered"]
    waits = [next(user for user in start.users if user.target is WAIT) for start in starts]
    for i, start in enumerate(starts[1:], start=1):
        point = waits[i - depth].prev if i >= depth else starts[i - 1]
        for node in reversed([start, *_made_ready(start)]):
            point.append(node)
            point = node


def _made_ready(start: fx.Node) -> Iterator[fx.Node]:
    """The nodes that prepare a shard for its gather, last first: padding, and before it a cast."""
    node = start.args[0]
    while isinstance(node, fx.Node) and node.op == "call_function":
        yield node
        node = node.args[0]


def _await_reductions_late(gm: fx.GraphModule, depth: int) -> None:
    chains: dict[str, list[fx.Node]] = defaultdict(list)
    for node in gm.graph.nodes:
        if node in REDUCES:
            chains[REDUCES.of(node)].append(node)
    tails = []
    for chain in chains.values():
        wait = next((i for i, node in enumerate(chain) if node.target is WAIT), None)
        if wait is not None:
            tails.append((chain[wait - 1], chain[wait:]))
    tails.sort()
    for i, (_, tail) in enumerate(tails):
        last = i + depth >= len(tails)
        point = gm.graph.output_node() if last else tails[i + depth][0].next
        for node in tail:
            point.prepend(node)
