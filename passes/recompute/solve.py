"""What to compute again so that no more than so many bytes are kept for backward, in the least time.

Variables
    ``a[c]``, whole, from 0 to ``most[c]``: how many members of class ``c`` backward computes again. ``k[r]``, from 0 to
    the number of ``r``: how many of result ``r`` are kept.

Objective
    The least seconds, ``sum(seconds[c] * a[c])``; or the fewest bytes, ``sum(nbytes[r] * k[r])``. Either decides
    between what is equal by the other.

Constraints
    1. *backward reads r*: members that are not computed again are kept, ``k[r] + a[maker of r] >= members``.
    2. *c reads r*: what is computed again finds what it reads kept, or computed again too:
       ``k[r] + a[maker of r] >= a[c]``, times how many of ``r`` there are for one of ``c``.
    3. *bytes kept*: ``sum(nbytes[r] * k[r]) <= bound``.

Without the third the constraints are those of a closure, whose relaxation is integral (Picard, 1976,
https://doi.org/10.1287/mnsc.22.11.1268); the one bound more leaves HiGHS little to branch on.

That bytes are kept, and not the peak, is what makes this fast: whoever asks simulates the program that follows. The
exact program that has the peak in it is :mod:`shardgraph.passes.recompute.checkmate`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardgraph.passes.milp import NoSolution, Program
from shardgraph.passes.recompute.problem import Class, RecomputeProblem

_GAP, _LIMIT = 1e-3, 3.0  # part of the seconds, and seconds of search, at which the best so far is good enough


@dataclass(frozen=True)
class Counts:
    """How many of each class to compute again, and the part of the seconds by which the best may be less."""

    of: Mapping[Class, int]
    gap: float


def least_seconds(problem: RecomputeProblem, bound: float) -> Counts | None:
    """How many of each class to compute again so that at most ``bound`` bytes are kept; None where that cannot be."""
    try:
        return _solve(problem, bound)
    except NoSolution:
        return None


def fewest_bytes(problem: RecomputeProblem) -> Counts:
    """How many of each class to compute again so that the fewest bytes are kept."""
    return _solve(problem, None)  # nothing at all may be computed again, so there is a solution


def _solve(problem: RecomputeProblem, bound: float | None) -> Counts:
    program, size = Program(), {key: len(nodes) for key, nodes in problem.members.items()}
    most_bytes = max([1.0, *problem.nbytes.values()])
    slowest = max([1e-12, *problem.seconds.values()])
    # What decides between equals counts for less than anything of the other.
    per_second, per_byte = (1e-6, 1.0) if bound is None else (1.0, 1e-6)
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
    solution = program.solve(limit=_LIMIT, gap=_GAP)
    return Counts({key: round(solution.values[variable]) for key, variable in again.items()}, solution.gap)
