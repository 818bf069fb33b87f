"""The partition of a joint graph into a forward and a backward graph.

Forward computes what the model returns and writes; backward computes the gradients. The forward values that backward
needs are saved or, for nodes with ``RECOMPUTE`` and their views and casts, recomputed: this is also how a parameter
that is resharded after forward is gathered a second time. The graph is split once, and not partitioned again.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from shardgraph.ir import (
    Role,
    Saved,
    UnboundGraph,
    add_output,
    copy_node,
    of_backward,
    outputs,
    placeholders,
    set_outputs,
)
from shardgraph.ir.attributes import ON_HOST, RECOMPUTE, ROLE, new_placeholder
from shardgraph.ir.operations import makes_view
from shardgraph.passes.analysis.places import on_host
from shardgraph.passes.base import Context, Graphs, GraphsPass, of_kind, sibling


@dataclass(frozen=True)
class Partition(GraphsPass):
    """Takes joint graphs; splits each into a forward graph and, if it is differentiable, a backward graph.

    Must not change: what either computes.
    """

    name = "partition"
    provides = frozenset({"split"})
    excludes = frozenset({"split"})

    def run_on(self, graphs: Graphs, context: Context) -> None:
        for name in of_kind(graphs, "joint"):
            forward, backward = split(graphs.pop(name))
            graphs[sibling(name, "forward")] = forward
            if backward is not None:
                graphs[sibling(name, "backward")] = backward


def split(gm: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule | None]:
    """``(forward, backward)`` of a joint graph; ``backward`` is None if nothing is differentiable.

    The forward graph is the joint graph, changed in place: its inputs without tangents, and its non-gradient results,
    then the values saved for backward (role ``Saved(j)``). The backward graph takes ``Saved(j)`` and ``Tangent(i)`` and
    returns the ``Gradient`` results. In a pipeline stage ``Returned`` inputs and results belong to backward too.
    """
    gradients = [(role, value) for role, value in outputs(gm) if of_backward(role)]
    results = [(role, value) for role, value in outputs(gm) if not of_backward(role) and role is not None]
    if not any(of_backward(role) for role in placeholders(gm)):
        return _forward(gm, results), None
    backward = _Backward(gm, forward_nodes(gm))
    graph = backward.build(gradients)
    return _forward(gm, results + [(Saved(i), node) for i, node in enumerate(backward.saved)]), graph


def forward_nodes(gm: fx.GraphModule) -> set[fx.Node]:
    """The nodes that forward results depend on, and the pieces of multi-output nodes among them."""
    inside = _ancestors((value for role, value in outputs(gm) if not of_backward(role)), lambda node: True)
    pieces = {n for n in gm.graph.nodes if n.target is operator.getitem and n.args[0] in inside}
    return inside | pieces


def after_tangents(gm: fx.GraphModule) -> set[fx.Node]:
    """The nodes that depend on backward's inputs (tangents); all others can run before backward."""
    late = {node for role, node in placeholders(gm).items() if of_backward(role)}
    for node in gm.graph.nodes:
        if node.op == "call_function" and not late.isdisjoint(node.all_input_nodes):
            late.add(node)
    return late


def _ancestors(values: Iterable[Any], follow: Callable[[fx.Node], bool]) -> set[fx.Node]:
    """The nodes among ``values`` and all that they depend on, as far as ``follow`` is true."""
    stack = [value for value in values if isinstance(value, fx.Node)]
    reached: set[fx.Node] = set()
    while stack:
        node = stack.pop()
        if node not in reached and follow(node):
            reached.add(node)
            stack.extend(node.all_input_nodes)
    return reached


def _forward(gm: fx.GraphModule, results: list[tuple[Role | None, Any]]) -> fx.GraphModule:
    set_outputs(gm, results)
    _erase_dead(gm.graph, {node for role, node in placeholders(gm).items() if of_backward(role)})
    return gm


def _erase_dead(graph: fx.Graph, tangents: Collection[fx.Node] = ()) -> None:
    for node in reversed(graph.nodes):
        if not node.users and (node in tangents or node.op not in ("placeholder", "output")):
            graph.erase_node(node)


class _Backward:
    """Builds the backward graph, deciding for each forward value whether to save or to recompute it."""

    def __init__(self, gm: fx.GraphModule, inside: set[fx.Node]) -> None:
        self.gm, self.inside, self.host = gm, inside, on_host(gm)
        self.graph = fx.Graph()
        self.order = {node: i for i, node in enumerate(gm.graph.nodes)}
        self.env: dict[fx.Node, fx.Node] = {}
        self.saved: list[fx.Node] = []

    def build(self, gradients: list[tuple[Role | None, Any]]) -> fx.GraphModule:
        needed = _ancestors(
            (value for _, value in gradients), lambda node: node not in self.inside and node.op == "call_function"
        )
        order = [node for node in self.gm.graph.nodes if node in needed]
        # Placeholders come first in a graph, so the saved values are found before any node is emitted.
        operands = [value for node in order for value in node.all_input_nodes]
        self._find_saved([*operands, *(value for _, value in gradients if isinstance(value, fx.Node))], needed)
        for index, node in enumerate(self.saved):
            self.env[node] = self._placeholder(f"saved_{node.name}", Saved(index), node)
        for role, node in placeholders(self.gm).items():
            if of_backward(role):
                self.env[node] = self._placeholder(node.name, role, node)
        # Nodes that only backward uses but that depend on forward values alone (a view for a derivative) may be among
        # the forward nodes. They are emitted at first use, else all their operands would be recomputed at the start.
        late = after_tangents(self.gm)
        for node in order:
            if node in late:
                self.env[node] = copy_node(self.graph, node, self._value)
        results = [(role, self._value(v) if isinstance(v, fx.Node) else v) for role, v in gradients]
        add_output(self.graph, results)
        _erase_dead(self.graph)
        return UnboundGraph(self.gm, self.graph)

    def _find_saved(self, operands: list[fx.Node], needed: set[fx.Node]) -> None:
        stack = operands[::-1]
        seen = set(needed)
        while stack:
            node = stack.pop()
            tangent = node.op == "placeholder" and of_backward(ROLE.of(node))
            if tangent or node.op == "get_attr" or node in seen:
                continue
            seen.add(node)
            if _again(node):
                stack.extend(reversed(node.all_input_nodes))
            else:
                self.saved.append(node)

    def _value(self, node: fx.Node) -> fx.Node:
        """The node in the backward graph; nodes that depend on no tangent are emitted at first use."""
        if node not in self.env:
            missing = _ancestors([node], lambda each: each not in self.env)
            for each in sorted(missing, key=self.order.__getitem__):
                self.env[each] = copy_node(self.graph, each, self.env.__getitem__)
        return self.env[node]

    def _placeholder(self, name: str, role: Role, like: fx.Node) -> fx.Node:
        node = new_placeholder(self.graph, name, role, like)
        if like in self.host:
            ON_HOST.set(node, True)
        return node


def _again(node: fx.Node) -> bool:
    """Whether backward recomputes the node: it is marked, or it is a view or cast of a marked one."""
    if node.op != "call_function":
        return False
    if node in RECOMPUTE:
        return RECOMPUTE.of(node)
    cheap = node.target is torch.ops.aten._to_copy.default or makes_view(node.target)
    return cheap and isinstance(node.args[0], fx.Node) and _again(node.args[0])
