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
        self._costs: list[float] = []
        self._bounds: list[tuple[float, float]] = []
        self._integer: list[bool] = []
        self._names: list[str] = []
        self._rows: list[Row] = []
        self._limits: list[tuple[float, float]] = []

    def variable(self, cost: float = 0.0, low: float = 0.0, high: float = 1.0, *, integer: bool = False) -> int:
        """A variable from ``low`` to ``high`` that adds ``cost`` times its value to the objective."""
        self._costs.append(cost)
        self._bounds.append((low, high))
        self._integer.append(integer)
        return len(self._costs) - 1

    def constrain(self, name: str, row: Row, low: float = -math.inf, high: float = math.inf) -> None:
        """Constrain ``row`` to the range ``low`` to ``high``. ``name`` is for messages and need not be unique."""
        self._names.append(name)
        self._rows.append(row)
        self._limits.append((low, high))

    def solve(self, *, limit: float, gap: float = 0.0) -> Solution:
        """The values that minimise the objective.

        Args:
            limit: seconds after which the best solution so far is taken.
            gap: the relative gap to the optimum at which a solution is accepted.

        Raises:
            NoSolution: the constraints contradict each other, or no solution was found within ``limit``.
        """
        costs = np.array(self._costs)
        scale = np.abs(costs).max(initial=0.0) or 1.0
        # The solver's tolerances are absolute, so costs are scaled: the largest becomes 1e6.
        found = self._solved(costs / scale * 1e6, self._rows, self._bounds, self._integer, limit, gap)
        if found.x is None:
            timed_out = found.status != _INFEASIBLE
            raise NoSolution(() if timed_out else self._contradiction(limit), limit, timed_out)
        objective = float(costs @ found.x)
        bound = objective if found.mip_dual_bound is None else float(found.mip_dual_bound) * scale / 1e6
        proven = found.mip_gap if found.mip_gap is not None else 0.0
        return Solution(found.x, objective, min(bound, objective), float(proven) if proven > 1e-9 else 0.0)

    def _contradiction(self, limit: float) -> tuple[str, ...]:
        """Names of constraints to relax so that the others can be met, minimising the total violation."""
        rows, bounds, integer = list(self._rows), list(self._bounds), list(self._integer)
        costs = [0.0] * len(bounds)
        slacks: list[tuple[str, int]] = []
        for number, name in enumerate(self._names):
            row = dict(rows[number])
            for sign in (1.0, -1.0):
                slacks.append((name, len(bounds)))
                row[len(bounds)] = sign
                bounds.append((0.0, math.inf))
                integer.append(False)
                costs.append(1.0)
            rows[number] = row
        found = self._solved(np.array(costs), rows, bounds, integer, limit, 0.0)
        if found.x is None:  # the bounds of variables contradict each other
            return tuple(dict.fromkeys(self._names))[:_NAMED]
        return tuple(dict.fromkeys(name for name, slack in slacks if found.x[slack] > _SLACK))[:_NAMED]

    def _solved(
        self,
        costs: np.ndarray,
        rows: Sequence[Row],
        bounds: Sequence[tuple[float, float]],
        integer: Sequence[bool],
        limit: float,
        gap: float,
    ) -> OptimizeResult:
        constraints = []
        if rows:
            entries = [(i, column, value) for i, row in enumerate(rows) for column, value in row.items()]
            at, columns, values = (np.array(each) for each in zip(*entries, strict=True))
            matrix = coo_array((values, (at, columns)), shape=(len(rows), len(costs))).tocsr()
            constraints.append(LinearConstraint(matrix, *(np.array(each) for each in zip(*self._limits, strict=True))))
        return milp(
            costs,
            integrality=np.array(integer, dtype=int),
            bounds=Bounds(*(np.array(each) for each in zip(*bounds, strict=True))),
            constraints=constraints,
            options={"mip_rel_gap": gap, "time_limit": limit},
        )
