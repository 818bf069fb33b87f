"""``shardgraph.compile``: what a user calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardgraph.capture.capture import own_loss
from shardgraph.capture.captures import Captures
from shardgraph.cost_models.cluster import Cluster
from shardgraph.errors import ShardGraphError
from shardgraph.module.fingerprint import fingerprint
from shardgraph.module.pipelined import PipelinedModule
from shardgraph.module.sharded import ShardedModule
from shardgraph.module.sharding import Stages, shard_model
from shardgraph.plans.dtype_support import check_present
from shardgraph.plans.offload_plan import Offload
from shardgraph.plans.pipeline_plan import Pipeline
from shardgraph.plans.plan import Plan
from shardgraph.plans.precision import Precision
from shardgraph.runtime.agreement import Agreement
from shardgraph.runtime.device import accelerator
from shardgraph.runtime.mesh import run_axes, run_device, run_mesh
from shardgraph.search.decide import decide
from shardgraph.search.question import Question


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
    backend: str = "eager",
    cluster: Cluster | str | Path | None = None,
    recompute: str | None = None,
    memory: int | str | None = None,
    loss_chunk: int | str | None = None,
    offload: str | Offload | None = None,
    initialize: bool = True,
    timeout: float = 300.0,
    progress: bool | None = None,
) -> ShardedModule:
    """Compile ``model`` into a module that trains like it, sharded over the ranks of this run.

    The model's parameters become the shards, in place, as with ``fully_shard``: the whole ones are freed with their
    last reference, once all shards are there. An error leaves the model as it was. Each rank calls the result with its
    own part of the batch; gradients are the mean over ranks.

    Args:
        model: any ``nn.Module``, on any device or on ``meta``. Every rank must build the same one: the same seed, or a
            checkpoint.
        plan: a preset (``"ddp"``, ``"zero1"``, ``"zero2"``, ``"fsdp"``, ``"hsdp"``, ``"single"``; ``"tp"``,
            ``"tp+sp"``, ``"cp"`` and ``"ep"``, also after one of these, as in ``"fsdp+tp"``), ``"auto"``, a
            :class:`Plan`, or the path of a plan file (``.yaml``). With ``"pp"`` before any preset, as in ``"pp+fsdp"``,
            ranks along the outermost axis have different stages of the model.
        example_inputs: positional inputs of one call, of which only shapes, dtypes and numbers matter; with them, or
            with ``example_kwargs``, compilation happens now. Otherwise at the first call. A plan that divides operators
            or experts and leaves it to be found where parameters lie (``"tp"``, ``"ep"``) needs them.
        example_kwargs: keyword inputs likewise.
        mesh: a DeviceMesh with named dimensions, or axis sizes by name. Default: all ranks along one axis.
        pipeline: of a preset with ``"pp"``: microbatches, schedule, stages and checkpointing.
        precision: ``"bf16"``, ``"fp16"`` or a :class:`Precision`: what is computed and reduced in which dtype, while
            parameters stay stored as they are. Default: what the plan says.
        loss_fn: ``loss_fn(output, target) -> scalar``; compiled into the program of :meth:`ShardedModule.train_step`.
        backend: what runs the graphs; ``"eager"``, the generated Python of the graph module.
        cluster: what ``plan="auto"`` and ``memory`` price plans by, and a pipeline its stages, as for
            :func:`shardgraph.analyze`; None: this machine. Without example inputs there is nothing to price, and
            ``"auto"`` takes the plan of least memory.
        recompute: what backward computes again rather than keep it from forward, instead of what the plan says:
            ``"none"``, ``"full"`` (every layer), ``"selective"`` (what is cheap for its bytes), or ``"budget"`` (what
            makes the predicted peak fit ``memory``, by default the device's, in the least time; needs example inputs).
        memory: bytes that the predicted peak of a rank may have, states included, or a text such as ``"12GiB"``. A
            plan that says nothing of recomputation, or of chunks of a loss, gets what fits.
        loss_chunk: bytes, or a text such as ``"64MiB"``: a cross-entropy over a large vocabulary is computed so many
            bytes of scores at a time, instead of what the plan says. What was found of it is in ``program.notes``.
        offload: ``"parameters"``, ``"activations"``, ``"all"`` or an :class:`Offload`: what is in host memory, or on
            disk, while the device does not use it. Offloaded parameters stay there, and so do their gradients and what
            the optimizer makes of them. Without a process group the device is then an accelerator, if there is one.
        initialize: run the model's own initialisation for what is on ``meta``. False leaves it to a
            checkpoint that is loaded next.
        timeout: seconds that a rank waits for rank 0 to decide the plan, and for the others to compile the program.
        progress: show a progress line on standard error; None: on a terminal only.

    Raises:
        PlanError: the plan, mesh or precision does not exist, is malformed, or does not fit this model or run.
        CaptureError: the model cannot be traced into one graph; names the line.
        RankMismatchError: ranks have different models, plans or input shapes, or another rank failed.
        InitializationError: something on ``meta`` has no initialisation.
        OffloadError: there is no room for what is offloaded.
        ClusterError: the cluster is unknown or malformed.
    """
    if backend != "eager":
        raise ShardGraphError(f"there is no backend {backend!r}; 'eager' runs everywhere")
    inputs = None if example_inputs is None and example_kwargs is None else (example_inputs or (), example_kwargs or {})
    agreement = Agreement(dist.group.WORLD if dist.is_initialized() else None, timeout)

    def ask() -> tuple[Question, torch.device]:
        asked = Question.of(
            model,
            plan,
            partial(run_axes, mesh),
            free_mesh=mesh is None,
            pipeline=pipeline,
            precision=precision,
            recompute=recompute,
            memory=memory,
            loss_chunk=loss_chunk,
            offload=offload,
            cluster=cluster,
        )
        device = _device(model, mesh, asked.plan.offload.parameters)
        check_present(asked.plan, device)
        return asked if inputs is None else _about_call(asked, *inputs, loss_fn), device

    question, device = _agreed(agreement, model, ask)
    captures = Captures(device)
    chosen = _decided(agreement, question, captures)

    found = run_mesh(mesh, chosen.whole_mesh)
    shared = found if chosen.whole_mesh else None
    stages = Stages(chosen, shared)
    common: dict[str, Any] = dict(
        device=device, loss_fn=loss_fn, agreement=agreement, progress=progress, captures=captures
    )
    sharded = (
        ShardedModule(model, chosen, shared, **common)
        if chosen.pipeline is None
        else PipelinedModule(model, chosen, shared, stage_mesh=stages.mesh, **common)
    )
    if inputs is not None:
        sharded.compile_for(*inputs[0], **inputs[1])  # while the model is as it was
    if isinstance(sharded, PipelinedModule):
        stages.owners = sharded.owners
    names = _names(model)
    shard_model(model, chosen, stages, device, agreement, initialize)
    sharded.let_go()
    if inputs is not None and _names(model) != names:  # its initialisation has tied parameters
        sharded.forget()
        sharded.compile_for(*inputs[0], **inputs[1])

    if plan == "auto" and (not dist.is_initialized() or dist.get_rank() == 0):
        print(f"shardgraph: {chosen}", flush=True)
    return sharded


def _agreed(
    agreement: Agreement, model: nn.Module, ask: Callable[[], tuple[Question, torch.device]]
) -> tuple[Question, torch.device]:
    """What this rank asks for, once all ranks ask for the same; a rank that cannot tells the others."""
    text, error = "", None
    try:
        asked = ask()
        text = f"{asked[0].text}\n{fingerprint(model)}"
    except Exception as failure:  # whatever it is, the other ranks must not wait for this one
        error = failure
    agreement.agree("the model and the plan", text, error)
    return asked


def _decided(agreement: Agreement, question: Question, captures: Captures) -> Plan:
    """The plan that rank 0 decides, machines having other memory free; other ranks get its text and solve nothing."""
    if not question.open:
        return decide(question, captures)
    text = agreement.from_first_rank("the plan", lambda: decide(question, captures).to_yaml())
    return Plan.from_yaml(text, "the plan of rank 0")


def _about_call(
    question: Question,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    loss_fn: Callable[..., torch.Tensor] | None,
) -> Question:
    """The question for the call that is compiled: of a pipeline in training mode that of ``train_step``."""
    training, loss = torch.is_grad_enabled(), loss_fn if "target" in kwargs else None
    if question.plan.pipeline is None:
        return question.about(args, kwargs, loss, training)
    step = training and question.model.training
    return question.about(args, kwargs, (loss or own_loss) if step else None, step)


def _device(model: nn.Module, mesh: DeviceMesh | Mapping[str, int] | None, offloads: bool) -> torch.device:
    """What computes. Without ranks it is where the model is; of one that is on the host to stay, an accelerator."""
    if (device := run_device(mesh)) is not None:
        return device
    real = None if offloads else next((p.device for p in model.parameters() if not p.is_meta), None)
    return real or accelerator() or torch.device("cpu")


def _names(model: nn.Module) -> list[list[str]]:
    """The names of every parameter."""
    found: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), []).append(name)
    return list(found.values())
