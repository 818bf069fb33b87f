"""The exact integer program: what to save and what to recompute before each backward step, bounding the live bytes.

Checkmate's integer program (Jain et al., 2020, https://arxiv.org/abs/1910.02653), with forward left unchanged.

Variables
    ``k[t, s]`` in {0, 1}: forward result ``s`` is in memory before step ``t`` of backward, and after the last step.
    ``a[t, o]`` in {0, 1}: forward operation ``o`` is recomputed before step ``t``.

Objective
    Minimise the recompute seconds: ``sum(seconds[o] * a[t, o])``.

Constraints
    1. *s at t*: a result in memory after a step was there before it or is recomputed:
       ``k[t + 1, s] <= k[t, s] + a[t, maker]``.
    2. *o reads s at t*: the operands of a recomputed operation are available: ``a[t, o] <= k[t, s] + a[t, maker]``.
    3. *step t reads s*: ``k[t + 1, s] = 1``, as a bound of the variable.
    4. *bytes at t*: ``sum(nbytes[s] * k[t + 1, s]) + own[t] <= bound``, where ``own`` is the live bytes of backward's
       own values; also before the first step, without ``own``.

Values that live only during recomputation are not counted, so the seconds found are a lower bound for any schedule,
however often it recomputes an operation. Its size is steps times operations: it is for small graphs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import fx

from shardgraph.passes.analysis.liveness import Storage, storages_as_run
from shardgraph.passes.milp import NoSolution, Program
from shardgraph.passes.partition.split import after_tangents, forward_nodes
from shardgraph.passes.recompute.values import Values


@dataclass(frozen=True)
class Step:
    """A backward operation: the forward results it reads, and the live bytes of backward's own values during it."""

    reads: frozenset[Storage]
    own: int


def _forward_operands(node: fx.Node, late: set[fx.Node], inside: set[fx.Node]) -> Iterator[fx.Node]:
    """The forward nodes that a backward node is computed from."""
    stack = [operand for operand in node.all_input_nodes if operand not in late]
    while stack:
        operand = stack.pop()
        if operand in inside:
            yield operand
        else:
            stack += operand.all_input_nodes


@dataclass(frozen=True)
class Schedule:
    """``seconds`` is a lower bound over all schedules within the memory bound; ``again`` is what this one recomputes.

    ``gap`` is the relative gap: the fraction of this schedule's own seconds by which it may exceed the bound.
    """

    seconds: float
    again: frozenset[fx.Node]
    gap: float


def backward_steps(gm: fx.GraphModule, values: Values, granule: int = 1) -> list[Step]:
    """The backward operations, in order, that constrain which forward results can be kept.

    Storage sizes are rounded up to ``granule`` bytes.
    """
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    stored = storages_as_run(gm, granule)
    late, inside = after_tangents(gm), forward_nodes(gm)
    mine = [node for node in gm.graph.nodes if node.op == "call_function" and node in late]
    others = {s for node in gm.graph.nodes if node not in late for s in stored[node]}
    births = {s: order[node] for node in reversed(mine) for s in stored[node] if s not in others}
    steps: list[Step] = []
    for node in mine:
        own = sum(s.nbytes for s, birth in births.items() if birth <= order[node] <= s.death)
        reads = frozenset(s for operand in _forward_operands(node, late, inside) for s in values.held.get(operand, ()))
        if reads or not steps or own > steps[-1].own:  # else the previous step implies it
            steps.append(Step(reads, own))
    return steps


def least_seconds(
    values: Values, steps: list[Step], seconds: Mapping[fx.Node, float], bound: int, limit: float = 10.0
) -> Schedule | None:
    """The schedule with the least recompute time whose live forward results and backward values fit ``bound`` bytes.

    ``seconds`` has the recompute time of each operation that may be recomputed. Returns None if no schedule fits the
    bound, or none was found within ``limit`` seconds.
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

    def available(t: int, s: Storage) -> dict[int, float]:
        """Row terms for: the result is in memory at step ``t``, kept from the previous step or recomputed."""
        run = runs.get((t, values.maker[s]))
        return {kept[t, s]: -1.0} | ({run: -1.0} if run is not None else {})

    program.constrain("bytes at the start", {kept[0, s]: s.nbytes / scale for s in stores}, high=bound / scale)
    for t, step in enumerate(steps):
        for s in stores:
            program.constrain(f"{s} at {t}", {kept[t + 1, s]: 1.0} | available(t, s), high=0.0)
        for o in seconds:
            for s in values.reads[o]:
                program.constrain(f"{o.name} reads {s} at {t}", {runs[t, o]: 1.0} | available(t, s), high=0.0)
        row = {kept[t + 1, s]: s.nbytes / scale for s in stores}
        program.constrain(f"bytes at {t}", row, high=(bound - step.own) / scale)
    try:
        solution = program.solve(limit=limit)
    except NoSolution:
        return None
    again = frozenset(o for (_, o), column in runs.items() if solution.values[column] > 0.5)
    return Schedule(solution.bound, again, solution.gap)
