"""A part of a graph as a graph of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import fx

from shardgraph.ir.attributes import new_placeholder
from shardgraph.ir.graph import UnboundGraph, add_output, copy_node
from shardgraph.ir.roles import Role


def subgraph(
    gm: fx.GraphModule,
    nodes: Sequence[fx.Node],
    inputs: Iterable[tuple[str, Role, fx.Node]],
    results: Sequence[tuple[Role | None, Any]],
) -> fx.GraphModule:
    """A graph of copies of ``nodes`` in this order, placeholders first, that returns ``results``.

    Each of the ``inputs``, as ``(name, role, node)``, is a further placeholder, which replaces a node of ``gm``.
    """
    graph = fx.Graph()
    env = {node: copy_node(graph, node) for node in nodes if node.op == "placeholder"}
    env |= {node: new_placeholder(graph, name, role, node) for name, role, node in inputs}
    for node in nodes:
        if node.op != "placeholder":
            env[node] = copy_node(graph, node, env.__getitem__)
    add_output(graph, [(role, env[value] if isinstance(value, fx.Node) else value) for role, value in results])
    graph.lint()
    return UnboundGraph(gm, graph)
