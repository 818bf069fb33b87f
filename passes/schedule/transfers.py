"""The parts of a graph that run beside its computation: gathers, reductions and copies, with what belongs to each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from shardgraph import ir
from shardgraph.ir.attributes import MEMORY_KIND, REDUCES


@dataclass(frozen=True)
class Lane:
    """Transfers of one kind, by their ``starts`` in order, of which some are in flight at a time.

    Those in flight during computation have together at most ``limit`` of the ``sizes``: 1 each, or their bytes. If the
    lane is ``relayed``, the next one starts right before the wait that makes room for it, else behind it.
    """

    starts: tuple[fx.Node, ...]
    sizes: tuple[int, ...]
    limit: int
    relayed: bool

    @classmethod
    def counted(cls, starts: Iterable[fx.Node], limit: int) -> Lane:
        """At most ``limit`` of them are in flight."""
        taken = tuple(starts)
        return cls(taken, (1,) * len(taken), limit, relayed=True)

    @classmethod
    def weighed(cls, starts: Iterable[fx.Node]) -> Lane:
        """Those in flight have at most the bytes of the largest one, which has to fit anyway."""
        taken = tuple(starts)
        sizes = tuple(map(nbytes, taken))
        return cls(taken, sizes, max(sizes, default=0), relayed=False)

    def first_beside(self, times: int = 1) -> list[int]:
        """For each transfer the first that may be in flight with it, within so many ``times`` the limit."""
        firsts, in_flight, first = [], 0, 0
        for i, size in enumerate(self.sizes):
            in_flight += size
            while in_flight > times * self.limit and first < i:
                in_flight -= self.sizes[first]
                first += 1
            firsts.append(first)
        return firsts

    def next_after(self) -> list[int]:
        """For each transfer the first later one that may not be in flight with it; their number if all may."""
        until: list[int] = []
        for i, first in enumerate(self.first_beside()):
            until += [i] * (first - len(until))
        return until + [len(self.starts)] * (len(self.starts) - len(until))


@dataclass(frozen=True)
class Chain:
    """A transfer to be awaited late: its ``start``, and its nodes from each wait on to the next.

    The second transfer of a gradient, over another axis, starts behind the wait of the first.
    """

    start: fx.Node
    tails: tuple[tuple[fx.Node, ...], ...]


def gathers_of(gm: fx.GraphModule) -> list[fx.Node]:
    """The starts of all-gathers of parameters, in order."""
    return [node for node in ir.collectives(gm) if MEMORY_KIND.get(node) == "gathered"]


def copies_of(gm: fx.GraphModule, target: Any) -> list[fx.Node]:
    """The starts of copies between host and device, in order."""
    return list(gm.graph.find_nodes(op="call_function", target=target))


def reductions_of(gm: fx.GraphModule) -> list[Chain]:
    """The reductions of gradients, or of the gradients of a bucket, in the order of their starts."""
    of: dict[fx.Node, list[fx.Node]] = {}
    for node in gm.graph.nodes:
        if node in REDUCES:
            before = {id(of[each]): of[each] for each in node.all_input_nodes if each in of}
            reduction = [each for part in before.values() for each in part] + [node]
            of.update(dict.fromkeys(reduction, reduction))
    chains = (_chain(sorted(nodes)) for nodes in {id(nodes): nodes for nodes in of.values()}.values())
    return sorted(filter(None, chains), key=lambda chain: chain.start)


def _chain(nodes: Sequence[fx.Node]) -> Chain | None:
    """None if the nodes have no collective."""
    waits = [i for i, node in enumerate(nodes) if node.target is ir.WAIT]
    tails = (tuple(nodes[begin:end]) for begin, end in pairwise([*waits, len(nodes)]))
    return Chain(nodes[waits[0]].args[0], tuple(tails)) if waits else None


def wait_of(start: fx.Node) -> fx.Node:
    """The wait of a started collective or copy."""
    return next(user for user in start.users if ir.is_wait(user))


def made_ready(start: fx.Node) -> list[fx.Node]:
    """The nodes that prepare shards for their gather, last first: padding, before it a cast, before that a copy."""
    return sorted(reached(start, lambda node: node.all_input_nodes, is_computed), reverse=True)


def nbytes(node: fx.Node) -> int:
    """The bytes of a node's value."""
    return sum(leaf.nbytes for leaf in tree_leaves(node.meta["val"]) if isinstance(leaf, torch.Tensor))


def is_computed(node: fx.Node) -> bool:
    """Whether a node is an operation."""
    return node.op == "call_function"


def reached(
    start: fx.Node, following: Callable[[fx.Node], Iterable[fx.Node]], among: Callable[[fx.Node], bool]
) -> set[fx.Node]:
    """The nodes that are reached from one, without it, over those that are ``among`` some."""
    found: set[fx.Node] = set()
    pending = list(following(start))
    while pending:
        node = pending.pop()
        if node not in found and among(node):
            found.add(node)
            pending += following(node)
    return found


def reorder(order: Iterator[fx.Node] | Sequence[fx.Node]) -> None:
    """Put the nodes of a graph in this order."""
    for last, node in pairwise(order):
        if last.next is not node:
            last.append(node)
