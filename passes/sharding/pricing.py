"""What placements cost, in bytes: of the network, and of memory and arithmetic in so many bytes of the network.

The unit makes the choice the same on every cluster, as names such as ``tp`` promise: every matrix product is
divided and every weight is cut if that is legal at all, and of the ways to do that the one that sends least is taken.
The relation of the terms is that of today's machines at large sizes, where a product of matrices takes longer
than sending them, and starting a collective as long as sending a small part of a layer's activations.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx
from torch.distributed.tensor.placement_types import Placement

from shardgraph.ir import Parameter
from shardgraph.ir.attributes import ROLE
from shardgraph.passes.analysis.costs import NodeCost
from shardgraph.passes.sharding.options import Option, operands, results
from shardgraph.passes.sharding.placements import PARTIAL, REPLICATE, is_cut

_WHOLE_PRODUCT = 16.0  # for each byte of a product that every rank computes whole
_WHOLE_WEIGHT = 256.0  # for each byte of a matrix of parameters that every rank holds
_START = 0.05  # for each byte of the result of a product of ordinary size: what starting a collective takes
_MOVED = {False: 1e-3, True: 2e-2}  # for each byte of memory read or written; with sequences cut, it is what they save


@dataclass(frozen=True)
class Prices:
    """Costs in bytes over ``parts`` ranks: ``start`` of starting a collective, ``moved`` of a byte of memory."""

    parts: int
    start: float
    moved: float
    flops: Mapping[fx.Node, int]

    @staticmethod
    def of(costs: Mapping[fx.Node, NodeCost], parts: int, sequence: bool) -> Prices:
        """The prices of a graph; ``sequence`` says that what lies between products should be cut too."""
        flops = {node: cost.flops for node, cost in costs.items()}
        products = [n for n, count in flops.items() if count > _moved_by(n)]
        sizes = [max(value.nbytes for value in results(n) if value is not None) for n in products]
        return Prices(parts, _START * (statistics.median(sizes) if sizes else 0.0), _MOVED[sequence], flops)

    def move(self, before: Placement, after: Placement, nbytes: int) -> float:
        """Bringing a tensor of ``nbytes`` from one placement to another; infinite for what cannot be.

        All-gather, reduce-scatter and all-reduce over a ring (Patarasu and Yuan, 2009); all-to-all sends all but its
        own.
        """
        share = nbytes * (self.parts - 1) / self.parts
        if before == after:
            return 0.0
        if before == REPLICATE:  # without a collective
            return math.inf if not nbytes else self.moved * nbytes / (self.parts if is_cut(after) else 1)
        if before == PARTIAL:
            return self.start + (2 * share if after == REPLICATE else share)
        if after == REPLICATE:
            return self.start + share
        return self.start + share / self.parts if is_cut(after) else math.inf

    def operation(self, node: fx.Node, option: Option) -> float:
        """Running an operation so: what its lowering sends, and what every rank repeats."""
        values = [(operand.meta["val"], p) for operand, p in zip(operands(node), option.operands, strict=True)]
        values += [(v, p) for v, p in zip(results(node), option.results, strict=True) if p is not None]
        cost = self.moved * sum(value.nbytes / (self.parts if is_cut(p) else 1) for value, p in values)
        if option.sent:
            cost += 2 * self.start + 2.0 * 4 * option.sent
        total = _moved_by(node)
        if self.flops.get(node, 0) > total and not any(is_cut(p) for p in option.operands):
            cost += _WHOLE_PRODUCT * total
        return cost

    def parameter(self, node: fx.Node, placement: Placement) -> float:
        """Holding a parameter so."""
        if not isinstance(ROLE.of(node), Parameter) or is_cut(placement):
            return 0.0
        value = node.meta["val"]
        return (_WHOLE_WEIGHT if value.dim() > 1 else self.moved) * value.nbytes


def _moved_by(node: fx.Node) -> int:
    values = [*(operand.meta["val"] for operand in operands(node)), *results(node)]
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))
