"""``plan="auto"``: price every preset that the ranks allow, and take the fastest that fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from shardgraph.analysis import Analysis, analyze_program
from shardgraph.compiler import lower
from shardgraph.cost_models.cluster import Cluster
from shardgraph.errors import PlanError
from shardgraph.ir import JointGraph
from shardgraph.mesh import Mesh
from shardgraph.plan import Candidate, Plan
from shardgraph.presets import PRESETS
from shardgraph.sizes import format_bytes, format_seconds


def choose_plan(
    joint: JointGraph,
    shapes: Mapping[str, torch.Size],
    meshes: list[Mesh],
    cluster: Cluster,
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
        optimizer: whose state and update are counted.
        memory: bytes that a rank may use; default: what the device has.

    Raises:
        PlanError: no preset fits; the message says what the smallest would take.
    """
    budget = memory or cluster.device.memory
    priced: list[tuple[Plan, Candidate]] = []
    for mesh in meshes:
        for plan in _presets(mesh):
            analysis = analyze_program(lower(joint, plan, shapes), cluster, optimizer=optimizer)
            priced.append((plan, _candidate(plan, analysis, budget)))
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
    """Every preset that can be on ``mesh``; one that leaves ranks unused (``single``) is none."""
    found = []
    for name, make in PRESETS.items():
        try:
            plan = make(mesh)
        except PlanError:
            continue
        if name != "single" or plan.world_size == 1:
            found.append(plan)
    return [plan for plan in found if plan.name == "single"] or found


def _candidate(plan: Plan, analysis: Analysis, budget: int) -> Candidate:
    memory = analysis.peak_memory
    return Candidate(plan.name, plan.mesh, memory, analysis.time.total, memory <= budget)
