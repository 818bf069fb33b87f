"""The front door's machinery: from a model and a plan to a program, one named step after another."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardgraph._torch import ordered_gloo
from shardgraph.capture import capture
from shardgraph.errors import PlanError
from shardgraph.ir import JointGraph, copy_graph
from shardgraph.mesh import Mesh
from shardgraph.mixed_precision import Precision
from shardgraph.parameters import named_shapes
from shardgraph.passes.analysis.collective_order import check_program, check_waits
from shardgraph.passes.analysis.places import on_host
from shardgraph.passes.analysis.random_state import check_random_state
from shardgraph.passes.base import Context, Pass, run_passes
from shardgraph.passes.rewrite.average_buffers import AverageBuffers
from shardgraph.passes.rewrite.chunk_loss import ChunkLoss, MarkScores
from shardgraph.passes.rewrite.divide_experts import DivideExperts
from shardgraph.passes.rewrite.mark_offloaded import MarkOffloaded
from shardgraph.passes.rewrite.mixed_precision import MixedPrecision
from shardgraph.passes.rewrite.offload_activations import check_offloaded, offload_activations
from shardgraph.passes.rewrite.offload_parameters import OffloadGradients, OffloadParameters
from shardgraph.passes.rewrite.overlap import OverlapCollectives
from shardgraph.passes.rewrite.overlap_copies import OverlapCopies
from shardgraph.passes.rewrite.recompute import Recompute
from shardgraph.passes.rewrite.reduce_gradients import ReduceGradients
from shardgraph.passes.rewrite.remove_constraints import RemoveConstraints
from shardgraph.passes.rewrite.shard_operators import ShardOperators
from shardgraph.passes.rewrite.shard_parameters import ShardParameters
from shardgraph.passes.rewrite.slice_before_scores import SliceBeforeScores
from shardgraph.passes.rewrite.split import split
from shardgraph.pipeline_plan import Pipeline
from shardgraph.plan import Plan, in_patterns
from shardgraph.presets import preset, refuse_pipeline
from shardgraph.program import Program

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
    where = device or torch.device("cpu")
    said, precision = plan.annotations, plan.precision
    joint = capture(
        model, args, dict(kwargs or {}), device=where, loss_fn=loss_fn, annotations=said, precision=precision
    )
    return lower(joint, plan, shapes, show)


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
    context = Context(plan, plan.resolve(shapes), dict(shapes), joint.fake_mode, stored=joint.stored)
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


# -- which plan, on which mesh ---------------------------------------------------------------------


def resolve_plan(
    plan: str | Path | Plan,
    mesh: Mesh,
    pipeline: Pipeline | None = None,
    precision: str | Precision | None = None,
) -> Plan:
    """The plan that ``compile`` was asked for, on a mesh of ``(axis, size)`` pairs, with ``precision`` if it is given.

    ``pipeline`` says what a preset's pipeline is to be.

    Raises:
        PlanError: no such preset, file or precision, or a plan made for another mesh.
    """
    found = _named_plan(plan, mesh, pipeline)
    return found if precision is None else replace(found, precision=Precision.of(precision))


def _named_plan(plan: str | Path | Plan, mesh: Mesh, pipeline: Pipeline | None) -> Plan:
    if plan == "auto":
        return _automatic(mesh)
    if isinstance(plan, Path) or (isinstance(plan, str) and plan.endswith((".yaml", ".yml"))):
        plan = Plan.load(plan)
    if isinstance(plan, str):
        return preset(plan, mesh, pipeline)
    if pipeline is not None:
        raise PlanError("pipeline is for a plan that is asked for by name: this one says itself what its pipeline is")
    if not isinstance(plan, Plan):
        raise PlanError(f"a plan is a name, a Plan or the path of a plan file, and this is a {type(plan).__name__}")
    if tuple(size for _, size in plan.whole_mesh) != tuple(size for _, size in mesh) and plan.world_size != 1:
        raise PlanError(
            f"plan {plan.name!r} is for the mesh {dict(plan.whole_mesh)} ({plan.world_size} ranks), and this run has "
            f"{dict(mesh)} ("
            f"{math.prod(size for _, size in mesh)} ranks): launch as many ranks, or change the plan's mesh"
        )
    return plan


def _automatic(mesh: Mesh) -> Plan:
    refuse_pipeline(mesh)
    world = math.prod(size for _, size in mesh)
    if world == 1:
        return replace(preset("single", mesh), note="chosen by 'auto': one rank, so there is nothing to shard")
    name = "hsdp" if len(mesh) == 2 else "fsdp"
    return replace(preset(name, mesh), note=f"chosen by 'auto': least memory per rank on {world} ranks")


def resolve_mesh(mesh: DeviceMesh | Mapping[str, int] | None, plan: str | Path | Plan) -> DeviceMesh | None:
    """The device mesh of this run; None without a process group.

    ``mesh`` may be a DeviceMesh with named dimensions or axis sizes by name, outermost first. By default it is all
    ranks along one axis ``dp``; for ``"hsdp"``, nodes times the ranks of a node.

    Raises:
        PlanError: the mesh does not fit the ranks that there are.
    """
    if isinstance(plan, (str, Path)) and str(plan).endswith((".yaml", ".yml")):
        plan = Plan.load(plan)
    if isinstance(mesh, DeviceMesh):
        if not mesh.mesh_dim_names:
            raise PlanError(
                "the mesh has no dimension names: make it with init_device_mesh(..., mesh_dim_names=('dp',))"
            )
        return mesh
    wanted = dict(mesh) if mesh is not None else dict(plan.whole_mesh) if isinstance(plan, Plan) else None
    if not dist.is_initialized():
        if wanted and math.prod(wanted.values()) > 1:
            raise PlanError(
                f"the mesh {wanted} needs {math.prod(wanted.values())} ranks and there is no process group: start with "
                "shardgraph.launch(fn, nproc=...) or torchrun, or check the plan in one process with shardgraph.verify"
            )
        return None
    world = dist.get_world_size()
    wanted = wanted or _default_mesh(world, plan)
    if math.prod(wanted.values()) != world:
        raise PlanError(
            f"the mesh {wanted} is for {math.prod(wanted.values())} ranks and {world} are running: "
            f"axis sizes must multiply to {world}"
        )
    if "nccl" in dist.get_backend():
        return init_device_mesh("cuda", tuple(wanted.values()), mesh_dim_names=tuple(wanted))
    override: dict[Any, Any] = dict.fromkeys(wanted, ordered_gloo())
    return init_device_mesh("cpu", tuple(wanted.values()), mesh_dim_names=tuple(wanted), backend_override=override)


def _default_mesh(world: int, plan: str | Path | Plan) -> dict[str, int]:
    if plan != "hsdp":
        return {"pp" if plan == "pp" else "dp": world}
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if world % per_node or world == per_node:
        raise PlanError(
            f"plan 'hsdp' on {world} ranks of one node: say how to divide them, such as "
            f"mesh={{'dp_replicate': 2, 'dp_shard': {max(world // 2, 1)}}}"
        )
    return {"dp_replicate": world // per_node, "dp_shard": per_node}
