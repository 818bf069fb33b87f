"""The choice of placements for a joint graph, put as a problem: what is legal, what it costs, what must agree."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor.placement_types import Placement

from shardgraph.ir import Gradient, Input, Parameter, outputs, placeholders
from shardgraph.ir.attributes import ROLE
from shardgraph.passes.analysis.costs import node_costs
from shardgraph.passes.sharding import collective_rules, ring_attention  # noqa: F401 (they register what they have)
from shardgraph.passes.sharding.choose import Problem, solve
from shardgraph.passes.sharding.classes import classes_of
from shardgraph.passes.sharding.constraints import Constraints
from shardgraph.passes.sharding.dtensor_rules import Refused
from shardgraph.passes.sharding.legal import Legal, Value, placed_values, reached, value_of
from shardgraph.passes.sharding.options import Option, operands, results
from shardgraph.passes.sharding.placements import PARTIAL, REPLICATE, blocks, cut_of, is_cut
from shardgraph.passes.sharding.pricing import Prices
from shardgraph.passes.sharding.sequences import Cuts, connected, input_sequences, stripes

aten = torch.ops.aten


def choose_options(
    gm: fx.GraphModule, parts: int, style: str, constraints: Constraints, refused: Refused | None = None
) -> dict[fx.Node, Option]:
    """The option of every node of a joint graph that together cost least and meet ``constraints``.

    ``style`` is that of the axis; see :class:`shardgraph.plans.plan.Plan`. ``refused`` counts what DTensor's strategies
    refuse.

    Raises:
        PlanError: none do, or the sequences are to be cut (``"context"``) and cannot be.
    """
    fixed, cuts = constraints.parameters, constraints.cut_activations()
    starts = stripes(gm, parts) if style == "context" else {}
    sequence = style != "whole"
    legal = Legal(gm, parts, _together(starts, constraints.cut_parameters(gm) | cuts), refused)
    allowed = _only(connected(legal, starts)) if starts else _all_but(_barred(legal, _dimensions(gm, sequence), cuts))
    weights = _weights(gm)
    classes = classes_of(gm, fixed)
    marked = {(classes[source], index) for source, index in (value_of(mark.args[0]) for mark in constraints.marks)}
    prices = Prices.of(node_costs(gm, fused=False), parts, sequence)
    problem = Problem()
    options: dict[fx.Node, list[Option]] = {}
    makers: dict[Any, Value] = {}
    for node in gm.graph.nodes:
        key = classes[node]
        if node.op in ("placeholder", "get_attr"):
            options[node] = [o for o in _held(node, parts, fixed, legal) if allowed(node, o)]
            price = [prices.parameter(node, o.results[0]) if node in ROLE else 0.0 for o in options[node]]
        elif node in constraints.marks:
            placement = constraints.marks[node]
            options[node], price = [Option((placement,), (placement,))], [0.0]
        elif node.op == "call_function" and node.target is not operator.getitem:
            options[node] = [o for o in legal.options(node) if allowed(node, o)]
            price = [prices.operation(node, o) for o in options[node]]
        else:
            continue
        problem.members[key] += 1
        if key not in problem.options:
            problem.options[key], problem.costs[key] = options[node], price
            for index in range(len(results(node))):
                makers[key, index] = (node, index)
        for position, operand in enumerate(operands(node) if node.op == "call_function" else []):
            source, index = value_of(operand)
            problem.uses[classes[source], index, key, position] += 1
    _add_results(gm, problem, classes)

    def moves(key: Any, index: int, before: Placement, after: Placement) -> float:
        node, at = makers[key, index]
        if before != after and node in weights and before != REPLICATE:
            return math.inf  # weights stay where they are: what is gathered is what they are multiplied with
        scattered = before == PARTIAL and is_cut(after) and node not in weights
        if scattered and not sequence and (key, index) not in marked:
            return math.inf
        return prices.move(before, after, results(node)[at].nbytes)

    found = solve(problem, moves)
    return {node: found[classes[node]] for node in options}


def _add_results(gm: fx.GraphModule, problem: Problem, classes: Mapping[fx.Node, Hashable]) -> None:
    """What the graph gives: gradients as their parameters lie, all else whole."""
    owners = placeholders(gm)
    problem.options["result"], problem.costs["result"] = [Option((REPLICATE,), ())], [0.0]
    problem.members["result"] = 1
    for role, value in outputs(gm):
        if isinstance(value, fx.Node):
            source, index = value_of(value)
            if isinstance(role, Gradient) and isinstance(role.of, Parameter):
                problem.ties[classes[source], index, classes[owners[role.of]]] += 1
            else:
                problem.uses[classes[source], index, "result", 0] += 1


def _held(node: fx.Node, parts: int, fixed: Mapping[str, Placement], legal: Legal) -> list[Option]:
    role = ROLE.get(node)
    if not isinstance(role, Parameter):
        return [Option((), (REPLICATE,))]
    if role.fqn in fixed:
        return [Option((), (fixed[role.fqn],))]
    cuts = sorted(legal.cuts[node, 0], key=cut_of)
    return [Option((), (REPLICATE,)), *(Option((), (cut,)) for cut in cuts)]


def _all_but(barred: Cuts) -> Callable[[fx.Node, Option], bool]:
    """Whether an option has none of the cuts."""
    return lambda node, option: all(p not in barred.get(value, ()) for value, p in placed_values(node, option))


def _only(cuts: Cuts) -> Callable[[fx.Node, Option], bool]:
    """Whether an option has no others than the cuts."""
    return lambda node, option: all(p in cuts.get(value, ()) for value, p in placed_values(node, option) if is_cut(p))


def _together(starts: Mapping[Value, Iterable[Placement]], demanded: Mapping[Value, Placement]) -> Cuts:
    found = {value: set(cuts) for value, cuts in starts.items()}
    for value, cut in demanded.items():
        found.setdefault(value, set()).add(cut)
    return found


def _barred(
    legal: Legal, starts: Mapping[Value, Sequence[Placement]], demanded: Mapping[Value, Placement]
) -> dict[Value, set[Placement]]:
    """What follows from cutting ``starts`` so, but for those from which follows what is ``demanded``."""
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
    """The cuts of inputs that no operation may follow: along the batch, and along the sequence without leave."""
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
