"""Which values of a graph may be in the memory of a parameter, and so until when nobody may change it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from shardgraph import ir
from shardgraph.passes.analysis.liveness import storages_of
from shardgraph.torch_api import OpOverload

Names = frozenset[str]


def in_memory_of(gm: fx.GraphModule, given: Mapping[ir.Role, Names]) -> dict[fx.Node, Names]:
    """The parameters in whose memory each value of a graph may be, or that its operation may still be reading when it
    is next; ``given`` says it of the graph's inputs.

    Shards that lie side by side are gathered where they are, so a bucket is in the memory of all of them.
    """
    held = storages_of(gm)
    names: dict[fx.Node, Names] = {node: given.get(role, frozenset()) for role, node in ir.placeholders(gm).items()}
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            continue
        sources = frozenset().union(*(names[each] for each in node.all_input_nodes))
        names[node] = frozenset() if sources and _is_fresh(node, held) else sources
    return names


def _is_fresh(node: fx.Node, held: Mapping[fx.Node, list[object]]) -> bool:
    """Whether what a node returns is in memory of its own, and its operands have been read."""
    if ir.is_wait(node):
        return True
    if ir.is_started(node) or not isinstance(node.target, OpOverload):
        return False
    own = {*held[node]}
    return not any(own.intersection(held[each]) for each in node.all_input_nodes)


def last_readers(gm: fx.GraphModule, given: Mapping[ir.Role, Names]) -> tuple[dict[fx.Node, Names], dict[str, fx.Node]]:
    """What :func:`in_memory_of` returns, and the last node that reads the memory of each parameter, if any does."""
    names = in_memory_of(gm, given)
    last = {fqn: node for node in gm.graph.nodes for each in node.all_input_nodes for fqn in names[each]}
    return names, last
