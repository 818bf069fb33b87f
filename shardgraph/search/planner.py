"""Chooses the plan of ``"auto"`` from what was priced, and says why."""

from __future__ import annotations

from collections.abc import Callable
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
from shardgraph.search.layouts import layouts_on
from shardgraph.search.question import Question
from shardgraph.search.source import Source
from shardgraph.sizes import format_bytes, format_seconds

_ALTERNATIVES = 8
"""Runners-up of which a plan keeps everything, so that they can be run."""


@collected_later()
def choose_plan(
    source: Source,
    *,
    own_batches: bool,
    limit: float | None = None,
    show: Callable[[str], None] = lambda stage: None,
) -> Plan:
    """The plan with the least predicted time per sample whose predicted peak fits; ties go to the smaller peak.

    On a free mesh all layouts of its ranks are searched (:mod:`.auto`), else those of the question's mesh, with which
    presets are compared that suit it otherwise. With ``own_batches`` ranks share a batch only where nothing else fits,
    and none have stages; else pipelines are searched if the call has its loss. Placements of operators, and where
    stages begin, are left open. The other arguments are those of :func:`.auto.search`.

    Raises:
        PlanError: no plan fits, and the message has the smallest peak; or none can meet the annotations.
        CaptureError: the model cannot be traced into one graph.
    """
    source = source.of_few_layers
    question = source.question
    budget, total = question.budget, question.total
    pipelines = question.has_loss and not own_batches
    found = Found((), 0, ())
    if question.free_mesh or _has_layouts(question, own_batches):
        batches = Batches(max(1, source.call.batch), total)
        found = search(source, batches, budget, pipelines=pipelines, own_batches=own_batches, limit=limit, show=show)
    if not question.free_mesh and total is None and "pp" not in dict(question.plan.mesh):
        show("the presets")
        found = _with_presets(found, source, budget)
    if total is not None:
        if not found.estimated and not question.free_mesh:
            raise PlanError(
                f"no layout on the mesh {dict(question.plan.mesh)} can divide steps of {total} samples: layouts have "
                "the axes 'pp', 'dp' or 'dp_replicate' and 'dp_shard', 'ep', 'cp' and 'tp', outermost first, each with "
                "more than one rank; stages need a stack of equal layers, and each data rank equally many samples"
            )
        if not found.estimated and total % question.plan.world_size:
            raise PlanError(
                f"steps of {total} samples cannot be divided over the data ranks of any layout of "
                f"{question.plan.world_size} devices: give another global_batch, such as a multiple of the devices"
            )
        found = replace(found, priced=[each.of_batch(total) for each in found.priced])
    return _chosen(source, found, budget)


def _has_layouts(question: Question, own_batches: bool) -> bool:
    """Whether there are layouts on the question's mesh; one of stages must be asked for by name where ranks have their
    own batches.

    Raises:
        PlanError: it has an axis of stages, and pipelines are not searched.
    """
    mesh = question.plan.mesh
    if "pp" in dict(mesh) and not own_batches and not question.has_loss:
        raise PlanError(
            f"the mesh {dict(mesh)} has an axis 'pp', and the last stage of a pipeline computes the loss, which this "
            "call does not have: give 'labels' to a model that computes it, or a loss_fn and its target in "
            "example_kwargs"
        )
    if own_batches:
        refuse_pipeline(mesh)
    return any(layouts_on(mesh, question.plan.world_size, pipelines=not own_batches))


def _with_presets(found: Found, source: Source, budget: int) -> Found:
    """What was found with the prices of the presets of its mesh that it has none of, each with the least recomputation
    with which it fits."""
    question = source.question
    known = {each.plan.name for each in found.priced}
    plans = [plan for plan in _presets(question.plan.mesh) if plan.name not in known]
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
    every = sorted([*found.priced, *priced], key=lambda each: each.rank(budget))
    return replace(
        found,
        priced=every,
        estimated=found.estimated + len(plans),
        remarks=list(dict.fromkeys([*found.remarks, *refused])),
    )


def _chosen(source: Source, found: Found, budget: int) -> Plan:
    """The best of what was found, with its reasons."""
    if not found.priced:
        reasons = "".join(f"\n  {remark}" for remark in found.remarks)
        on = "" if source.question.free_mesh else f" on the mesh {dict(source.question.plan.mesh)}"
        raise PlanError(f"no plan{on} can be as the model is annotated:{reasons}")
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
    return replace(best.plan, note=note, considered=considered, remarks=tuple(remarks), bounds=found.bounds)


def _distinct(found: Found) -> list[Priced]:
    """What was priced, without those that differ from a faster one in their buckets alone."""
    kept: dict[object, Priced] = {}
    for each in found.priced:
        kept.setdefault((replace(each.plan, bucket=0), each.microbatches, each.samples), each)
    return list(kept.values())


def _presets(mesh: Mesh) -> list[Plan]:
    """The presets that suit a mesh, without those that leave ranks unused (``single``).

    If an axis has the name that presets use for sharding operators or experts, only presets that do so.
    """
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
