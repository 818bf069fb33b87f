"""The placement problem of a joint graph: legal options, costs and constraints."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import fx
from torch.distributed.tensor.placement_types import Placement

from shardgraph.ir import Gradient, Input, Parameter, outputs, placeholders
from shardgraph.ir.attributes import ROLE
from shardgraph.passes.analysis.costs import node_costs
from shardgraph.passes.sharding import collective_rules, ring_attention  # noqa: F401 (they register rules and lowerings)
from shardgraph.passes.sharding.activations import pattern_of, written_names
from shardgraph.passes.sharding.choose import PlacementProblem, solve
from shardgraph.passes.sharding.classes import classes_of
from shardgraph.passes.sharding.constraints import Constraints
from shardgraph.passes.sharding.dtensor_rules import Refused
from shardgraph.passes.sharding.legal import Legal, Value, placed_values, reached, value_of
from shardgraph.passes.sharding.options import Option, operands, results
from shardgraph.passes.sharding.placements import PARTIAL, REPLICATE, blocks, cut_of, is_cut
from shardgraph.passes.sharding.pricing import PlacementPrices
from shardgraph.passes.sharding.sequences import Cuts, connected, input_sequences, stripes

aten = torch.ops.aten


class OperatorPlacements:
    """The legal options of a joint graph's operations over ``parts`` ranks under ``constraints``, and their costs.

    ``style`` is the axis's, see :class:`shardgraph.plans.plan.Plan`. ``refused`` counts what DTensor's strategies
    refuse.

    Raises:
        PlanError: the style is ``"context"`` and the sequences cannot be sharded.
    """

    def __init__(
        self, gm: fx.GraphModule, parts: int, style: str, constraints: Constraints, refused: Refused | None = None
    ) -> None:
        self.gm, self._constraints, self._sequence = gm, constraints, style != "whole"
        cuts = constraints.cut_activations()
        starts = stripes(gm, parts) if style == "context" else {}
        legal = Legal(gm, parts, _together(starts, constraints.cut_parameters(gm) | cuts), refused)
        dimensions = {} if starts else _dimensions(gm, self._sequence)
        allowed = _only(connected(legal, starts)) if starts else _all_but(_barred(legal, dimensions, cuts))
        self._options = {
            node: options
            for node in gm.graph.nodes
            if (options := self._legal(node, legal, parts, allowed)) is not None
        }
        self._weights = _weights(gm)
        self._marked = {value_of(mark.args[0]) for mark in constraints.marks}
        self._prices = PlacementPrices.of(node_costs(gm, fused=False), parts, self._sequence)

    def options(self, node: fx.Node) -> list[Option]:
        """The legal options of a placeholder, constant or operation."""
        return self._options[node]

    def move(self, value: Value, before: Placement, after: Placement) -> float:
        """Seconds to redistribute a value from one placement to another; infinite if not allowed."""
        node, index = value
        if before != after and node in self._weights and before != REPLICATE:
            return math.inf  # weights are not redistributed: their other operand is gathered instead
        scattered = before == PARTIAL and is_cut(after) and node not in self._weights
        if scattered and not self._sequence and value not in self._marked:
            return math.inf
        return self._prices.move(before, after, results(node)[index])

    def ends(self, chosen: Mapping[fx.Node, Option]) -> Iterator[tuple[Value, Placement]]:
        """The placements required of the graph's outputs: gradients as their parameters, all else replicated."""
        for value, owner in _ends(self.gm):
            yield value, REPLICATE if owner is None else chosen[owner].results[0]

    def solve(self) -> tuple[dict[fx.Node, Option], float]:
        """The option of every node that minimizes total time, and the gap (:mod:`shardgraph.passes.milp`).

        Raises:
            PlanError: no choice meets the constraints.
        """
        classes = classes_of(self.gm, self._constraints.parameters)
        problem, makers = self._problem(classes)

        def moves(key: Hashable, index: int, before: Placement, after: Placement) -> float:
            return self.move(makers[key, index], before, after)

        found = solve(problem, moves)
        return {node: found.options[classes[node]] for node in self._options}, found.gap

    def _legal(
        self, node: fx.Node, legal: Legal, parts: int, allowed: Callable[[fx.Node, Option], bool]
    ) -> list[Option] | None:
        if node in self._constraints.marks:
            placement = self._constraints.marks[node]
            return [Option((placement,), (placement,))]
        if node.op in ("placeholder", "get_attr"):
            return [o for o in _held(node, self._constraints.parameters, legal) if allowed(node, o)]
        if node.op == "call_function" and node.target is not operator.getitem:
            return [o for o in legal.options(node) if allowed(node, o)]
        return None

    def _seconds(self, node: fx.Node, option: Option) -> float:
        if node in self._constraints.marks:
            return 0.0
        if node.op == "call_function":
            return self._prices.operation(node, option)
        return self._prices.parameter(node, option.results[0]) if node in ROLE else 0.0

    def _problem(
        self, classes: Mapping[fx.Node, Hashable]
    ) -> tuple[PlacementProblem, dict[tuple[Hashable, int], Value]]:
        problem = PlacementProblem()
        makers: dict[tuple[Hashable, int], Value] = {}
        names = written_names(self.gm)
        for node, options in self._options.items():
            key = classes[node]
            problem.members[key] += 1
            if key not in problem.options:
                problem.options[key] = options
                problem.costs[key] = [self._seconds(node, option) for option in options]
                problem.names[key] = pattern_of(names[node]) if node in names else node.name
                for index in range(len(results(node))):
                    makers[key, index] = (node, index)
            for position, operand in enumerate(operands(node) if node.op == "call_function" else []):
                source, index = value_of(operand)
                problem.uses[classes[source], index, key, position] += 1
        problem.options["result"], problem.costs["result"] = [Option((REPLICATE,), ())], [0.0]
        problem.members["result"] = 1
        for (source, index), owner in _ends(self.gm):
            if owner is None:
                problem.uses[classes[source], index, "result", 0] += 1
            else:
                problem.ties[classes[source], index, classes[owner]] += 1
        return problem, makers


def _ends(gm: fx.GraphModule) -> Iterator[tuple[Value, fx.Node | None]]:
    """The graph's outputs, with the parameter for each gradient of a parameter."""
    owners = placeholders(gm)
    for role, value in outputs(gm):
        if isinstance(value, fx.Node):
            of_parameter = isinstance(role, Gradient) and isinstance(role.of, Parameter)
            yield value_of(value), owners[role.of] if of_parameter else None


def _held(node: fx.Node, fixed: Mapping[str, Placement], legal: Legal) -> list[Option]:
    role = ROLE.get(node)
    if not isinstance(role, Parameter):
        return [Option((), (REPLICATE,))]
    if role.fqn in fixed:
        return [Option((), (fixed[role.fqn],))]
    cuts = sorted(legal.cuts[node, 0], key=cut_of)
    return [Option((), (REPLICATE,)), *(Option((), (cut,)) for cut in cuts)]


def _all_but(barred: Cuts) -> Callable[[fx.Node, Option], bool]:
    """A filter for options that use none of the ``barred`` shardings."""
    return lambda node, option: all(p not in barred.get(value, ()) for value, p in placed_values(node, option))


def _only(cuts: Cuts) -> Callable[[fx.Node, Option], bool]:
    """A filter for options that use no shardings other than ``cuts``."""
    return lambda node, option: all(p in cuts.get(value, ()) for value, p in placed_values(node, option) if is_cut(p))


def _together(starts: Mapping[Value, Iterable[Placement]], demanded: Mapping[Value, Placement]) -> Cuts:
    found = {value: set(cuts) for value, cuts in starts.items()}
    for value, cut in demanded.items():
        found.setdefault(value, set()).add(cut)
    return found


def _barred(
    legal: Legal, starts: Mapping[Value, Sequence[Placement]], demanded: Mapping[Value, Placement]
) -> dict[Value, set[Placement]]:
    """Shardings that follow from those in ``starts``, except from the ones that lead to a ``demanded`` sharding."""
    if not demanded:
        return reached(legal, starts)
    found: dict[Value, set[Placement]] = {}
    for start in ({value: [cut]} for value, cuts in starts.items() for cut in cuts):
        follows = reached(legal, start)
        if not any(cut in follows.get(value, ()) for value, cut in demanded.items()):
            for value, cuts in follows.items():
                found.setdefault(value, set()).update(cuts)
    return found


def _dimensions(gm: fx.GraphModule, sequence: bool) -> dict[Value, list[Placement]]:
    """Input shardings that no operation may follow: along the batch, and along the sequence unless ``sequence``."""
    found: dict[Value, list[Placement]] = {}
    for role, node in placeholders(gm).items():
        value = node.meta.get("val")
        if isinstance(role, Input) and isinstance(value, torch.Tensor) and value.dim():
            found[node, 0] = [blocks(0, 1)]
    if not sequence:
        for value, dim in input_sequences(gm).items():
            found[value].append(blocks(dim, 1))
    return found


def _weights(gm: fx.GraphModule) -> set[fx.Node]:
    """Parameters of at least two dimensions, and their views and casts."""
    found: set[fx.Node] = set()
    for node in gm.graph.nodes:
        role = ROLE.get(node)
        if isinstance(role, Parameter) and node.meta["val"].dim() > 1:
            found.add(node)
        elif node.op == "call_function":
            moves = node.target is aten._to_copy.default or getattr(node.target, "is_view", False)
            if moves and all(operand in found for operand in node.all_input_nodes):
                found.add(node)
    return found
