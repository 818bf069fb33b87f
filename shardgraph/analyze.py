"""``shardgraph.analyze``: what a model would cost under a plan on a cluster, from a laptop."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardgraph.analysis import Analysis, analyze_program
from shardgraph.annotations.annotate import annotated
from shardgraph.asked import Asked
from shardgraph.capture import own_loss
from shardgraph.compiler import resolve_plan
from shardgraph.cost_models.cluster import Cluster
from shardgraph.dtype_support import check_described
from shardgraph.errors import CaptureError, ShardGraphError
from shardgraph.folding import SHALLOW, NotPeriodicError, Stack, extend, shortened
from shardgraph.mesh import Mesh
from shardgraph.mixed_precision import AS_STORED, Precision
from shardgraph.offload_plan import Offload
from shardgraph.pipeline.analysis import PipelineAnalysis, analyze_pipeline
from shardgraph.pipeline.microbatches import microbatches
from shardgraph.pipeline.placing import place_stages
from shardgraph.pipeline.program import lower_pipeline
from shardgraph.pipeline_plan import Pipeline
from shardgraph.plan import Plan
from shardgraph.planner import choose_plan, plans_of, plans_on
from shardgraph.recomputation import with_recomputation
from shardgraph.source import Source


def analyze(
    model: nn.Module,
    example_inputs: tuple[Any, ...] = (),
    plan: str | Path | Plan = "fsdp",
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    cluster: Cluster | str | Path | None = None,
    mesh: Mapping[str, int] | None = None,
    pipeline: Pipeline | None = None,
    precision: str | Precision | None = None,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    optimizer: str = "adamw",
    training: bool = True,
    backend: str = "eager",
    fold: bool = True,
    recompute: str | None = None,
    memory: int | str | None = None,
    loss_chunk: int | str | None = None,
    offload: str | Offload | None = None,
) -> Analysis | PipelineAnalysis:
    """Predict the memory and time of a step of ``model`` under ``plan``, node by node.

    Of a plan with a pipeline it is the memory and time of every stage and of the schedule that runs them.

    Nothing is run: no process group, accelerator or memory for the weights is needed, and a model on ``meta`` will do.

    Args:
        model: any module; only shapes and dtypes of its tensors matter.
        example_inputs: positional inputs of one rank's call, real or on ``meta``.
        plan: as for ``shardgraph.compile``.
        example_kwargs: keyword inputs likewise.
        cluster: a :class:`Cluster`, a device's name such as ``"H100"`` (then as many nodes as the mesh needs), the path
            of a cluster file, or None: this machine.
        mesh: axis sizes by name, outermost first; default: the plan's own, else all devices of the cluster along
            ``dp`` (for ``"hsdp"``, nodes times the devices of a node).
        pipeline: of a preset with ``"pp"``, as for ``shardgraph.compile``.
        precision: ``"bf16"``, ``"fp16"`` or a :class:`Precision`; default: what the plan says.
        loss_fn: ``loss_fn(output, target)``, made part of the program as in ``train_step``; the target is taken from
            ``example_kwargs``.
        optimizer: whose state and update are counted; see :mod:`shardgraph.cost_models.optimizers`.
        training: a training step; False: a forward without gradients.
        fold: analyse a stack of equal layers by a few of them, which gives the same; False: all of them.
        backend: ``"eager"``, or ``"inductor"``: chains of pointwise operations priced as fused.
        recompute: what backward computes again, as for ``shardgraph.compile``.
        memory: what the predicted peak of a rank may be, likewise.
        loss_chunk: bytes of scores of a cross-entropy at a time, likewise.
        offload: what is in host memory, likewise.

    Raises:
        CaptureError: the model cannot be traced into one graph.
        PlanError: the plan does not exist or does not fit the model or the mesh, or the device lacks its precision.
        ClusterError: the cluster is unknown, malformed or smaller than the mesh.
    """
    if backend not in ("eager", "inductor"):
        raise ShardGraphError(f"there is no backend {backend!r} to analyse for; there are 'eager' and 'inductor'")
    axes = resolve_axes(plan, mesh, cluster)
    ranks = math.prod(size for _, size in axes)
    machine = resolve_cluster(cluster, ranks)
    machine.check_mesh(axes)
    nothing = annotated(replace(Plan("", axes, ()), precision=Precision.of(precision or AS_STORED)), model)
    source = Source(
        model, example_inputs, dict(example_kwargs or {}), nothing, machine, loss_fn, optimizer, training,
        backend == "inductor", fold,
    )  # fmt: skip
    asked = Asked(recompute, memory, loss_chunk, offload)
    if plan == "auto":
        check_described(nothing, machine.device)
        groups, said = plans_of(ranks, machine) if mesh is None else plans_on(axes), nothing.annotations
        groups = [[asked.of(each) for each in group] for group in groups]
        chosen = choose_plan(
            source.joint(),
            source.shapes,
            groups,
            machine,
            said,
            precision=nothing.precision,
            optimizer=optimizer,
            memory=memory,
        )
        return analyze_source(replace(source, plan=chosen))
    chosen = annotated(asked.of(resolve_plan(plan, axes, pipeline, precision)), model)
    check_described(chosen, machine.device)
    if chosen.pipeline is not None:
        return _analyze_pipeline(replace(source, plan=chosen), memory)
    if memory is not None or chosen.recompute == "budget":
        joint = replace(source, plan=chosen).joint()
        chosen = with_recomputation(joint, chosen, source.shapes, machine, memory, optimizer)
    return analyze_source(replace(source, plan=chosen))


def _analyze_pipeline(source: Source, memory: int | str | None) -> PipelineAnalysis:
    """The analysis of a plan with a pipeline, of which one microbatch is captured."""
    plan, cluster = source.plan, source.cluster
    assert plan.pipeline is not None
    if not source.training:
        raise ShardGraphError("a pipeline is analysed by its training step: leave training as it is")
    args, kwargs = microbatches((source.args, dict(source.kwargs)), plan.pipeline.parts)[0]
    loss_fn = source.loss_fn if "target" in kwargs else own_loss if "labels" in kwargs else None
    joint = replace(source, args=args, kwargs=kwargs, loss_fn=loss_fn).joint()
    plan = place_stages(joint, plan, source.shapes, cluster)
    plan = with_recomputation(joint, plan, source.shapes, cluster, memory, source.optimizer)
    program = lower_pipeline(joint, plan, source.shapes)
    return analyze_pipeline(program, cluster, optimizer=source.optimizer, fused=source.fused)


def analyze_source(source: Source) -> Analysis:
    """The analysis that :func:`analyze` gives, of a question that is put together already."""
    _ = source.parameters  # a plan that does not fit is told before the long work

    def whole() -> Analysis:
        return analyze_program(
            source.program(), source.cluster, optimizer=source.optimizer, fused=source.fused, source=source
        )

    return whole() if source.stack is None else _folded(source, source.stack, whole)


def _folded(source: Source, stack: Stack, whole: Callable[[], Analysis]) -> Analysis:
    """The analysis of all layers of a stack from those of a few, or of all where that cannot be."""
    try:
        shallow = []
        for layers in SHALLOW:
            with shortened(source.model, stack, layers):
                shallow.append(whole())
        return replace(shallow[0], rows=tuple(extend([each.rows for each in shallow], stack.layers)))
    except (NotPeriodicError, CaptureError):
        return whole()  # layers that are counted, or indexed by number, do not fold


def resolve_cluster(cluster: Cluster | str | Path | None, ranks: int) -> Cluster:
    """The cluster that a caller means, with enough nodes for ``ranks`` where only a device is named.

    Raises:
        ClusterError: no such device or file.
    """
    if isinstance(cluster, Cluster):
        return cluster
    if cluster is None:
        return Cluster.detect()
    if isinstance(cluster, Path) or cluster.endswith((".yaml", ".yml")):
        return Cluster.load(cluster)
    one = Cluster.of(cluster)
    return Cluster.of(cluster, nodes=-(-ranks // one.devices_per_node))


def machine_for(cluster: Cluster | str | Path | None, ranks: int) -> Cluster:
    """:func:`resolve_cluster`, where ranks may be more than this machine has cores.

    Raises:
        ClusterError: no such device or file.
    """
    machine = resolve_cluster(cluster, ranks)
    return replace(machine, devices_per_node=max(machine.devices_per_node, ranks)) if cluster is None else machine


def resolve_axes(plan: str | Path | Plan, mesh: Mapping[str, int] | None, cluster: Cluster | str | Path | None) -> Mesh:
    """The mesh to plan for: as given, else the plan's own, else all of the cluster."""
    if mesh is not None:
        return tuple(mesh.items())
    if isinstance(plan, (str, Path)) and str(plan).endswith((".yaml", ".yml")):
        plan = Plan.load(plan)
    if isinstance(plan, Plan):
        return plan.whole_mesh
    machine = resolve_cluster(cluster, 1)
    if plan == "hsdp":
        return (("dp_replicate", machine.nodes), ("dp_shard", machine.devices_per_node))
    return (("dp", machine.world_size),)
