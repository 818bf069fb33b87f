"""The communication of a graph: counts and bytes on the wire, per operation and mesh axis."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from torch import fx

from shardgraph.cost_models import collectives as prices
from shardgraph.ir import collectives, group_of
from shardgraph.mesh import Mesh, size_along


@dataclass(frozen=True)
class Traffic:
    """The calls of one operation over one mesh axis: their number, and the bytes that a rank sends in them."""

    operation: str
    axis: str
    count: int
    nbytes: int


@dataclass(frozen=True)
class CommunicationSummary:
    """The traffic of one run of a graph, one row per operation and axis, in order of first use."""

    rows: tuple[Traffic, ...]

    def __str__(self) -> str:
        return "\n".join(f"{r.count} x {r.operation} over {r.axis!r}: {r.nbytes:,} bytes per rank" for r in self.rows)


def summarize_communication(gm: fx.GraphModule, mesh: Mesh) -> CommunicationSummary:
    """Count the collectives of a symbolic graph and the bytes that each rank of ``mesh`` sends in one run of it.

    Raises:
        ShardGraphError: a collective has no formula.
    """
    totals: dict[tuple[str, str], tuple[int, int]] = {}
    for node in collectives(gm):
        key = (operation_of(node), group_of(node))
        count, nbytes = totals.get(key, (0, 0))
        totals[key] = (count + 1, nbytes + node_wire_bytes(node, mesh))
    return CommunicationSummary(tuple(Traffic(*key, *value) for key, value in totals.items()))


def wire_bytes(gm: fx.GraphModule, mesh: Mesh) -> dict[str, int]:
    """Bytes that each rank sends over each axis of ``mesh`` (or several axes) in one run of a symbolic graph."""
    total: Counter[str] = Counter({axis: 0 for axis, _ in mesh})
    for row in summarize_communication(gm, mesh).rows:
        total[row.axis] += row.nbytes
    return dict(total)


def node_wire_bytes(node: fx.Node, mesh: Mesh) -> int:
    """Bytes that each rank sends in one collective."""
    given, gotten = node.args[0].meta["val"], node.meta["val"]
    return prices.wire_bytes(operation_of(node), given.nbytes, gotten.nbytes, size_along(mesh, group_of(node)))


def operation_of(node: fx.Node) -> str:
    """The name of a collective's operation, such as ``all_reduce``."""
    return node.target.__name__.split(".")[0]
