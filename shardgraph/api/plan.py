"""``shardgraph.plan``: finds the plan for a model on a cluster that need not be there."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardgraph.api.analyze import is_fused
from shardgraph.api.options import OPTIONS
from shardgraph.api.unsharded import check_unsharded
from shardgraph.arguments import checked, sequence_of
from shardgraph.calibration import this_machine
from shardgraph.cost_models.cluster import Cluster
from shardgraph.errors import expect
from shardgraph.plans.dtype_support import check_described
from shardgraph.plans.offload_plan import Offload
from shardgraph.plans.plan import Plan
from shardgraph.plans.precision import Precision
from shardgraph.progress import Progress
from shardgraph.proof.microbatches import check_cut
from shardgraph.search.machine import machine_for, resolve_axes
from shardgraph.search.planner import choose_plan
from shardgraph.search.precisions import fastest
from shardgraph.search.question import Question
from shardgraph.search.source import Source
from shardgraph.sizes import is_whole

_ALTERNATIVE = OPTIONS["precision"]
_PERMITTED = sequence_of("several of them, such as ('bf16', 'fp8')", _ALTERNATIVE, least=1)


@checked(OPTIONS, precision=_ALTERNATIVE | _PERMITTED)
def plan(
    model: nn.Module,
    example_inputs: tuple[Any, ...] = (),
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    cluster: Cluster | str | Path | None = None,
    devices: int | None = None,
    mesh: Mapping[str, int] | None = None,
    memory: int | str | None = None,
    global_batch: int | None = None,
    optimizer: str = "adamw",
    precision: str | Precision | Sequence[str | Precision] | None = None,
    backend: str = "eager",
    loss_fn: Callable[..., torch.Tensor] | None = None,
    recompute: str | None = None,
    loss_chunk: int | str | None = None,
    offload: str | Offload | None = None,
    seconds: float | None = None,
    progress: bool | None = None,
) -> Plan:
    """Find the plan with the least predicted time per sample whose predicted peak fits, over all layouts of devices.

    Meshes of data, tensor, context, expert and pipeline parallelism, what is sharded over data ranks, what backward
    recomputes, microbatches and schedules are searched together, and what is kept in host memory where nothing fits
    otherwise; annotations of the model and the options below are constraints. Nothing is run:
    no process group, accelerator or memory for weights is needed, and the model may be on ``meta``. The same search
    answers ``plan="auto"`` of :func:`shardgraph.compile` and :func:`shardgraph.analyze`.

    ``plan.explain()`` says why; ``plan.alternatives`` are the runners-up. Stages of a pipeline are given as numbers of
    layers, and placements of operators are assigned when the plan is compiled or analysed.

    Args:
        model: any module; only shapes and dtypes of its tensors matter.
        example_inputs: positional inputs of one rank's call, real or on ``meta``. With ``global_batch`` their number of
            samples does not matter, since microbatches are searched.
        example_kwargs: keyword inputs of the same call. Pipelines are searched if the call has its loss: with
            ``labels`` here if the model computes it, or with a ``loss_fn`` and its ``target`` here.
        cluster: as for :func:`shardgraph.analyze`.
        devices: number of ranks; default: all devices of the cluster.
        mesh: axis sizes by name, outermost first, of which layouts are searched: ``pp``, ``dp`` or ``dp_replicate`` and
            ``dp_shard``, ``ep``, ``cp`` and ``tp``, each with more than one rank; default: all meshes of the devices.
        memory: bytes that a rank may use, or text such as ``"80GiB"``; default: the device's memory.
        global_batch: samples of one step over all ranks. Ranks whose part is larger than a microbatch accumulate, or
            give microbatches to a pipeline. Default: those of ``example_inputs`` on every data rank.
        optimizer: the optimizer whose state and update are counted; see :mod:`shardgraph.cost_models.optimizers`.
        precision: as for :func:`shardgraph.compile`; or several, each of which you permit: the fastest is found.
        backend: as for :func:`shardgraph.analyze`.
        loss_fn: ``loss_fn(output, target) -> scalar``; or, without a ``target``, of the output alone, such as
            ``lambda output: output.loss``: then a step returns the loss and nothing else, as ``train_step`` does, and
            no rank has all scores of ``labels``.
        recompute: what backward recomputes in all layouts; default: searched.
        loss_chunk: bytes of a cross-entropy's logits per chunk in all layouts.
        offload: what is kept in host memory in all layouts.
        seconds: a limit on the search. Without one it is deterministic; with one, the plan's remarks say if it cut.
        progress: show a progress line on standard error; None: on a terminal only.

    Raises:
        PlanError: no plan fits; the message has the smallest peak and ways to make it fit. Or an option is malformed.
        CaptureError: the model cannot be traced into one graph.
        ClusterError: the cluster is unknown, malformed or has fewer devices.
        ShardGraphError: the model is compiled already.
    """
    permitted = precision if isinstance(precision, (list, tuple)) else (precision,)
    permitted = [each and Precision.of(each) for each in permitted]
    options: dict[str, Any] = {"recompute": recompute, "memory": memory, "loss_chunk": loss_chunk, "offload": offload}

    def of(each: Precision | None) -> Plan:
        job = cluster, devices, global_batch, optimizer, each, backend, loss_fn
        source = searched(model, example_inputs, example_kwargs, *job, mesh=mesh, **options)
        return choose_plan(source, own_batches=False, limit=seconds, show=show)

    with Progress("plan", stages=2 * len(permitted), enabled=progress) as show:
        return of(permitted[0]) if len(permitted) == 1 else fastest(permitted, of)


def searched(
    model: nn.Module,
    example_inputs: tuple[Any, ...],
    example_kwargs: Mapping[str, Any] | None,
    cluster: Cluster | str | Path | None,
    devices: int | None,
    global_batch: int | None,
    optimizer: str,
    precision: str | Precision | None,
    backend: str,
    loss_fn: Callable[..., torch.Tensor] | None,
    mesh: Mapping[str, int] | None = None,
    **options: Any,
) -> Source:
    """The source of a search over all layouts for the arguments of :func:`plan`.

    Raises:
        PlanError: an option is malformed.
        ClusterError: the cluster is unknown, malformed or has fewer devices.
        ShardGraphError: the model is compiled already.
    """
    for name, value in (("devices", devices), ("global_batch", global_batch)):
        expect(value is None or is_whole(value, 1), name, value, "a whole number from 1")
    check_unsharded(model)
    asked = None if mesh is None else math.prod(mesh.values())
    expect(devices in (None, asked) or mesh is None, "devices", devices, f"{asked}, the ranks of the mesh, or left out")
    devices = devices or asked
    machine = machine_for(cluster or this_machine(), devices or 1)
    mesh_of = partial(resolve_axes, mesh=mesh or {"dp": devices or machine.world_size}, cluster=machine)
    options |= {"cluster": machine, "optimizer": optimizer, "total": global_batch}
    question = Question.of(model, "auto", mesh_of, mesh is None, None, precision, **options)
    machine.check_mesh(question.plan.whole_mesh)
    check_described(question.plan, machine.device)
    call = question.about(example_inputs, dict(example_kwargs or {}), loss_fn)
    return Source(call, fused=is_fused(backend), check_cut=check_cut)
