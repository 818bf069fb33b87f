"""``shardgraph.compile``: the entry point for training."""

from __future__ import annotations

import copy
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import shardgraph
from shardgraph.api.options import OPTIONS, RUN_MESH
from shardgraph.api.timed_steps import TimedSteps
from shardgraph.api.tune import fastest
from shardgraph.api.unsharded import check_unsharded
from shardgraph.arguments import SECONDS, checked
from shardgraph.calibration.network import measure_network
from shardgraph.capture.capture import own_loss, returns_loss
from shardgraph.capture.captures import Captures
from shardgraph.cost_models.cluster import Cluster
from shardgraph.cost_models.detection import host_memory
from shardgraph.errors import expect
from shardgraph.module.compiled import Setup
from shardgraph.module.fingerprint import fingerprint
from shardgraph.module.lengths import Lengths, Padding
from shardgraph.module.parameters import tied_names
from shardgraph.module.pipelined import PipelinedModule
from shardgraph.module.sharded import ShardedModule
from shardgraph.module.sharding import Stages, shard_model
from shardgraph.plans.dtype_support import check_present
from shardgraph.plans.offload_plan import Offload
from shardgraph.plans.pipeline_plan import Pipeline
from shardgraph.plans.plan import Plan
from shardgraph.plans.precision import Precision
from shardgraph.proof.microbatches import check_cut
from shardgraph.runtime.agreement import Agreement
from shardgraph.runtime.backends import backend_of
from shardgraph.runtime.device import accelerator
from shardgraph.runtime.loss_weight import check_loss_weight
from shardgraph.runtime.mesh import run_axes, run_device, run_mesh
from shardgraph.runtime.nodes import nodes_of_run, ranks_per_node
from shardgraph.runtime.sample_rows import check_random
from shardgraph.runtime.watch import translated
from shardgraph.search.answer import answer
from shardgraph.search.question import Question
from shardgraph.search.remembered import remembered
from shardgraph.sizes import format_bytes


@translated
@checked(OPTIONS, mesh=RUN_MESH, tune=SECONDS)
def compile(
    model: nn.Module,
    plan: str | Path | Plan = "auto",
    *,
    example_inputs: tuple[Any, ...] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    mesh: DeviceMesh | Mapping[str, int] | None = None,
    pipeline: Pipeline | None = None,
    precision: str | Precision | None = None,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    loss_weight: str = "ranks",
    random: str = "ranks",
    backend: str = "eager",
    cluster: Cluster | str | Path | None = None,
    recompute: str | None = None,
    memory: int | str | None = None,
    loss_chunk: int | str | None = None,
    offload: str | Offload | None = None,
    gradient_statistics: bool = False,
    lengths: Lengths | None = None,
    global_batch: int | None = None,
    tune: float | None = None,
    initialize: bool = True,
    timeout: float = 300.0,
    progress: bool | None = None,
) -> ShardedModule:
    """Compile ``model`` into an equivalent module for training, sharded over the ranks of this run.

    Parameters are replaced by their shards in place, as with ``fully_shard``; full parameters are freed with their last
    reference, once all shards exist. On an error the model is unchanged. Each rank calls the compiled module with its
    own part of the batch; gradients are averaged over ranks.

    Args:
        model: any ``nn.Module``, on any device or on ``meta``. Every rank must build the same one: from the same seed
            or checkpoint.
        plan: a preset, ``"auto"``, a :class:`Plan`, or the path of a plan file (``.yaml``). Presets are ``"ddp"``,
            ``"zero1"``, ``"zero2"``, ``"fsdp"``, ``"hsdp"`` and ``"single"``; ``"tp"``, ``"tp+sp"``, ``"cp"`` and
            ``"ep"``, alone or after one of these (``"fsdp+tp"``); any of them after ``"pp"`` (``"pp+fsdp"``), which
            gives ranks along the outermost axis different stages of the model, or after ``"local-sgd"``, which gives
            them copies of their own (:class:`shardgraph.LocalSGD`).
        example_inputs: positional inputs of one call; only their shapes, dtypes and numbers matter. With these or
            ``example_kwargs`` the program is compiled now, otherwise at the first call. Required if placements along
            an axis of operators or experts are still to be chosen (``"tp"``, ``"ep"``), and for a pipeline unless the
            model is an ``nn.Sequential`` and ``stages`` or ``balance`` of ``pipeline`` name its children.
        example_kwargs: keyword inputs of the same call.
        mesh: a DeviceMesh with named dimensions, or axis sizes by name. Default: all ranks along one axis.
        pipeline: microbatches, schedule, stages and checkpointing, for a preset with ``"pp"``.
        precision: ``"bf16"``, ``"fp16"``, ``"fp8"`` or a :class:`Precision`: the dtypes of computation and reduction;
            parameters are stored in their own dtype. Default: the plan's.
        loss_fn: ``loss_fn(output, target) -> scalar``; compiled into the program of :meth:`ShardedModule.train_step`.
        loss_weight: how ``train_step`` averages the losses of data-parallel ranks: ``"ranks"``, all alike, as DDP and
            FSDP do, or ``"tokens"``, by the elements that each is a mean of, which is the mean over all elements of all
            ranks, as of one batch. How a loss is reduced is read off the graph.
        random: what ranks along data axes draw, for dropout and others: ``"ranks"``, each its own numbers, or
            ``"samples"``, those that the original would draw for all their batches as one, in their order: the same for
            a sample on any number of ranks, or on one. Each rank draws all of them. For ``"eager"`` and plans of data
            parallelism.
        backend: what runs the graphs: ``"eager"``, the generated Python of the graph module, or ``"inductor"``, kernels
            compiled at the first call, which needs a C++ compiler for CPUs: once for equal layers. Collectives stay as
            they are scheduled. Operations that inductor cannot compile run eagerly, with a warning that says why.
        cluster: the hardware for which ``plan="auto"``, ``memory`` and the choice of pipeline stages predict costs, as
            for :func:`shardgraph.analyze`; None: this machine, or the nodes of this run, whose network its ranks
            measure the first time. Without example inputs no cost can be predicted, and ``"auto"`` takes the plan with
            the least memory.
        recompute: what backward recomputes instead of saving it in forward; overrides the plan. ``"none"``, ``"full"``
            (every layer), ``"selective"`` (operations that are cheap for the bytes they free), or ``"budget"`` (the
            fastest choice whose predicted peak fits ``memory``, by default the device's; needs example inputs).
        memory: limit on the predicted peak of a rank, states included, in bytes or as text (``"12GiB"``). If the plan
            does not set recomputation, or chunks of the loss, they are chosen to fit.
        loss_chunk: bytes, or text (``"64MiB"``): compute a cross-entropy over a large vocabulary in chunks of
            so many bytes of logits; overrides the plan. ``program.notes`` reports the outcome.
        offload: ``"parameters"``, ``"activations"``, ``"all"`` or an :class:`Offload`: what is kept in host memory, or
            on disk, while the device does not use it. Gradients and optimizer state of offloaded parameters stay there
            too. Without a process group the device is then an accelerator, if there is one.
        gradient_statistics: also measure gradients before and after they are reduced over data-parallel ranks, for
            :class:`shardgraph.AdaScale`; as ``gradient_statistics`` of the plan.
        lengths: pad inputs of every call to few lengths, so that few programs are compiled, and cut what forward
            returns: a :class:`shardgraph.Lengths`, with a value to fill each such input with.
        global_batch: with ``plan="auto"`` and example inputs: samples of one step over all ranks, for which the layouts
            of :func:`shardgraph.plan` are searched, also those whose ranks share a batch, and pipelines if the call has
            its loss (``labels`` of a model that computes it, or ``loss_fn`` and a ``target``). The number of samples of
            the example inputs does not matter then: ``sharded.plan`` says how a step is divided, by ``data_size``,
            ``data_rank(rank)``, ``calls`` and ``samples_per_call``. Default: each rank has its own batch wherever that
            fits, in one call.
        tune: with ``plan="auto"`` and example inputs: seconds for which the best candidates are run on the ranks, with
            copies of the model and AdamW, to take the one whose measured step is fastest. Compiling them comes on top.
            Without ``cluster``, what is measured corrects this machine's prices for next time.
        initialize: run the model's own initialisation for tensors on ``meta``. False: a checkpoint is loaded next.
        timeout: seconds that a rank waits for rank 0 to choose the plan, for the others to compile the program, and
            for each collective. A rank that dies, fails or is stopped is told of within seconds, whatever this is.
        progress: show a progress line on standard error; None: on a terminal only.

    Raises:
        PlanError: the plan, mesh or precision does not exist, is malformed, or does not fit this model or run.
        CaptureError: the model cannot be traced into one graph; the message names the line.
        RankMismatchError: ranks have different models, plans, meshes, input shapes or versions of Python, torch or
            shardgraph, or another rank failed here.
        RankFailedError: another rank failed, ended or was stopped.
        InitializationError: a tensor on ``meta`` has no initialisation.
        OffloadError: there is no room for what is offloaded.
        ClusterError: the cluster is unknown or malformed.
        ShardGraphError: there is no such backend or loss weight, no compiler for the backend, the plan or the backend
            cannot draw by sample, or the model is compiled already.
    """
    check_loss_weight(loss_weight)
    inputs = None if example_inputs is None and example_kwargs is None else (example_inputs or (), example_kwargs or {})
    agreement = Agreement(dist.group.WORLD if dist.is_initialized() else None, timeout)

    mesh_of = partial(run_axes, mesh)
    with agreement.on_all_ranks("the model and the plan") as lines:
        check_unsharded(model)
        training = model.training and torch.is_grad_enabled()
        allowed = "for a model in training mode, outside of torch.no_grad(): call model.train() first"
        expect(global_batch is None or training, "global_batch", global_batch, allowed)
        options = (recompute, memory, loss_chunk, offload, cluster)
        also: Any = {"gradient_statistics": gradient_statistics, "total": global_batch}
        question = Question.of(model, plan, mesh_of, mesh is None, pipeline, precision, *options, **also)
        device = _device(model, mesh, question.plan.offload.parameters)
        check_present(question.plan, device)
        runs = backend_of(backend, device)
        if inputs is not None and lengths is not None:
            inputs = Padding(lengths, model, device).padded(inputs[0], dict(inputs[1]))
        if inputs is not None:
            question = _about_call(question, *inputs, loss_fn, device)
        lines += [_versions(), question.text, f"loss weight: {loss_weight}", f"random: {random}", f"lengths: {lengths}"]
        measures = question.open and question.cluster is None and nodes_of_run() > 1
        lines += [fingerprint(model, question.plan.ignores), f"measures the network between nodes: {measures}"]
    for name, value in (("tune", tune), ("global_batch", global_batch)):
        possible = value is None or (question.automatic and inputs is not None)
        expect(possible, name, value, "for plan='auto' with example inputs")
    if measures:
        measure_network(progress)
    captures = Captures(device, agreement.first_made)
    setup = Setup(device, loss_fn, agreement, progress, captures, loss_weight, runs, lengths, random)
    chosen = _decided(agreement, question, setup.captures)
    if tune is not None:

        def timed(candidate: Plan) -> TimedSteps:
            call = question.settled(candidate).call
            assert call is not None
            inputs: Any = {"example_inputs": call.args, "example_kwargs": call.kwargs}
            options: Any = {"loss_fn": loss_fn, "loss_weight": loss_weight, "backend": backend, "timeout": timeout}
            options |= {"random": random, "mesh": mesh}
            return TimedSteps(compile(copy.deepcopy(model), candidate, **inputs, **options), (call.args, call.kwargs))

        room = question.budget - question.parameter_bytes  # beside the model that is given
        chosen = fastest(chosen, timed, tune, room, here=question.cluster is None)
        chosen = _decided(agreement, question.settled(chosen), setup.captures)
    if question.automatic and question.call is not None:
        question = question.settled(chosen)

    check_random(random, chosen, backend, lengths is not None)
    if chosen.considered and question.cluster is None and device.type == "cpu":
        _warn_of_memory(chosen.considered[0].memory)
    whole_mesh = run_mesh(mesh, chosen.whole_mesh, timeout) if chosen.whole_mesh else None
    kind = ShardedModule if chosen.pipeline is None else PipelinedModule
    sharded = kind(model, chosen, whole_mesh, setup)
    if question.call is not None:
        sharded.compile_for(question.call)  # while the model is as it was
    if isinstance(sharded, PipelinedModule) and question.call is None:
        sharded.declare_owners()
    owners = sharded.owners if isinstance(sharded, PipelinedModule) else {}
    stages = Stages(chosen, whole_mesh, sharded.mesh, owners)
    tied = tied_names(model)
    shard_model(model, chosen, stages, device, agreement, initialize)
    sharded.settle()
    if question.call is not None and tied_names(model) != tied:  # its initialisation has tied parameters
        sharded.forget()
        sharded.compile_for(question.call)

    if plan == "auto" and (not dist.is_initialized() or dist.get_rank() == 0):
        print(f"shardgraph: {chosen}", flush=True)
    return sharded


def _warn_of_memory(nbytes: int) -> None:
    """Warn, once on this machine, if its ranks are predicted to take more memory than is free now."""
    here, free = ranks_per_node(), host_memory()
    if nbytes * here > free and os.environ.get("LOCAL_RANK", "0") == "0":
        warnings.warn(
            f"{here} ranks are predicted to take {format_bytes(nbytes)} each at their peak, and of this machine's "
            f"memory {format_bytes(free)} are free now: end other programs, or plan for less with memory=",
            stacklevel=5,  # of the caller of compile, through its decorators
        )


def _versions() -> str:
    python = ".".join(map(str, sys.version_info[:2]))
    return f"Python {python}, torch {torch.__version__}, shardgraph {shardgraph.__version__}"


def _decided(agreement: Agreement, question: Question, captures: Captures) -> Plan:
    """The plan chosen by rank 0, since machines may differ in memory and prices; other ranks receive it as text."""
    if not question.open:
        return answer(question, captures)
    text = agreement.from_first_rank("the plan", lambda: remembered(question, captures, check_cut).to_yaml())
    return Plan.from_yaml(text, "the plan of rank 0")


def _about_call(
    question: Question,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    loss_fn: Callable[..., torch.Tensor] | None,
    device: torch.device,
) -> Question:
    """The question for the call to compile: for a pipeline in training mode ``train_step``, if it has a loss."""
    training, loss = torch.is_grad_enabled(), loss_fn if "target" in kwargs else None
    if question.plan.pipeline is None:
        return question.about(args, kwargs, loss, training)
    step = training and question.model.training
    if step and loss is None and returns_loss(question.model, args, dict(kwargs), device):
        loss = own_loss
    return question.about(args, kwargs, loss if step else None, step)


def _device(model: nn.Module, mesh: DeviceMesh | Mapping[str, int] | None, offloads: bool) -> torch.device:
    """The device to compute on. Without ranks: the model's, or an accelerator if its parameters are offloaded."""
    if (device := run_device(mesh)) is not None:
        return device
    real = None if offloads else next((p.device for p in model.parameters() if not p.is_meta), None)
    return real or accelerator() or torch.device("cpu")
