"""Lowering: from a captured graph and a plan to a program, by a sequence of named passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardgraph.capture.captures import Call, Captures
from shardgraph.capture.scaled_products import unscaled
from shardgraph.errors import PlanError
from shardgraph.ir import JointGraph
from shardgraph.passes.analysis.collective_order import check_program, check_waits
from shardgraph.passes.analysis.places import on_host
from shardgraph.passes.analysis.random_state import check_random_state
from shardgraph.passes.base import Context, Graphs, GraphsPass, Only, Pass, of_kind, run_on_graphs, sibling
from shardgraph.passes.chunking.chunk_loss import ChunkLoss
from shardgraph.passes.offload.mark_offloaded import MarkOffloaded, offloads
from shardgraph.passes.offload.offload_activations import OffloadActivations
from shardgraph.passes.offload.offload_parameters import OffloadGradients, OffloadParameters
from shardgraph.passes.parameters.accumulate_gradients import KeepGradientsLocal
from shardgraph.passes.parameters.average_buffers import AverageBuffers
from shardgraph.passes.parameters.gather_scaled import GatherScaled
from shardgraph.passes.parameters.measure_gradients import MeasureGradients
from shardgraph.passes.parameters.mixed_precision import MixedPrecision
from shardgraph.passes.parameters.reduce_gradients import ReduceGradients
from shardgraph.passes.parameters.shard_parameters import ShardParameters
from shardgraph.passes.parameters.synchronize_batch_norms import SynchronizeBatchNorms
from shardgraph.passes.partition.split import Partition
from shardgraph.passes.pipeline.extract import DivideIntoStages
from shardgraph.passes.pipeline.once import DropUntrained, GatherOnce, ReduceOnce
from shardgraph.passes.pipeline.recompute_stage import CopyToRecompute, RecomputeStage
from shardgraph.passes.placing import place
from shardgraph.passes.program import Program, schedule
from shardgraph.passes.recompute.recompute import Recompute
from shardgraph.passes.schedule.merge import MergeCollectives
from shardgraph.passes.schedule.schedule import Schedule
from shardgraph.passes.sharding.remove_constraints import RemoveConstraints
from shardgraph.plans.plan import Plan
from shardgraph.plans.shards import named_shapes


@dataclass(frozen=True)
class CheckProgram(GraphsPass):
    """Takes all graphs; checks that collectives cannot deadlock, that no operation mixes host and device operands, and
    that no random numbers are drawn twice. Must not change: anything.
    """

    name = "check-program"
    requires = frozenset({"split"})
    provides = frozenset({"checked"})

    def run_on(self, graphs: Graphs, context: Context) -> None:
        for gm in graphs.values():
            on_host(gm)
            check_waits(gm)
            check_program(gm, context.plan.mesh)
        for name in of_kind(graphs, "forward"):
            check_random_state(graphs[name], graphs.get(sibling(name, "backward")))


WHOLE_PASSES: tuple[Pass, ...] = (
    RemoveConstraints(),  # annotated activations have their placements
    ChunkLoss(),  # logits over a vocabulary exist one chunk of rows at a time
    Recompute(),  # which values backward recomputes, while all nodes still come from modules
    MarkOffloaded(),  # which of the others are offloaded to host memory
)
RANK_PASSES: tuple[Pass, ...] = (
    SynchronizeBatchNorms(),  # some batch norms are over the rows of all ranks
    GatherScaled(),  # parameters that products take in 8 bits become shards, and gathers of bytes
    ShardParameters(),  # whole parameters become shards and gathers
    MixedPrecision(),  # stored parameters are cast before they are gathered, gradients before they are reduced
    OffloadParameters(),  # offloaded parameters are copied to the device before that
    ReduceGradients(),  # local gradients become their mean over ranks
    MeasureGradients(),  # whose squared norms are read on the device
    OffloadGradients(),  # and are copied to the host
    AverageBuffers(),  # running statistics stay equal on all ranks
)
SCHEDULE_PASSES: tuple[GraphsPass, ...] = (
    MergeCollectives(),  # small collectives become few
    Schedule(),  # collectives and copies run beside the computation
)


def passes_of(plan: Plan) -> dict[str, list[GraphsPass]]:
    """All passes between :func:`place` and the program, in order, by the name of their step."""
    divide: list[GraphsPass] = []
    once: list[GraphsPass] = []
    if plan.pipeline is not None:
        divide = [DivideIntoStages(plan.pipeline.stages)]  # one graph per stage, with the values exchanged
        once = [
            GatherOnce(),  # parameters that are kept are gathered once per step
            ReduceOnce(),  # gradients are reduced once per step,
            Only("backward", KeepGradientsLocal()),  # and not for every microbatch
            DropUntrained(),  # frozen first stages have no backward
        ]
    again: list[GraphsPass] = []
    if plan.pipeline is not None and plan.pipeline.checkpoint != "never":
        again = [
            CopyToRecompute(),  # for microbatches that save only the stage's inputs
            Only("recompute/joint", RecomputeStage()),  # all else is recomputed
            Only("recompute/joint", MarkOffloaded()),  # so different values can be offloaded
        ]
    # Offloaded activations are in host memory between forward and backward.
    offload: list[GraphsPass] = [OffloadActivations()] if offloads(plan) else []
    return {
        "rewrite": [*WHOLE_PASSES, *divide, *RANK_PASSES, *again],
        "split": [Partition(), *once],  # forward and backward
        "schedule": list(SCHEDULE_PASSES),
        "offload": offload,
        "check": [CheckProgram()],
    }


STAGES = 5  # capture, rewrite, split, schedule, check: the steps of a progress line


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

    ``show`` is called with the name of each step as it begins.

    Raises:
        CaptureError: the model cannot be traced into one graph.
        PlanError: the plan does not fit the model's parameters.
        DeadlockError: the program's collectives could block for ever.
    """
    shapes = named_shapes(model)
    plan.resolve(shapes)  # fail before the long work if the plan does not fit
    show("capture")
    call = Call(model, args, dict(kwargs or {}), loss_fn, torch.is_grad_enabled())
    return lower(Captures(device).take(call, plan), plan, shapes, show)


def lower(
    joint: JointGraph,
    plan: Plan,
    shapes: Mapping[str, torch.Size],
    show: Callable[[str], None] = lambda stage: None,
    *,
    scheduled: bool = True,
) -> Program:
    """Lower a captured graph under ``plan`` to a program; the graph is not changed, so other plans can be tried on it.

    If the plan has a pipeline, the graph is that of one microbatch, and the plan lists where stages begin. Unless
    ``scheduled``, collectives stay one for each value, where it is needed: in the order in which people read.

    Raises:
        PlanError: the plan does not fit the model's parameters, whose unsharded ``shapes`` are given by name, or its
            recomputation names operations that the model does not have, or it has a pipeline and the model sets
            attributes to tensors.
        DeadlockError: the program's collectives could block for ever.
    """
    if plan.pipeline is not None:
        _check_attributes(joint)
        _check_products(plan)
    show("rewrite")
    gm, context = place(joint, plan, shapes)
    if note := unscaled(gm):
        context.notes.append(note)
    graphs: Graphs = {"joint": gm}
    for step, passes in passes_of(plan).items():
        if step not in ("rewrite", "offload"):  # shown already, before placing; and no step of its own
            show(step)
        if step != "schedule" or scheduled:
            run_on_graphs(graphs, passes, context)
    actions = schedule(plan, any(of_kind(graphs, "backward")))
    return Program(joint, graphs, actions, plan, context.parameters, shapes, context)


def _check_attributes(joint: JointGraph) -> None:
    """Raise PlanError if forward sets attributes to what only exists for a microbatch."""
    for attribute in joint.results:
        raise PlanError(
            f"forward sets the attribute {attribute.fqn!r} of the model{attribute.source} to a value of the call, and "
            "a pipeline calls it for each microbatch: return the value as an output, write a buffer in place, or "
            "choose a plan without a pipeline"
        )


def _check_products(plan: Plan) -> None:
    """Raise PlanError if products would have the scales of microbatches."""
    if plan.precision.products is not None:
        raise PlanError(
            f"products of float8 values have one scale for each tensor of a batch, and under {plan.name!r} it would be "
            "the scale of a microbatch: use precision 'bf16', or a plan without a pipeline"
        )
