"""Binding to a rank and its device.

Mesh axes become process group names, symbolic operations of the IR slices, and fused operators the device's kernels.
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
            elif node.target in (ir.trim_shard, ir.local_chunk):
                tensor, rows, axis = node.args
                start, stop = ir.chunk_bounds(rows, mesh[axis].size(), mesh.get_local_rank(axis))
                bounds = (0, stop - start) if node.target is ir.trim_shard else (start, stop)
                node.target, node.args = aten.slice.Tensor, (tensor, 0, *bounds)
            elif node.target is ir.local_part:
                tensor, dim, blocks, axis, *back = node.args
                node.target = ir.take_part
                size = mesh[axis].size()
                node.args = (tensor, dim, blocks, size, (mesh.get_local_rank(axis) - sum(back)) % size)
            elif node.target is ir.first_only:
                tensor, axis = node.args
                node.target = aten.zeros_like.default if mesh.get_local_rank(axis) else aten.clone.default
                node.args = (tensor,)
            elif node.target in (ir.first_row, ir.from_later):
                number, rank = node.args[0], mesh.get_local_rank(node.args[1])
                node.replace_all_uses_with(number * rank if node.target is ir.first_row else int(rank < number))
                bound.graph.erase_node(node)
    return fx.GraphModule(bound, bound.graph)


def _send(node: fx.Node, mesh: DeviceMesh) -> None:
    tensor, axis = node.args
    size, here = mesh[axis].size(), mesh.get_local_rank(axis)
    rows = tensor.meta["val"].shape[0]
    sent, received = [0] * size, [0] * size
    sent[(here + 1) % size] = received[(here - 1) % size] = rows
    node.target = ir.ALL_TO_ALL
    node.args = (tensor, received, sent, mesh.get_group(axis).group_name)
