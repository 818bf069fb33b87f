"""Mixed-integer linear programs: variables, named constraints and a minimised objective, solved by HiGHS.

The modules that build a problem (placements, recomputation) document its variables, objective and constraints; this one
only represents and solves programs. The solver (J. Hall and others, https://highs.dev, through ``scipy.optimize.milp``)
runs on one thread and is deterministic: the same program has the same solution, unless a time limit ends the search,
which then reports the gap of its solution.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, milp
from scipy.sparse import coo_array

from shardgraph.passes.solver_output import without_chatter

_INFEASIBLE = 2  # the status of scipy.optimize.milp
_NAMED = 8  # most constraints that an error names
_SLACK = 1e-6  # above which a constraint counts as violated

Row = Mapping[int, float]
"""The coefficients of a constraint by variable."""


@dataclass(frozen=True)
class Solution:
    """The values of all variables, in the order in which they were added.

    ``objective`` is that of the solution, ``bound`` a lower bound on the optimum. ``gap`` is the fraction of
    ``objective`` by which the optimum may be smaller, 0 if the solution is proven optimal.
    """

    values: Sequence[float]
    objective: float
    bound: float
    gap: float


class NoSolution(Exception):
    """The program is infeasible, or no solution was found in time.

    ``constraints`` are the names of some that contradict each other; empty if ``timed_out``.
    """

    def __init__(self, constraints: tuple[str, ...], limit: float, timed_out: bool) -> None:
        self.constraints, self.timed_out = constraints, timed_out
        reason = f"no solution was found within {limit:g} seconds"
        if not timed_out:
            reason = f"these constraints contradict each other: {'; '.join(constraints)}"
        super().__init__(reason)


class Program:
    """A program under construction."""

    def __init__(self) -> None:
        self._variables: list[tuple[float, float, float, bool]] = []  # cost, bounds, whether it is an integer
        self._constraints: list[tuple[str, Row, float, float]] = []  # name, coefficients, limits

    def variable(self, cost: float = 0.0, low: float = 0.0, high: float = 1.0, *, integer: bool = False) -> int:
        """A variable from ``low`` to ``high`` that adds ``cost`` times its value to the objective."""
        self._variables.append((cost, low, high, integer))
        return len(self._variables) - 1

    def constrain(self, name: str, row: Row, low: float = -math.inf, high: float = math.inf) -> None:
        """Constrain ``row`` to the range ``low`` to ``high``. ``name`` is for messages and need not be unique."""
        self._constraints.append((name, row, low, high))

    def solve(self, *, limit: float, gap: float = 0.0, nodes: int | None = None) -> Solution:
        """The values that minimise the objective.

        Args:
            limit: seconds after which the best solution so far is taken.
            nodes: nodes of the search after which it is, whatever else the machine does: the same program has the same
                solution.
            gap: the relative gap to the optimum at which a solution is accepted.

        Raises:
            NoSolution: the constraints contradict each other, or no solution was found within ``limit``.
        """
        costs = np.array([cost for cost, *_ in self._variables])
        scale = np.abs(costs).max(initial=0.0) or 1.0
        # The solver's tolerances are absolute, so costs are scaled: the largest becomes 1e6.
        result = self._result(costs / scale * 1e6, limit, gap, nodes)
        if result.x is None:
            timed_out = result.status != _INFEASIBLE
            raise NoSolution(() if timed_out else self._contradiction(limit), limit, timed_out)
        objective = float(costs @ result.x)
        bound = objective if result.mip_dual_bound is None else float(result.mip_dual_bound) * scale / 1e6
        proven = float(result.mip_gap or 0.0)
        return Solution(result.x, objective, min(bound, objective), proven if proven > 1e-9 else 0.0)

    def _contradiction(self, limit: float) -> tuple[str, ...]:
        """Names of constraints to relax so that the others can be met, minimising the total violation."""
        relaxed = Program()
        for _, low, high, integer in self._variables:
            relaxed.variable(0.0, low, high, integer=integer)
        slacks: list[tuple[str, int]] = []
        for name, row, *limits in self._constraints:
            above, below = (relaxed.variable(1.0, high=math.inf) for _ in range(2))
            slacks += [(name, above), (name, below)]
            relaxed.constrain(name, {**row, above: 1.0, below: -1.0}, *limits)
        result = relaxed._result(np.array([cost for cost, *_ in relaxed._variables]), limit, 0.0)
        names = [name for name, *_ in self._constraints]  # all, if the bounds of variables contradict each other
        if result.x is not None:
            names = [name for name, slack in slacks if result.x[slack] > _SLACK]
        return tuple(dict.fromkeys(names))[:_NAMED]

    def _result(self, costs: np.ndarray, limit: float, gap: float, nodes: int | None = None) -> OptimizeResult:
        constraints = []
        if self._constraints:
            _, coefficients, lows, highs = zip(*self._constraints, strict=True)
            entries = [(i, column, value) for i, row in enumerate(coefficients) for column, value in row.items()]
            rows, columns, values = (np.array(each) for each in zip(*entries, strict=True))
            matrix = coo_array((values, (rows, columns)), shape=(len(coefficients), len(costs))).tocsr()
            constraints.append(LinearConstraint(matrix, np.array(lows), np.array(highs)))
        _, lows, highs, integer = zip(*self._variables, strict=True)
        with without_chatter():
            return milp(
                costs,
                integrality=np.array(integer, dtype=int),
                bounds=Bounds(np.array(lows), np.array(highs)),
                constraints=constraints,
                options={"mip_rel_gap": gap, "time_limit": limit} | ({"node_limit": nodes} if nodes else {}),
            )
