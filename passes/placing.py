"""Assigns placements to operations along the mesh axes that shard the computation.

This takes most of the time of lowering, and depends on little of a plan: plans that differ only in how parameters are
stored over data ranks have the same placements. So a captured graph caches them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from shardgraph.ir import JointGraph, copy_graph
from shardgraph.passes.base import Context, Pass, run_passes
from shardgraph.passes.chunking.chunk_loss import MarkScores
from shardgraph.passes.chunking.slice_before_scores import SliceBeforeScores
from shardgraph.passes.experts.divide_experts import DivideExperts
from shardgraph.passes.sharding.activations import call_of
from shardgraph.passes.sharding.order_rows import OrderRows
from shardgraph.passes.sharding.shard_operators import ShardOperators, record_text
from shardgraph.passes.sharding.share_heads import ShareHeads, repeats_heads
from shardgraph.plans.activation_plan import Activations
from shardgraph.plans.annotations.kinds import recompute, save, stage
from shardgraph.plans.parameter_plan import ParameterPlan, in_patterns
from shardgraph.plans.plan import Plan

_OF_LATER_PASSES = (recompute, save, stage)
"""Annotations that placements do not depend on."""


@dataclass(frozen=True)
class Placed:
    """A graph over a rank's part of the sharded computation, and the context after the placing passes."""

    module: fx.GraphModule
    context: Context
    axes: tuple[str, ...]


def place(joint: JointGraph, plan: Plan, shapes: Mapping[str, torch.Size]) -> tuple[fx.GraphModule, Context]:
    """A copy of a captured graph that computes a rank's part of the sharded computation, and the context for passes.

    Raises:
        PlanError: the plan does not fit the model's parameters.
    """
    gm, context = placed(joint, plan, shapes)
    return copy_graph(gm), context


def placed(joint: JointGraph, plan: Plan, shapes: Mapping[str, torch.Size]) -> tuple[fx.GraphModule, Context]:
    """As :func:`place`, with the graph that others are copied from, which must not be changed."""
    context = Context.of(plan, shapes, joint.fake_mode, joint.stored, joint.values)
    context.notes.extend(f"both ways are computed, one of which is chosen at random: {at}" for at in joint.choices)
    passes = placing_passes(plan, repeated_heads=repeats_heads(joint.module))
    if not passes:
        return joint.module, context
    key = placement_key(plan, context.parameters)
    if key not in joint.placed:
        gm = copy_graph(joint.module)
        run_passes(gm, passes, context)
        joint.placed[key] = Placed(gm, context.copy(), plan.axes)
        return gm, context
    known = joint.placed[key]
    after = known.context.copy(plan)
    if not plan.experts:  # parameters may be stored otherwise along data axes
        after = replace(after, parameters=context.parameters)
        for fqn, entry in known.context.parameters.items():
            for axis, _ in plan.operators:
                text = entry.placements[known.axes.index(axis)]
                record_text(after, fqn, plan.axes.index(axis), text)
    return known.module, after


def placement_key(plan: Plan, entries: Mapping[str, ParameterPlan]) -> tuple[Any, ...]:
    """The key of a plan's placements in :attr:`JointGraph.placed`.

    Expert passes read how parameters are stored along all axes; operators only along their own.
    """
    sizes = plan.mesh if plan.experts else tuple((axis, dict(plan.mesh)[axis]) for axis, _ in plan.operators)
    positions = [plan.axes.index(axis) for axis, _ in plan.operators]
    stored = tuple(
        (fqn, entry if plan.experts else tuple(entry.placements[at] for at in positions))
        for fqn, entry in entries.items()
    )
    annotations = tuple(each for each in plan.annotations if not isinstance(each[1], _OF_LATER_PASSES))
    return plan.operators, plan.experts, sizes, stored, annotations, plan.activations, plan.loss_chunk


def placing_passes(plan: Plan, *, repeated_heads: bool) -> list[Pass]:
    """The passes that shard the computation, and thereby the parameters that it uses in parts; and one for attention
    with ``repeated_heads`` of keys and values, if the graph has such.

    Experts are divided first, as their axis is outside of those of operators: a parameter that both split along the
    same dimension is split as DTensor splits it, by the outer axis and then by the inner one. Exchanges of tokens are
    to operators what any collective of another axis is. Context parallelism (the sequence) runs last, so that it sees
    what is left of each operation, and its rings no heads of keys and values that are repeated.
    """
    every = [ShardOperators(axis, style) for axis, style in plan.operators]
    operators, context = ([each for each in every if (each.style == "context") is last] for last in (False, True))
    experts: list[Pass] = [DivideExperts(plan.experts)] if plan.experts else []
    loss: list[Pass] = [] if plan.loss_chunk is None else [SliceBeforeScores(), MarkScores()]
    heads: list[Pass] = [ShareHeads()] if repeated_heads else []
    order: list[Pass] = [OrderRows()] if operators else []
    return [*loss, *experts, *operators, *heads, *context, *order]


def place_operators(joint: JointGraph, plan: Plan, shapes: Mapping[str, torch.Size]) -> Plan:
    """``plan`` with all placements assigned along operator and expert axes, of parameters and operations.

    Lowering ``joint`` under the result solves nothing.

    Raises:
        PlanError: the plan does not fit the model's parameters, or its placements of operations the graph.
    """
    if plan.decided and not plan.undecided(shapes):
        return plan
    gm, context = placed(joint, plan, shapes)
    activations = Activations(call_of(gm), tuple(context.activations.items())) if context.activations else None
    decided = replace(plan, parameters=in_patterns(context.parameters), activations=activations)
    joint.placed[placement_key(decided, context.parameters)] = joint.placed[placement_key(plan, plan.resolve(shapes))]
    return decided
