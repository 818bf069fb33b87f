"""Which operations run on the ranks' own experts, and so where tokens are exchanged: the cheapest way that is legal.

The problem is that of :mod:`shardgraph.passes.sharding.problem` with other placements; see
:mod:`shardgraph.passes.experts.rules`. It can always be solved: what nothing says how to do on exchanged tokens is done
on the rank's own batch, for which tokens go back and weights are gathered.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from shardgraph.ir import Gradient, Parameter, outputs, placeholders
from shardgraph.ir.attributes import ROLE
from shardgraph.passes.experts.rules import expert_options, same_on_all_ranks
from shardgraph.passes.sharding.choose import Problem, solve
from shardgraph.passes.sharding.classes import classes_of
from shardgraph.passes.sharding.legal import Value, placed_values, value_of
from shardgraph.passes.sharding.options import Option, operands, replicated, results
from shardgraph.passes.sharding.placements import REPLICATE, Exchanged, Summed, divides

_WHOLE = 256.0  # for each byte of a weight that is gathered after all, or of a gradient scattered
_START = 1024.0  # bytes that starting a collective is worth
_INSIDE = 1.0  # of every operation on exchanged tokens: they go no further than they must


class ExpertOptions:
    """The options of the operations of ``gm`` over ``parts`` ranks, of which each has its part of ``experts``.

    ``experts`` are parameters by name, cut along dim 0. What may lie in parts is found from them on, over all that is
    computed with them, up and down the graph.
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
        """What is legal for a node; the first is to do it on the rank's own batch."""
        return list(dict.fromkeys([replicated(node), *self._linked(node)]))

    def _linked(self, node: fx.Node) -> list[Option]:
        """The options that divide evenly and go with how some tensor is known to lie."""
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


def choose_experts(gm: fx.GraphModule, parts: int, experts: Collection[str]) -> dict[fx.Node, Option]:
    """The option of every node of a joint graph that together cost least."""
    legal = ExpertOptions(gm, parts, experts)
    options: dict[fx.Node, list[Option]] = {}
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            cut = _names(ROLE.get(node), experts)
            options[node] = [Option((), (Shard(0) if cut else REPLICATE,))]
        elif node.op == "call_function" and node.target is not operator.getitem:
            options[node] = legal.of(node)
    classes = classes_of(gm, dict.fromkeys(experts, Shard(0)))
    problem, makers = _problem(gm, options, classes, experts)

    def moves(key: Any, index: int, before: Placement, after: Placement) -> float:
        node, at = makers[key, index]
        return _move(before, after, results(node)[at], node in legal.common)

    found = solve(problem, moves) if problem.uses else {}
    return {node: found.get(classes[node], choices[0]) for node, choices in options.items()}


def _names(role: Any, experts: Collection[str]) -> bool:
    return isinstance(role, Parameter) and role.fqn in experts


def _problem(
    gm: fx.GraphModule, options: Mapping[fx.Node, list[Option]], classes: Mapping[fx.Node, Any], experts: Any
) -> tuple[Problem, dict[tuple[Any, int], Value]]:
    """What is to be chosen, of the part of the graph where there is a choice."""
    problem = Problem()
    makers: dict[tuple[Any, int], Value] = {}
    seen: set[fx.Node] = set()

    def enter(node: fx.Node) -> Any:
        key = classes[node]
        if node not in seen:
            seen.add(node)
            problem.members[key] += 1
            problem.options.setdefault(key, options[node])
            problem.costs.setdefault(key, [0.0, *(_INSIDE for _ in options[node][1:])])
            for index in range(len(results(node))):
                makers.setdefault((key, index), (node, index))
        return key

    for node in options:
        for position, operand in enumerate(operands(node) if node.op == "call_function" else []):
            source, index = value_of(operand)
            if len(options[node]) > 1 or len(options[source]) > 1:
                problem.uses[enter(source), index, enter(node), position] += 1
    for role, value in outputs(gm):
        if isinstance(value, fx.Node):
            source, index = value_of(value)
            if len(options[source]) > 1:
                end = "gradient" if isinstance(role, Gradient) and _names(role.of, experts) else "result"
                problem.uses[enter(source), index, end, 0] += 1
    for end, placement in (("gradient", Summed(0)), ("result", REPLICATE)):
        problem.options[end], problem.costs[end] = [Option((placement,), ())], [0.0]
        problem.members[end] = 1
    return problem, makers


def _move(before: Placement, after: Placement, value: torch.Tensor, common: bool) -> float:
    """Bytes, or what they are worth, of bringing a tensor, of which a rank has ``value``, to another placement."""
    if before == after:
        return 0.0
    exchanges = isinstance(before, Exchanged) + isinstance(after, Exchanged)
    if exchanges and {type(before), type(after)} <= {Exchanged, type(REPLICATE)}:
        return exchanges * (_START + value.nbytes)
    if before == REPLICATE and isinstance(after, Shard):
        return 0.0 if common else math.inf
    if (before == REPLICATE and isinstance(after, Summed)) or (isinstance(before, Shard) and after == REPLICATE):
        return _START + _WHOLE * value.nbytes
    return math.inf
