"""Chooses which operations run on the ranks' own experts, and so where tokens are exchanged: the cheapest legal choice.

The problem is that of :mod:`shardgraph.passes.sharding.problem` with other placements; see
:mod:`shardgraph.passes.experts.rules`. It always has a solution: an operation without a rule for exchanged tokens runs
on the rank's own batch, for which tokens are sent back and weights are gathered.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator
from typing import Any, ClassVar

from torch import fx
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from shardgraph.ir import Gradient, Parameter, outputs, placeholders
from shardgraph.ir.attributes import ROLE
from shardgraph.passes.analysis.costs import node_costs
from shardgraph.passes.experts.rules import expert_options, same_on_all_ranks
from shardgraph.passes.sharding.choose import Placements
from shardgraph.passes.sharding.legal import Value, all_divide, placed_values, spread, value_of
from shardgraph.passes.sharding.options import Option, is_operation, operations, replicated, results
from shardgraph.passes.sharding.placements import REPLICATE, Exchanged, Summed
from shardgraph.passes.sharding.pricing import PlacementPrices

_GATHERED = 256.0
"""Factor on the seconds of gathering a weight, or of reduce-scattering its gradient: on this axis tokens travel, and
weights only where nothing else is possible."""
_INSIDE = 1e-9  # seconds per operation on exchanged tokens, so that no more operations than necessary run on them


class ExpertOptions:
    """The options of the operations of ``gm`` over ``parts`` ranks, each with its shard of ``experts``.

    ``experts`` are parameter names, sharded along dim 0. Placements of other values are propagated from them, up and
    down the graph, to everything computed with them.
    """

    def __init__(self, gm: fx.GraphModule, parts: int, experts: Collection[str]) -> None:
        self.parts = parts
        self.common = same_on_all_ranks(gm)
        self.known: dict[Value, set[Placement]] = defaultdict(set)
        self.known |= {(node, 0): {Shard(0)} for role, node in placeholders(gm).items() if _is_expert(role, experts)}
        spread(operations(gm), self.known, self._linked)

    def of(self, node: fx.Node) -> list[Option]:
        """The legal options of a node; the first is to run on the rank's own batch."""
        return list(dict.fromkeys([replicated(node), *self._linked(node)]))

    def _linked(self, node: fx.Node) -> list[Option]:
        """Evenly dividing options that match a known placement of at least one of their tensors."""
        linked = []
        for option in expert_options(node, self.known, self.common):
            values = placed_values(node, option)
            if all_divide(values, self.parts) and any(p in self.known.get(value, ()) for value, p in values):
                linked.append(option)
        return linked


class ExpertPlacements(Placements):
    """The legal options of a joint graph's operations over ``parts`` ranks of an expert axis, and their costs.

    ``experts`` are parameter names, as for :class:`ExpertOptions`.
    """

    whole: ClassVar = False
    ends_as: ClassVar = {Summed(0): "gradient", REPLICATE: "result"}

    def __init__(self, gm: fx.GraphModule, parts: int, experts: Collection[str]) -> None:
        self._legal = ExpertOptions(gm, parts, experts)
        self._prices = PlacementPrices(node_costs(gm), parts, sequence=False)
        options: dict[fx.Node, list[Option]] = {}
        for node in gm.graph.nodes:
            if is_operation(node):
                options[node] = self._legal.of(node)
            elif node.op in ("placeholder", "get_attr"):
                options[node] = [Option((), (Shard(0) if _is_expert(ROLE.get(node), experts) else REPLICATE,))]
        self.gm, self.options, self.fixed = gm, options, dict.fromkeys(experts, Shard(0))

    def seconds(self, node: fx.Node, option: Option) -> float:
        """Next to nothing: what counts is which values are exchanged."""
        return 0.0 if option == self.options[node][0] else _INSIDE

    def move(self, value: Value, before: Placement, after: Placement) -> float:
        """Seconds to redistribute a value, scaled up for weights and their gradients; infinite if not allowed."""
        node, index = value
        nbytes, send = self._prices.grown(results(node)[index]), self._prices.collective
        if before == after:
            return 0.0
        exchanges = isinstance(before, Exchanged) + isinstance(after, Exchanged)
        if exchanges and {type(before), type(after)} <= {Exchanged, type(REPLICATE)}:
            return exchanges * send("all_to_all_single", nbytes, nbytes)
        part = nbytes / self._legal.parts
        if before == REPLICATE and isinstance(after, Shard):
            return 0.0 if node in self._legal.common else math.inf
        if before == REPLICATE and isinstance(after, Summed):
            return _GATHERED * send("reduce_scatter_tensor", nbytes, part)
        if isinstance(before, Shard) and after == REPLICATE:
            return _GATHERED * send("all_gather_into_tensor", part, nbytes)
        return math.inf

    def ends(self) -> Iterator[tuple[Value, Placement]]:
        """Gradients of experts end sharded, all else replicated."""
        for role, value in outputs(self.gm):
            if isinstance(value, fx.Node):
                of_expert = isinstance(role, Gradient) and _is_expert(role.of, self.fixed)
                yield value_of(value), Summed(0) if of_expert else REPLICATE


def _is_expert(role: Any, experts: Collection[str]) -> bool:
    return isinstance(role, Parameter) and role.fqn in experts
