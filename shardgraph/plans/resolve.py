"""Resolves a caller's preset name, plan file or plan to the plan on a mesh."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from shardgraph.errors import PlanError
from shardgraph.mesh import Mesh
from shardgraph.plans.pipeline_plan import Pipeline
from shardgraph.plans.plan import Plan
from shardgraph.plans.precision import Precision
from shardgraph.plans.presets import preset, refuse_pipeline


def named_or_loaded(plan: str | Path | Plan) -> str | Plan:
    """A preset's name unchanged; otherwise the plan, loaded if ``plan`` is the path of a plan file.

    Raises:
        PlanError: there is no such file, it is malformed, or ``plan`` is not a plan.
    """
    if isinstance(plan, Path) or (isinstance(plan, str) and plan.endswith((".yaml", ".yml"))):
        return Plan.load(plan)
    if not isinstance(plan, (str, Plan)):
        raise PlanError(f"a plan is a name, a Plan or the path of a plan file, and this is a {type(plan).__name__}")
    return plan


def resolve_plan(
    plan: str | Path | Plan, mesh: Mesh, pipeline: Pipeline | None = None, precision: str | Precision | None = None
) -> Plan:
    """The requested plan on a mesh of ``(axis, size)`` pairs, with ``precision`` if it is given.

    ``pipeline`` configures the pipeline of a preset.

    Raises:
        PlanError: there is no such preset, file or precision, or the plan was made for another mesh.
    """
    resolved = _automatic(mesh) if plan == "auto" else named_or_loaded(plan)
    if isinstance(resolved, str):
        resolved = preset(resolved, mesh, pipeline)
    elif plan != "auto":
        _check_fits(resolved, mesh, pipeline)
    return resolved if precision is None else replace(resolved, precision=Precision.of(precision))


def _check_fits(plan: Plan, mesh: Mesh, pipeline: Pipeline | None) -> None:
    if pipeline is not None:
        raise PlanError("pipeline is for a plan that is requested by name: this one defines its own pipeline")
    if tuple(size for _, size in plan.whole_mesh) != tuple(size for _, size in mesh) and plan.world_size != 1:
        raise PlanError(
            f"plan {plan.name!r} is for the mesh {dict(plan.whole_mesh)} ({plan.world_size} ranks), and this run has "
            f"{dict(mesh)} ({math.prod(size for _, size in mesh)} ranks): launch as many ranks, or change the plan"
        )


def _automatic(mesh: Mesh) -> Plan:
    refuse_pipeline(mesh)
    world = math.prod(size for _, size in mesh)
    if world == 1:
        return replace(preset("single", mesh), note="chosen by 'auto': one rank, so there is nothing to shard")
    name = "hsdp" if len(mesh) == 2 else "fsdp"
    unseen = "without example inputs nothing was priced, and no other plan, recomputation or mesh compared"
    return replace(preset(name, mesh), note=f"chosen by 'auto': least memory per rank on {world} ranks; {unseen}")
