"""The fastest of the precisions that a user permits, each of which is searched on its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from shardgraph.errors import PlanError
from shardgraph.plans.plan import Plan
from shardgraph.plans.precision import Precision
from shardgraph.sizes import format_seconds


def fastest(permitted: Sequence[Precision], search: Callable[[Precision], Plan]) -> Plan:
    """The plan of ``search`` that takes least time per sample; the best of the others are among those considered.

    Raises:
        PlanError: no precision has a plan; the error is that of the first.
    """
    found: list[tuple[str, Plan]] = []
    refused: list[tuple[str, PlanError]] = []
    for precision in permitted:
        name = str(precision) or "dtypes as stored"
        try:
            found.append((name, search(precision)))
        except PlanError as error:
            refused.append((name, error))
    if not found:
        raise refused[0][1]
    found.sort(key=lambda pair: pair[1].considered[0].per_sample)
    (_, best), *others = found
    seconds = ", ".join(f"{format_seconds(plan.considered[0].per_sample)} in {name}" for name, plan in found)
    remarks = [f"of the precisions that are permitted, a sample takes {seconds}"]
    remarks += [f"not in {name}: {str(why).splitlines()[0]}" for name, why in refused]
    considered = (*best.considered, *(plan.considered[0] for _, plan in others))
    return replace(best, considered=considered, remarks=(*remarks, *best.remarks))
