"""Gradient reduction: local gradients become the mean over all data-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from shardgraph.ir import Gradient, Parameter, local_chunk, trim_shard
from shardgraph.ir.attributes import (
    CAST_OF,
    EQUALS,
    MADE_BY,
    MEAN_OF,
    PADDED_SHARD,
    REDUCES,
    SOURCE,
    SUBJECT,
    Attribute,
    Change,
    Labels,
    carried,
    write,
)
from shardgraph.mesh import together
from shardgraph.passes.base import Context, Pass
from shardgraph.passes.builder import Builder, padded_rows
from shardgraph.passes.parameters.rewrite import replace_results
from shardgraph.plans.parameter_plan import OWN

aten = torch.ops.aten


@dataclass(frozen=True)
class ReduceGradients(Pass):
    """Takes a joint graph that returns each rank's own gradients; returns their mean over ranks instead.

    Depending on the parameter's plan the reduction is an all-reduce (every rank holds the whole gradient; a sharded
    parameter then takes its rows of it, as in ZeRO-1) or a reduce-scatter over the axis that shards it, followed by an
    all-reduce over the axes that replicate it (hybrid sharding). The sum is divided by the number of data-parallel
    ranks afterwards, on the smaller tensor; float16 gradients are divided before, lest the sum overflow. Partial
    gradients along operator axes are summed in the same way, without division; along an axis that shards experts their
    gradients are sums already. The reduction runs in the gradient's dtype, and its result is cast to the dtype in which
    the parameter is stored.

    Under a plan that measures gradients, those that are partial along operator axes are summed by a reduction of their
    own, before which no rank has the gradient of its batch. ``no_sync`` keeps it.

    A gradient that several parameters have is a view for each but the first, so that what is done to one of them, such
    as adding it up over microbatches, is not done to the others. Every other node added here has ``REDUCES``, the
    parameter's name. Must not change: gradients of inputs.
    """

    name = "reduce-gradients"
    requires = frozenset({"sharded-parameters"})
    provides = frozenset({"reduced-gradients"})
    excludes = frozenset({"reduced-gradients", "split"})

    def run(self, gm: fx.GraphModule, context: Context) -> None:
        taken: set[fx.Node] = set()

        def reduced(fqn: str, gradient: fx.Node) -> fx.Node:
            own = _viewed(gm, context, gradient) if gradient in taken else gradient
            taken.add(gradient)
            return _reduce(gm, context, fqn, own)

        replace_results(gm, Gradient, Parameter, reduced)


def _viewed(gm: fx.GraphModule, context: Context, gradient: fx.Node) -> fx.Node:
    """A node of its own for a gradient."""
    captured: Labels = {} if gradient in MADE_BY else {EQUALS: gradient.name}
    build = Builder(gm.graph, context.values, {**carried(Change.PASSED, gradient), **captured}, after=gradient)
    return build.call(aten.view.default, gradient, list(gradient.meta["val"].shape))


def _reduce(gm: fx.GraphModule, context: Context, fqn: str, gradient: fx.Node) -> fx.Node:
    """Insert the reduction of ``gradient`` (this rank's own) right after it; returns the reduced node."""
    entry, world, mesh = context.parameters[fqn], context.plan.data_size, context.plan.mesh
    sums = context.sums.get(fqn, ())
    labels: dict[Attribute[Any], Any] = {SUBJECT: f"gradient of {fqn}", SOURCE: SOURCE.get(gradient, "")}
    captured = CAST_OF.get(gradient, EQUALS.get(gradient, gradient.name))
    if sums and context.plan.measures_gradients:
        of_batch = Builder(gm.graph, context.values, labels, after=gradient)
        gradient = of_batch.all_reduce(gradient, together(axis for axis in context.plan.axes if axis in sums))
        sums = ()
    build = Builder(gm.graph, context.values, {**labels, REDUCES: fqn}, after=gradient)
    node, dtype = gradient, gradient.meta["val"].dtype
    stored = context.stored.get(fqn, dtype)
    if entry.gradient == OWN or (world == 1 and not sums):
        return node if dtype == stored else build.cast(node, stored)
    early = dtype == torch.float16 and world > 1
    if early:
        node = build.call(aten.div.Tensor, node, world)

    done = {mesh[position][0] for position in entry.splits}  # such as experts, whose gradients cover all ranks' tokens
    rows = context.shapes[fqn][0] if context.shapes[fqn] else 0
    axis, size = mesh[entry.shard_axis] if entry.shard_axis is not None else ("", 1)
    axis = axis if size > 1 else ""  # the only rank of an axis has all rows
    padded = padded_rows(rows, size)
    scattered = axis and entry.gradient == "reduce_scatter"
    if scattered:
        if padded != rows:
            node = build.pad_rows(node, padded)
        node = build.reduce_scatter(node, axis)
        done.add(axis)
    summed = {*(axis for axis, size in context.plan.data_mesh if size > 1), *sums} - done
    if summed:  # one collective over all axes
        node = build.all_reduce(node, together(axis for axis in context.plan.axes if axis in summed))
    if not early and world > 1:
        node = build.call(aten.div.Tensor, node, world)
    if axis and not scattered:
        node = build.call(local_chunk, node, rows, axis)
    elif scattered and padded != rows:
        write(node, {MEAN_OF: captured, PADDED_SHARD: fqn})
        node = build.call(trim_shard, node, rows, axis)
    MEAN_OF.set(node, captured)
    if node.meta["val"].dtype != stored:
        node = build.cast(node, stored)
        MEAN_OF.set(node, captured)
    return node
