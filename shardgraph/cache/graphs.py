"""Graphs as JSON: nodes in order, each with its operation, arguments and attributes.

Attributes repeat from node to node (stack traces, modules), so they are in a table. Values are not: every node has a
tensor of its own, and which of them share memory is kept.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import fx

from shardgraph.cache.values import NotStorable, Reader, Writer, target_name, target_of, well_formed
from shardgraph.ir import UnboundGraph
from shardgraph.ir.attributes import REGISTRY, VALUE
from shardgraph.torch_api import append_node

_PLAIN = ("placeholder", "output")


def graph_data(gm: fx.GraphModule, writer: Writer) -> Any:
    """A graph as data for JSON; ``writer`` collects its real tensors.

    Raises:
        NotStorable: it has something that the format does not have, such as a graph inside it.
    """
    table: dict[str, int] = {}
    writer.numbers = {node: i for i, node in enumerate(gm.graph.nodes)}
    nodes, held = [], {}
    for node in gm.graph.nodes:
        if node.op == "call_function":
            target = target_name(node.target)
        elif node.op in _PLAIN:
            target = str(node.target)
        elif node.op == "get_attr" and isinstance(value := getattr(gm, str(node.target), None), torch.Tensor):
            target = str(node.target)
            held[target] = writer.write(value)
        else:
            raise NotStorable(f"the node {node.name!r}, which is a {node.op}")
        attributes = []
        for key, value in node.meta.items():
            if key != VALUE.key:
                text = json.dumps(writer.write(value))
                attributes += [key, table.setdefault(text, len(table))]
        value = [writer.write(node.meta[VALUE.key])] if VALUE.key in node.meta else []
        args, kwargs = (
            [writer.write(each) for each in node.args],
            [[k, writer.write(v)] for k, v in node.kwargs.items()],
        )
        nodes.append([node.op, node.name, target, args, kwargs, attributes, *value])
    return {"nodes": nodes, "table": list(map(json.loads, table)), "held": held}


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
    for op, name, target, args, kwargs, attributes, *value in data["nodes"]:
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
        if value:
            meta[VALUE.key] = read(value[0])
        nodes.append(node)
    return UnboundGraph(root, graph)
