"""Overlaps copies between host and device with computation by reordering the graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from shardgraph.ir import is_wait
from shardgraph.ir.copies import TO_DEVICE, TO_HOST
from shardgraph.passes.base import Context


@dataclass(frozen=True)
class OverlapCopies:
    """Takes a forward or backward graph; reorders it so that copies to the device start early and copies to the host
    are awaited late.

    The copies in flight in one direction have together at most the bytes of the largest one, which has to fit anyway:
    the link is used during computation, and the device holds little more than what it computes with. If the plan has
    no ``prefetch``, nothing is reordered.

    Must not change: which nodes there are, and what each computes.
    """

    name: ClassVar[str] = "overlap-copies"
    requires: ClassVar[frozenset[str]] = frozenset({"split"})
    provides: ClassVar[frozenset[str]] = frozenset({"overlapped-copies"})
    excludes: ClassVar[frozenset[str]] = frozenset()

    def run(self, gm: fx.GraphModule, context: Context) -> None:
        if context.plan.prefetch:
            _start_early(gm)
            _await_late(gm)


def _start_early(gm: fx.GraphModule) -> None:
    """Start each copy to the device, in the order of the waits, once enough earlier copies have been awaited."""
    nodes = list(gm.graph.nodes)
    order = {node: i for i, node in enumerate(nodes)}
    copies = sorted(_copies(gm, TO_DEVICE), key=lambda copy: order[copy[1]])
    inputs = max((i for i, node in enumerate(nodes) if node.op == "placeholder"), default=0)
    moves: list[tuple[fx.Node, int]] = []
    after = inputs
    for i, first in enumerate(_windows([start for start, _ in copies])):
        start = copies[i][0]
        awaited = order[copies[first - 1][1]] if first else inputs
        after = max(after, awaited, order[start.all_input_nodes[0]])
        moves.append((start, after))
    for start, after in reversed(moves):
        nodes[after].append(start)


def _await_late(gm: fx.GraphModule) -> None:
    """Await each copy to the host, in start order, before the first later copy that would exceed the window."""
    copies = list(_copies(gm, TO_HOST))
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    until: list[fx.Node] = []
    for i, first in enumerate(_windows([start for start, _ in copies])):
        until += [copies[i][0]] * (first - len(until))
    until += [gm.graph.output_node()] * (len(copies) - len(until))
    for (_, wait), point in zip(copies, until, strict=True):
        min([point, *wait.users], key=order.__getitem__).prepend(wait)


def _copies(gm: fx.GraphModule, target: Any) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Each start of a copy, in order, with its wait."""
    for node in gm.graph.nodes:
        if node.target is target:
            yield node, next(user for user in node.users if is_wait(user))


def _windows(starts: Sequence[fx.Node]) -> Iterator[int]:
    """For each copy the first that may be in flight with it, so that together they do not exceed the largest copy."""
    sizes = [start.meta["val"].nbytes for start in starts]
    limit, under_way, first = max(sizes, default=0), 0, 0
    for i, size in enumerate(sizes):
        under_way += size
        while under_way > limit and first < i:
            under_way -= sizes[first]
            first += 1
        yield first
