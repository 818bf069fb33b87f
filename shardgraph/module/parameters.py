"""Parameters in their sharded form: the model's own become DTensors, under their own names."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.utils.weak import WeakIdKeyDictionary

from shardgraph import torch_api
from shardgraph.module.local_step import step_on_shard
from shardgraph.plans.parameter_plan import OWN
from shardgraph.plans.plan import ParameterPlan
from shardgraph.plans.shards import part_of

_OWN: Any = WeakIdKeyDictionary()


def is_each_ranks_own(parameter: torch.Tensor) -> bool:
    """Whether a plan leaves a parameter to each rank, with its own gradient."""
    return parameter in _OWN


def own_part(full: torch.Tensor, entry: ParameterPlan, mesh: DeviceMesh | None) -> torch.Tensor:
    """This rank's shard of ``full``; all of it without a mesh."""
    if mesh is None:
        return full
    here = tuple(mesh.get_local_rank(axis) for axis in range(mesh.ndim))
    return part_of(full, entry, tuple((str(axis), mesh.size(axis)) for axis in range(mesh.ndim)), here)


def as_dtensor(local: torch.Tensor, entry: ParameterPlan, shape: torch.Size, mesh: DeviceMesh) -> DTensor:
    """The DTensor of global ``shape`` whose shard on this rank is ``local``."""
    placements: list[Placement] = [Replicate() for _ in entry.placements]
    rows = 1  # into how many parts the rows are already split when data axes shard them
    for position, (dim, blocks) in entry.splits.items():
        placements[position] = Shard(dim) if blocks == 1 else _StridedShard(dim, split_factor=blocks)
        rows *= mesh.size(position) if dim == 0 and position > (entry.shard_axis or 0) else 1
    if entry.shard_axis is not None:
        placements[entry.shard_axis] = Shard(0) if rows == 1 else _StridedShard(0, split_factor=rows)
    return torch_api.placed(local, mesh, placements, shape)


@torch.no_grad()
def as_parameter(local: torch.Tensor, old: nn.Parameter, entry: ParameterPlan, mesh: DeviceMesh | None) -> nn.Parameter:
    """The parameter whose shard on this rank is ``local``, with the attributes and hooks of ``old``, which it replaces.
    Hooks are in the same dictionaries, so that their handles remove them. What the plan leaves alone stays plain.
    ``local`` is on ``meta`` where another stage of a pipeline has the parameter.
    """
    if local.is_meta:
        return like(local.as_subclass(torch_api.Elsewhere), old)
    if entry.gradient == OWN and mesh is not None:
        _OWN[made := like(local, old)] = True
        return made
    return like(local if mesh is None else as_dtensor(local, entry, old.shape, mesh), old)


def like(values: torch.Tensor, old: nn.Parameter) -> nn.Parameter:
    """A parameter of ``values`` with the attributes and hooks of ``old``."""
    new = nn.Parameter(values, requires_grad=old.requires_grad)
    vars(new).update(vars(old))  # attributes that libraries attach to parameters
    step_on_shard(new)
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(old, hooks, None) is not None:
            setattr(new, hooks, getattr(old, hooks))
    return new


def tied_names(model: nn.Module) -> list[list[str]]:
    """The names of each parameter, the first one first; tied parameters have several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return list(names.values())
