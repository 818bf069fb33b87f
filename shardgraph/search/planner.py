"""Chooses the plan of ``"auto"`` from what was priced, and says why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from shardgraph.errors import PlanError
from shardgraph.garbage import collected_later
from shardgraph.mesh import Mesh
from shardgraph.plans.plan import Plan
from shardgraph.plans.presets import DIVIDING, PRESETS, preset, refuse_pipeline
from shardgraph.search.auto import Found, search
from shardgraph.search.batches import Batches
from shardgraph.search.exact import Priced, cheapest, in_other_buckets
from shardgraph.search.fitting import advice, described
from shardgraph.search.source import Source
from shardgraph.sizes import format_bytes, format_seconds

_ALTERNATIVES = 8
"""Runners-up of which a plan keeps everything, so that they can be run."""


@collected_later()
def choose_plan(
    source: Source,
    *,
    total: int | None = None,
    pipelines: bool = False,
    own_batches: bool = False,
    limit: float | None = None,
    show: Callable[[str], None] = lambda stage: None,
) -> Plan:
    """The plan with the least predicted time per sample whose predicted peak fits; ties go to the smaller peak.

    On a free mesh all layouts of its ranks are searched (:mod:`.auto`), otherwise the presets that suit the mesh. A
    step has ``total`` samples; None: the call's on every data rank. Placements of operators, and where stages begin,
    are left open. The other arguments are those of :func:`.auto.search`.

    Raises:
        PlanError: no plan fits, and the message has the smallest peak; or none can meet the annotations.
        CaptureError: the model cannot be traced into one graph.
    """
    source = source.of_few_layers
    question = source.question
    budget = question.budget
    if question.free_mesh:
        batches = Batches(max(1, source.call.batch), total)
        found = search(source, batches, budget, pipelines=pipelines, own_batches=own_batches, limit=limit, show=show)
    else:
        show("the presets")
        found = _on(source, _presets(question.plan.mesh), budget)
    if total is not None:
        if not found.estimated and total % question.plan.world_size:
            raise PlanError(
                f"steps of {total} samples cannot be divided over the data ranks of any layout of "
                f"{question.plan.world_size} devices: give another global_batch, such as a multiple of the devices"
            )
        found = replace(found, priced=[each.of_batch(total) for each in found.priced])
    return _chosen(source, found, budget)


def _on(source: Source, plans: Sequence[Plan], budget: int) -> Found:
    """The prices of plans, each with the least recomputation with which it fits."""
    question = source.question
    priced, refused = [], []
    for plan in plans:
        for recompute in source.recomputations:
            try:
                each = cheapest(source, replace(question.with_options(plan), recompute=recompute), budget)
            except PlanError as error:
                refused.append(f"{plan.name} on {dict(plan.mesh)}: {error}")
                break
            priced.append(each)
            if each.memory <= budget:
                break
    if priced:
        priced += in_other_buckets(source, min(priced, key=lambda each: each.rank(budget)), budget)
    priced.sort(key=lambda each: each.rank(budget))
    return Found(priced, len(plans), list(dict.fromkeys(refused)))


def _chosen(source: Source, found: Found, budget: int) -> Plan:
    """The best of what was found, with its reasons."""
    if not found.priced:
        reasons = "".join(f"\n  {remark}" for remark in found.remarks)
        raise PlanError(f"no plan can be as the model is annotated:{reasons}")
    best = found.priced[0]
    if best.memory > budget:
        raise PlanError(
            f"no plan fits {format_bytes(budget)} per rank: the smallest is {described(best.plan)} and takes "
            f"{format_bytes(best.memory)}, {format_bytes(best.memory - budget)} too much. Use more ranks, a smaller "
            f"batch, or give it more memory{advice(source, best, budget, found.larger)}"
        )
    cluster = source.question.machine
    fitting = sum(each.memory <= budget for each in found.priced)
    note = (
        f"chosen by 'auto': the fastest of {found.estimated} layouts, {len(found.priced)} of them priced exactly and "
        f"{fitting} of those within {format_bytes(budget)}; predicted {format_seconds(best.seconds)} a step and "
        f"{format_bytes(best.memory)} on {cluster.name}"
    )
    remarks = [*found.remarks]
    # The same recomputation with other buckets was not looked for again.
    if gap := max(each.gap for each in found.priced if each.plan.recompute == best.plan.recompute):
        remarks.append(f"of as few saved bytes another recomputation may take {gap:.2%} less, the gap of its program")
    considered = tuple(each.candidate(budget, place <= _ALTERNATIVES) for place, each in enumerate(_distinct(found)))
    return replace(best.plan, note=note, considered=considered, remarks=tuple(remarks))


def _distinct(found: Found) -> list[Priced]:
    """What was priced, without those that differ from a faster one in their buckets alone."""
    kept: dict[object, Priced] = {}
    for each in found.priced:
        kept.setdefault((replace(each.plan, bucket=0), each.microbatches, each.samples), each)
    return list(kept.values())


def _presets(mesh: Mesh) -> list[Plan]:
    """The presets that suit a mesh, without those that leave ranks unused (``single``).

    If an axis has the name that presets use for sharding operators or experts, only presets that do so. An axis with
    the name of a pipeline's raises a ``PlanError``: a pipeline must be requested by name.
    """
    refuse_pipeline(mesh)
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
