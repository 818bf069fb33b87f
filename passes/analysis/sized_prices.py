"""The prices of operations with symbolic sizes, as expressions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy
from torch import fx

from shardgraph.cost_models import compute
from shardgraph.cost_models.arithmetic import EXPRESSIONS
from shardgraph.cost_models.collectives import collective_seconds, wire_bytes
from shardgraph.cost_models.group import Group
from shardgraph.ir import ALL_GATHER, REDUCE_SCATTER, group_of
from shardgraph.mesh import axes_of, position_of
from shardgraph.passes.analysis.costs import NodeCost
from shardgraph.passes.analysis.rows import Prices, operation_of
from shardgraph.passes.analysis.sized import Sizes


@dataclass(frozen=True)
class SizedPrices(Prices):
    """Like :class:`shardgraph.passes.analysis.rows.Prices`, as expressions in the symbols of ``sizes``."""

    sizes: Sizes

    def sent(self, node: fx.Node) -> Any:
        taken, returned, ranks = self._sizes(node)
        return wire_bytes(operation_of(node), taken, returned, ranks, EXPRESSIONS)

    def communication(self, node: fx.Node) -> Any:
        taken, returned, ranks = self._sizes(node)
        cluster, operation = self.cluster, operation_of(node)

        def seconds(group: Group) -> Any:
            return collective_seconds(operation, taken, returned, group, cluster.efficiency, EXPRESSIONS)

        here = seconds(Group.of_node(ranks, cluster.intra))
        if cluster.inter is None:
            return here
        # As Cluster.group_of.
        members, inside = sympy.Integer(1), sympy.true
        for axis in axes_of(group_of(node)):
            inner = self.mesh[position_of(self.mesh, axis) + 1 :]
            stride = sympy.Mul(*(self.sizes.axes[name] for name, _ in inner))
            along = sympy.Min(self.sizes.axes[axis], sympy.floor(cluster.devices_per_node / stride))
            members *= sympy.Max(1, along)
            inside &= sympy.Le(stride * self.sizes.axes[axis], cluster.devices_per_node)
        spanning = Group(ranks, members, sympy.ceiling(ranks / members), cluster.intra, cluster.inter)
        return sympy.Piecewise((here, inside), (seconds(spanning), True))

    def copy(self, node: fx.Node) -> Any:
        link = self.cluster.device.linked_host.link
        return link.latency + self.sizes.expression(node.meta["val"].nbytes) / link.bandwidth

    def computation(self, cost: NodeCost) -> Any:
        device, flops, moved = self.cluster.device, self.sizes.expression(cost.flops), self.sizes.expression(cost.moved)
        if cost.causal:
            flops = flops * compute.causal_part(self.sizes.expression(cost.causal), device.is_cpu, EXPRESSIONS)
        return compute.seconds(device, cost.kind, cost.dtype, flops, moved, EXPRESSIONS, cost.alignment)

    def _sizes(self, node: fx.Node) -> tuple[Any, Any, Any]:
        """Input bytes, output bytes and ranks; computed from the shard, whose size includes padding for uneven rows."""
        taken, returned = (self.sizes.expression(n.meta["val"].nbytes) for n in (node.args[0], node))
        ranks = sympy.Mul(*(self.sizes.axes[axis] for axis in axes_of(group_of(node))))
        if node.target is ALL_GATHER:
            returned = taken * ranks
        elif node.target is REDUCE_SCATTER:
            taken = returned * ranks
        return taken, returned, ranks
