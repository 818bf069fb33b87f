"""The cheapest legal placements for a whole graph, as an integer program.

One binary variable for each option of each operation, exactly one of which is taken. For each use of a value a flow
from the placement in which it is made to the one in which it is used; what a flow between different placements sends
is paid once for all uses in the same placement. The relaxation is close to integral, and HiGHS solves it exactly. The
formulation is that of Alpa's intra-operator pass (Zheng et al., OSDI 2022, https://arxiv.org/abs/2201.12023) with its
products of variables written as flows.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array
from torch.distributed.tensor.placement_types import Placement

from shardgraph.errors import PlanError
from shardgraph.passes.sharding.options import Option

Class = Hashable


@dataclass
class Problem:
    """What is to be chosen: the options of each class with their costs, and which class uses which result of which.

    ``uses`` counts, for ``(maker, result, user, operand)``, how often a member of ``user`` takes as its ``operand``
    the ``result`` of a member of ``maker``. ``moves`` prices a change of placement of a result; infinite forbids it.
    """

    options: dict[Class, list[Option]] = field(default_factory=dict)
    costs: dict[Class, list[float]] = field(default_factory=dict)
    members: Counter[Class] = field(default_factory=Counter)
    uses: Counter[tuple[Class, int, Class, int]] = field(default_factory=Counter)
    ties: Counter[tuple[Class, int, Class]] = field(default_factory=Counter)
    """``(maker, result, owner)``: the result must end as the first result of ``owner`` lies."""


def solve(problem: Problem, moves: Callable[[Class, int, Placement, Placement], float]) -> dict[Class, Option]:
    """The option of every class that together cost least.

    Raises:
        PlanError: none are possible together.
    """
    program = _Program()
    chosen = {
        key: [program.variable(problem.members[key] * cost, binary=len(costs) > 1) for cost in costs]
        for key, costs in problem.costs.items()
    }
    for variables in chosen.values():
        program.equal({variable: 1.0 for variable in variables}, 1.0)

    def made(key: Class, result: int) -> dict[Placement, dict[int, float]]:
        found: dict[Placement, dict[int, float]] = defaultdict(dict)
        for option, variable in zip(problem.options[key], chosen[key], strict=True):
            placement = option.results[result]
            assert placement is not None
            found[placement][variable] = 1.0
        return found

    def taken(key: Class, operand: int) -> dict[Placement, dict[int, float]]:
        found: dict[Placement, dict[int, float]] = defaultdict(dict)
        for option, variable in zip(problem.options[key], chosen[key], strict=True):
            found[option.operands[operand]][variable] = 1.0
        return found

    paid: dict[tuple[Class, int, Placement, Placement], int] = {}
    flows = [(maker, result, taken(user, operand)) for maker, result, user, operand in problem.uses]
    flows += [(maker, result, made(owner, 0)) for maker, result, owner in problem.ties]
    for maker, result, wanted in flows:
        have = made(maker, result)
        out: dict[Placement, dict[int, float]] = {p: {v: -1.0 for v in vs} for p, vs in have.items()}
        into: dict[Placement, dict[int, float]] = {q: {v: -1.0 for v in vs} for q, vs in wanted.items()}
        for before in have:
            for after in wanted:
                cost = moves(maker, result, before, after)
                if math.isinf(cost):
                    continue
                flow = program.variable(0.0)
                out[before][flow] = into[after][flow] = 1.0
                if cost:
                    key = (maker, result, before, after)
                    if key not in paid:
                        paid[key] = program.variable(problem.members[maker] * cost)
                    program.at_most({flow: 1.0, paid[key]: -1.0}, 0.0)
        for row in (*out.values(), *into.values()):
            program.equal(row, 0.0)
    values = program.solve()
    return {
        key: problem.options[key][int(np.argmax([values[v] for v in variables]))] for key, variables in chosen.items()
    }


class _Program:
    """An integer program under construction."""

    def __init__(self) -> None:
        self.costs: list[float] = []
        self.integer: list[bool] = []
        self.rows: list[Mapping[int, float]] = []
        self.bounds: list[tuple[float, float]] = []

    def variable(self, cost: float, *, binary: bool = False) -> int:
        self.costs.append(cost)
        self.integer.append(binary)
        return len(self.costs) - 1

    def equal(self, row: Mapping[int, float], value: float) -> None:
        self.rows.append(row)
        self.bounds.append((value, value))

    def at_most(self, row: Mapping[int, float], value: float) -> None:
        self.rows.append(row)
        self.bounds.append((-np.inf, value))

    def solve(self) -> np.ndarray:
        entries = [(i, column, value) for i, row in enumerate(self.rows) for column, value in row.items()]
        at, columns, values = (np.array(each) for each in zip(*entries, strict=True))
        matrix = coo_array((values, (at, columns)), shape=(len(self.rows), len(self.costs))).tocsr()
        low, high = (np.array(each) for each in zip(*self.bounds, strict=True))
        costs = np.array(self.costs)
        found = milp(
            costs / max(costs.max(), 1.0) * 1e6,
            integrality=np.array(self.integer, dtype=int),
            bounds=Bounds(0, 1),
            constraints=LinearConstraint(matrix, low, high),
            options={"mip_rel_gap": 0.0},
        )
        if found.x is None:
            raise PlanError(
                f"no placement of the operators meets all constraints ({found.message}): take back an annotation"
            )
        return found.x
