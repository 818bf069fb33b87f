"""Nodes of graphs, made without looking through what they are made of."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from torch import fx


def append_node(graph: fx.Graph, op: str, target: Any, args: Any, kwargs: Any, name: str) -> fx.Node:
    """``graph.create_node`` for arguments of another graph's node, or as those are: they need not be checked.

    Checks take most of the time in which a graph is copied or read, and then names.
    """
    names = graph._graph_namespace
    base, number = _parts(name)
    if number is None or name in names._used_names:
        name = names.create_name(name, None)
    else:  # as a name of another graph's node nearly always is: this is what it does then
        names._used_names.add(name)
        names._base_count[base] = number
    node = fx.Node(graph, name, op, target, args, kwargs)
    names._obj_to_name[node] = name
    graph._insert(node)
    graph._find_nodes_lookup_table.insert(node)
    graph._len += 1
    return node


@lru_cache(1 << 16)
def _parts(name: str) -> tuple[str, int | None]:
    """A name without its number, and that; None if it has none, or is no name."""
    found = _NUMBERED.fullmatch(name)
    return (found[1], int(found[2])) if found else (name, None)


_NUMBERED = re.compile(r"([a-zA-Z_][0-9a-zA-Z_]*?)_(\d+)")


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
