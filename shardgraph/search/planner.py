"""``plan="auto"``: price the presets that the ranks allow, and take the fastest that fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from shardgraph.cost_models.cluster import Cluster
from shardgraph.errors import PlanError
from shardgraph.ir import JointGraph
from shardgraph.mesh import Mesh
from shardgraph.plans.annotations.match import Annotated
from shardgraph.plans.candidate import Candidate
from shardgraph.plans.plan import Plan
from shardgraph.plans.precision import AS_STORED, Precision
from shardgraph.plans.presets import DIVIDING, PRESETS, preset, refuse_pipeline
from shardgraph.report.analysis import Analysis, analyze_program
from shardgraph.search.recomputation import nearest_to
from shardgraph.sizes import format_bytes, format_seconds, parse_bytes


def choose_plan(
    joint: JointGraph,
    shapes: Mapping[str, torch.Size],
    groups: list[list[Plan]],
    cluster: Cluster,
    annotations: tuple[Annotated, ...] = (),
    *,
    precision: Precision = AS_STORED,
    optimizer: str = "adamw",
    memory: int | str | None = None,
) -> Plan:
    """The fastest plan for a batch whose predicted peak fits; of equally fast ones the smaller.

    Args:
        joint: the captured model, left as it is.
        shapes: unsharded shapes of its parameters by name.
        groups: the plans to try, a group only if nothing of those before it fits; see :func:`plans_of`.
        cluster: what prices them.
        annotations: what the plan must have, as ``joint`` was captured with; one that cannot is passed over.
        precision: what ``joint`` was captured with.
        optimizer: whose state and update are counted.
        memory: bytes that a rank may use, or a text; default: what the device has. Plans whose recomputation is
            ``"budget"`` get what makes them fit.

    Raises:
        PlanError: no plan fits, and the message says what the smallest would take; or none can be as annotated.
    """
    budget = cluster.device.memory if memory is None else parse_bytes(memory)
    priced: list[tuple[Plan, Candidate]] = []
    refused: list[PlanError] = []
    for group in groups:
        for plan in [replace(plan, annotations=annotations, precision=precision) for plan in group]:
            try:
                found, choice = nearest_to(budget, joint, plan, shapes, cluster, optimizer)
            except PlanError as error:
                refused.append(error)
            else:
                analysis = analyze_program(found.program(choice), cluster, optimizer=optimizer)
                priced.append((found.chosen(choice), _candidate(plan, analysis, budget)))
        if any(candidate.fits for _, candidate in priced):
            break
    if not priced:
        reasons = "".join(f"\n  {error}" for error in dict.fromkeys(map(str, refused)))
        raise PlanError(f"no plan can be as the model is annotated:{reasons}")
    considered = tuple(sorted((candidate for _, candidate in priced), key=_price))
    fitting = [pair for pair in priced if pair[1].fits]
    if not fitting:
        _, least = min(priced, key=lambda pair: pair[1].memory)
        raise PlanError(
            f"no plan fits {format_bytes(budget)} per rank: the smallest is {least.name!r} on {dict(least.mesh)} with "
            f"{format_bytes(least.memory)}. Use more ranks, a smaller batch, or give it more memory"
        )
    plan, best = min(fitting, key=lambda pair: _price(pair[1]))
    note = (
        f"chosen by 'auto': the fastest of {len(fitting)} that fit {format_bytes(budget)}, predicted "
        f"{format_seconds(best.seconds)} a step and {format_bytes(best.memory)} on {cluster.name}"
    )
    return replace(plan, note=note, considered=considered)


def _price(candidate: Candidate) -> tuple[float, int]:
    """The time of one batch: plans differ in how many they have in a step."""
    return candidate.seconds / candidate.batches, candidate.memory


def plans_of(ranks: int, cluster: Cluster) -> list[list[Plan]]:
    """The plans to try for as many ranks, in groups of which a later one is tried when nothing of the earlier fits.

    First those in which every rank has a batch of its own, on one axis and on nodes times the devices of a node. Then
    those in which the devices of a node divide operators too: a rank then has less of the activations.
    """
    inside = cluster.devices_per_node
    meshes: list[Mesh] = [(("dp", ranks),)]
    if ranks > inside and ranks % inside == 0:
        meshes.append((("dp_replicate", ranks // inside), ("dp_shard", inside)))
    degrees = [2**i for i in range(1, inside.bit_length()) if ranks % 2**i == 0 and 2**i <= inside]
    divided = [_divided(ranks // degree, degree, name) for degree in degrees for name in ("tp", "tp+sp")]
    return [[plan for mesh in meshes for plan in _presets(mesh)], divided]


def plans_on(mesh: Mesh) -> list[list[Plan]]:
    """Every preset that can be on ``mesh``, as one group of :func:`plans_of`.

    With an axis that is called as presets call those that they divide operators or experts along, those that do.

    Raises:
        PlanError: an axis is called as that of a pipeline, which is asked for by name.
    """
    refuse_pipeline(mesh)
    return [_presets(mesh)]


def _divided(batches: int, degree: int, name: str) -> Plan:
    if batches == 1:
        return preset(name, {"tp": degree})
    return preset(f"fsdp+{name}", {"dp": batches, "tp": degree})


def _presets(mesh: Mesh) -> list[Plan]:
    """The presets that a mesh suits; one that leaves ranks unused (``single``) is none."""
    names = [*PRESETS]
    if divided := {axis for styles in DIVIDING.values() for axis in styles} & set(dict(mesh)):
        dividing = [name for name, styles in DIVIDING.items() if set(styles) == divided]
        names = [*dividing, *(f"{data}+{name}" for data in PRESETS for name in dividing)]
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
    return Candidate(plan.name, plan.mesh, memory, analysis.time.total, memory <= budget, plan.data_size)
