"""A program as rows, one per operation in execution order: the table from which every prediction is derived."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import fx

from shardgraph.cost_models import compute
from shardgraph.cost_models.cluster import Cluster
from shardgraph.cost_models.collectives import collective_seconds, wire_bytes
from shardgraph.cost_models.device import VIEW
from shardgraph.cost_models.group import Group
from shardgraph.ir import group_of, is_started, is_wait
from shardgraph.ir.attributes import SOURCE, SUBJECT
from shardgraph.ir.copies import DIRECTIONS
from shardgraph.mesh import Mesh, size_along
from shardgraph.passes.analysis.costs import NodeCost, node_costs
from shardgraph.passes.analysis.liveness import MemoryProfile
from shardgraph.passes.analysis.names import module_of


@dataclass(frozen=True, kw_only=True)
class Row:
    """One operation: its location in the program and the model, its work, and its cost on one rank.

    ``half`` is ``"forward"``, ``"backward"`` or ``"optimizer"``. ``stream`` is the mesh axis of a collective, the
    direction of a copy (``"to host"``), ``""`` for computation; ``seconds`` is the time on it. ``link`` is the link
    that a collective uses, which axes may share. ``read``, ``written``
    and ``sent`` are bytes of its operands, of its results, and on the wire; ``memory`` and ``host`` are live bytes at
    its end by kind, on the device and on the host. ``waits`` is the distance in rows to the earlier collective or copy
    that it waits for; 0 if it waits for none. ``known`` is False for an operation without a formula, which is priced by
    its bytes; ``again`` is True for one of backward that forward has computed already.
    """

    half: str
    node: str
    operation: str
    module: str = ""
    source: str = ""
    label: str
    kind: str
    dtype: str = ""
    stream: str = ""
    link: str = ""
    flops: int = 0
    read: int
    written: int
    sent: int = 0
    seconds: float
    memory: Mapping[str, int]
    waits: int = 0
    known: bool = True
    again: bool = False
    host: Mapping[str, int] = field(default_factory=dict)

    @property
    def live(self) -> int:
        """Live bytes on the device at the end of the operation."""
        return sum(self.memory.values())

    def but(self, **changes: Any) -> Row:
        """The row with some fields changed: ``dataclasses.replace`` takes longer than all else that is done to rows."""
        row = object.__new__(Row)
        vars(row).update(vars(self), **changes)
        return row


@dataclass(frozen=True)
class Prices:
    """The prices of a program's operations on a cluster; a quantity without a price raises when it is needed.

    Raises:
        ClusterError: the device has no rate for an operation's kind of work in its dtype, or describes no host.
        ShardGraphError: a collective has no formula.
    """

    cluster: Cluster
    mesh: Mesh

    @property
    def view(self) -> float:
        """Seconds of a view."""
        rate = self.cluster.device.rate(VIEW)
        return rate.overhead if rate else 0.0

    def sent(self, node: fx.Node) -> int:
        """Bytes that a collective puts on the wire."""
        return node_wire_bytes(node, self.mesh)

    def communication(self, node: fx.Node) -> float:
        """Seconds of a collective on its stream."""
        taken, returned = node.args[0].meta["val"].nbytes, node.meta["val"].nbytes
        return self.collective(operation_of(node), taken, returned, group_of(node))

    def collective(self, operation: str, taken: int, returned: int, axis: str) -> float:
        """Seconds of one ``operation`` over ``axis``; ``taken`` and ``returned`` are a rank's bytes in and out."""
        return collective_seconds(operation, taken, returned, self._group(axis), self.cluster.efficiency)

    @cached_property
    def _groups(self) -> dict[str, Group]:
        return {}

    def _group(self, axis: str) -> Group:
        if axis not in self._groups:
            self._groups[axis] = self.cluster.group_of(self.mesh, axis)
        return self._groups[axis]

    def link(self, axis: str) -> str:
        """The link that collectives over ``axis`` take turns on, with those over other axes that use it."""
        return self._group(axis).where

    def copy(self, node: fx.Node) -> float:
        """Seconds of a copy between host and device on its stream."""
        link = self.cluster.device.linked_host.link
        return link.latency + node.meta["val"].nbytes / link.bandwidth

    def computation(self, cost: NodeCost) -> float:
        """Seconds of one operation that is not a view."""
        device = self.cluster.device
        flops = cost.executed(device.is_cpu)
        return compute.seconds(device, cost.kind, cost.dtype, flops, cost.moved, alignment=cost.alignment)


def rows_of(halves: Mapping[str, fx.GraphModule], memory: MemoryProfile, prices: Prices, fused: bool) -> Iterator[Row]:
    """The rows of graphs that run one after the other, with the errors of :class:`Prices`.

    ``memory`` is the profile of the same graphs.
    """
    at = {point: i for i, point in enumerate(memory.nodes)}
    forward = {node.name for node in halves["forward"].graph.nodes} if "forward" in halves else set()
    for half, gm in halves.items():
        costs = node_costs(gm, fused)
        # Views have no rows: no more is live at one than at the previous operation. Their time is added to the next.
        shown = [n for n in gm.graph.nodes if costs[n].kind not in ("free", VIEW) or is_wait(n)]
        views = _views_before(gm, costs)
        index = {node: i for i, node in enumerate(shown)}
        for node in shown:
            cost, i = costs[node], at[half, node.name]
            collective, beside = cost.kind == "collective", is_started(node)
            yield Row(
                half=half,
                node=node.name,
                operation=str(getattr(node.target, "__name__", node.target)),
                module=module_of(node),
                source=SOURCE.get(node, ""),
                label=f"{operation_of(node)} of {SUBJECT.get(node, node.name)}" if beside else node.name,
                kind=cost.kind,
                dtype=cost.dtype,
                stream=group_of(node) if collective else DIRECTIONS.get(node.target, ""),
                link=prices.link(group_of(node)) if collective else "",
                flops=cost.flops,
                read=cost.read,
                written=cost.written,
                sent=prices.sent(node) if collective else 0,
                seconds=node_seconds(node, cost, prices) + views[node] * prices.view,
                memory={kind: line[i] for kind, line in memory.compositions.items() if line[i]},
                waits=index[node] - index[node.args[0]] if is_wait(node) else 0,
                known=cost.known,
                again=half != "forward" and node.name in forward,
                host={kind: line[i] for kind, line in memory.host.items() if line[i]},
            )


def _views_before(gm: fx.GraphModule, costs: Mapping[fx.Node, NodeCost]) -> Counter[fx.Node]:
    """The number of views between each operation of the computation and the previous one."""
    views: Counter[fx.Node] = Counter()
    waiting = 0
    for node in gm.graph.nodes:
        kind = costs[node].kind
        waiting += kind == VIEW
        if kind not in ("free", VIEW, "collective", "copy"):
            views[node], waiting = waiting, 0
    return views


def node_seconds(node: fx.Node, cost: NodeCost, prices: Prices) -> float:
    """Seconds of one node on its stream, with the errors of :class:`Prices`."""
    if cost.kind == "free":
        return 0.0
    if cost.kind == "copy":
        return prices.copy(node)
    return prices.communication(node) if cost.kind == "collective" else prices.computation(cost)


def node_wire_bytes(node: fx.Node, mesh: Mesh) -> int:
    """Bytes that each rank sends in one collective.

    Raises:
        ShardGraphError: the operation has no formula.
    """
    source, result = node.args[0].meta["val"], node.meta["val"]
    return wire_bytes(operation_of(node), source.nbytes, result.nbytes, size_along(mesh, group_of(node)))


def operation_of(node: fx.Node) -> str:
    """The name of a collective's operation, such as ``all_reduce``."""
    return node.target.__name__.split(".")[0].rstrip("_")
