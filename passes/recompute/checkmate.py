"""The exact program: which values to keep and which to compute again, step by step, under a bound on the bytes alive.

Checkmate's integer program (Jain et al., 2020, https://arxiv.org/abs/1910.02653) with forward as it is: for each step
of backward, which of forward's results are in memory, and which operations of forward run again before it. What lives
only while those run is not counted, so no schedule, however often it computes what, takes less than the seconds found.
Its size is steps times operations: it is for small graphs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array
from torch import fx

from shardgraph.passes.analysis.liveness import Storage, storages_of
from shardgraph.passes.partition.split import after_tangents, forward_nodes
from shardgraph.passes.recompute.values import Values


@dataclass(frozen=True)
class Step:
    """An operation of backward: the results of forward that it reads, and the bytes of backward's own alive at it."""

    reads: frozenset[Storage]
    own: int


def _given(node: fx.Node, late: set[fx.Node], inside: set[fx.Node]) -> Iterator[fx.Node]:
    """The nodes of forward that a node of backward is computed from."""
    stack = [operand for operand in node.all_input_nodes if operand not in late]
    while stack:
        operand = stack.pop()
        if operand in inside:
            yield operand
        else:
            stack += operand.all_input_nodes


@dataclass(frozen=True)
class Schedule:
    """``seconds`` that no schedule within the bound goes below, and the operations that run again in this one."""

    seconds: float
    again: frozenset[fx.Node]


def backward_steps(gm: fx.GraphModule, values: Values, granule: int = 1) -> list[Step]:
    """The operations of backward that matter to what can be kept of forward, in order."""
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    stored = storages_of(gm, granule)
    late, inside = after_tangents(gm), forward_nodes(gm)
    mine = [node for node in gm.graph.nodes if node.op == "call_function" and node in late]
    others = {s for node in gm.graph.nodes if node not in late for s in stored[node]}
    made = {s: order[node] for node in reversed(mine) for s in stored[node] if s not in others}
    end: dict[Storage, int] = {}
    for node in mine:
        for s in stored[node]:
            end[s] = max(end.get(s, 0), *(order[user] for user in (node, *node.users)))
    steps: list[Step] = []
    for node in mine:
        own = sum(s.nbytes for s, birth in made.items() if birth <= order[node] <= end[s])
        reads = frozenset(s for operand in _given(node, late, inside) for s in values.held.get(operand, ()))
        if reads or not steps or own > steps[-1].own:  # else the step before says as much
            steps.append(Step(reads, own))
    return steps


def least_seconds(
    values: Values, steps: list[Step], seconds: Mapping[fx.Node, float], bound: int, limit: float = 10.0
) -> Schedule | None:
    """The least time to compute again so that at most ``bound`` bytes of forward's results and backward's are alive.

    ``seconds`` has the operations that may run again. None where no schedule is within the bound, or none was found
    within ``limit`` seconds.
    """
    stores = list(values.maker)
    kept = {(t, s): i for i, (t, s) in enumerate((t, s) for t in range(len(steps) + 1) for s in stores)}
    runs = {(t, o): len(kept) + i for i, (t, o) in enumerate((t, o) for t in range(len(steps)) for o in seconds)}
    rows: list[dict[int, float]] = []
    most: list[float] = []
    lower = np.zeros(len(kept) + len(runs))

    def found_before(t: int, s: Storage) -> dict[int, float]:
        """That a result is in memory at step ``t``, kept from the one before or computed again."""
        run = runs.get((t, values.maker[s]))
        return {kept[t, s]: -1.0} | ({run: -1.0} if run is not None else {})

    for t, step in enumerate(steps):
        for s in stores:  # what is there in a step was there before it, or is computed
            rows.append({kept[t + 1, s]: 1.0} | found_before(t, s))
            most.append(0.0)
        for o in seconds:
            for s in values.takes[o]:
                rows.append({runs[t, o]: 1.0} | found_before(t, s))
                most.append(0.0)
        for s in step.reads:
            lower[kept[t + 1, s]] = 1.0
        scale = max(bound, 1)
        rows.append({kept[t + 1, s]: s.nbytes / scale for s in stores})
        most.append((bound - step.own) / scale)
    rows.append({kept[0, s]: s.nbytes / max(bound, 1) for s in stores})
    most.append(1.0)
    if min(most) < 0:
        return None
    entries = [(i, column, value) for i, row in enumerate(rows) for column, value in row.items()]
    at, columns, numbers = zip(*entries, strict=True)
    matrix = coo_array((numbers, (at, columns)), shape=(len(rows), len(lower))).tocsr()
    costs = np.array([0.0] * len(kept) + [seconds[o] for _, o in runs])
    solution = milp(
        costs / max(costs.max(initial=0.0), 1e-12),
        integrality=np.ones(len(lower)),
        bounds=Bounds(lower, 1.0),
        constraints=LinearConstraint(matrix, -np.inf, np.array(most)),
        options={"time_limit": limit},
    )
    if solution.x is None:
        return None
    again = frozenset(o for (_, o), column in runs.items() if solution.x[column] > 0.5)
    return Schedule(float(solution.mip_dual_bound) * max(costs.max(initial=0.0), 1e-12), again)
