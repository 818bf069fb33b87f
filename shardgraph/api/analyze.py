"""``shardgraph.analyze``: predicts the cost of a model under a plan on a cluster, from a laptop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardgraph.api.options import OPTIONS
from shardgraph.api.unsharded import check_unsharded
from shardgraph.arguments import checked
from shardgraph.calibration import this_machine
from shardgraph.capture.captures import Captures
from shardgraph.cost_models.cluster import Cluster
from shardgraph.errors import ShardGraphError, expect
from shardgraph.plans.dtype_support import check_described
from shardgraph.plans.offload_plan import Offload
from shardgraph.plans.pipeline_plan import Pipeline
from shardgraph.plans.plan import Plan
from shardgraph.plans.precision import Precision
from shardgraph.proof.microbatches import check_cut
from shardgraph.report.analysis import Analysis
from shardgraph.report.pipeline import PipelineAnalysis
from shardgraph.search.analysis import analyze_pipeline_source, analyze_source
from shardgraph.search.machine import resolve_axes
from shardgraph.search.planner import choose_plan
from shardgraph.search.question import Question
from shardgraph.search.source import Source


@checked(OPTIONS)
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
    global_batch: int | None = None,
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

    For a plan with a pipeline: the memory and time of every stage and of the schedule.

    Nothing is run: no process group, accelerator or memory for weights is needed, and the model may be on ``meta``.

    Args:
        model: any module; only shapes and dtypes of its tensors matter.
        example_inputs: positional inputs of one rank's call, real or on ``meta``.
        plan: as for ``shardgraph.compile``.
        example_kwargs: keyword inputs of the same call.
        cluster: a :class:`Cluster`, a device's name such as ``"H100"`` (then as many nodes as the mesh needs), the path
            of a cluster file, or None: this machine.
        mesh: axis sizes by name, outermost first; default: the plan's own, else all devices of the cluster along
            ``dp`` (for ``"hsdp"``, nodes times the devices of a node).
        pipeline: for a preset with ``"pp"``, as for ``shardgraph.compile``.
        precision: ``"bf16"``, ``"fp16"``, ``"fp8"`` or a :class:`Precision`; default: the plan's.
        global_batch: with ``plan="auto"``: samples of one step over all ranks, for which the layouts of
            ``shardgraph.plan`` are searched; the analysis is of the call that a rank makes then.
        loss_fn: ``loss_fn(output, target) -> scalar``, part of the program as in ``train_step``; the target is taken
            from ``example_kwargs``. Without one, it is called with the output alone.
        optimizer: the optimizer whose state and update are counted; see :mod:`shardgraph.cost_models.optimizers`.
        training: a training step; False: a forward without gradients.
        fold: analyse only a few layers of a stack of equal ones, with the same result; False: all of them.
        backend: ``"eager"``, or ``"inductor"``: chains of pointwise operations priced as fused.
        recompute: what backward recomputes, as for ``shardgraph.compile``.
        memory: limit on the predicted peak of a rank, likewise.
        loss_chunk: bytes of a cross-entropy's logits per chunk, likewise.
        offload: what is kept in host memory, likewise.

    Raises:
        CaptureError: the model cannot be traced into one graph.
        PlanError: the plan does not exist or does not fit the model or the mesh, or the device lacks its precision.
        ClusterError: the cluster is unknown, malformed or smaller than the mesh.
        ShardGraphError: the model is compiled already.
    """
    check_unsharded(model)
    fused = is_fused(backend)
    mesh_of, cluster = partial(resolve_axes, mesh=mesh, cluster=cluster), cluster or this_machine()
    options = (recompute, memory, loss_chunk, offload)
    also: Any = {"cluster": cluster, "optimizer": optimizer, "total": global_batch}
    question = Question.of(model, plan, mesh_of, mesh is None, pipeline, precision, *options, **also)
    possible = global_batch is None or (question.automatic and training)
    expect(possible, "global_batch", global_batch, "for training steps under plan='auto'")
    question.machine.check_mesh(question.plan.whole_mesh)
    check_described(question.plan, question.machine.device)
    kwargs, captures = dict(example_kwargs or {}), Captures()
    if question.automatic:
        asked = question.about(example_inputs, kwargs, loss_fn, training)
        source = Source(asked, fused, fold, captures, check_cut=check_cut)
        question = asked.settled(choose_plan(source, own_batches=global_batch is None))
    elif question.plan.pipeline is None:
        question = question.about(example_inputs, kwargs, loss_fn, training)
    else:
        if not training:
            raise ShardGraphError("a pipeline is analysed by its training step: leave training as it is")
        question = question.about_step(example_inputs, kwargs, loss_fn)
    analysed = analyze_source if question.plan.pipeline is None else analyze_pipeline_source
    return analysed(Source(question, fused, fold, captures))


def is_fused(backend: str) -> bool:
    """Whether chains of pointwise operations are priced as fused for a backend.

    Raises:
        ShardGraphError: there is no such backend.
    """
    if backend not in ("eager", "inductor"):
        raise ShardGraphError(f"there is no backend {backend!r} to analyse for; there are 'eager' and 'inductor'")
    return backend == "inductor"
