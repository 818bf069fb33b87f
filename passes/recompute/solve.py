"""What to recompute, in the least time, so that at most a given number of bytes is saved for backward.

Variables
    ``a[c]``, integer, from 0 to ``most[c]``: how many members of class ``c`` are recomputed. ``k[r]``, from 0 to the
    number of ``r``: how many of result ``r`` are saved.

Objective
    Minimise the seconds, ``sum(seconds[c] * a[c])``, or the bytes, ``sum(nbytes[r] * k[r])``. The other one breaks
    ties.

Constraints
    1. *backward reads r*: members that are not recomputed are saved, ``k[r] + a[maker of r] >= members``.
    2. *c reads r*: the operands of a recomputed operation are saved or recomputed:
       ``k[r] + a[maker of r] >= a[c]``, scaled by the number of ``r`` for each member of ``c``.
    3. *bytes kept*: ``sum(nbytes[r] * k[r]) <= bound``.

Without the third the constraints are those of a closure problem, whose relaxation is integral (Picard, 1976,
https://doi.org/10.1287/mnsc.22.11.1268); the single extra bound leaves HiGHS little to branch on.

Constraining the saved bytes instead of the peak is what makes this fast: the caller simulates the resulting program.
The exact program, which constrains the peak, is :mod:`shardgraph.passes.recompute.checkmate`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardgraph.passes.milp import NoSolution, Program
from shardgraph.passes.recompute.problem import Class, RecomputeProblem

_GAP, _NODES = 1e-3, 1500  # relative gap, and nodes of search (about two seconds), at which the incumbent is accepted
_LIMIT = 60.0  # seconds of search, on the slowest of machines


@dataclass(frozen=True)
class Counts:
    """How many of each class to recompute, and the relative gap of the objective to the optimum."""

    of: Mapping[Class, int]
    gap: float


def least_seconds(problem: RecomputeProblem, bound: float) -> Counts | None:
    """The fastest counts to recompute so that at most ``bound`` bytes are saved; None if no solution was found."""
    try:
        return _solve(problem, bound)
    except NoSolution:
        return None


def fewest_bytes(problem: RecomputeProblem) -> Counts:
    """How many of each class to recompute so that the fewest bytes are saved."""
    return _solve(problem, None)  # recomputing nothing is a solution


def _solve(problem: RecomputeProblem, bound: float | None) -> Counts:
    program, size = Program(), {key: len(nodes) for key, nodes in problem.members.items()}
    most_bytes = max([1.0, *problem.nbytes.values()])
    slowest = max([1e-12, *problem.seconds.values()])
    per_second, per_byte = (1e-6, 1.0) if bound is None else (1.0, 1e-6)  # the tie-breaker has a small weight
    again = {
        key: program.variable(per_second * problem.seconds[key] / slowest, high=problem.most[key], integer=True)
        for key in problem.members
    }
    kept = {
        result: program.variable(per_byte * nbytes / most_bytes, high=size[result[0]])
        for result, nbytes in problem.nbytes.items()
    }
    for result in problem.demanded:
        program.constrain(f"backward reads {result}", {kept[result]: 1.0, again[result[0]]: 1.0}, low=size[result[0]])
    for key, result in problem.reads:
        row = {kept[result]: 1.0, again[result[0]]: 1.0}
        row[again[key]] = row.get(again[key], 0.0) - size[result[0]] / size[key]
        program.constrain(f"{key} reads {result}", row, low=0.0)
    if bound is not None:
        row = {variable: problem.nbytes[result] / most_bytes for result, variable in kept.items()}
        program.constrain("bytes kept", row, high=bound / most_bytes)
    solution = program.solve(limit=_LIMIT, gap=_GAP, nodes=_NODES)
    return Counts({key: round(solution.values[variable]) for key, variable in again.items()}, solution.gap)
