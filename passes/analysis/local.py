"""The shapes of a program's values on one rank, where ranks differ: uneven shards of parameters."""

from __future__ import annotations

import math

import torch
from torch import fx

from shardgraph.ir import Parameter, Role, Saved, chunk_bounds, copy_graph, outputs, placeholders
from shardgraph.ir.copies import TO_DEVICE, WAIT_COPY
from shardgraph.mesh import coordinates
from shardgraph.passes.base import Context


def on_rank(
    forward: fx.GraphModule, backward: fx.GraphModule | None, context: Context, rank: int
) -> tuple[fx.GraphModule, fx.GraphModule | None]:
    """Both halves with parameters, also those saved for backward, of ``rank``'s shapes: copies, if any are others.

    Values computed from them, except for casts and copies, have the same shape on every rank, because shards are padded
    before they are sent.
    """
    halves = [half for half in (forward, backward) if half is not None]
    inputs = [pair for half in halves for pair in placeholders(half).items()]
    if not any(_differs(role, node, context, rank) for role, node in inputs):
        return forward, backward
    shards: dict[Role, torch.Tensor] = {}
    forward = _reshape(forward, context, rank, shards)
    for role, value in outputs(forward):
        if isinstance(role, Saved) and isinstance(value, fx.Node) and value.op == "placeholder":
            shards[role] = value.meta["val"]
    return forward, None if backward is None else _reshape(backward, context, rank, shards)


def shard_shape(context: Context, fqn: str, rank: int) -> tuple[int, ...]:
    """The shape of ``rank``'s shard of a parameter."""
    shape, axis, mesh = tuple(context.shapes[fqn]), context.parameters[fqn].shard_axis, context.plan.mesh
    if axis is None:
        return shape
    start, stop = chunk_bounds(shape[0], mesh[axis][1], coordinates(mesh, rank)[axis])
    return (stop - start, *shape[1:])


def shard_bytes(context: Context, fqn: str, rank: int) -> int:
    """Bytes of ``rank``'s shard of a parameter, as stored between steps."""
    return math.prod(shard_shape(context, fqn, rank)) * context.stored[fqn].itemsize


def _differs(role: Role, node: fx.Node, context: Context, rank: int) -> bool:
    """Whether an input is a parameter of which ``rank`` has a part of another shape."""
    return isinstance(role, Parameter) and tuple(node.meta["val"].shape) != shard_shape(context, role.fqn, rank)


def _reshape_copies(shard: fx.Node, shape: torch.Size, context: Context) -> None:
    """Set ``shape`` on values with the elements of a shard: copies to the device, and casts before the all-gather."""
    for user in shard.users:
        if user.target in (TO_DEVICE, WAIT_COPY, torch.ops.aten._to_copy.default):
            user.meta["val"] = context.values.empty(shape, user.meta["val"])
            _reshape_copies(user, shape, context)


def _reshape(gm: fx.GraphModule, context: Context, rank: int, shards: dict[Role, torch.Tensor]) -> fx.GraphModule:
    copy = copy_graph(gm)
    for role, node in placeholders(copy).items():
        if isinstance(role, Parameter) and _differs(role, node, context, rank):
            shards[role] = context.values.empty(shard_shape(context, role.fqn, rank), node.meta["val"])
        if role in shards:
            node.meta["val"] = shards[role]
            _reshape_copies(node, shards[role].shape, context)
    return copy
