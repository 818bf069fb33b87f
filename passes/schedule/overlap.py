"""Overlaps communication, and copies between host and device, with computation by reordering the graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import fx

from shardgraph.ir import WAIT, is_wait
from shardgraph.ir.attributes import REDUCES
from shardgraph.ir.copies import TO_DEVICE, TO_HOST
from shardgraph.passes.base import Context, Graphs, GraphsPass, Pass, of_kind, sibling
from shardgraph.passes.schedule.lookahead import fill_memory, gathers_of
from shardgraph.passes.schedule.merge import made_ready, wait_of

_FURTHER = 2
"""How many times as many gathers as ``plan.prefetch`` may be in flight where memory has room for them."""


@dataclass(frozen=True)
class OverlapCollectives(GraphsPass):
    """Takes forward and backward graphs; reorders each so that collectives start early and are awaited late.

    A parameter's gather starts when the gather ``plan.prefetch`` before it is awaited, so that as many gathers are in
    flight during computation; earlier, up to twice as many gathers ahead, where the peak of the step's live bytes
    is no higher for that (:mod:`shardgraph.passes.schedule.lookahead`). A gradient's reduction is awaited once
    ``plan.prefetch`` later ones have started. The order is part of the text, which is the same on all ranks, so they
    still issue the same collectives in the same order.

    Must not change: which nodes there are, and what each computes.
    """

    name = "overlap-collectives"
    requires = frozenset({"split"})
    provides = frozenset({"overlapped"})

    def run_on(self, graphs: Graphs, context: Context) -> None:
        depth = context.plan.prefetch
        if not depth:
            return
        for gm in graphs.values():
            _start_gathers_early(gm, depth)
            _await_reductions_late(gm, depth)
        for name in of_kind(graphs, "forward"):
            fill_memory(graphs[name], graphs.get(sibling(name, "backward")), context, _FURTHER * depth)


def _start_gathers_early(gm: fx.GraphModule, depth: int) -> None:
    starts = gathers_of(gm)
    waits = [wait_of(start) for start in starts]
    for i, start in enumerate(starts[1:], start=1):
        point = waits[i - depth].prev if i >= depth else starts[i - 1]
        for node in reversed([start, *made_ready(start)]):
            point.append(node)
            point = node


def _await_reductions_late(gm: fx.GraphModule, depth: int) -> None:
    parts = sorted(filter(None, map(_after_waits, _reductions(gm))), key=lambda of_chain: of_chain[0])
    ends = [start for start, _ in parts]  # the last node that is put behind each start
    # The second collective of a gradient, over another axis, is awaited as much later again.
    for number in range(max((len(tails) for _, tails in parts), default=0)):
        for i, (_, tails) in enumerate(parts):
            if number < len(tails):
                later = i + (number + 1) * depth
                for node in tails[number]:
                    if later < len(ends):
                        ends[later].append(node)
                        ends[later] = node
                    else:
                        gm.graph.output_node().prepend(node)


def _reductions(gm: fx.GraphModule) -> list[list[fx.Node]]:
    """The nodes of each reduction in order: those that reduce a gradient, or the gradients of a bucket."""
    of: dict[fx.Node, list[fx.Node]] = {}
    for node in gm.graph.nodes:
        if node in REDUCES:
            before = {id(of[each]): of[each] for each in node.all_input_nodes if each in of}
            chain = [each for part in before.values() for each in part] + [node]
            of.update(dict.fromkeys(chain, chain))
    return [sorted(chain) for chain in {id(chain): chain for chain in of.values()}.values()]


def _after_waits(chain: Sequence[fx.Node]) -> tuple[fx.Node, list[list[fx.Node]]] | None:
    """The first collective of a reduction, and its nodes from each wait on to the next; None if it has none."""
    waits = [i for i, node in enumerate(chain) if node.target is WAIT]
    if not waits:
        return None
    return chain[waits[0] - 1], [list(chain[begin:end]) for begin, end in pairwise([*waits, len(chain)])]


@dataclass(frozen=True)
class OverlapCopies(Pass):
    """Takes a forward or backward graph; reorders it so that copies to the device start early and copies to the host
    are awaited late.

    The copies in flight in one direction have together at most the bytes of the largest one, which has to fit anyway:
    the link is used during computation, and the device holds little more than what it computes with. If the plan has
    no ``prefetch``, nothing is reordered.

    Must not change: which nodes there are, and what each computes.
    """

    name = "overlap-copies"
    requires = frozenset({"split"})
    provides = frozenset({"overlapped-copies"})

    def run(self, gm: fx.GraphModule, context: Context) -> None:
        if context.plan.prefetch:
            _start_copies_early(gm)
            _await_copies_late(gm)


def _start_copies_early(gm: fx.GraphModule) -> None:
    """Start each copy to the device, in the order of the waits, once enough earlier copies have been awaited."""
    copies = sorted(_copies(gm, TO_DEVICE), key=lambda copy: copy[1])
    after = inputs = max(gm.graph.find_nodes(op="placeholder"), default=next(iter(gm.graph.nodes)))
    moves: list[tuple[fx.Node, fx.Node]] = []
    for (start, _), first in zip(copies, _windows(copies), strict=True):
        after = max(after, copies[first - 1][1] if first else inputs, start.all_input_nodes[0])
        moves.append((start, after))
    for start, after in reversed(moves):
        after.append(start)


def _await_copies_late(gm: fx.GraphModule) -> None:
    """Await each copy to the host, in start order, before the first later copy that would exceed the window."""
    copies = list(_copies(gm, TO_HOST))
    until: list[fx.Node] = []
    for (start, _), first in zip(copies, _windows(copies), strict=True):
        until += [start] * (first - len(until))
    until += [gm.graph.output_node()] * (len(copies) - len(until))
    for (_, wait), point in zip(copies, until, strict=True):
        min([point, *wait.users]).prepend(wait)


def _copies(gm: fx.GraphModule, target: Any) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Each start of a copy, in order, with its wait."""
    for node in gm.graph.find_nodes(op="call_function", target=target):
        yield node, next(user for user in node.users if is_wait(user))


def _windows(copies: Sequence[tuple[fx.Node, fx.Node]]) -> Iterator[int]:
    """For each copy the first that may be in flight with it, so that together they do not exceed the largest copy."""
    sizes = [start.meta["val"].nbytes for start, _ in copies]
    limit, in_flight, first = max(sizes, default=0), 0, 0
    for i, size in enumerate(sizes):
        in_flight += size
        while in_flight > limit and first < i:
            in_flight -= sizes[first]
            first += 1
        yield first
