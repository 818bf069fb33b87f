"""The shard of a parameter that a rank holds under a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from shardgraph.ir import chunk_bounds, take_part
from shardgraph.mesh import Mesh
from shardgraph.plans.parameter_plan import REPLICATE, SHARD, ParameterPlan, split_text


def named_shapes(model: nn.Module) -> dict[str, torch.Size]:
    """The unsharded shape of every parameter by its first name."""
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def part_of(full: torch.Tensor, entry: ParameterPlan, mesh: Mesh, here: tuple[int, ...]) -> torch.Tensor:
    """The shard of ``full`` at mesh coordinates ``here``: its part along operator axes, then its rows of that part."""
    for position, (dim, blocks) in entry.splits.items():
        full = take_part(full, dim, blocks, mesh[position][1], here[position])
    if entry.shard_axis is not None:
        start, stop = chunk_bounds(full.shape[0], mesh[entry.shard_axis][1], here[entry.shard_axis])
        full = full[start:stop]
    return full


def indices_of(shape: Sequence[int], entry: ParameterPlan, mesh: Mesh, here: tuple[int, ...]) -> list[torch.Tensor]:
    """For each dimension of a tensor of ``shape``, the indices that its shard at mesh coordinates ``here`` has."""
    return [part_of(torch.arange(size, device="cpu"), _along(dim, entry), mesh, here) for dim, size in enumerate(shape)]


def _along(dim: int, entry: ParameterPlan) -> ParameterPlan:
    """What ``entry`` does to one dimension, as the plan of a vector."""
    placements = [SHARD if placement == SHARD and dim == 0 else REPLICATE for placement in entry.placements]
    for position, (split, blocks) in entry.splits.items():
        if split == dim:
            placements[position] = split_text(0, blocks)
    return replace(entry, placements=tuple(placements))
