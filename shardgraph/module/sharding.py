"""Replaces a model's parameters by this rank's shards: all of them, or none."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardgraph.capture.casting import cast_buffers
from shardgraph.errors import OffloadError, ShardGraphError
from shardgraph.module.materialize import is_meta, materialize
from shardgraph.module.parameter_memory import ParameterMemory, without_values
from shardgraph.module.parameters import as_dtensor, as_parameter, own_part, tied_names
from shardgraph.module.replaced import remember
from shardgraph.module.state_on_disk import keep_state_on_disk
from shardgraph.plans.plan import ParameterPlan, Plan
from shardgraph.plans.shards import named_shapes
from shardgraph.runtime.agreement import Agreement
from shardgraph.runtime.nodes import ranks_per_node
from shardgraph.torch_api import has_backend, list_weights


class Stages:
    """Which parameters this rank has, and their mesh: without a pipeline, all of them.

    ``whole_mesh`` has the pipeline axis too; ``owners`` are the stages that use each parameter.
    """

    def __init__(
        self, plan: Plan, whole_mesh: DeviceMesh | None, mesh: DeviceMesh | None, owners: Mapping[str, tuple[int, ...]]
    ) -> None:
        self.mesh, self._owners, self._pipeline = mesh, owners, plan.pipeline if whole_mesh is not None else None
        if self._pipeline is not None and whole_mesh is not None:
            axis = self._pipeline.axis
            self._place, self._group = whole_mesh.get_local_rank(axis), whole_mesh.get_group(axis)

    def has(self, fqn: str) -> bool:
        """Whether a stage of this rank uses the parameter."""
        return self._pipeline is None or self._place in self._pipeline.places_of(self._owners[fqn])

    def on_all(self, fqn: str, whole: torch.Tensor) -> torch.Tensor:
        """Broadcast ``whole`` along the pipeline axis, from the first rank that has the parameter."""
        if self._pipeline is not None:
            first = self._pipeline.rank_of(self._owners[fqn][0])
            dist.broadcast(whole, src=dist.get_global_rank(self._group, first), group=self._group)
        return whole


def shard_model(
    model: nn.Module, plan: Plan, stages: Stages, device: torch.device, agreement: Agreement, initialize: bool
) -> None:
    """Replace every parameter by this rank's shard, and move buffers to ``device``, in the plan's dtype for buffers.
    Tensors on ``meta`` are initialised on the way if ``initialize``.

    Full parameters are kept beside the shards until all ranks have all their shards: after that nothing can fail.

    Raises:
        OffloadError: there is no room for what is offloaded.
        InitializationError: a tensor on ``meta`` has no initialisation.
        RankMismatchError: another rank failed.
        After any error, of these or others, the model is unchanged.
    """
    entries = plan.resolve(named_shapes(model))
    with agreement.on_all_ranks("room for what is offloaded"):
        memory = _parameter_memory(model, plan, entries, stages, device)
    with unchanged_on_failure(model), agreement.on_all_ranks("the sharded parameters"):
        shards = _shards(model, entries, stages, memory, device, initialize)
        cast_buffers(model, plan.precision, plan.annotations)
        meshes = {fqn: stages.mesh if stages.has(fqn) else None for fqn in shards}
        replaced = _put(model, {fqn: (shard, entries[fqn], meshes[fqn]) for fqn, shard in shards.items()})
        _move_buffers(model, device)
    remember(replaced)
    if plan.offload.optimizer_state:
        assert plan.offload.disk is not None
        offloaded = (p for fqn, p in model.named_parameters() if entries[fqn].offload)
        keep_state_on_disk(offloaded, plan.offload.disk)


def shard_added(
    model: nn.Module, names: Collection[str], plan: Plan, mesh: DeviceMesh | None, device: torch.device
) -> None:
    """Shard the parameters of ``names``, which were added to a sharded model or replaced since, and move buffers.

    Raises:
        PlanError: the plan says nothing of them.
        ShardGraphError: one is on ``meta``.
    """
    entries, parameters = plan.resolve(named_shapes(model)), dict(model.named_parameters())
    if on_meta := [name for name in names if parameters[name].is_meta]:
        raise ShardGraphError(
            f"the parameter {on_meta[0]!r} was added after shardgraph.compile and is on meta: give it values first, as "
            "to_empty and the module's reset_parameters do"
        )

    def shard(name: str) -> torch.Tensor:
        return own_part(parameters[name].detach().to(device), entries[name], mesh).clone()

    with unchanged_on_failure(model):
        replaced = _put(model, {name: (shard(name), entries[name], mesh) for name in names})
        _move_buffers(model, device)
    remember(replaced)


def _put(
    model: nn.Module, shards: Mapping[str, tuple[torch.Tensor, ParameterPlan, DeviceMesh | None]]
) -> dict[nn.Parameter, nn.Parameter]:
    """Put parameters of shards in the places of those of these names, and of all names tied to them; returns the new
    ones by the old ones. A shard has its entry of the plan and its mesh."""
    parameters, replaced = dict(model.named_parameters()), {}
    for names in tied_names(model):
        if names[0] not in shards:
            continue
        parameter = as_parameter(shards[names[0]][0], parameters[names[0]], *shards[names[0]][1:])
        for name in names:
            owner, _, key = name.rpartition(".")
            model.get_submodule(owner)._parameters[key] = parameter
            list_weights(model.get_submodule(owner))
        replaced[parameters[names[0]]] = parameter
    return replaced


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    buffers = {
        id(b): without_values(torch.empty_like(b, device=device)) if b.is_meta else b.to(device)
        for b in model.buffers()
    }
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:  # shared ones stay shared
                module._buffers[key] = buffers[id(buffer)]


@contextmanager
def unchanged_on_failure(model: nn.Module) -> Iterator[None]:
    """Restore the tensors of modules that the body replaces if it raises; values written in place are not restored."""
    holders: list[dict[str, Any]] = [vars(tensor) for tensor in chain(model.parameters(), model.buffers())]
    for module in model.modules():
        holders += [vars(module), module._parameters, module._buffers, module._modules]
    before = [(holder, dict(holder)) for holder in holders]
    try:
        yield
    except BaseException:
        for holder, items in before:
            holder.clear()
            holder.update(items)
        raise


def _parameter_memory(
    model: nn.Module, plan: Plan, entries: Mapping[str, ParameterPlan], stages: Stages, device: torch.device
) -> ParameterMemory:
    if dist.is_initialized() and any(entry.offload for entry in entries.values()) and not has_backend("cpu"):
        raise OffloadError(
            "parameters in host memory are communicated from there too (norms of gradients, checkpoints), and this "
            "process group communicates from GPUs alone: start it with init_process_group('cpu:gloo,cuda:nccl')"
        )
    parts = {
        fqn: own_part(torch.empty_like(parameter, device="meta"), entries[fqn], stages.mesh)
        for fqn, parameter in model.named_parameters()
        if stages.has(fqn)
    }
    return ParameterMemory(parts, entries, device, plan.offload.disk, ranks_per_node())


def _shards(
    model: nn.Module,
    entries: Mapping[str, ParameterPlan],
    stages: Stages,
    memory: ParameterMemory,
    device: torch.device,
    initialize: bool,
) -> dict[str, torch.Tensor]:
    """This rank's shard of every parameter by name, in memory of its own; on ``meta`` for those of other stages."""
    shapes, mesh = named_shapes(model), stages.mesh
    dtypes = {fqn: parameter.dtype for fqn, parameter in model.named_parameters()}
    shards: dict[str, torch.Tensor] = {}

    def store(fqn: str, full: torch.Tensor) -> None:
        full = full.detach()
        shards[fqn] = memory.filled(fqn, own_part(full, entries[fqn], mesh)) if stages.has(fqn) else full.to("meta")

    def fetch(fqn: str) -> torch.Tensor:
        if not stages.has(fqn):
            return stages.on_all(fqn, torch.empty(shapes[fqn], dtype=dtypes[fqn], device=device))
        whole = shards[fqn] if mesh is None else as_dtensor(shards[fqn], entries[fqn], shapes[fqn], mesh).full_tensor()
        return stages.on_all(fqn, whole.clone())

    if initialize and is_meta(model):
        offloads = any(entry.offload for entry in entries.values())
        materialize(model, device, store=store, fetch=fetch, on_host=offloads)
    for fqn, parameter in model.named_parameters():
        if fqn not in shards:
            store(fqn, parameter)
    return shards
