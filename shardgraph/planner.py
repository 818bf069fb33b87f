"""``plan="auto"``: price every preset that the ranks allow, and take the fastest that fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from shardgraph.analysis import Analysis, analyze_program
from shardgraph.annotations.match import Annotated
from shardgraph.compiler import lower
from shardgraph.cost_models.cluster import Cluster
from shardgraph.errors import PlanError
from shardgraph.ir import JointGraph
from shardgraph.mesh import Mesh
from shardgraph.plan import Candidate, Plan
from shardgraph.presets import PRESETS, preset
from shardgraph.sizes import format_bytes, format_seconds


def choose_plan(
    joint: JointGraph,
    shapes: Mapping[str, torch.Size],
    meshes: list[Mesh],
    cluster: Cluster,
    annotations: tuple[Annotated, ...] = (),
    *,
    optimizer: str = "adamw",
    memory: int | None = None,
) -> Plan:
    """The fastest preset on one of ``meshes`` whose predicted peak fits; of equally fast ones the smaller.

    Args:
        joint: the captured model, left as it is.
        shapes: unsharded shapes of its parameters by name.
        meshes: the meshes to try; a preset that a mesh does not suit is passed over.
        cluster: what prices them.
        annotations: what the plan must have, as ``joint`` was captured with; a preset that cannot is passed over.
        optimizer: whose state and update are counted.
        memory: bytes that a rank may use; default: what the device has.

    Raises:
        PlanError: no preset fits, and the message says what the smallest would take; or none can be as annotated.
    """
    budget = memory or cluster.device.memory
    priced: list[tuple[Plan, Candidate]] = []
    refused: list[PlanError] = []
    for plan in [replace(plan, annotations=annotations) for mesh in meshes for plan in _presets(mesh)]:
        try:
            program = lower(joint, plan, shapes)
        except PlanError as error:
            refused.append(error)
        else:
            priced.append((plan, _candidate(plan, analyze_program(program, cluster, optimizer=optimizer), budget)))
    if not priced:
        reasons = "".join(f"\n  {error}" for error in dict.fromkeys(map(str, refused)))
        raise PlanError(f"no plan can be as the model is annotated:{reasons}")
    considered = tuple(candidate for _, candidate in sorted(priced, key=lambda pair: pair[1].seconds))
    fitting = [pair for pair in priced if pair[1].fits]
    if not fitting:
        _, least = min(priced, key=lambda pair: pair[1].memory)
        raise PlanError(
            f"no plan fits {format_bytes(budget)} per rank: the smallest is {least.name!r} on {dict(least.mesh)} with "
            f"{format_bytes(least.memory)}. Use more ranks, a smaller batch, or give it more memory"
        )
    plan, best = min(fitting, key=lambda pair: (pair[1].seconds, pair[1].memory))
    note = (
        f"chosen by 'auto': the fastest of {len(fitting)} that fit {format_bytes(budget)}, predicted "
        f"{format_seconds(best.seconds)} a step and {format_bytes(best.memory)} on {cluster.name}"
    )
    return replace(plan, note=note, considered=considered)


def meshes_of(ranks: int, cluster: Cluster) -> list[Mesh]:
    """The meshes to try for as many ranks: one axis, and nodes times the devices of a node where there are several."""
    found: list[Mesh] = [(("dp", ranks),)]
    inside = cluster.devices_per_node
    if ranks > inside and ranks % inside == 0:
        found.append((("dp_replicate", ranks // inside), ("dp_shard", inside)))
    return found


def _presets(mesh: Mesh) -> list[Plan]:
    """Every preset that can be on ``mesh``, with operators divided where it has an axis for that.

    One that leaves ranks unused (``single``) is none.
    """
    operators = ("tp", "tp+sp") if "tp" in dict(mesh) else ()
    names = [*PRESETS, *operators, *(f"{data}+{divided}" for data in PRESETS for divided in operators)]
    found = []
    for name in names:
        try:
            plan = preset(name, mesh)
        except PlanError:
            continue
        if name != "single" or plan.world_size == 1:
            found.append(plan)
    return [plan for plan in found if plan.name == "single"] or found


def _candidate(plan: Plan, analysis: Analysis, budget: int) -> Candidate:
    memory = analysis.peak_memory
    return Candidate(plan.name, plan.mesh, memory, analysis.time.total, memory <= budget)
