"""Nodes of graphs, made without looking through what they are made of."""

from __future__ import annotations

from typing import Any

from torch import fx


def append_node(graph: fx.Graph, op: str, target: Any, args: Any, kwargs: Any, name: str) -> fx.Node:
    """``graph.create_node`` for arguments of another graph's node, or as those are: they need not be checked.

    Checks take most of the time in which a graph is copied or read.
    """
    names = graph._graph_namespace
    name = names.create_name(name, None)
    node = fx.Node(graph, name, op, target, args, kwargs)
    names.associate_name_with_obj(name, node)
    graph._insert(node)
    graph._find_nodes_lookup_table.insert(node)
    graph._len += 1
    return node


def parts_of_nodes(graph: fx.Graph) -> list[Any]:
    """Each node of a graph, what it calls, and its arguments, one after the other: equal if nothing of them changed."""
    return [part for node in graph.nodes for part in (node, node.target, node._args, node._kwargs)]


def is_valid(gm: fx.GraphModule) -> bool:
    """Whether ``gm.graph.lint()`` has nothing to say, for sure; without a call for every argument."""
    graph, count = gm.graph, 0
    seen, names = set[fx.Node](), set[str]()
    for node in graph.nodes:
        op, target = node.op, node.target
        known = callable(target) if op == "call_function" else op in ("placeholder", "output")
        if not (known or (op == "get_attr" and hasattr(gm, target))) or node.graph is not graph:
            return False
        if not seen.issuperset(node._input_nodes):
            return False
        seen.add(node)
        names.add(node.name)
        count += 1
    indexed = sum(map(len, graph._find_nodes_lookup_table.table.values()))
    return count == len(seen) == len(names) == indexed
