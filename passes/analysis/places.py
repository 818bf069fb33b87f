"""Where the values of a graph are: in device memory or in host memory.

The rule is PyTorch's for devices: the result of an operation on host values is on the host; only copies move values.
"""

from __future__ import annotations

from functools import partial

from torch import fx

from shardgraph.errors import GraphInvariantError
from shardgraph.ir.attributes import ON_HOST
from shardgraph.ir.copies import TO_DEVICE, TO_HOST, WAIT_COPY


def on_host(gm: fx.GraphModule) -> set[fx.Node]:
    """The nodes whose values are in host memory: placeholders with ``ON_HOST``, and values computed from them.

    Raises:
        GraphInvariantError: an operation has operands in both memories, or a copy's operand is already in its target.
    """
    hosted: set[fx.Node] = set()
    inputs, copied = gm.graph.find_nodes(op="placeholder"), partial(gm.graph.find_nodes, op="call_function")
    if not any(map(ON_HOST.get, inputs)) and not copied(target=TO_HOST) and not copied(target=TO_DEVICE):
        return hosted
    for node in gm.graph.nodes:
        if node.target is WAIT_COPY:
            host = node.args[0] in hosted
        elif node.target in (TO_HOST, TO_DEVICE):
            host = node.target is TO_HOST
            if (node.args[0] in hosted) == host:
                where = "host" if host else "device"
                raise GraphInvariantError(f"{node.format_node()} copies to the {where} what is there already")
        elif node.op == "call_function":
            places = {value in hosted for value in node.all_input_nodes if not isinstance(value.meta.get("val"), int)}
            if len(places) > 1:
                raise GraphInvariantError(
                    f"{node.format_node()} takes values of the host and of the device: copy the one to the other first"
                )
            host = places == {True}
        else:
            host = bool(ON_HOST.get(node))
        if host:
            hosted.add(node)
    return hosted
