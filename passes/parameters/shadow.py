"""The collectives of a graph without its batch: what a rank that has run out of data does beside the others."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from shardgraph import ir
from shardgraph.errors import ShardGraphError
from shardgraph.ir.attributes import AVERAGES, MEMORY_KIND, REDUCES, SUBJECT
from shardgraph.passes.base import Context, Graphs, GraphsPass
from shardgraph.passes.builder import Builder

aten = torch.ops.aten


@dataclass(frozen=True)
class Shadow(GraphsPass):
    """Takes forward and backward graphs; replaces each by a graph of its collectives, in order, and of what they need
    of parameters.

    What other ranks reduce from their batches is zero here: gradients, and statistics of synchronized batch norms with
    their numbers of rows. A buffer that ranks average is the present one. Results are reduced gradients and averaged
    buffers.

    Raises:
        ShardGraphError: a collective is of other values of the batch.
    """

    name = "shadow"
    requires = frozenset({"split"})
    provides = frozenset({"shadow"})
    excludes = frozenset({"shadow"})

    def run_on(self, graphs: Graphs, context: Context) -> None:
        for name, gm in graphs.items():
            graphs[name] = _without_batch(ir.copy_graph(gm), context)


def _without_batch(gm: fx.GraphModule, context: Context) -> fx.GraphModule:
    inputs = ir.placeholders(gm)
    buffers = {role.fqn: node for role, node in inputs.items() if isinstance(role, ir.Buffer)}
    for start in list(ir.collectives(gm)):
        if MEMORY_KIND.get(start) != "gathered" and not _follows_another(start):
            averaged = AVERAGES.get(start, ())
            present = [buffers[fqn] for fqn in averaged if fqn in buffers]  # one that is not is written and never read
            known = averaged and len(present) == len(averaged)
            given = _together(start, present, context) if known else _zeros(start, context)
            start.replace_input_with(start.args[0], given)
    ir.set_outputs(gm, [(role, value) for role, value in ir.outputs(gm) if _is_common(role, value)])
    _drop_unused(gm)
    return gm


def _together(start: fx.Node, buffers: list[fx.Node], context: Context) -> fx.Node:
    """Buffers as a collective takes them: one as it is, several in one."""
    if len(buffers) == 1:
        return buffers[0]
    build = Builder(start.graph, context.values, {}, after=start.prev)
    return build.call(ir.buckets.pack, buffers, 1)


def _follows_another(start: fx.Node) -> bool:
    """Whether a collective is of what another one has reduced or gathered before."""
    node = start.args[0]
    while isinstance(node, fx.Node) and node.op == "call_function":
        if node.target is ir.WAIT:
            return True
        if node.target not in (aten.div.Tensor, aten._to_copy.default, aten.view.default, operator.getitem):
            return False
        node = node.args[0]
    return False


def _zeros(start: fx.Node, context: Context) -> fx.Node:
    if start not in REDUCES and SUBJECT.get(start) != "statistics of batch norm":
        raise ShardGraphError(
            f"a rank without data cannot take part in {ir.describe_collective(start)}: ranks exchange values of their "
            "batches there"
        )
    value = start.args[0].meta["val"]
    build = Builder(start.graph, context.values, {}, after=start.prev)
    return build.call(aten.full.default, list(value.shape), 0, dtype=value.dtype, device=value.device)


def _is_common(role: ir.Role | None, value: Any) -> bool:
    """Whether a result is the same thing on every rank: a reduced gradient, a buffer."""
    if isinstance(role, ir.Gradient):
        return isinstance(role.of, ir.Parameter) and isinstance(value, fx.Node) and value in REDUCES
    return isinstance(role, ir.Mutation) and isinstance(role.of, ir.Buffer)


def _drop_unused(gm: fx.GraphModule) -> None:
    for node in reversed(list(gm.graph.nodes)):
        if not node.users and node.op == "call_function" and not ir.is_collective(node) and node.target is not ir.WAIT:
            gm.graph.erase_node(node)
    for node in list(gm.graph.find_nodes(op="placeholder")):
        if not node.users:
            gm.graph.erase_node(node)
