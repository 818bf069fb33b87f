"""Decides what a requested plan leaves open; the plan of ``"auto"`` is chosen by :mod:`.answer` before."""

from __future__ import annotations

from dataclasses import replace

from shardgraph.capture.captures import Captures
from shardgraph.errors import PlanError
from shardgraph.plans.declared_stages import declared_stages
from shardgraph.plans.plan import Plan
from shardgraph.plans.resolve import resolve_plan
from shardgraph.search.question import Question
from shardgraph.search.recomputation import Recomputations, with_placements, with_recomputation
from shardgraph.search.stages import place_stages


def decide(question: Question, captures: Captures) -> Plan:
    """The requested plan with all open choices decided.

    These are: where pipeline stages begin; placements of parameters along operator and expert axes; what is recomputed,
    and whether a loss is computed in chunks. All are decided from one captured graph, which stays in ``captures``. For
    ``"auto"`` without example inputs it is the preset with the least memory.

    Raises:
        CaptureError: the model cannot be traced into one graph.
        PlanError: no plan meets the request; or a choice is open and there are no example inputs.
    """
    if question.automatic:
        assert question.call is None
        plan = question.with_options(resolve_plan("auto", question.plan.mesh))
        plan.resolve(question.shapes)
        question = replace(question, plan=plan, automatic=False)
    plan = question.plan
    if not question.open:
        return plan
    if question.call is None:
        if plan.world_size == 1 and plan.pipeline is None and not question.budgeted:
            return plan  # one rank needs no placements
        declared = plan.pipeline and declared_stages(question.model, plan.pipeline)
        if declared and not question.undecided and not question.budgeted:
            return replace(plan, pipeline=declared)
        raise PlanError(_without_inputs(question))
    joint, shapes = captures.joint(question.captured, plan), question.shapes
    if plan.pipeline is not None:
        plan = place_stages(joint, plan, shapes, question.cluster)
    if question.budgeted:
        candidates = Recomputations(joint, plan, shapes, question.machine, question.optimizer)
        plan = with_recomputation(candidates, question.budget)
    return with_placements(joint, plan, shapes)


def _without_inputs(question: Question) -> str:
    name = question.plan.name
    if question.plan.pipeline is not None:
        return (
            f"plan {name!r} finds where stages begin and parameters lie by what is computed: give example_inputs or "
            "example_kwargs; or, for an nn.Sequential under a plan that leaves nothing else open, the children at "
            "which stages begin: Pipeline(stages=...) or Pipeline(balance=...)"
        )
    return (
        f"plan {name!r} finds {'where parameters lie' if question.undecided else 'what fits the memory'} by what is "
        "computed with them: give example_inputs or example_kwargs, or a plan that says it (sharded.plan.save(path) of "
        "an earlier run writes one)"
    )
