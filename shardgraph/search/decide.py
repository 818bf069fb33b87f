"""Decides the plan for a question: the one place where open choices of plans are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from shardgraph.capture.captures import Captures
from shardgraph.errors import PlanError
from shardgraph.ir import JointGraph
from shardgraph.passes.placing import place_operators
from shardgraph.plans.plan import Plan
from shardgraph.plans.resolve import resolve_plan
from shardgraph.search.planner import choose_plan, plans_of, plans_on
from shardgraph.search.question import Question
from shardgraph.search.recomputation import with_recomputation
from shardgraph.search.stages import place_stages


def decide(question: Question, captures: Captures) -> Plan:
    """The requested plan with all open choices decided.

    These are: the preset for ``"auto"``; where pipeline stages begin; placements of parameters along operator and
    expert axes; what is recomputed, and whether a loss is computed in chunks. All are decided from one captured graph,
    which stays in ``captures``.

    Raises:
        CaptureError: the model cannot be traced into one graph.
        PlanError: no plan meets the request; or a choice is open and there are no example inputs.
    """
    if question.automatic:
        if question.call is not None:
            return _fastest(question, captures)
        least = question.with_asked(resolve_plan("auto", question.plan.mesh))
        least = replace(least, annotations=question.plan.annotations, precision=question.plan.precision)
        question = replace(question, plan=least, automatic=False)
        question.plan.resolve(question.shapes)
    plan = question.plan
    if not question.open:
        return plan
    if question.call is None:
        if plan.world_size == 1 and plan.pipeline is None and not question.budgeted:
            return plan  # one rank needs no placements
        raise PlanError(_without_inputs(question))
    joint, shapes = captures.joint(question.captured, plan), question.shapes
    if plan.pipeline is not None:
        plan = place_stages(joint, plan, shapes, question.machine)
    if question.budgeted:
        plan = with_recomputation(joint, plan, shapes, question.machine, question.memory, question.optimizer)
    return with_placements(joint, plan, shapes)


def with_placements(joint: JointGraph, plan: Plan, shapes: Mapping[str, torch.Size]) -> Plan:
    """``plan`` with placements assigned to every parameter and operation.

    Raises:
        PlanError: the plan does not fit the model.
    """
    return replace(place_operators(joint, plan.of_stage, shapes), pipeline=plan.pipeline)


def _fastest(question: Question, captures: Captures) -> Plan:
    """The preset with the least predicted time per batch."""
    plan, machine, shapes = question.plan, question.machine, question.shapes
    groups = plans_of(plan.world_size, machine) if question.free_mesh else plans_on(plan.mesh)
    joint = captures.joint(question.captured, plan)
    chosen = choose_plan(
        joint,
        shapes,
        [[question.with_asked(candidate) for candidate in group] for group in groups],
        machine,
        plan.annotations,
        precision=plan.precision,
        optimizer=question.optimizer,
        memory=question.memory,
    )
    return with_placements(joint, chosen, shapes)


def _without_inputs(question: Question) -> str:
    name = question.plan.name
    if question.plan.pipeline is not None:
        return (
            f"plan {name!r} finds where stages begin and parameters lie by what is computed: give example_inputs or "
            "example_kwargs"
        )
    return (
        f"plan {name!r} finds {'where parameters lie' if question.undecided else 'what fits the memory'} by what is "
        "computed with them: give example_inputs or example_kwargs, or a plan that says it (sharded.plan.save(path) of "
        "an earlier run writes one)"
    )
