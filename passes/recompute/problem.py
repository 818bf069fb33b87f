"""What is to be chosen: operations of forward by class, what each takes to compute again, and what it keeps alive.

Equal layers are one class of each operation, decided once: how many of them compute it again. The first so many do, as
their values would be kept for longest, and the backward of the last, where most is live, then has nothing to compute
first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

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
    """The operations of forward by class.

    ``members``
        The operations of each class, in order; the layers of a class come first to last.
    ``seconds``
        What one of them takes to compute again.
    ``most``
        How many of them may be computed again, at most.
    ``nbytes``
        The size of each result, ``(class, position)``.
    ``demanded``
        The results that backward reads.
    ``reads``
        The results that a class reads, ``(class, (class, position))``.
    """

    members: dict[Class, list[fx.Node]]
    seconds: dict[Class, float]
    most: dict[Class, int]
    nbytes: dict[tuple[Class, int], int]
    demanded: set[tuple[Class, int]]
    reads: set[tuple[Class, tuple[Class, int]]]

    def operations(self, counts: Mapping[Class, int]) -> set[fx.Node]:
        """The operations that are computed again when so many of each class are."""
        return {node for key, count in counts.items() for node in self.members[key][:count]}


def problem_of(gm: fx.GraphModule, values: Values, prices: Prices) -> RecomputeProblem:
    """The problem of a joint graph.

    What leaves a layer is not computed again: else the backward of one would begin with all those before it.
    What is marked already, with ``RECOMPUTE``, stays as it is: kept, or for nothing.

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
            reads |= {(key, result(s)) for s in values.takes[each] if classes[values.maker[s]] in members}
    demanded = {result(storage) for storage in values.demanded if classes[values.maker[storage]] in members}
    return RecomputeProblem(dict(members), seconds, most, nbytes, demanded, reads)
