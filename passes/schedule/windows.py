"""Transfers beside the computation, as many as a lane allows: started early, or awaited late, whatever they take."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from shardgraph.passes.schedule.transfers import Chain, Lane, made_ready, wait_of


def start_early(lane: Lane, earliest: fx.Node) -> None:
    """Start each, with what makes it ready, once enough earlier ones have been awaited, behind ``earliest``.

    The lane is in the order of the waits.
    """
    waits = [wait_of(start) for start in lane.starts]
    free = [wait.prev if lane.relayed else wait for wait in waits]
    after, moves = earliest, list[tuple[list[fx.Node], fx.Node]]()
    for start, first in zip(lane.starts, lane.first_beside(), strict=True):
        block = [*reversed(made_ready(start)), start]
        operands = {each for node in block for each in node.all_input_nodes}.difference(block)
        after = max([after, *operands, *free[:first][-1:]])
        moves.append((block, after))
    for block, point in reversed(moves):
        for node in reversed(block):
            point.append(node)


def await_late(gm: fx.GraphModule, chains: Sequence[Chain], lane: Lane) -> None:
    """Await each at the first later one that would be too many in flight, a second part as much later again."""
    until = [*lane.next_after(), len(chains)]
    points = [*lane.starts, gm.graph.output_node()]
    ends = list(lane.starts)  # the last node that is put behind each start of a relayed lane
    at = list(range(len(chains)))
    for number in range(max((len(chain.tails) for chain in chains), default=0)):
        at = [until[i] for i in at]
        for chain, i in zip(chains, at, strict=True):
            for tail in chain.tails[number : number + 1]:
                used = _used(chain.tails[number:], points[-1])
                if lane.relayed and i < len(ends) and ends[i] < used:
                    for node in tail:
                        ends[i].append(node)
                        ends[i] = node
                else:
                    for node in tail:
                        min(points[i], used).prepend(node)


def _used(tails: Sequence[Sequence[fx.Node]], end: fx.Node) -> fx.Node:
    """Where the first of the tails, which the others follow, has to be awaited: before the first user of any."""
    nodes = {node for tail in tails for node in tail}
    return min((user for node in nodes for user in node.users if user not in nodes), default=end)
