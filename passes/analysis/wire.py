"""The communication of a graph: the operation of each collective, and its bytes on the wire."""

from __future__ import annotations

from torch import fx

from shardgraph.cost_models import collectives as prices
from shardgraph.ir import group_of
from shardgraph.mesh import Mesh, size_along


def node_wire_bytes(node: fx.Node, mesh: Mesh) -> int:
    """Bytes that each rank sends in one collective.

    Raises:
        ShardGraphError: the operation has no formula.
    """
    source, result = node.args[0].meta["val"], node.meta["val"]
    return prices.wire_bytes(operation_of(node), source.nbytes, result.nbytes, size_along(mesh, group_of(node)))


def operation_of(node: fx.Node) -> str:
    """The name of a collective's operation, such as ``all_reduce``."""
    return node.target.__name__.split(".")[0]
