"""The shard of a parameter that a rank holds under a plan."""

from __future__ import annotations

import torch
from torch import nn

from shardgraph.ir import chunk_bounds, take_part
from shardgraph.mesh import Mesh
from shardgraph.plans.parameter_plan import ParameterPlan


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
