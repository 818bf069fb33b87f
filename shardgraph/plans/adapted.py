"""A plan for other conditions: another number of ranks, another global batch."""

from __future__ import annotations

from dataclasses import replace

from shardgraph.errors import PlanError
from shardgraph.plans.batch import Batch
from shardgraph.plans.plan import Plan


def adapted(plan: Plan, ranks: int, samples: int, per_call: int) -> Plan:
    """``plan`` on so many ranks, for steps of so many samples, of which a rank's call had ``per_call`` so far.

    Its outermost axis of data gets more ranks or fewer. A call, and a microbatch of a pipeline, stay as large as they
    are or become smaller; their number changes. Placements of operations are chosen anew.

    Raises:
        PlanError: that many ranks, or samples, cannot be divided so.
    """
    reduce = plan.batch.reduce if plan.batch else "each"
    plan = replace(_on(plan, ranks), activations=None)
    if plan.data_size < 1 or samples % plan.data_size:
        raise PlanError(
            f"{samples} samples cannot be divided over the {plan.data_size} data ranks of plan {plan.name!r} on "
            f"{dict(plan.whole_mesh)}: take a multiple of {plan.data_size}"
        )
    of_rank = samples // plan.data_size
    if plan.pipeline is not None:
        size = max(1, per_call // plan.pipeline.parts)
        parts = next(count for count in range(1, of_rank + 1) if of_rank % count == 0 and of_rank // count <= size)
        return replace(plan, pipeline=replace(plan.pipeline, microbatches=parts), batch=Batch(samples))
    calls = next(count for count in range(1, of_rank + 1) if of_rank % count == 0 and of_rank // count <= per_call)
    return replace(plan, batch=Batch(samples, calls, reduce))


def _on(plan: Plan, ranks: int) -> Plan:
    """The plan on so many ranks; its batch is no longer known if there are more or fewer."""
    if ranks == plan.world_size:
        return plan
    if not plan.data_mesh:
        raise PlanError(
            f"plan {plan.name!r} has no axis of data on {dict(plan.whole_mesh)}, so it is for {plan.world_size} ranks "
            "alone"
        )
    axis, size = plan.data_mesh[0]
    others = plan.world_size // size
    if ranks % others or not ranks // others:
        raise PlanError(
            f"plan {plan.name!r} on {dict(plan.whole_mesh)} has {others} ranks for each along {axis!r}, so it cannot "
            f"be on {ranks}: take a multiple of {others}"
        )
    mesh = tuple((name, ranks // others if name == axis else count) for name, count in plan.mesh)
    return replace(plan, mesh=mesh, batch=None)
