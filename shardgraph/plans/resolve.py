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
    plan: str | Path | Plan,
    mesh: Mesh,
    pipeline: Pipeline | None = None,
    precision: str | Precision | None = None,
) -> Plan:
    """The requested plan on a mesh of ``(axis, size)`` pairs, with ``precision`` if it is given.

    ``pipeline`` configures the pipeline of a preset.

    Raises:
        PlanError: there is no such preset, file or precision, or the plan was made for another mesh.
    """
    found = _named_plan(plan, mesh, pipeline)
    return found if precision is None else replace(found, precision=Precision.of(precision))


def _named_plan(plan: str | Path | Plan, mesh: Mesh, pipeline: Pipeline | None) -> Plan:
    if plan == "auto":
        return _automatic(mesh)
    plan = named_or_loaded(plan)
    if isinstance(plan, str):
        return preset(plan, mesh, pipeline)
    if pipeline is not None:
        raise PlanError("pipeline is for a plan that is asked for by name: this one says itself what its pipeline is")
    if tuple(size for _, size in plan.whole_mesh) != tuple(size for _, size in mesh) and plan.world_size != 1:
        raise PlanError(
            f"plan {plan.name!r} is for the mesh {dict(plan.whole_mesh)} ({plan.world_size} ranks), and this run has "
            f"{dict(mesh)} ("
            f"{math.prod(size for _, size in mesh)} ranks): launch as many ranks, or change the plan's mesh"
        )
    return plan


def _automatic(mesh: Mesh) -> Plan:
    refuse_pipeline(mesh)
    world = math.prod(size for _, size in mesh)
    if world == 1:
        return replace(preset("single", mesh), note="chosen by 'auto': one rank, so there is nothing to shard")
    name = "hsdp" if len(mesh) == 2 else "fsdp"
    return replace(preset(name, mesh), note=f"chosen by 'auto': least memory per rank on {world} ranks")
