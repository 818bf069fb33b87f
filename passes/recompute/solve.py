"""What to compute again so that no more than so many bytes are kept for backward, in the least time.

For each class of operations a whole number, how many of its members backward computes again; for each result how many
are kept. Of a result that backward reads, members that are not computed again are kept; an operation that is computed
again finds what it reads kept, or computed again too. The kept bytes are bounded and the seconds least. Without the
bound the constraints are those of a closure, whose relaxation is integral (Picard, 1976,
https://doi.org/10.1287/mnsc.22.11.1268); the one bound more leaves HiGHS little to branch on.

That bytes are kept, and not the peak, is what makes this fast: whoever asks simulates the program that follows. The
exact program that has the peak in it is :mod:`shardgraph.passes.recompute.checkmate`.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from shardgraph.passes.recompute.problem import Class, Problem

_GAP, _LIMIT = 1e-3, 3.0  # part of the seconds, and seconds of search, at which the best so far is good enough


def least_seconds(problem: Problem, bound: float) -> dict[Class, int] | None:
    """How many of each class to compute again so that at most ``bound`` bytes are kept; None where that cannot be."""
    return _Program(problem).solve(bound)


def fewest_bytes(problem: Problem) -> dict[Class, int]:
    """How many of each class to compute again so that the fewest bytes are kept."""
    found = _Program(problem).solve(None)
    assert found is not None  # nothing at all may be computed again
    return found


class _Program:
    """The integer program: a variable for each class, then one for each result."""

    def __init__(self, problem: Problem) -> None:
        self.classes = [key for key in problem.members]
        self.results = [result for result in problem.nbytes]
        self.problem = problem
        column = {key: i for i, key in enumerate(self.classes)}
        row_of = {result: len(column) + i for i, result in enumerate(self.results)}
        size = {key: len(nodes) for key, nodes in problem.members.items()}
        entries: list[tuple[int, int, float]] = []
        low: list[float] = []
        for result in problem.demanded:
            entries += [(len(low), row_of[result], 1.0), (len(low), column[result[0]], 1.0)]
            low.append(size[result[0]])
        for key, result in problem.reads:
            share = size[result[0]] / size[key]
            entries += [(len(low), row_of[result], 1.0), (len(low), column[result[0]], 1.0)]
            entries.append((len(low), column[key], -share))
            low.append(0.0)
        at, columns, values = zip(*entries, strict=True) if entries else ((), (), ())
        shape = (len(low), len(column) + len(row_of))
        self.matrix, self.low = coo_array((values, (at, columns)), shape=shape).tocsr(), np.array(low)
        self.seconds = np.array([problem.seconds[key] for key in self.classes] + [0.0] * len(row_of))
        self.bytes = np.array([0.0] * len(column) + [float(problem.nbytes[result]) for result in self.results])
        self.upper = np.array([problem.most[key] for key in self.classes] + [size[r[0]] for r in self.results])

    def solve(self, bound: float | None) -> dict[Class, int] | None:
        constraints = [LinearConstraint(self.matrix, self.low, np.inf)]
        scale = max(self.bytes.max(initial=0.0), 1.0)
        slow = max(self.seconds.max(initial=0.0), 1e-12)
        if bound is None:
            # The seconds decide between what keeps the same bytes, and count for less than any byte.
            costs = self.bytes / scale + 1e-6 * self.seconds / slow
        else:
            costs = self.seconds / slow + 1e-6 * self.bytes / scale
            constraints.append(LinearConstraint(self.bytes[None, :] / scale, -np.inf, bound / scale))
        integral = np.array([1] * len(self.classes) + [0] * len(self.results))
        found = milp(
            costs,
            integrality=integral,
            bounds=Bounds(0, self.upper),
            constraints=constraints,
            options={"mip_rel_gap": _GAP, "time_limit": _LIMIT},
        )
        if found.x is None:
            return None
        return {key: round(value) for key, value in zip(self.classes, found.x, strict=False)}
