"""Puts the collectives of a graph in the order of another graph's, so that ranks may run either beside each other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from shardgraph import ir
from shardgraph.ir.attributes import MEMORY_KIND, MODULES, REDUCES, ROLE, SHARD_OF, SUBJECT
from shardgraph.passes.analysis.random_state import draws
from shardgraph.passes.schedule.transfers import made_ready, reorder


def in_words(start: fx.Node) -> str:
    """A collective as text: all that other ranks see of it, and what it is of.

    Two ranks whose texts are equal gather the same parameters and reduce the same gradients, whatever they compute with
    them.
    """
    rest = [arg for arg in start.args if not isinstance(arg, fx.Node)]
    return f"{start.target} {form(start.args[0])} {rest} of {_subject(start)}"


def form(value: Any) -> str:
    """Shape and dtype of a node's value, as text."""
    tensor = value.meta.get("val") if isinstance(value, fx.Node) else value
    return f"{tuple(tensor.shape)} {tensor.dtype}" if isinstance(tensor, torch.Tensor) else str(tensor)


def _subject(start: fx.Node) -> str:
    if (gradients := REDUCES.get(start)) is not None:
        return str(gradients)
    if MEMORY_KIND.get(start) == "gathered":
        return ", ".join(_gathered(start))
    module = next(reversed([path for path, _ in MODULES.get(start, {}).values()]), "")
    return f"{SUBJECT.get(start, 'values')} in {module!r}"


def _gathered(start: fx.Node) -> Iterator[str]:
    """The parameters that are gathered, in their order in the buffer."""
    ready = {start, *made_ready(start)}
    pending = [start]
    while pending:
        node = pending.pop()
        if node in ready:
            pending += reversed(node.all_input_nodes)
        else:
            role = ROLE.get(node)
            yield role.fqn if isinstance(role, ir.Parameter) else SHARD_OF.get(node, str(role))


def put_in_order(gm: fx.GraphModule, order: Iterable[str]) -> bool:
    """Reorder a graph so that its collectives, :func:`in_words`, start in this order; returns whether that can be.

    Nodes keep their order, but for collectives whose turn is later, which wait for it, and for what those before them
    need, which comes earlier. Nothing has happened if it cannot be: where host memory is copied to and from, whose
    copies have an order of their own.
    """
    starts: dict[str, list[fx.Node]] = {}
    for start in ir.collectives(gm):
        starts.setdefault(in_words(start), []).append(start)
    if any(map(ir.is_copy, gm.graph.nodes)):
        return [in_words(start) for start in ir.collectives(gm)] == list(order)
    turns = [starts[words].pop(0) for words in order]
    put = _Put(turns, list(filter(draws, gm.graph.nodes)))
    for node in gm.graph.nodes:
        if not put.later(node) and not put.with_needed(node):
            return False
    reorder(list(put.order))
    return True


class _Put:
    """An order of a graph's nodes that is being made, in which collectives start by ``turns``."""

    def __init__(self, turns: Sequence[fx.Node], drawn: Sequence[fx.Node]) -> None:
        self.order: dict[fx.Node, None] = {}
        self._turns, self._next = turns, 0
        self._turn = {start: i for i, start in enumerate(turns)}
        self._before = {second: first for first, second in pairwise(drawn)}  # random numbers keep their order

    def later(self, node: fx.Node) -> bool:
        """Whether a node is a collective whose turn is not yet: it is put when it is needed, or on its turn."""
        return self._turn.get(node, -1) > self._next

    def with_needed(self, node: fx.Node) -> bool:
        """Put a node behind all that it needs; returns False if it needs itself."""
        pending, begun = [node], set[fx.Node]()
        while pending:
            node = pending[-1]
            if node in self.order:
                pending.pop()
                continue
            if missing := [each for each in self._needed(node) if each not in self.order]:
                if node in begun:
                    return False
                begun.add(node)
                pending += reversed(missing)
                continue
            self.order[node] = None
            pending.pop()
            if node in self._turn:
                self._next += 1
                following = self._turns[self._next : self._next + 1]
                pending += [each for each in following if all(need in self.order for need in each.all_input_nodes)]
        return True

    def _needed(self, node: fx.Node) -> Iterator[fx.Node]:
        yield from node.all_input_nodes
        if node in self._before:
            yield self._before[node]
        if node in self._turn:
            yield from self._turns[self._next : self._turn[node]]
