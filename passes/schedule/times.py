"""What the schedule expects each node to take.

These are the prices of one described device, whatever the program runs on: what a rank measured or detected would
differ between ranks, and so would their orders; and the program that is analysed is the one that is compiled. An order
needs no more than how long computation and communication take beside each other, in which accelerators are alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from torch import fx

from shardgraph.cost_models.cluster import Cluster
from shardgraph.errors import ClusterError
from shardgraph.ir import group_of, is_copy
from shardgraph.ir.copies import DIRECTIONS
from shardgraph.passes.analysis.costs import node_costs
from shardgraph.passes.analysis.rows import Prices, node_seconds
from shardgraph.plans.plan import Plan

_DEVICE = "H100"


@dataclass(frozen=True)
class Times:
    """The times of a program's nodes under ``plan``."""

    plan: Plan

    @cached_property
    def prices(self) -> Prices:
        node = Cluster.of(_DEVICE)
        nodes = math.ceil(self.plan.world_size / node.devices_per_node)
        return Prices(Cluster.of(_DEVICE, nodes=nodes), self.plan.mesh)

    @cached_property
    def _known(self) -> dict[fx.GraphModule, dict[fx.Node, float]]:
        return {}

    def of(self, gm: fx.GraphModule) -> dict[fx.Node, float]:
        """The seconds of every node of a graph, in whatever order; what the device has no price for takes none."""
        if gm not in self._known:
            seconds = self._known[gm] = {}
            for node, cost in node_costs(gm).items():
                try:
                    seconds[node] = node_seconds(node, cost, self.prices)
                except ClusterError:  # analyze says which; here it is only a guess at an order
                    seconds[node] = 0.0
        return self._known[gm]

    def taken_by(self, start: fx.Node) -> tuple[str, ...]:
        """What a collective or copy needs for itself while it runs: its stream, and the link of its axis."""
        if is_copy(start):
            return (DIRECTIONS[start.target],)
        axis = group_of(start)
        return axis, f"link {self.prices.link(axis)}"
