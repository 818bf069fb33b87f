"""Graphs as JSON: nodes in order, each with its operation, arguments and attributes.

Attributes repeat from node to node (stack traces, modules, and the values of equal layers), so they are in a table. So
a node that shares its value with another one does so again when it is read, and which of them share memory is kept.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import fx

from shardgraph.cache.values import NotStorable, Reader, Writer, target_name, target_of, well_formed
from shardgraph.ir import UnboundGraph
from shardgraph.ir.attributes import REGISTRY
from shardgraph.torch_api import append_node

_PLAIN = ("placeholder", "output")


def graph_data(gm: fx.GraphModule, writer: Writer) -> Any:
    """A graph as data for JSON; ``writer`` collects its real tensors.

    Raises:
        NotStorable: it has something that the format does not have, such as a graph inside it.
    """
    table = _Table(writer)
    writer.numbers = {node: i for i, node in enumerate(gm.graph.nodes)}
    nodes, held = [], {}
    names: dict[Any, str] = {}
    for node in gm.graph.nodes:
        if node.op == "call_function":
            if node.target not in names:
                names[node.target] = target_name(node.target)
            target = names[node.target]
        elif node.op in _PLAIN:
            target = str(node.target)
        elif node.op == "get_attr" and isinstance(value := getattr(gm, str(node.target), None), torch.Tensor):
            target = str(node.target)
            held[target] = writer.write(value)
        else:
            raise NotStorable(f"the node {node.name!r}, which is a {node.op}")
        attributes = [part for key, value in node.meta.items() for part in (key, table.number(value))]
        args, kwargs = (
            [writer.write(each) for each in node.args],
            [[k, writer.write(v)] for k, v in node.kwargs.items()],
        )
        nodes.append([node.op, node.name, target, args, kwargs, attributes])
    return {"nodes": nodes, "table": list(map(json.loads, table.texts)), "held": held}


class _Table:
    """Attributes of nodes, each once. Most nodes share theirs with others, so one that was seen is not written anew."""

    def __init__(self, writer: Writer) -> None:
        self.texts: dict[str, int] = {}
        self._write, self._seen = writer.write, dict[int, tuple[Any, int]]()  # which are kept: no id is used twice

    def number(self, value: Any) -> int:
        if (seen := self._seen.get(id(value))) is None:
            text = json.dumps(self._write(value))
            seen = self._seen[id(value)] = value, self.texts.setdefault(text, len(self.texts))
        return seen[1]


@well_formed
def graph_of(data: Any, reader: Reader) -> fx.GraphModule:
    """The graph that :func:`graph_data` wrote.

    Raises:
        NotStorable: it calls something that graphs do not call.
    """
    graph, root = fx.Graph(), torch.nn.Module()
    table = [reader.read(each) for each in data["table"]]
    targets: dict[str, Any] = {}
    read, keys = reader.read, REGISTRY
    nodes: list[fx.Node] = []
    reader.nodes = nodes
    for name, value in data["held"].items():
        setattr(root, name, read(value))
    for op, name, target, args, kwargs, attributes in data["nodes"]:
        if op == "call_function":
            if target not in targets:
                targets[target] = target_of(target)
            called = targets[target]
        elif op in _PLAIN or op == "get_attr":
            called = target
        else:
            raise NotStorable(f"a node that is a {op}")
        arguments = tuple([read(each) for each in args])
        node = append_node(graph, op, called, arguments, {key: read(each) for key, each in kwargs}, name)
        if node.name != name:
            raise NotStorable(f"two nodes named {name!r}")
        meta = node.meta
        for key, number in zip(attributes[::2], attributes[1::2], strict=True):
            if key not in keys:
                raise NotStorable(f"the attribute {key!r}")
            meta[key] = table[number]
        nodes.append(node)
    return UnboundGraph(root, graph)
