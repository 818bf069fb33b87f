"""The cheapest legal placements for a whole graph, as an integer program.

Variables
    ``x[c, o]`` in {0, 1}: every operation of class ``c`` takes option ``o``. For every use ``u`` of a result as an
    operand, ``f[u, p, q]`` in [0, 1]: the result is produced as ``p`` and used as ``q``. For every result ``r``,
    ``m[r, p, q]`` in [0, 1]: it is redistributed from ``p`` to ``q``, once for all its uses as ``q``. Pairs of
    placements without a collective between them have no variables.

Objective
    Minimize the seconds ``sum(members[c] * seconds[c, o] * x[c, o]) + sum(members[c] * move[r, p, q] * m[r, p, q])``,
    where ``c`` in the second sum is the class that produces ``r``.

Constraints
    1. *one option of c*: ``sum_o x[c, o] = 1``.
    2. *r as it is made*: for every use and ``p``, ``sum_q f[u, p, q] = sum(x[maker, o])`` over the options that
       produce ``p``.
    3. *r as it is used*: for every use and ``q``, ``sum_p f[u, p, q] = sum(x[user, o])`` over the options that
       use ``q``.
    4. *r is brought from p to q*: ``f[u, p, q] <= m[r, p, q]``.

The relaxation is close to integral, and HiGHS solves it exactly. The formulation is that of Alpa's intra-operator pass
(Zheng et al., OSDI 2022, https://arxiv.org/abs/2201.12023) with its products of variables written as flows.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from torch import fx
from torch.distributed.tensor.placement_types import Placement

from shardgraph.errors import PlanError
from shardgraph.passes.milp import NoSolution, Program
from shardgraph.passes.sharding.classes import classes_of, pattern_of, written_names
from shardgraph.passes.sharding.legal import Value, value_of
from shardgraph.passes.sharding.options import Option, operands
from shardgraph.passes.sharding.placements import PARTIAL

_NODES = 1000  # of search; most programs take one
_LIMIT = 120.0  # seconds of search, on the slowest of machines
_EARLY = 1 + 1e-5  # for a choice among equals: what a reduction costs that is not left to the end


class Placements(ABC):
    """The legal options of a graph's operations along one mesh axis, and their costs.

    ``options`` has those of every placeholder, constant and operation; the first of an operation is fully replicated.
    ``fixed`` are placements of parameters, by name. If ``whole``, all operations are part of the integer program,
    otherwise only those with several options and their neighbours. ``ends_as`` has the placements that outputs may be
    required to have, with their names in errors.
    """

    gm: fx.GraphModule
    options: dict[fx.Node, list[Option]]
    fixed: Mapping[str, Placement]
    whole: ClassVar[bool] = True
    ends_as: ClassVar[Mapping[Placement, str]]

    @abstractmethod
    def seconds(self, node: fx.Node, option: Option) -> float:
        """Seconds of a placeholder, constant or operation under an option."""

    @abstractmethod
    def move(self, value: Value, before: Placement, after: Placement) -> float:
        """Seconds to redistribute a value from one placement to another; infinite if not allowed."""

    @abstractmethod
    def ends(self) -> Iterator[tuple[Value, Placement | fx.Node]]:
        """The graph's outputs, each with its required placement, or with the parameter whose placement it must have."""

    def solve(self) -> tuple[dict[fx.Node, Option], float]:
        """The option of every node that minimizes total time, and the gap (:mod:`shardgraph.passes.milp`).

        After 1,000 nodes of the search, or 120 seconds, the best solution so far is returned.

        Raises:
            PlanError: the constraints are infeasible, and the message names the contradiction; or no solution was found
                in time.
        """
        keys = classes_of(self.gm, self.fixed)
        classes, uses = self._problem(keys)
        program = Program()
        for each in classes.values():
            costs = [self.seconds(each.node, option) if each.node else 0.0 for option in each.options]
            each.variables = [program.variable(each.members * cost, integer=len(costs) > 1) for cost in costs]
            program.constrain(f"one option of {each.name}", dict.fromkeys(each.variables, 1.0), 1.0, 1.0)
        moves: dict[_Move, int] = {}
        for use in uses:
            self._add_flows(program, moves, use)
        try:
            solution = program.solve(limit=_LIMIT, nodes=_NODES)
        except NoSolution as error:
            raise PlanError(
                f"no placement of the operators meets all constraints: {error}. Take back an annotation, or a "
                "placement that the plan sets"
            ) from None
        chosen = {
            key: each.options[int(np.argmax([solution.values[variable] for variable in each.variables]))]
            for key, each in classes.items()
        }
        return {node: chosen.get(keys[node], options[0]) for node, options in self.options.items()}, solution.gap

    def _problem(self, keys: Mapping[fx.Node, Hashable]) -> tuple[dict[Hashable, _Class], list[_Use]]:
        """The classes by their ``keys``, and which class uses which result of which."""
        names = written_names(self.gm)
        classes: dict[Hashable, _Class] = {}
        entered: set[fx.Node] = set()
        uses: list[_Use] = []
        ties: list[_Use] = []
        ends = {placement: _Class(name, [Option((placement,), ())]) for placement, name in self.ends_as.items()}

        def enter(node: fx.Node) -> _Class:
            name = pattern_of(names[node]) if node in names else node.name
            entry = classes.setdefault(keys[node], _Class(name, self.options[node], node))
            entry.members += node not in entered
            entered.add(node)
            return entry

        for node, options in self.options.items():
            if self.whole:
                enter(node)
            for position, operand in enumerate(operands(node)):
                source, index = value_of(operand)
                if self.whole or len(options) > 1 or len(self.options[source]) > 1:
                    uses.append((enter(source), index, enter(node), position))
        for (source, index), end in self.ends():
            if isinstance(end, fx.Node):
                ties.append((enter(source), index, enter(end), None))
            elif self.whole or len(self.options[source]) > 1:
                uses.append((enter(source), index, ends[end], 0))
        return classes | ends, list(dict.fromkeys(uses + ties))

    def _add_flows(self, program: Program, moves: dict[_Move, int], use: _Use) -> None:
        """Add the variables and constraints of a use; ``moves`` are the redistributions that have a variable."""
        maker, result, user, operand = use
        made = maker.by_placement(option.results[result] for option in maker.options)
        used = user.by_placement(o.results[0] if operand is None else o.operands[operand] for o in user.options)
        out = {p: dict.fromkeys(variables, -1.0) for p, variables in made.items()}
        into = {q: dict.fromkeys(variables, -1.0) for q, variables in used.items()}
        for before, after in itertools.product(made, used):
            if math.isinf(cost := self.move((maker.node, result), before, after)):
                continue
            if before == PARTIAL and operand is not None:  # at the end, reductions of several gradients are merged
                cost *= _EARLY
            flow = program.variable()
            out[before][flow] = into[after][flow] = 1.0
            if cost:
                move = maker, result, before, after
                if move not in moves:
                    moves[move] = program.variable(maker.members * cost)
                row = {flow: 1.0, moves[move]: -1.0}
                program.constrain(f"{maker.name} is brought from {before} to {after}", row, high=0.0)
        for row in out.values():
            program.constrain(f"{maker.name} as it is made for {user.name}", row, 0.0, 0.0)
        for row in into.values():
            program.constrain(f"{maker.name} as {user.name} uses it", row, 0.0, 0.0)


@dataclass(eq=False)
class _Class:
    """Operations that take the same option, of which ``node`` is one, or an end of the graph, without a node."""

    name: str
    options: list[Option]
    node: fx.Node | None = None
    members: int = 0
    variables: list[int] = field(default_factory=list)

    def by_placement(self, placements: Iterable[Placement | None]) -> dict[Placement, list[int]]:
        """The variables by the placement that each option gives an operand or a result."""
        variables: dict[Placement, list[int]] = defaultdict(list)
        for placement, variable in zip(placements, self.variables, strict=True):
            assert placement is not None
            variables[placement].append(variable)
        return variables


_Use = tuple[_Class, int, _Class, int | None]
"""Maker, its result, user, its operand; None if the result must end with the placement of the user's first result."""
_Move = tuple[_Class, int, Placement, Placement]
