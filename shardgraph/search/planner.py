"""``plan="auto"``: price the candidate presets, and take the fastest that fits."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import product

import torch

from shardgraph.cost_models.cluster import Cluster
from shardgraph.errors import PlanError
from shardgraph.ir import JointGraph
from shardgraph.mesh import Mesh
from shardgraph.plans.candidate import Candidate
from shardgraph.plans.plan import Plan
from shardgraph.plans.presets import DIVIDING, PRESETS, preset, refuse_pipeline
from shardgraph.report.analysis import analyze_program
from shardgraph.search.buckets import with_buckets
from shardgraph.search.recomputation import Recomputations, nearest_to
from shardgraph.sizes import format_bytes, format_seconds


def choose_plan(
    joint: JointGraph,
    shapes: Mapping[str, torch.Size],
    groups: list[list[Plan]],
    cluster: Cluster,
    optimizer: str = "adamw",
    budget: int | None = None,
) -> Plan:
    """The plan with the least predicted time per batch whose predicted peak fits; ties go to the smaller peak.

    A group of candidates is tried only if nothing in the earlier ones fits; see :func:`plans_of`. Those that cannot
    meet their annotations are skipped. ``budget`` is the bytes that a rank may use, by default the device's memory. The
    small collectives of the chosen plan are in buckets if that is faster still. Plans whose recomputation is
    ``"budget"`` get a recomputation with which they fit, if there is one.

    Raises:
        PlanError: no plan fits, and the message has the smallest peak; or none can meet the annotations.
    """
    budget = cluster.device.memory if budget is None else budget
    priced: list[tuple[Plan, Candidate]] = []
    refused: list[PlanError] = []
    for group in groups:
        for plan in group:
            plan = replace(plan, bucket=0)  # the chosen one gets them
            try:
                recomputations, choice = nearest_to(budget, Recomputations(joint, plan, shapes, cluster, optimizer))
            except PlanError as error:
                refused.append(error)
            else:
                analysis = analyze_program(recomputations.program(choice), cluster, optimizer=optimizer)
                peak, seconds = analysis.peak_memory, analysis.time.total
                candidate = Candidate(plan.name, plan.mesh, peak, seconds, peak <= budget, plan.data_size)
                priced.append((recomputations.chosen(choice), candidate))
        if any(candidate.fits for _, candidate in priced):
            break
    if not priced:
        reasons = "".join(f"\n  {error}" for error in dict.fromkeys(map(str, refused)))
        raise PlanError(f"no plan can be as the model is annotated:{reasons}")
    # Per batch, because plans differ in the number of batches per step.
    priced.sort(key=lambda pair: (pair[1].seconds / pair[1].batches, pair[1].memory))
    fitting = [pair for pair in priced if pair[1].fits]
    if not fitting:
        _, least = min(priced, key=lambda pair: pair[1].memory)
        raise PlanError(
            f"no plan fits {format_bytes(budget)} per rank: the smallest is {least.name!r} on {dict(least.mesh)} with "
            f"{format_bytes(least.memory)}. Use more ranks, a smaller batch, or give it more memory"
        )
    plan, best = fitting[0]
    note = (
        f"chosen by 'auto': the fastest of {len(fitting)} that fit {format_bytes(budget)}, predicted "
        f"{format_seconds(best.seconds)} a step and {format_bytes(best.memory)} on {cluster.name}"
    )
    plan = replace(plan, note=note, considered=tuple(candidate for _, candidate in priced))
    return with_buckets(joint, plan, shapes, cluster, optimizer, budget, best.seconds)


def plans_of(ranks: int, cluster: Cluster) -> list[list[Plan]]:
    """Candidate plans for ``ranks``, in groups; a later group is tried if nothing in the earlier ones fits.

    First data-parallel plans, on one axis and on nodes times devices per node. Then plans that also shard operators
    over devices of a node, with which a rank has fewer of the activations.
    """
    inside = cluster.devices_per_node
    meshes: list[Mesh] = [(("dp", ranks),)]
    if ranks > inside and ranks % inside == 0:
        meshes.append((("dp_replicate", ranks // inside), ("dp_shard", inside)))
    degrees = [2**i for i in range(1, inside.bit_length()) if ranks % 2**i == 0 and 2**i <= inside]
    divided = []
    for degree, name in product(degrees, ("tp", "tp+sp")):
        data = {} if degree == ranks else {"dp": ranks // degree}
        divided.append(preset(f"fsdp+{name}" if data else name, data | {"tp": degree}))
    return [[plan for mesh in meshes for plan in _presets(mesh)], divided]


def plans_on(mesh: Mesh) -> list[list[Plan]]:
    """Every preset that suits ``mesh``, as one group of :func:`plans_of`.

    If an axis has the name that presets use for sharding operators or experts, only presets that do so. An axis with
    the name of a pipeline's raises a ``PlanError``: a pipeline must be requested by name.
    """
    refuse_pipeline(mesh)
    return [_presets(mesh)]


def _presets(mesh: Mesh) -> list[Plan]:
    """The presets that suit a mesh, without those that leave ranks unused (``single``)."""
    names = list(PRESETS)
    if divided := {axis for styles in DIVIDING.values() for axis in styles} & set(dict(mesh)):
        dividing = [name for name, styles in DIVIDING.items() if set(styles) == divided]
        names = [*dividing, *(f"{data}+{name}" for data in PRESETS for name in dividing)]
    plans = []
    for name in names:
        with suppress(PlanError):
            plans.append(preset(name, mesh))
    alone = [plan for plan in plans if plan.name == "single" and plan.world_size == 1]
    return alone or [plan for plan in plans if plan.name != "single"]
