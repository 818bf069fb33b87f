"""Moves waits to where what they wait for is expected to be done, on a clock that runs as the graph does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from shardgraph import ir
from shardgraph.passes.schedule.memory import Memory
from shardgraph.passes.schedule.times import Times
from shardgraph.passes.schedule.transfers import nbytes, reductions_of, reorder, wait_of

Tail = Sequence[fx.Node]
"""The nodes from a wait on to the next."""


def await_done(gm: fx.GraphModule, memory: Memory, times: Times, depth: int) -> None:
    """Let reductions be awaited when they are expected to be done.

    A wait that another collective follows, over the next axis of a gradient, comes as early as it takes no time even if
    its transfer takes twice what is expected: so the next link is not idle. Any other comes later than it is, where it
    would take time, while no more than ``depth`` are late and their bytes are under the limit.
    """
    tails = {tail[0]: tail for chain in reductions_of(gm) for tail in map(_to_copy, chain.tails)}
    if tails:
        clock = _Clock(times, times.of(gm))
        reorder(_Walk(memory, clock, tails, depth).over(gm))


def _to_copy(tail: Sequence[fx.Node]) -> Tail:
    """A tail up to a copy to the host, which has a place of its own."""
    copy = next((i for i, node in enumerate(tail) if ir.is_copy(node)), len(tail))
    return tuple(tail[:copy])


@dataclass
class _Clock:
    """When each transfer ends, and what is busy until when, at the time ``now`` of the computation."""

    times: Times
    seconds: Mapping[fx.Node, float]
    now: float = 0.0
    busy: dict[str, float] = field(default_factory=dict)
    ends: dict[fx.Node, float] = field(default_factory=dict)

    def run(self, node: fx.Node) -> None:
        if ir.is_started(node):
            taken = self.times.taken_by(node)
            end = max(self.now, *(self.busy.get(each, 0.0) for each in taken)) + self.seconds[node]
            self.busy.update(dict.fromkeys(taken, end))
            self.ends[node] = end
        elif ir.is_wait(node):
            self.now = max(self.now, self.ends[node.args[0]])
        else:
            self.now += self.seconds[node]

    def is_done(self, wait: fx.Node, more: float = 0.0) -> bool:
        """Whether a wait would take no time now, even if its transfer took ``more`` times longer than expected."""
        start = wait.args[0]
        return start in self.ends and self.ends[start] + more * self.seconds[start] <= self.now


class _Walk:
    """One walk over a graph, in which each node is put at the end of a new order."""

    def __init__(self, memory: Memory, clock: _Clock, tails: Mapping[fx.Node, Tail], depth: int) -> None:
        self.memory, self.clock, self.tails, self.depth = memory, clock, tails, depth
        self.part_of = {node: wait for wait, tail in tails.items() for node in tail}
        self.put: dict[fx.Node, None] = {}  # in order
        self.followed: dict[fx.Node, None] = {}  # waits, of what has started, that another collective follows
        self.late: dict[fx.Node, int] = {}  # waits that are put off, and the bytes that live until then

    def over(self, gm: fx.GraphModule) -> list[fx.Node]:
        for node in gm.graph.nodes:
            if self.part_of.get(node, node) is not node or node in self.put:
                continue  # a tail is put as a whole
            self._catch_up(0 if node.op == "output" else self.memory.peak - self.memory.live[node])
            if node in self.tails and self._can_be_late(node):
                self.late[node] = nbytes(node.args[0].args[0])
            else:
                self._put(node)
        return list(self.put)

    def _catch_up(self, room: int) -> None:
        """Put the waits whose time has come, and those whose bytes there is no ``room`` for."""
        for wait in [wait for wait in self.followed if self.clock.is_done(wait, more=1.0)]:
            self._put(wait)
        for wait in [wait for wait in self.late if self.clock.is_done(wait)]:
            self._put(wait)
        while self.late and (sum(self.late.values()) > room or len(self.late) > self.depth):
            self._put(next(iter(self.late)))

    def _can_be_late(self, wait: fx.Node) -> bool:
        return not self.clock.is_done(wait) and self._is_returned(wait)

    def _is_returned(self, wait: fx.Node) -> bool:
        """Whether nothing but the output, and other waits of that sort, need what is awaited."""
        others = (user for node in self.tails[wait] for user in node.users if user not in self.tails[wait])
        return all(user.op == "output" or (user in self.tails and self._is_returned(user)) for user in others)

    def _put(self, node: fx.Node) -> None:
        """Put a node, a wait with its tail, behind the start of what it waits for."""
        if ir.is_wait(node) and node.args[0] not in self.put:
            self._put(self.part_of[node.args[0]])
        self.late.pop(node, None)
        self.followed.pop(node, None)
        for each in self.tails.get(node, (node,)):
            self.put[each] = None
            self.clock.run(each)
            if ir.is_collective(each) and any(map(ir.is_collective, self.tails.get(wait_of(each), ()))):
                self.followed[wait_of(each)] = None
