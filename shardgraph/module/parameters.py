"""Parameters in their sharded form: the model's own become DTensors, under their own names."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from shardgraph import torch_api
from shardgraph.plans.plan import ParameterPlan
from shardgraph.plans.shards import part_of


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


class ParameterSlots:
    """The modules and keys under which each parameter tensor of a model is registered."""

    def __init__(self, model: nn.Module) -> None:
        self._slots: dict[str, list[tuple[dict[str, nn.Parameter | None], str]]] = {}
        names = {id(parameter): fqn for fqn, parameter in model.named_parameters()}
        for module in model.modules():
            for key, value in module._parameters.items():
                if value is not None:
                    self._slots.setdefault(names[id(value)], []).append((module._parameters, key))

    def made(self, fqn: str, local: torch.Tensor, entry: ParameterPlan, mesh: DeviceMesh | None) -> nn.Parameter:
        """The parameter whose shard on this rank is ``local``, with the attributes of the one that it replaces."""
        slots = self._slots[fqn]
        old = slots[0][0][slots[0][1]]
        assert old is not None
        with torch.no_grad():
            placed = local if mesh is None else as_dtensor(local, entry, old.shape, mesh)
        new = nn.Parameter(placed, requires_grad=old.requires_grad)
        vars(new).update(vars(old))  # attributes that libraries attach to parameters
        return new

    def place(self, fqn: str, parameter: nn.Parameter) -> None:
        """Register ``parameter`` as ``fqn`` and under every name tied to it."""
        for holder, key in self._slots[fqn]:
            holder[key] = parameter
