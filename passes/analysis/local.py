"""What a program's values are on one rank, where ranks differ: the shards of parameters whose rows do not divide."""

from __future__ import annotations

import math

import torch
from torch import fx

from shardgraph.ir import Parameter, Role, Saved, chunk_bounds, copy_graph, outputs, placeholders
from shardgraph.mesh import coordinates
from shardgraph.passes.base import Context


def on_rank(
    forward: fx.GraphModule, backward: fx.GraphModule | None, context: Context, rank: int
) -> tuple[fx.GraphModule, fx.GraphModule | None]:
    """Copies of both halves whose parameters, also where they are saved for backward, have ``rank``'s shapes.

    What is computed from them, but for casts, has the same shape on every rank: shards are padded before they are sent.
    """
    given: dict[Role, torch.Tensor] = {}
    forward = _reshape(forward, context, rank, given)
    for role, value in outputs(forward):
        if isinstance(role, Saved) and isinstance(value, fx.Node) and value.op == "placeholder":
            given[role] = value.meta["val"]
    return forward, None if backward is None else _reshape(backward, context, rank, given)


def shard_shape(context: Context, fqn: str, rank: int) -> tuple[int, ...]:
    """The shape of ``rank``'s part of a parameter."""
    shape, entry = tuple(context.shapes[fqn]), context.parameters[fqn]
    if entry.shard_axis is None:
        return shape
    mesh = context.plan.mesh
    index = coordinates(mesh, rank)[entry.shard_axis]
    start, stop = chunk_bounds(shape[0], mesh[entry.shard_axis][1], index)
    return (stop - start, *shape[1:])


def shard_bytes(context: Context, fqn: str, rank: int) -> int:
    """Bytes of ``rank``'s part of a parameter, as it is stored between steps."""
    return math.prod(shard_shape(context, fqn, rank)) * context.stored[fqn].itemsize


def _reshape(gm: fx.GraphModule, context: Context, rank: int, given: dict[Role, torch.Tensor]) -> fx.GraphModule:
    copy = copy_graph(gm)
    for role, node in placeholders(copy).items():
        value = node.meta["val"]
        if isinstance(role, Parameter) and tuple(value.shape) != (shape := shard_shape(context, role.fqn, rank)):
            with context.fake_mode:
                given[role] = torch.empty(shape, dtype=value.dtype, device=value.device)
        if role in given:
            node.meta["val"] = given[role]
            for user in node.users:
                if user.target is torch.ops.aten._to_copy.default:  # of a shard, to the dtype that it is gathered in
                    with context.fake_mode:
                        user.meta["val"] = torch.empty_like(given[role], dtype=user.meta["val"].dtype)
    return copy
