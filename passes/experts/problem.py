"""Chooses which operations run on the ranks' own experts, and so where tokens are exchanged: the cheapest legal choice.

The problem is that of :mod:`shardgraph.passes.sharding.problem` with other placements; see
:mod:`shardgraph.passes.experts.rules`. It always has a solution: an operation without a rule for exchanged tokens runs
on the rank's own batch, for which tokens are sent back and weights are gathered.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import fx
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from shardgraph.ir import Gradient, Parameter, outputs, placeholders
from shardgraph.ir.attributes import ROLE
from shardgraph.passes.analysis.costs import node_costs
from shardgraph.passes.experts.rules import expert_options, same_on_all_ranks
from shardgraph.passes.sharding.activations import pattern_of, written_names
from shardgraph.passes.sharding.choose import PlacementProblem, solve
from shardgraph.passes.sharding.classes import classes_of
from shardgraph.passes.sharding.legal import Value, placed_values, value_of
from shardgraph.passes.sharding.options import Option, operands, replicated, results
from shardgraph.passes.sharding.placements import REPLICATE, Exchanged, Summed, divides
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
        self.nodes = [n for n in gm.graph.nodes if n.op == "call_function" and n.target is not operator.getitem]
        self.known: dict[Value, set[Placement]] = defaultdict(set)
        starts = {node for role, node in placeholders(gm).items() if _names(role, experts)}
        for node in starts:
            self.known[node, 0].add(Shard(0))
        self._spread(starts)

    def of(self, node: fx.Node) -> list[Option]:
        """The legal options of a node; the first is to run on the rank's own batch."""
        return list(dict.fromkeys([replicated(node), *self._linked(node)]))

    def _linked(self, node: fx.Node) -> list[Option]:
        """Evenly dividing options that match a known placement of at least one of their tensors."""
        found = []
        for option in expert_options(node, self.known, self.common):
            values = placed_values(node, option)
            even = all(divides(p, results(maker)[index].shape, self.parts) for (maker, index), p in values)
            if even and any(p in self.known[value] for value, p in values if value in self.known):
                found.append(option)
        return found

    def _spread(self, starts: set[fx.Node]) -> None:
        users: dict[fx.Node, set[fx.Node]] = defaultdict(set)
        for node in self.nodes:
            for operand in operands(node):
                users[value_of(operand)[0]].add(node)
        grown = {user for node in starts for user in users[node]}
        while grown:
            again: set[fx.Node] = set()
            for node in self.nodes:
                if node not in grown:
                    continue
                for option in self._linked(node):
                    for value, placement in placed_values(node, option):
                        if placement != REPLICATE and placement not in self.known[value]:
                            self.known[value].add(placement)
                            again |= users[value[0]] | {value[0]}
            grown = again


class ExpertPlacements:
    """The legal options of a joint graph's operations over ``parts`` ranks of an expert axis, and their costs.

    ``experts`` are parameter names, as for :class:`ExpertOptions`.
    """

    def __init__(self, gm: fx.GraphModule, parts: int, experts: Collection[str]) -> None:
        self.gm, self._experts, self._legal = gm, experts, ExpertOptions(gm, parts, experts)
        self._prices = PlacementPrices.of(node_costs(gm), parts, sequence=False)
        self._options: dict[fx.Node, list[Option]] = {}
        for node in gm.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                cut = _names(ROLE.get(node), experts)
                self._options[node] = [Option((), (Shard(0) if cut else REPLICATE,))]
            elif node.op == "call_function" and node.target is not operator.getitem:
                self._options[node] = self._legal.of(node)

    def options(self, node: fx.Node) -> list[Option]:
        """The legal options of a placeholder, constant or operation."""
        return self._options[node]

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

    def ends(self, chosen: Mapping[fx.Node, Option]) -> Iterator[tuple[Value, Placement]]:
        """The placements required of the graph's outputs: gradients of experts sharded, the rest ``Replicate()``."""
        for role, value in outputs(self.gm):
            if isinstance(value, fx.Node):
                of_expert = isinstance(role, Gradient) and _names(role.of, self._experts)
                yield value_of(value), Summed(0) if of_expert else REPLICATE

    def solve(self) -> tuple[dict[fx.Node, Option], float]:
        """The option of every node that minimizes total time, and the gap (:mod:`shardgraph.passes.milp`)."""
        classes = classes_of(self.gm, dict.fromkeys(self._experts, Shard(0)))
        problem, makers = self._problem(classes)

        def moves(key: Any, index: int, before: Placement, after: Placement) -> float:
            return self.move(makers[key, index], before, after)

        if not problem.uses:
            return {node: choices[0] for node, choices in self._options.items()}, 0.0
        found = solve(problem, moves)
        chosen = {node: found.options.get(classes[node], choices[0]) for node, choices in self._options.items()}
        return chosen, found.gap

    def _problem(self, classes: Mapping[fx.Node, Any]) -> tuple[PlacementProblem, dict[tuple[Any, int], Value]]:
        """The integer program for the part of the graph that has a choice."""
        options, problem = self._options, PlacementProblem()
        makers: dict[tuple[Any, int], Value] = {}
        names, seen = written_names(self.gm), set[fx.Node]()

        def enter(node: fx.Node) -> Any:
            key = classes[node]
            if node not in seen:
                seen.add(node)
                problem.members[key] += 1
                problem.options.setdefault(key, options[node])
                problem.costs.setdefault(key, [0.0, *(_INSIDE for _ in options[node][1:])])
                problem.names.setdefault(key, pattern_of(names[node]) if node in names else node.name)
                for index in range(len(results(node))):
                    makers.setdefault((key, index), (node, index))
            return key

        for node in options:
            for position, operand in enumerate(operands(node) if node.op == "call_function" else []):
                source, index = value_of(operand)
                if len(options[node]) > 1 or len(options[source]) > 1:
                    problem.uses[enter(source), index, enter(node), position] += 1
        for (source, index), wanted in self.ends({}):
            if len(options[source]) > 1:
                problem.uses[enter(source), index, "result" if wanted == REPLICATE else "gradient", 0] += 1
        for end, placement in (("gradient", Summed(0)), ("result", REPLICATE)):
            problem.options[end], problem.costs[end] = [Option((placement,), ())], [0.0]
            problem.members[end] = 1
        return problem, makers


def _names(role: Any, experts: Collection[str]) -> bool:
    return isinstance(role, Parameter) and role.fqn in experts
