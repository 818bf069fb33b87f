"""The recomputation problem: forward operations by class, what each costs to recompute, and what it keeps alive.

The same operation of equal layers is one class, and the decision is how many members to recompute. The first layers
are taken: their values would be saved for longest, and the backward of the last layer, where most is live, then starts
without recomputation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import fx

from shardgraph.ir import is_collective
from shardgraph.ir.attributes import RECOMPUTE
from shardgraph.passes.analysis.costs import node_costs
from shardgraph.passes.analysis.liveness import Storage
from shardgraph.passes.analysis.rows import Prices
from shardgraph.passes.recompute.values import Values
from shardgraph.passes.sharding.classes import classes_of

Class = Hashable


@dataclass(frozen=True)
class RecomputeProblem:
    """Forward operations by class.

    ``members`` are the operations of each class, from the first layer to the last; at ``most`` so many may be
    recomputed, in ``seconds`` each. ``nbytes`` are the bytes of each result, by ``(class, position)``; ``demanded`` are
    the results that backward reads, ``reads`` those that a class reads, as ``(class, (class, position))``.
    """

    members: dict[Class, list[fx.Node]]
    seconds: dict[Class, float]
    most: dict[Class, int]
    nbytes: dict[tuple[Class, int], int]
    demanded: set[tuple[Class, int]]
    reads: set[tuple[Class, tuple[Class, int]]]

    @cached_property
    def seconds_of(self) -> dict[fx.Node, float]:
        """The seconds of each operation."""
        return {node: self.seconds[key] for key, nodes in self.members.items() for node in nodes}

    def total(self, operations: Iterable[fx.Node]) -> float:
        """The seconds of these operations together."""
        return sum(self.seconds_of[node] for node in operations)

    def operations(self, counts: Mapping[Class, int]) -> set[fx.Node]:
        """The operations to recompute, given how many of each class."""
        return {node for key, count in counts.items() for node in self.members[key][:count]}


def problem_of(gm: fx.GraphModule, values: Values, prices: Prices) -> RecomputeProblem:
    """The recomputation problem of a joint graph.

    Layer outputs are not recomputed: else the backward of a layer would begin with recomputing all layers before it.
    Operations already marked with ``RECOMPUTE`` stay as they are: saved, or recomputed at no cost.

    Raises:
        ClusterError: the device has no rate for an operation's arithmetic in its dtype.
    """
    classes, costs = classes_of(gm, {}, least=2), node_costs(gm)
    fixed = values.once | values.leaving()
    members: dict[Class, list[fx.Node]] = defaultdict(list)
    for node in values.makes:
        if not RECOMPUTE.get(node):
            members[classes[node]].append(node)

    def result(storage: Storage) -> tuple[Class, int]:
        maker = values.maker[storage]
        return classes[maker], values.makes[maker].index(storage)

    seconds: dict[Class, float] = {}
    most: dict[Class, int] = {}
    nbytes: dict[tuple[Class, int], int] = {}
    reads: set[tuple[Class, tuple[Class, int]]] = set()
    for key, nodes in members.items():
        node = nodes[0]
        seconds[key] = prices.communication(node) if is_collective(node) else prices.computation(costs[node])
        settled = any(each in fixed or each in RECOMPUTE for each in nodes)
        most[key] = 0 if settled else len(nodes)
        nbytes |= {(key, position): storage.nbytes for position, storage in enumerate(values.makes[node])}
        for each in nodes:
            reads |= {(key, result(s)) for s in values.reads[each] if classes[values.maker[s]] in members}
    demanded = {result(storage) for storage in values.demanded if classes[values.maker[storage]] in members}
    return RecomputeProblem(dict(members), seconds, most, nbytes, demanded, reads)
