"""Cost of placements in seconds, by :mod:`shardgraph.cost_models`, on one fixed cluster.

A plan name such as ``tp`` means the same placements on every machine, a laptop included, and the same for a small model
as for a large one of the same architecture. So placements are chosen for :data:`CLUSTER`, not for the local machine,
and a model smaller than those typically trained is priced as if it were of that size. All tensor sizes are scaled
alike, bytes by a factor and FLOPs by its power 3/2 (as for a product of square matrices), until the result of the
median product has :data:`TRAINED` bytes. At smaller sizes, latencies and launches dominate, and nothing would be
sharded. Nor do placements depend on how many tokens a step has: one of a larger result is priced as several steps of
that size, each of which reduces gradients and updates parameters. Else long sequences would have whole parameters on
all ranks, since their time, unlike their memory, is then next to nothing beside that of activations.

An axis's style (:class:`shardgraph.plans.plan.Plan`) is part of the price. With ``"whole"``, activations between
sharded products are replicated, so the time of operations between products must not be a reason to shard them: it is
weighted by :data:`_BETWEEN`, which only breaks ties. In other styles it is weighted by :data:`_DIVIDED`, since a fused
kernel moves a part of what its operations would alone; that weight was chosen among 1/16 to 1 by the prices of whole
programs (``benchmarks/README.md``).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from shardgraph.cost_models.cluster import Cluster
from shardgraph.cost_models.device import FLOP_KINDS
from shardgraph.cost_models.optimizers import optimizer_cost
from shardgraph.errors import ClusterError
from shardgraph.ir import Parameter
from shardgraph.ir.attributes import ROLE
from shardgraph.ir.operations import makes_view
from shardgraph.passes.analysis.costs import NodeCost
from shardgraph.passes.analysis.rows import Prices
from shardgraph.passes.sharding.options import Option, operands, results
from shardgraph.passes.sharding.placements import PARTIAL, REPLICATE, cut_of, is_cut

CLUSTER = "H100"
"""The cluster that placements are priced on: nodes of eight of these devices with NVLink, as in ``devices.yaml``.
The ranks of an axis are neighbours there."""

TRAINED = 64 * 2**20
"""Bytes of a typical product's result in training: 8,192 tokens of width 4,096 in ``bfloat16``."""

OPTIMIZER = "adamw"
"""The optimizer whose update is priced on every rank that holds a parameter."""

_BETWEEN = 1 / 16
_DIVIDED = 1 / 8
_TIE = 1 / 1024


class PlacementPrices:
    """Seconds of placements over ``parts`` ranks of a graph with per-operation ``costs``.

    ``sequence`` means that activations between products are sharded too.
    """

    def __init__(self, costs: Mapping[fx.Node, NodeCost], parts: int, sequence: bool) -> None:
        self.costs, self.parts, self.sequence = costs, parts, sequence
        self.between = _DIVIDED if sequence else _BETWEEN
        nodes = math.ceil(parts / Cluster.of(CLUSTER).devices_per_node)
        self.prices = Prices(Cluster.of(CLUSTER, nodes=nodes), (("ranks", parts),))
        products = [results(node) for node, cost in costs.items() if cost.kind in FLOP_KINDS]
        sizes = [max(v.nbytes for v in values if isinstance(v, torch.Tensor)) for values in products]
        typical = TRAINED / statistics.median(sizes) if sizes else 1.0
        self.scale, self.steps = max(1.0, typical), max(1.0, 1 / typical)
        self.returned = _returned_views(costs)

    def move(self, before: Placement, after: Placement, value: torch.Tensor) -> float:
        """Seconds to redistribute a tensor, given as the global ``value``; infinite if impossible."""
        whole = self.grown(value)
        part = whole / self.parts
        if before == after:
            return 0.0
        if before == REPLICATE:  # no collective
            return self.between * self._traffic(part if is_cut(after) else whole) if whole else math.inf
        if before == PARTIAL and after == REPLICATE and self.sequence and value.dim() > 1:
            return self.move(PARTIAL, Shard(0), value) + self.move(Shard(0), REPLICATE, value)
        if before == PARTIAL and after == REPLICATE:
            return self.collective("all_reduce", whole, whole)
        if before == PARTIAL:
            return self.collective("reduce_scatter_tensor", whole, part)
        if after == REPLICATE:
            return self.collective("all_gather_into_tensor", part, whole)
        return self.collective("all_to_all_single", part, part) if is_cut(after) else math.inf

    def summed_together(self, gradient: torch.Tensor) -> float:
        """Seconds to sum a parameter's gradient over the ranks together with those of others: without the latency."""
        whole = self.grown(gradient)
        return self.collective("all_reduce", whole, whole) - self.collective("all_reduce", 0, 0)

    def operation(self, node: fx.Node, option: Option) -> float:
        """Seconds of an operation under an option, including its lowering's communication."""
        if node in self.returned:
            return 0.0  # or a gradient would be scattered to save half of its transposes, and gathered at the end
        values = [(operand.meta["val"], p) for operand, p in zip(operands(node), option.operands, strict=True)]
        values += [(v, p) for v, p in zip(results(node), option.results, strict=True) if p is not None]
        moved = sum(self.grown(value) * self._share(p) for value, p in values)
        # A lowering reduces 4-byte elements, in two collectives; its ring communication overlaps with computation.
        sent, passed = 2 * self.scale * option.sent, 4 * self.scale * option.passed
        reduced = 2 * self.collective("all_reduce", sent, sent) if sent else 0.0
        cost = self.costs[node]
        if cost.kind not in FLOP_KINDS:
            return reduced + self.between * self._traffic(moved)
        parts = self.parts if any(is_cut(p) for p in (*option.operands, *option.results)) else 1
        ring = (self.parts - 1) * self.collective("send", passed / self.parts, 0) if passed else 0.0
        return reduced + max(ring, self._product(cost, cost.executed(on_cpu=False) / parts, moved))

    def parameter(self, node: fx.Node, option: Option) -> float:
        """Seconds of the reads and writes of a parameter's optimizer; 0 for another placeholder or a constant."""
        if not isinstance(ROLE.get(node), Parameter):
            return 0.0
        value = node.meta["val"]
        moved = optimizer_cost(OPTIMIZER).moved * self.grown(value) / (self.parts if is_cut(option.results[0]) else 1)
        return self.steps * self._traffic(moved) * (1 if value.dim() > 1 else self.between)

    def collective(self, operation: str, read: float, written: float) -> float:
        """Seconds of one collective over the ranks, from a rank's input and output bytes at training size."""
        return self.prices.collective(operation, int(read), int(written), "ranks")

    def grown(self, value: torch.Tensor) -> float:
        """A tensor's bytes at training size: two of its dimensions are scaled, or the only one."""
        return value.nbytes * self.scale ** (min(value.dim(), 2) / 2)

    def _share(self, placement: Placement) -> float:
        """The fraction of a tensor that a rank reads or writes; a little more in blocks.

        So of equally fast choices the one that cuts a dimension as a whole is taken, in every layer and at every depth.
        """
        if not is_cut(placement):
            return 1.0
        return (1 + _TIE * (cut_of(placement)[1] > 1)) / self.parts

    def _traffic(self, nbytes: float) -> float:
        """Seconds to read or write memory; launches cost the same in every placement, and are left out."""
        rate = self.prices.cluster.device.rate("pointwise")
        assert rate is not None
        return nbytes / rate.per_second

    def _product(self, cost: NodeCost, flops: float, moved: float) -> float:
        work: dict[str, Any] = {"flops": int(self.scale**1.5 * flops), "written": int(moved)}
        work["alignment"] = cost.alignment
        try:
            return self.prices.computation(NodeCost(cost.kind, cost.dtype, **work))
        except ClusterError:  # no rate for the dtype, such as integers, which no device multiplies faster than float32
            return self.prices.computation(NodeCost(cost.kind, "float32", **work))


def _returned_views(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The views that no operation reads, but other such views and the output."""
    found: set[fx.Node] = set()
    for node in reversed(list(nodes)):
        if makes_view(node.target) and all(u.op == "output" or u in found for u in node.users):
            found.add(node)
    return found
