"""Binding to a rank and its device.

Mesh axes become process group names, symbolic operations of the IR slices, and fused operators the device's kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from shardgraph import ir, torch_api
from shardgraph.ir.attributes import AXIS
from shardgraph.mesh import axes_of

aten = torch.ops.aten

SYMBOLIC = (ir.trim_shard, ir.local_chunk, ir.local_part, ir.first_only, ir.first_row, ir.from_later)
"""Operations that depend on the rank."""


def bind(gm: fx.GraphModule, mesh: DeviceMesh | None) -> fx.GraphModule:
    """A copy of ``gm`` for this rank of ``mesh`` (None: one process, and nothing to bind); a backend makes its code."""
    bound = ir.copy_graph(gm)
    for node in bound.graph.nodes:
        if node.target in ir.fused.OPERATORS:
            node.target = ir.fused.kernel_on(node.target, node.meta["val"][0].device.type)
    if mesh is not None:
        for node in bound.graph.nodes:
            if ir.is_collective(node):
                AXIS.set(node, ir.group_of(node))  # for display: group names mean nothing to readers
            if node.target is ir.send:
                _send(node, mesh)
            elif ir.is_collective(node):
                node.args = (*node.args[:-1], torch_api.group_along(mesh, axes_of(node.args[-1])).group_name)
            elif node.target in SYMBOLIC:
                here = on_rank(node.target, node.args, lambda axis: (mesh[axis].size(), mesh.get_local_rank(axis)))
                if isinstance(here, int):
                    node.replace_all_uses_with(here)
                    bound.graph.erase_node(node)
                else:
                    node.target, node.args = here
    return bound


def on_rank(
    target: Any, args: tuple[Any, ...], along: Callable[[str], tuple[int, int]]
) -> int | tuple[Any, tuple[Any, ...]]:
    """What one of the ``SYMBOLIC`` operations is on a rank: a number, or an operator and its arguments.

    ``along`` returns the size of a mesh axis, and the rank's place on it.
    """
    size, here = along(next(arg for arg in args if isinstance(arg, str)))
    if target is ir.first_row:
        return int(args[0] * here)
    if target is ir.from_later:
        return int(here < args[0])
    if target is ir.first_only:
        return aten.zeros_like.default if here else aten.clone.default, args[:1]
    if target is ir.local_part:
        tensor, dim, blocks, _, *back = args
        return ir.take_part, (tensor, dim, blocks, size, (here - sum(back)) % size)
    tensor, rows, _ = args
    start, stop = ir.chunk_bounds(rows, size, here)
    return aten.slice.Tensor, (tensor, 0, *((0, stop - start) if target is ir.trim_shard else (start, stop)))


def _send(node: fx.Node, mesh: DeviceMesh) -> None:
    tensor, axis = node.args
    size, here = mesh[axis].size(), mesh.get_local_rank(axis)
    rows = tensor.meta["val"].shape[0]
    sent, received = [0] * size, [0] * size
    sent[(here + 1) % size] = received[(here - 1) % size] = rows
    node.target = ir.ALL_TO_ALL
    node.args = (tensor, received, sent, mesh.get_group(axis).group_name)
