"""``shardgraph.analyze``: what a model would cost under a plan on a cluster, from a laptop."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardgraph.capture.capture import own_loss
from shardgraph.cost_models.cluster import Cluster
from shardgraph.errors import ShardGraphError
from shardgraph.passes.lowering import lower
from shardgraph.plans.dtype_support import check_described
from shardgraph.plans.offload_plan import Offload
from shardgraph.plans.pipeline_plan import Pipeline
from shardgraph.plans.plan import Plan
from shardgraph.plans.precision import AS_STORED, Precision
from shardgraph.plans.remembered import annotated
from shardgraph.plans.resolve import resolve_plan
from shardgraph.report.analysis import Analysis
from shardgraph.report.from_source import analyze_source
from shardgraph.report.pipeline import PipelineAnalysis, analyze_pipeline
from shardgraph.report.source import Source
from shardgraph.runtime.pipeline.microbatches import microbatches
from shardgraph.search.asked import Asked
from shardgraph.search.machine import resolve_axes, resolve_cluster
from shardgraph.search.planner import choose_plan, plans_of, plans_on
from shardgraph.search.recomputation import with_recomputation
from shardgraph.search.stages import place_stages


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
    program = lower(joint, plan, source.shapes)
    return analyze_pipeline(program, cluster, optimizer=source.optimizer, fused=source.fused)
