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

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import numpy as np
from torch.distributed.tensor.placement_types import Placement

from shardgraph.errors import PlanError
from shardgraph.passes.milp import NoSolution, Program
from shardgraph.passes.sharding.options import Option

Class = Hashable
LIMIT = 120.0  # seconds of search


@dataclass
class PlacementProblem:
    """The integer program's input: options and seconds of each class, and which class uses which result of which.

    ``uses`` counts, for ``(maker, result, user, operand)``, how often a member of ``user`` takes the ``result`` of a
    member of ``maker`` as its ``operand``. ``names`` identify the classes in errors.
    """

    options: dict[Class, list[Option]] = field(default_factory=dict)
    costs: dict[Class, list[float]] = field(default_factory=dict)
    members: Counter[Class] = field(default_factory=Counter)
    uses: Counter[tuple[Class, int, Class, int]] = field(default_factory=Counter)
    ties: Counter[tuple[Class, int, Class]] = field(default_factory=Counter)
    """``(maker, result, owner)``: the result must end with the placement of the first result of ``owner``."""
    names: dict[Class, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Chosen:
    """The option of every class, and the ``gap``: the fraction of the time by which the optimum may be faster."""

    options: dict[Class, Option]
    gap: float


def solve(
    problem: PlacementProblem,
    moves: Callable[[Class, int, Placement, Placement], float],
    limit: float = LIMIT,
) -> Chosen:
    """The option of every class that minimizes total seconds.

    ``moves`` gives the seconds to redistribute a result; infinite forbids it. After ``limit`` seconds the best solution
    so far is returned.

    Raises:
        PlanError: the constraints are infeasible, and the message names the contradiction; or no solution was found in
            time.
    """
    program = Program()
    chosen = {
        key: [program.variable(problem.members[key] * cost, integer=len(costs) > 1) for cost in costs]
        for key, costs in problem.costs.items()
    }

    def name(key: Class) -> str:
        return problem.names.get(key, str(key))

    for key, variables in chosen.items():
        program.constrain(f"one option of {name(key)}", dict.fromkeys(variables, 1.0), 1.0, 1.0)

    def made(key: Class, result: int) -> dict[Placement, list[int]]:
        found: dict[Placement, list[int]] = defaultdict(list)
        for option, variable in zip(problem.options[key], chosen[key], strict=True):
            placement = option.results[result]
            assert placement is not None
            found[placement].append(variable)
        return found

    def used(key: Class, operand: int) -> dict[Placement, list[int]]:
        found: dict[Placement, list[int]] = defaultdict(list)
        for option, variable in zip(problem.options[key], chosen[key], strict=True):
            found[option.operands[operand]].append(variable)
        return found

    brought: dict[tuple[Class, int, Placement, Placement], int] = {}
    flows = [(maker, result, user, used(user, operand)) for maker, result, user, operand in problem.uses]
    flows += [(maker, result, owner, made(owner, 0)) for maker, result, owner in problem.ties]
    for maker, result, user, wanted in flows:
        have = made(maker, result)
        out = {p: dict.fromkeys(variables, -1.0) for p, variables in have.items()}
        into = {q: dict.fromkeys(variables, -1.0) for q, variables in wanted.items()}
        for before in have:
            for after in wanted:
                cost = moves(maker, result, before, after)
                if math.isinf(cost):
                    continue
                flow = program.variable()
                out[before][flow] = into[after][flow] = 1.0
                if cost:
                    key = (maker, result, before, after)
                    if key not in brought:
                        brought[key] = program.variable(problem.members[maker] * cost)
                    row = {flow: 1.0, brought[key]: -1.0}
                    program.constrain(f"{name(maker)} is brought from {before} to {after}", row, high=0.0)
        for row in out.values():
            program.constrain(f"{name(maker)} as it is made for {name(user)}", row, 0.0, 0.0)
        for row in into.values():
            program.constrain(f"{name(maker)} as {name(user)} uses it", row, 0.0, 0.0)
    try:
        solution = program.solve(limit=limit)
    except NoSolution as error:
        raise PlanError(
            f"no placement of the operators meets all constraints: {error}. Take back an annotation, or a placement "
            "that the plan says"
        ) from None
    return Chosen(
        {
            key: problem.options[key][int(np.argmax([solution.values[v] for v in variables]))]
            for key, variables in chosen.items()
        },
        solution.gap,
    )
