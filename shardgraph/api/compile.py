"""``shardgraph.compile``: what a user calls."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardgraph.capture.capture import capture, own_loss
from shardgraph.capture.casting import cast_buffers, computed_dtypes
from shardgraph.cost_models.cluster import Cluster
from shardgraph.errors import OffloadError, PlanError, ShardGraphError
from shardgraph.mesh import Mesh
from shardgraph.module.materialize import is_meta, materialize
from shardgraph.module.parameter_memory import ParameterMemory
from shardgraph.module.parameters import ParameterSlots, as_dtensor, own_part
from shardgraph.module.pipelined import PipelinedModule
from shardgraph.module.sharded import ShardedModule
from shardgraph.passes.lowering import place_operators
from shardgraph.plans.annotations.remembered import annotated, remembered
from shardgraph.plans.dtype_support import check_present
from shardgraph.plans.offload_plan import Offload
from shardgraph.plans.pipeline_plan import Pipeline
from shardgraph.plans.plan import ParameterPlan, Plan
from shardgraph.plans.precision import AS_STORED, Precision
from shardgraph.plans.resolve import resolve_plan
from shardgraph.plans.shards import named_shapes
from shardgraph.runtime.agreement import Agreement
from shardgraph.runtime.device import accelerator, current_device
from shardgraph.runtime.mesh import resolve_mesh
from shardgraph.search.asked import Asked
from shardgraph.search.machine import machine_for
from shardgraph.search.planner import choose_plan, plans_of, plans_on
from shardgraph.search.recomputation import with_recomputation
from shardgraph.search.stages import place_pipeline
from shardgraph.torch_api import has_backend

Owners = Mapping[str, tuple[int, ...]]
"""The pipeline stages that use each parameter; empty without a pipeline."""

_Found = TypeVar("_Found")


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
    last reference. Each rank calls the result with its own part of the batch; gradients are the mean over ranks.

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
        timeout: seconds that a rank waits for the others to compile the same program.
        progress: show a progress line on standard error; None: on a terminal only.

    Raises:
        PlanError: the plan, mesh or precision does not exist, is malformed, or does not fit this model or run.
        CaptureError: the model cannot be traced into one graph; names the line.
        RankMismatchError: ranks have different models, plans or input shapes.
        InitializationError: something on ``meta`` has no initialisation.
        OffloadError: there is no room for what is offloaded; nothing has changed.
    """
    if backend != "eager":
        raise ShardGraphError(f"there is no backend {backend!r}; 'eager' runs everywhere")
    asked, automatic = Asked(recompute, memory, loss_chunk, offload), plan == "auto"
    if automatic and dist.is_initialized() and dist.get_world_size() > 1 and (example_inputs or example_kwargs):
        call = (example_inputs or (), dict(example_kwargs or {}))
        loss = loss_fn if "target" in call[1] else None
        find = partial(_fastest, model, *call, mesh, precision, loss, cluster, asked)
        plan, asked = _from_first_rank(find), Asked()  # what is asked for is in it
    device_mesh = resolve_mesh(mesh, plan)
    axes = () if device_mesh is None else tuple(zip(device_mesh.mesh_dim_names or (), device_mesh.shape, strict=True))
    agreement = Agreement(dist.group.WORLD if device_mesh is not None else None, timeout)
    inputs = None if example_inputs is None and example_kwargs is None else (example_inputs or (), example_kwargs or {})
    decided, owners = _decided(model, plan, axes, pipeline, precision, inputs, loss_fn, cluster, agreement, asked)
    device = _device(device_mesh, model, isinstance(decided, Plan) and decided.offload.parameters)
    chosen, entries = _agree_on_plan(agreement, decided, axes, pipeline, precision, model, device)

    shared = device_mesh if chosen.whole_mesh else None
    stages = _Stages(chosen, shared, owners)
    memory_of = _parameter_memory(agreement, model, chosen, entries, stages, device)
    _shard_parameters(model, entries, stages, memory_of, device, initialize)
    cast_buffers(model, chosen.precision, chosen.annotations)
    for module in model.modules():
        for key, value in module._buffers.items():
            if value is not None:
                module._buffers[key] = torch.empty_like(value, device=device) if value.is_meta else value.to(device)

    if automatic and (device_mesh is None or device_mesh.get_rank() == 0):
        print(f"shardgraph: {chosen}", flush=True)
    common: dict[str, Any] = dict(device=device, loss_fn=loss_fn, agreement=agreement, progress=progress)
    if chosen.pipeline is not None:
        sharded: ShardedModule = PipelinedModule(model, chosen, shared, stage_mesh=stages.mesh, owners=owners, **common)
    else:
        sharded = ShardedModule(model, chosen, shared, **common)
    if inputs is not None:
        sharded.compile_for(*inputs[0], **inputs[1])
    return sharded


def _decided(
    model: nn.Module,
    plan: str | Path | Plan,
    axes: Mesh,
    pipeline: Pipeline | None,
    precision: str | Precision | None,
    inputs: tuple[tuple[Any, ...], Mapping[str, Any]] | None,
    loss_fn: Callable[..., torch.Tensor] | None,
    cluster: Cluster | str | Path | None,
    agreement: Agreement,
    asked: Asked,
) -> tuple[str | Path | Plan, Owners]:
    """The plan with a placement for every parameter, and a recomputation, where it leaves them to be found.

    They are what rank 0 finds. Of a pipeline also where stages begin, and beside the plan which stages use each
    parameter.
    """
    try:
        resolved, shapes = resolve_plan(plan, axes, pipeline, precision), named_shapes(model)
        annotated(resolved, model)
        undecided = bool(resolved.undecided(shapes)) and dist.is_initialized()
    except ShardGraphError:
        return plan, {}  # all ranks are told of it together when they agree on the plan
    plan = asked.of(resolved)
    chosen = annotated(plan, model)
    budgeted = asked.memory is not None or chosen.recompute == "budget"
    if chosen.pipeline is None and not undecided and not budgeted:
        return plan, {}
    if inputs is None:
        if chosen.pipeline is not None:
            raise PlanError(
                f"plan {chosen.name!r} finds where stages begin and parameters lie by what is computed: give "
                "example_inputs or example_kwargs"
            )
        raise PlanError(
            f"plan {chosen.name!r} finds {'where parameters lie' if undecided else 'what fits the memory'} by what is "
            "computed with them: give example_inputs or example_kwargs, or a plan that says it "
            "(sharded.plan.save(path) of an earlier run writes one)"
        )
    args, kwargs = inputs
    agreement.agree("the plan", chosen.to_yaml())

    def find() -> tuple[Plan, Owners]:
        if chosen.pipeline is not None:
            loss = (loss_fn if "target" in kwargs else own_loss) if model.training else None
            machine = machine_for(cluster, chosen.world_size)
            return place_pipeline(model, chosen, args, dict(kwargs), loss, machine, asked.memory)
        loss = loss_fn if "target" in kwargs else None
        cpu, said = torch.device("cpu"), chosen.annotations
        joint = capture(
            model, args, dict(kwargs), device=cpu, loss_fn=loss, annotations=said, precision=chosen.precision
        )
        placed = place_operators(joint, chosen, shapes)
        if not budgeted:
            return placed, {}
        return with_recomputation(joint, placed, shapes, machine_for(cluster, placed.world_size), asked.memory), {}

    return _from_first_rank(find)


def _from_first_rank(find: Callable[[], _Found]) -> _Found:
    """What ``find`` gives on rank 0, or its error, on every rank."""
    if not dist.is_initialized():
        return find()
    found: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            found = [find()]
        except Exception as error:  # whatever it is, the other ranks must not wait for this one
            found = [error]
    dist.broadcast_object_list(found, src=0)
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


def _fastest(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    mesh: DeviceMesh | Mapping[str, int] | None,
    precision: str | Precision | None,
    loss_fn: Callable[..., torch.Tensor] | None,
    cluster: Cluster | str | Path | None,
    asked: Asked,
) -> Plan:
    """The plan that this rank finds fastest; machines differ in what memory they have free."""
    ranks = dist.get_world_size()
    machine = machine_for(cluster, ranks)
    if isinstance(mesh, DeviceMesh):
        groups = plans_on(tuple(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True)))
    else:
        groups = plans_of(ranks, machine) if mesh is None else plans_on(tuple(mesh.items()))
    said, chosen, cpu = remembered(model), Precision.of(precision or AS_STORED), torch.device("cpu")
    joint = capture(model, args, kwargs, device=cpu, loss_fn=loss_fn, annotations=said, precision=chosen)
    groups = [[asked.of(plan) for plan in group] for group in groups]
    return choose_plan(joint, named_shapes(model), groups, machine, said, precision=chosen, memory=asked.memory)


def _agree_on_plan(
    agreement: Agreement,
    plan: str | Path | Plan,
    axes: Mesh,
    pipeline: Pipeline | None,
    precision: str | Precision | None,
    model: nn.Module,
    device: torch.device,
) -> tuple[Plan, dict[str, ParameterPlan]]:
    """The plan and its entries, once all ranks have the same; a rank that has none tells the others."""
    text, error = "", None
    try:
        chosen = annotated(resolve_plan(plan, axes, None if isinstance(plan, Plan) else pipeline, precision), model)
        check_present(chosen, device)
        computed_dtypes(model, chosen.precision, chosen.annotations)
        entries = chosen.resolve(named_shapes(model))
        text = _fingerprint(model, chosen)
    except ShardGraphError as failure:
        error = failure
    agreement.agree("the model and the plan", text, error)
    return chosen, entries


def _device(mesh: DeviceMesh | None, model: nn.Module, offloads: bool) -> torch.device:
    """What computes. Without a mesh it is where the model is; of one that is on the host to stay, an accelerator."""
    if mesh is not None:
        return current_device(mesh.device_type)
    real = None if offloads else next((p.device for p in model.parameters() if not p.is_meta), None)
    return real or accelerator() or torch.device("cpu")


class _Stages:
    """Which parameters this rank has, and the mesh that they lie on: all of them and ``mesh``, without a pipeline."""

    def __init__(self, plan: Plan, mesh: DeviceMesh | None, owners: Owners) -> None:
        self.mesh, self._pipeline, self._owners = mesh, plan.pipeline, owners
        if plan.pipeline is not None and mesh is not None:
            self._place, self._group = mesh.get_local_rank(plan.pipeline.axis), mesh.get_group(plan.pipeline.axis)
            self.mesh = mesh[plan.axes] if plan.axes else None

    def has(self, fqn: str) -> bool:
        """Whether a stage of this rank uses the parameter."""
        if self._pipeline is None or self._pipeline.ranks == 1:
            return True
        return self._place in self._pipeline.places_of(self._owners[fqn])

    def on_all(self, fqn: str, whole: torch.Tensor) -> torch.Tensor:
        """``whole`` as the ranks have it that have the parameter, on every rank."""
        if self._pipeline is not None and self._pipeline.ranks > 1:
            first = self._pipeline.rank_of(self._owners[fqn][0])
            dist.broadcast(whole, src=dist.get_global_rank(self._group, first), group=self._group)
        return whole


def _parameter_memory(
    agreement: Agreement,
    model: nn.Module,
    plan: Plan,
    entries: Mapping[str, ParameterPlan],
    stages: _Stages,
    device: torch.device,
) -> ParameterMemory:
    """Memory for this rank's parameters, once all ranks have room for theirs."""
    parts = {
        fqn: own_part(torch.empty_like(parameter, device="meta"), entries[fqn], stages.mesh)
        for fqn, parameter in model.named_parameters()
        if stages.has(fqn)
    }
    error = None
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size())) if dist.is_initialized() else 1
    try:
        if dist.is_initialized() and any(entry.offload for entry in entries.values()) and not has_backend("cpu"):
            raise OffloadError(
                "parameters in host memory are communicated from there too (norms of gradients, checkpoints), and this "
                "process group communicates from GPUs alone: start it with init_process_group('cpu:gloo,cuda:nccl')"
            )
        memory = ParameterMemory(parts, entries, device, plan.offload.disk, ranks)
    except OffloadError as failure:
        error = failure
    agreement.agree("room for what is offloaded", "", error)
    return memory


def _shard_parameters(
    model: nn.Module,
    entries: Mapping[str, ParameterPlan],
    stages: _Stages,
    memory: ParameterMemory,
    device: torch.device,
    initialize: bool,
) -> None:
    """Replace every parameter by this rank's part of it; what is on ``meta`` is initialised on the way."""
    shapes, mesh = named_shapes(model), stages.mesh
    dtypes = {fqn: parameter.dtype for fqn, parameter in model.named_parameters()}
    shards: dict[str, torch.Tensor] = {}

    def store(fqn: str, full: torch.Tensor) -> None:
        part = own_part(full.detach(), entries[fqn], mesh) if stages.has(fqn) else full.detach().to("meta")
        shards[fqn] = memory.filled(fqn, part) if stages.has(fqn) else part

    def fetch(fqn: str) -> torch.Tensor:
        if not stages.has(fqn):
            return stages.on_all(fqn, torch.empty(shapes[fqn], dtype=dtypes[fqn], device=device))
        whole = shards[fqn] if mesh is None else as_dtensor(shards[fqn], entries[fqn], shapes[fqn], mesh).full_tensor()
        return stages.on_all(fqn, whole.clone())

    if initialize and is_meta(model):
        offloads = any(entry.offload for entry in entries.values())
        materialize(model, device, store=store, fetch=fetch, on_host=offloads)
    slots = ParameterSlots(model)
    for fqn, parameter in list(model.named_parameters()):
        if fqn not in shards:
            store(fqn, parameter)
        slots.place(fqn, shards.pop(fqn), entries[fqn], mesh if stages.has(fqn) else None)


def _fingerprint(model: nn.Module, plan: Plan) -> str:
    """What must be equal on all ranks before anything is sharded, a line each."""
    lines = [plan.to_yaml(), type(model).__name__]
    for name, parameter in model.named_parameters():
        lines.append(f"{name}: {list(parameter.shape)} {parameter.dtype} {_checksum(parameter)}")
    return "\n".join(lines)


def _checksum(parameter: torch.Tensor) -> str:
    # Enough to tell two seeds apart, cheap enough for large models: the sum of at most 1024 spread elements.
    if parameter.is_meta or not parameter.numel():
        return parameter.device.type
    flat = parameter.detach().reshape(-1)
    return f"{flat[:: max(1, flat.numel() // 1024)].double().sum().item():.17g}"
