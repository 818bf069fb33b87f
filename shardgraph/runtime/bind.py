"""Binding: turns a graph that is the same on every rank into this rank's.

Mesh axes become process group names, and symbolic operations of :mod:`shardgraph.ir` become slices.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from shardgraph import ir, torch_api
from shardgraph.ir.attributes import AXIS
from shardgraph.mesh import axes_of

aten = torch.ops.aten


def bind(gm: fx.GraphModule, mesh: DeviceMesh | None) -> fx.GraphModule:
    """A copy of ``gm`` that runs on this rank of ``mesh`` (None: one process, and nothing to bind)."""
    bound = ir.copy_graph(gm)  # without code, until it is bound
    if mesh is not None:
        for node in bound.graph.nodes:
            if ir.is_collective(node):
                AXIS.set(node, ir.group_of(node))  # for display: group names mean nothing to readers
            if node.target is ir.send:
                _send(node, mesh)
            elif ir.is_collective(node):
                node.args = (*node.args[:-1], torch_api.group_along(mesh, axes_of(node.args[-1])).group_name)
            elif node.target in (ir.trim_shard, ir.local_chunk):
                _cut(node, mesh)
            elif node.target is ir.local_part:
                tensor, dim, blocks, axis, *back = node.args
                node.target = ir.take_part
                size = mesh[axis].size()
                node.args = (tensor, dim, blocks, size, (mesh.get_local_rank(axis) - sum(back)) % size)
            elif node.target is ir.first_only:
                tensor, axis = node.args
                node.target = aten.zeros_like.default if mesh.get_local_rank(axis) else aten.clone.default
                node.args = (tensor,)
            elif node.target is ir.first_row:
                rows, axis = node.args
                node.replace_all_uses_with(rows * mesh.get_local_rank(axis))
                bound.graph.erase_node(node)
            elif node.target is ir.from_later:
                steps, axis = node.args
                node.replace_all_uses_with(int(mesh.get_local_rank(axis) < steps))
                bound.graph.erase_node(node)
    return fx.GraphModule(bound, bound.graph)


def _send(node: fx.Node, mesh: DeviceMesh) -> None:
    tensor, axis = node.args
    size, here = mesh[axis].size(), mesh.get_local_rank(axis)
    rows = tensor.meta["val"].shape[0]
    given, gotten = [0] * size, [0] * size
    given[(here + 1) % size] = gotten[(here - 1) % size] = rows
    node.target = ir.ALL_TO_ALL
    node.args = (tensor, gotten, given, mesh.get_group(axis).group_name)


def _cut(node: fx.Node, mesh: DeviceMesh) -> None:
    tensor, rows, axis = node.args
    start, stop = ir.chunk_bounds(rows, mesh[axis].size(), mesh.get_local_rank(axis))
    if node.target is ir.trim_shard:
        start, stop = 0, stop - start
    node.target = torch.ops.aten.slice.Tensor
    node.args = (tensor, 0, start, stop)
