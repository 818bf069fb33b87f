"""Keeps buffers that forward writes (running statistics of batch norm) equal on all data-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from shardgraph.ir import Buffer, Mutation, first_only, random_choices
from shardgraph.ir.attributes import AVERAGES, MEAN_OF, SOURCE, SUBJECT, SYNCHRONIZED
from shardgraph.mesh import together
from shardgraph.passes.base import Context, Pass
from shardgraph.passes.builder import Builder
from shardgraph.passes.parameters.rewrite import replace_results


@dataclass(frozen=True)
class AverageBuffers(Pass):
    """Takes a graph that writes buffers from this rank's batch; writes their mean over ranks instead.

    Each rank computes the new value from its part of the batch; floating-point values are then averaged over all
    data-parallel ranks, so that evaluation and checkpoints do not depend on the rank. With equal batches the mean of
    running means is the running mean of the whole batch. Integers (a count of batches) are the same on every rank
    already, unless ranks drop layers at random: then they are those of the first rank, as under DDP. Statistics that
    are synchronized are the same too. In a pipeline, whose statistics are combined over microbatches
    first, the runtime averages once per step, and nothing is changed here. Must not change: what forward returns.
    """

    name = "average-buffers"
    provides = frozenset({"averaged-buffers"})
    excludes = frozenset({"averaged-buffers", "split"})

    def run(self, gm: fx.GraphModule, context: Context) -> None:
        if context.plan.data_size == 1 or context.plan.pipeline is not None:
            return

        dropping, axes = bool(random_choices(gm)), [axis for axis, _ in context.plan.data_mesh]

        def average(fqn: str, value: fx.Node) -> fx.Node:
            counts = not value.meta["val"].is_floating_point()
            if (counts and not dropping) or SYNCHRONIZED.get(value):
                return value
            labels = {SUBJECT: f"buffer {fqn}", SOURCE: SOURCE.get(value, ""), AVERAGES: (fqn,)}
            build = Builder(gm.graph, context.values, labels, after=value)
            if counts:
                for axis in axes:
                    value = build.call(first_only, value, axis)
                return build.all_reduce(value, together(axes))
            total = build.all_reduce(value, together(axes))
            mean = build.call(torch.ops.aten.div.Tensor, total, context.plan.data_size)
            MEAN_OF.set(mean, value.name)
            return mean

        replace_results(gm, Mutation, Buffer, average)
