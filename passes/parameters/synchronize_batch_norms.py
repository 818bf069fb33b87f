"""Batch norms over the rows of all data-parallel ranks (``torch.nn.SyncBatchNorm``)."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from shardgraph.errors import PlanError
from shardgraph.ir.attributes import SOURCE, SUBJECT, SYNCHRONIZED, Change, carried
from shardgraph.mesh import together
from shardgraph.passes.base import Context, Pass
from shardgraph.passes.builder import Builder

aten = torch.ops.aten
_WITH_STATISTICS = aten._native_batch_norm_legit_functional.default
_WITHOUT = aten._native_batch_norm_legit.no_stats
_BACKWARD = aten.native_batch_norm_backward.default


@dataclass(frozen=True)
class SynchronizeBatchNorms(Pass):
    """Takes a graph with batch norms of this rank's rows that are ``SYNCHRONIZED``; normalizes over the rows of all
    data-parallel ranks, which may have unequally many.

    In forward, each rank's means and variances are gathered with its number of rows, in one collective, and combined
    (Chan et al., 1979, "Updating formulae and a pairwise algorithm for computing sample variances"); in backward the
    two sums per channel that the derivative needs are reduced in one, with that number. Gradients of weight and bias
    are this rank's part, as all gradients are before they are reduced. Must not change: what is not such a batch norm.

    Raises:
        PlanError: the plan has a pipeline, or the batch norm is another kernel.
    """

    name = "synchronize-batch-norms"
    provides = frozenset({"synchronized-batch-norms"})
    excludes = frozenset({"synchronized-batch-norms", "reduced-gradients", "split"})

    def run(self, gm: fx.GraphModule, context: Context) -> None:
        axes = [axis for axis, size in context.plan.data_mesh if size > 1]
        nodes = [node for node in gm.graph.nodes if SYNCHRONIZED.get(node) and "batch_norm" in str(node.target)]
        if nodes and context.plan.pipeline is not None:
            raise PlanError(
                f"{SOURCE.get(nodes[0]) or nodes[0].name}: a SyncBatchNorm has statistics of all rows of a batch, and "
                "stages of a pipeline see a microbatch at a time: use a BatchNorm, whose running statistics are those "
                "of the whole batch there, or a plan without a pipeline"
            )
        for node in nodes if axes else ():
            written = _Written(gm.graph, context, node, axes)
            if node.target in (_WITH_STATISTICS, _WITHOUT):
                written.forward()
            elif node.target is _BACKWARD:
                written.backward()
            else:
                raise PlanError(
                    f"{SOURCE.get(node) or node.name}: {node.target} has no form over the rows of all ranks"
                )


class _Written:
    """The operations that stand for one batch norm, or for its derivative."""

    def __init__(self, graph: fx.Graph, context: Context, node: fx.Node, axes: Sequence[str]) -> None:
        self.node, self.axes = node, axes
        labels = {**carried(Change.REWRITTEN, node), SUBJECT: "statistics of batch norm"}
        labels.pop(SYNCHRONIZED)
        self.build = Builder(graph, context.values, labels, after=node)
        x = node.args[1] if node.target is _BACKWARD else node.args[0]
        assert isinstance(x, fx.Node)
        self.x, self.value = x, x.meta["val"]
        self.channels, self.ranks = self.value.shape[1], context.plan.data_size
        self.dims = [dim for dim in range(self.value.dim()) if dim != 1]
        self.dtype = torch.promote_types(self.value.dtype, torch.float32)  # in which statistics are computed
        rows = self.value.numel() // max(self.channels, 1)
        options = {"dtype": self.dtype, "device": self.value.device}
        self.count = self.build.call(aten.full.default, [1], rows, **options)  # of this rank

    def forward(self) -> None:
        build, node = self.build, self.node
        weight, bias = node.args[1:3]
        momentum, eps = node.args[-2:]
        values = self._computed(self.x)
        mean, variance, count = self._over_all_ranks(values)
        scale = build.call(aten.rsqrt.default, build.call(aten.add.Tensor, variance, eps))
        if self.value.dtype == self.dtype:
            args = (self.x, weight, bias, mean, variance, momentum, eps)
            normed = build.call(aten._native_batch_norm_legit_no_training.default, *args)
            normalized = build.call(operator.getitem, normed, 0)
        else:
            factor = self._factor(scale, weight)
            centred = build.call(aten.sub.Tensor, values, self._along_channels(mean))
            normalized = build.call(aten.mul.Tensor, centred, self._along_channels(factor))
            if bias is not None:
                normalized = build.call(aten.add.Tensor, normalized, self._along_channels(self._computed(bias)))
            normalized = build.call(aten._to_copy.default, normalized, dtype=self.value.dtype)
        results = [normalized, mean, scale]
        if node.target is _WITH_STATISTICS:
            others = build.call(aten.clamp_min.default, build.call(aten.sub.Tensor, count, 1), 1)
            unbiased = build.call(aten.mul.Tensor, variance, build.call(aten.div.Tensor, count, others))
            for running, present in zip(node.args[3:5], (mean, unbiased), strict=True):
                results.append(self._moved(running, present, momentum))
        self._replace(results)

    def backward(self) -> None:
        build, node = self.build, self.node
        gradient, _, weight, _, _, mean, scale, *_, mask = node.args
        gradients = self._computed(gradient)
        centred = build.call(aten.sub.Tensor, self._computed(self.x), self._along_channels(self._computed(mean)))
        scale = self._computed(scale)
        sums = build.call(aten.sum.dim_IntList, gradients, self.dims)
        products = build.call(aten.sum.dim_IntList, build.call(aten.mul.Tensor, gradients, centred), self.dims)
        results: list[fx.Node | None] = [None, None, None]
        if mask[0]:
            own = build.call(aten.cat.default, [sums, products, self.count])
            packed = build.all_reduce(own, together(self.axes))
            count = build.call(aten.slice.Tensor, packed, 0, 2 * self.channels, 2 * self.channels + 1)
            means = build.call(aten.div.Tensor, packed, count)
            of_gradients = build.call(aten.slice.Tensor, means, 0, 0, self.channels)
            of_products = build.call(aten.slice.Tensor, means, 0, self.channels, 2 * self.channels)
            slope = build.call(aten.mul.Tensor, of_products, build.call(aten.mul.Tensor, scale, scale))
            rest = build.call(aten.sub.Tensor, gradients, self._along_channels(of_gradients))
            rest = build.call(aten.sub.Tensor, rest, build.call(aten.mul.Tensor, centred, self._along_channels(slope)))
            results[0] = build.call(aten.mul.Tensor, rest, self._along_channels(self._factor(scale, weight)))
        if mask[1]:
            results[1] = build.call(aten.mul.Tensor, products, scale)
        if mask[2]:
            results[2] = sums
        self._replace(results)

    def _over_all_ranks(self, values: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node]:
        """The mean and the biased variance of each channel, from those of each rank, and the number of rows of all."""
        build = self.build
        own = [
            build.call(aten.mean.dim, values, self.dims),
            build.call(aten.var.correction, values, self.dims, correction=0),
            self.count,
        ]
        gathered = build.call(aten.cat.default, own)
        for axis in reversed(self.axes):
            gathered = build.all_gather(gathered, axis)
        each = build.view(gathered, (self.ranks, 2 * self.channels + 1))
        counts = build.call(aten.slice.Tensor, each, 1, 2 * self.channels, 2 * self.channels + 1)
        means, variances = (
            build.call(aten.slice.Tensor, each, 1, i * self.channels, (i + 1) * self.channels) for i in (0, 1)
        )
        count = build.call(aten.sum.dim_IntList, counts, [0])

        def over_ranks(values: fx.Node) -> fx.Node:
            counted = build.call(aten.sum.dim_IntList, build.call(aten.mul.Tensor, values, counts), [0])
            return build.call(aten.div.Tensor, counted, count)

        mean = over_ranks(means)
        apart = build.call(aten.sub.Tensor, means, mean)
        between = build.call(aten.mul.Tensor, apart, apart)
        return mean, over_ranks(build.call(aten.add.Tensor, variances, between)), count

    def _moved(self, running: Any, present: fx.Node, momentum: float) -> fx.Node:
        build, stored = self.build, running.meta["val"].dtype
        kept = build.call(aten.mul.Tensor, self._computed(running), 1 - momentum)
        moved = build.call(aten.add.Tensor, kept, build.call(aten.mul.Tensor, present, momentum))
        moved = moved if stored == self.dtype else build.call(aten._to_copy.default, moved, dtype=stored)
        SYNCHRONIZED.set(moved, True)
        return moved

    def _factor(self, scale: fx.Node, weight: Any) -> fx.Node:
        """What a centred value is multiplied by, per channel."""
        return scale if weight is None else self.build.call(aten.mul.Tensor, scale, self._computed(weight))

    def _computed(self, node: Any) -> fx.Node:
        """A value in the dtype of statistics."""
        if node.meta["val"].dtype == self.dtype:
            return node
        return self.build.call(aten._to_copy.default, node, dtype=self.dtype)

    def _along_channels(self, vector: fx.Node) -> fx.Node:
        return self.build.view(vector, (1, self.channels, *[1] * (self.value.dim() - 2)))

    def _replace(self, results: Sequence[fx.Node | None]) -> None:
        for user in list(self.node.users):
            result = results[user.args[1]]
            if result is None:
                continue
            due = user.meta["val"].dtype
            if result.meta["val"].dtype != due:
                result = self.build.call(aten._to_copy.default, result, dtype=due)
            user.replace_all_uses_with(result)
            self.node.graph.erase_node(user)
        self.node.graph.erase_node(self.node)
