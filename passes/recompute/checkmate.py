"""The exact program: which values to keep and which to compute again, step by step, under a bound on the bytes alive.

Checkmate's integer program (Jain et al., 2020, https://arxiv.org/abs/1910.02653) with forward as it is.

Variables
    ``k[t, s]`` in {0, 1}: forward's result ``s`` is in memory before step ``t`` of backward, and after the last.
    ``a[t, o]`` in {0, 1}: forward's operation ``o`` runs again before step ``t``.

Objective
    The least seconds: ``sum(seconds[o] * a[t, o])``.

Constraints
    1. *s at t*: what is there after a step was there before it, or is computed:
       ``k[t + 1, s] <= k[t, s] + a[t, maker]``.
    2. *o reads s at t*: what runs again finds what it reads: ``a[t, o] <= k[t, s] + a[t, maker]``.
    3. *step t reads s*: ``k[t + 1, s] = 1``, as a bound of the variable.
    4. *bytes at t*: ``sum(nbytes[s] * k[t + 1, s]) + own[t] <= bound``, ``own`` being what backward itself has alive;
       and before the first step, without ``own``.

What lives only while operations run again is not counted, so no schedule, however often it computes what, takes less
than the seconds found. Its size is steps times operations: it is for small graphs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import fx

from shardgraph.passes.analysis.liveness import Storage, storages_of
from shardgraph.passes.milp import NoSolution, Program
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
    """``seconds`` that no schedule within the bound goes below, and the operations that run again in this one.

    ``gap`` is the part of its own seconds by which it may be above them.
    """

    seconds: float
    again: frozenset[fx.Node]
    gap: float


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
    if bound < 0 or any(step.own > bound for step in steps):
        return None
    program, stores, scale = Program(), list(values.maker), max(bound, 1)
    kept = {
        (t, s): program.variable(low=float(t > 0 and s in steps[t - 1].reads), integer=True)
        for t in range(len(steps) + 1)
        for s in stores
    }
    runs = {(t, o): program.variable(cost, integer=True) for t in range(len(steps)) for o, cost in seconds.items()}

    def found_before(t: int, s: Storage) -> dict[int, float]:
        """That a result is in memory at step ``t``, kept from the one before or computed again."""
        run = runs.get((t, values.maker[s]))
        return {kept[t, s]: -1.0} | ({run: -1.0} if run is not None else {})

    program.constrain("bytes at the start", {kept[0, s]: s.nbytes / scale for s in stores}, high=bound / scale)
    for t, step in enumerate(steps):
        for s in stores:
            program.constrain(f"{s} at {t}", {kept[t + 1, s]: 1.0} | found_before(t, s), high=0.0)
        for o in seconds:
            for s in values.takes[o]:
                program.constrain(f"{o.name} reads {s} at {t}", {runs[t, o]: 1.0} | found_before(t, s), high=0.0)
        row = {kept[t + 1, s]: s.nbytes / scale for s in stores}
        program.constrain(f"bytes at {t}", row, high=(bound - step.own) / scale)
    try:
        solution = program.solve(limit=limit)
    except NoSolution:
        return None
    again = frozenset(o for (_, o), column in runs.items() if solution.values[column] > 0.5)
    return Schedule(solution.bound, again, solution.gap)
