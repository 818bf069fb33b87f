"""A rank's own shards as plain tensors, and a description by which they become whole tensors without the ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardgraph.errors import CheckpointError
from shardgraph.module.checkpoint import LoadedKeys, check_dtypes, tensors_of
from shardgraph.plans.plan import Plan
from shardgraph.plans.shards import named_shapes
from shardgraph.torch_api import local_tensor

FORMAT = "shardgraph.shards.1"
"""Marks a description of a rank's shards, and its version."""


def local_state_dict(state: Mapping[str, Any]) -> dict[str, Any]:
    """``state`` with this rank's shards in place of DTensors."""
    return {name: local_tensor(value) if isinstance(value, DTensor) else value for name, value in state.items()}


@torch.no_grad()
def load_local_state_dict(
    model: nn.Module, own: Mapping[str, Any], state: Mapping[str, Any], *, strict: bool = True
) -> LoadedKeys:
    """Copy the shards of a rank into the ``own`` ones of ``model``, both of :func:`local_state_dict`, and give its
    modules their extra state.

    Raises:
        CheckpointError: they are of another model or dtype, or of another number of ranks; nothing has been loaded.
    """
    extra = {name for name in own if name.rpartition(".")[-1] == "_extra_state"}  # torch's name for it
    tensors = {name: value for name, value in own.items() if isinstance(value, torch.Tensor) and name not in extra}
    missing, unexpected = [n for n in own if n not in state], [n for n in state if n not in own]
    differ = [n for n in tensors if n in state and tensors[n].shape != state[n].shape]
    if differ or (strict and (missing or unexpected)):
        raise CheckpointError(
            f"these shards are not of this rank of this model: missing {missing}, unknown {unexpected}, of another "
            f"shape {differ}. Load them on as many ranks as saved them; state_dict() loads on any number"
        )
    check_dtypes(tensors, state)
    for name in tensors.keys() & state.keys():
        tensors[name].copy_(state[name])
    for name in extra & state.keys():
        model.get_submodule(name.rpartition(".")[0]).set_extra_state(state[name])
    return LoadedKeys(missing, unexpected)


def description(
    model: nn.Module, plan: Plan, rank: int, coordinates: tuple[int, ...], names: Collection[str]
) -> dict[str, Any]:
    """What the shards called ``names`` are of, in types that a file can hold: ``rank`` has them, at these coordinates
    of the plan's mesh. ``model`` may be sharded, or on ``meta``.

    ``parameters`` has shapes of whole tensors and placements (as in :class:`shardgraph.ParameterPlan`), ``tied`` the
    first name of each tensor by its other ones, ``buffers`` what every rank has whole.
    """
    shapes, ties = named_shapes(model), tied(model)
    entries = plan.resolve(shapes)
    return {
        "format": FORMAT,
        "rank": rank,
        "ranks": plan.world_size,
        "mesh": [list(axis) for axis in plan.mesh],
        "coordinates": list(coordinates),
        "parameters": {
            name: {"shape": list(shape), "placements": list(entries[name].placements)}
            for name, shape in shapes.items()
            if name in names
        },
        "tied": {name: first for name, first in ties.items() if name in names},
        "buffers": [each for each in tensors_of(model) if each in names and each not in shapes and each not in ties],
    }


def tied(model: nn.Module) -> dict[str, str]:
    """The first name of each parameter and persistent buffer by its other ones."""
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(tensor), name) for name, tensor in tensors_of(model).items()}
    return {name: other for name, other in names.items() if name != other}
