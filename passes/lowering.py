"""Lowering: from a captured graph and a plan to a program, one named pass after another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from shardgraph.capture.captures import Call, Captures
from shardgraph.ir import JointGraph, copy_graph
from shardgraph.passes.analysis.collective_order import check_program, check_waits
from shardgraph.passes.analysis.places import on_host
from shardgraph.passes.analysis.random_state import check_random_state
from shardgraph.passes.base import Context, Pass, run_passes
from shardgraph.passes.chunking.chunk_loss import ChunkLoss, MarkScores
from shardgraph.passes.chunking.slice_before_scores import SliceBeforeScores
from shardgraph.passes.experts.divide_experts import DivideExperts
from shardgraph.passes.offload.mark_offloaded import MarkOffloaded
from shardgraph.passes.offload.offload_activations import check_offloaded, offload_activations
from shardgraph.passes.offload.offload_parameters import OffloadGradients, OffloadParameters
from shardgraph.passes.parameters.average_buffers import AverageBuffers
from shardgraph.passes.parameters.mixed_precision import MixedPrecision
from shardgraph.passes.parameters.reduce_gradients import ReduceGradients
from shardgraph.passes.parameters.shard_parameters import ShardParameters
from shardgraph.passes.partition.split import split
from shardgraph.passes.program import Program
from shardgraph.passes.recompute.recompute import Recompute
from shardgraph.passes.schedule.overlap import OverlapCollectives
from shardgraph.passes.schedule.overlap_copies import OverlapCopies
from shardgraph.passes.sharding.remove_constraints import RemoveConstraints
from shardgraph.passes.sharding.shard_operators import ShardOperators
from shardgraph.plans.plan import Plan, in_patterns
from shardgraph.plans.shards import named_shapes

WHOLE_PASSES: tuple[Pass, ...] = (
    RemoveConstraints(),  # annotated activations have their placements
    ChunkLoss(),  # scores over a vocabulary exist a chunk of rows at a time
    Recompute(),  # which values backward computes again, while modules are all that made them
    MarkOffloaded(),  # which of the others are to lie in host memory
)
RANK_PASSES: tuple[Pass, ...] = (
    ShardParameters(),  # whole parameters become shards and gathers
    MixedPrecision(),  # stored parameters are cast before they are gathered, gradients before they are reduced
    OffloadParameters(),  # stored parameters in host memory are copied to the device before all that
    ReduceGradients(),  # local gradients become their mean over ranks
    OffloadGradients(),  # and go to the host
    AverageBuffers(),  # running statistics stay equal on all ranks
)
JOINT_PASSES = (*WHOLE_PASSES, *RANK_PASSES)
HALF_PASSES: tuple[Pass, ...] = (
    OverlapCollectives(),  # start gathers early, await reductions late
    OverlapCopies(),  # and so copies between host and device
)

STAGES = 5  # capture, rewrite, split, schedule, check: what a progress line counts


def build_program(
    model: nn.Module,
    plan: Plan,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    device: torch.device | None = None,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    show: Callable[[str], None] = lambda stage: None,
) -> Program:
    """Compile one call of ``model`` under ``plan``. Needs no process group, no accelerator and no weights.

    ``show`` is told the name of each stage as it begins.

    Raises:
        CaptureError: the model cannot be traced into one graph.
        PlanError: the plan does not fit the model's parameters.
        DeadlockError: the program's collectives could block for ever.
    """
    shapes = named_shapes(model)
    plan.resolve(shapes)  # a plan that does not fit is told before the long work
    show("capture")
    call = Call(model, args, dict(kwargs or {}), loss_fn, torch.is_grad_enabled())
    return lower(Captures(device).take(call, plan), plan, shapes, show)


def lower(
    joint: JointGraph, plan: Plan, shapes: Mapping[str, torch.Size], show: Callable[[str], None] = lambda stage: None
) -> Program:
    """The program of a captured graph under ``plan``; the graph is left as it is, so that plans can be tried on it.

    Raises:
        PlanError: the plan does not fit the model's parameters, whose unsharded ``shapes`` are given by name.
        DeadlockError: the program's collectives could block for ever.
    """
    show("rewrite")
    return emit(joint, shapes, *place(joint, plan, shapes), show)


def place(joint: JointGraph, plan: Plan, shapes: Mapping[str, torch.Size]) -> tuple[fx.GraphModule, Context]:
    """A copy of a captured graph that computes a rank's part of what is divided, and what passes know of it.

    Raises:
        PlanError: the plan does not fit the model's parameters.
    """
    context = Context.of(plan, shapes, joint.fake_mode, joint.stored)
    gm = copy_graph(joint.module)
    run_passes(gm, placing_passes(plan), context)
    return gm, context


def emit(
    joint: JointGraph,
    shapes: Mapping[str, torch.Size],
    gm: fx.GraphModule,
    context: Context,
    show: Callable[[str], None] = lambda stage: None,
) -> Program:
    """The program of ``joint`` from what :func:`place` gives, which is used up.

    Raises:
        PlanError: the plan's recomputation names what the model does not have.
        DeadlockError: the program's collectives could block for ever.
    """
    plan = context.plan
    run_passes(gm, JOINT_PASSES, context)

    show("split")
    forward, backward = split(gm, context)

    show("schedule")
    for half in (forward, backward):
        if half is not None:
            run_passes(half, HALF_PASSES, context)

    kept = None if backward is None else offload_activations(forward, backward, context)
    check_offloaded(plan, shapes, kept)

    show("check")
    for half in (forward, backward):
        if half is not None:
            check_half(half, plan)
    check_random_state(forward, backward)
    return Program(joint, forward, backward, plan, context.parameters, shapes, context)


def check_half(half: fx.GraphModule, plan: Plan) -> None:
    """Raise DeadlockError if the collectives of a graph could block for ever, GraphInvariantError if an operation has
    values of both host and device."""
    on_host(half)
    check_waits(half)
    check_program(half, plan.mesh)


def placing_passes(plan: Plan) -> list[Pass]:
    """The passes that divide the computation, and so find where parameters lie that it uses in parts.

    Along sequences last, so that it sees what is left of each operation.
    """
    axes = sorted(plan.operators, key=lambda operators: operators[1] == "context")
    operators: list[Pass] = [ShardOperators(axis, style) for axis, style in axes]
    experts: list[Pass] = [DivideExperts(plan.experts)] if plan.experts else []
    loss: list[Pass] = [] if plan.loss_chunk is None else [SliceBeforeScores(), MarkScores()]
    return [*loss, *operators, *experts]


def place_operators(joint: JointGraph, plan: Plan, shapes: Mapping[str, torch.Size]) -> Plan:
    """``plan`` with a placement for every parameter that it leaves to be found along axes of operators and experts."""
    if not plan.undecided(shapes):
        return plan
    _, context = place(joint, plan, shapes)
    return replace(plan, parameters=in_patterns(context.parameters))
