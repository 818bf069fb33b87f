"""Graph builder for local shards: collectives along one mesh axis, and redistribution."""

from __future__ import annotations

import math

import torch
from torch import fx
from torch.distributed.tensor.placement_types import Placement

from shardgraph import ir
from shardgraph.ir.attributes import VALUE
from shardgraph.ir.fake_values import Propagation
from shardgraph.passes.builder import Builder
from shardgraph.passes.sharding.placements import PARTIAL, REPLICATE, cut_of, is_cut, local_shape

aten = torch.ops.aten


class AxisBuilder(Builder):
    """Appends nodes, named after the axis, to the graph of a rank of mesh ``axis``, which has ``parts`` ranks."""

    maker = "shard-operators"  # the pass recorded as the maker of new nodes

    def __init__(self, graph: fx.Graph, values: Propagation, axis: str) -> None:
        super().__init__(graph, values, prefix=axis)
        self.axis, self.parts = axis, values.ranks(axis)

    def placeholder(self, node: fx.Node, placement: Placement) -> fx.Node:
        """A copy of a placeholder or constant, with its local shape under ``placement``."""
        copy, value = self.graph.node_copy(node), VALUE.get(node)
        if is_cut(placement):
            VALUE.set(copy, self.values.empty(local_shape(placement, value.shape, self.parts), value))
        elif node.op == "get_attr":
            VALUE.set(copy, self.values.fake(value))
        return copy

    def reduce(self, tensor: fx.Node, operation: str = "sum") -> fx.Node:
        """All-reduce: the sum over ranks, or another reduction."""
        return self.all_reduce(self.contiguous(tensor), self.axis, operation)

    def exchange(self, tensor: fx.Node) -> fx.Node:
        """All-to-all over dim 0, which has one row per rank: row ``r`` of the input goes to rank ``r``."""
        splits = [1] * self.parts
        return self.as_bytes(
            self.contiguous(tensor), lambda rows: self.wait(self.call(ir.ALL_TO_ALL, rows, splits, splits, self.axis))
        )

    def send(self, tensor: fx.Node) -> fx.Node:
        """Start sending a tensor to the ring's next rank; :meth:`wait` returns the one from the previous rank."""
        return self.call(ir.send, self.contiguous(tensor), self.axis)

    def part(self, tensor: fx.Node, cut: Placement, back: int = 0) -> fx.Node:
        """The shard of a replicated tensor that belongs to this rank, or to the rank ``back`` positions before it."""
        return self.call(ir.local_part, tensor, *cut_of(cut), self.axis, *([back] if back else []))

    def converted(self, tensor: fx.Node, dtype: torch.dtype) -> fx.Node:
        """Cast to ``dtype`` if needed."""
        return tensor if tensor.meta["val"].dtype == dtype else self.call(aten._to_copy.default, tensor, dtype=dtype)

    def place(self, tensor: fx.Node, before: Placement, after: Placement, shape: torch.Size) -> fx.Node:
        """Redistribute a tensor of global ``shape`` from one placement to another."""
        if before == after:
            return tensor
        if before == REPLICATE:
            return self.call(ir.first_only, tensor, self.axis) if after == PARTIAL else self.part(tensor, after)
        if before == PARTIAL:
            return self.reduce(tensor) if after == REPLICATE else self._scatter(tensor, after)
        if after == REPLICATE:
            return self._gather(tensor, before, shape)
        if cut_of(before)[0] == cut_of(after)[0]:
            return self.part(self._gather(tensor, before, shape), after)
        return self._joined(self.exchange(self._rows(tensor, after)), before, local_shape(after, shape, self.parts))

    def gradient(self, placement: Placement) -> Placement:
        """The placement of the gradient of a parameter with ``placement``."""
        return placement

    def _gather(self, tensor: fx.Node, before: Placement, shape: torch.Size) -> fx.Node:
        row = self.contiguous(self.view(tensor, (1, *tensor.meta["val"].shape)))
        return self._joined(self.all_gather(row, self.axis), before, tuple(shape))

    def _scatter(self, tensor: fx.Node, after: Placement) -> fx.Node:
        shard = self.reduce_scatter(self.contiguous(self._rows(tensor, after)), self.axis)
        return self.view(shard, local_shape(after, tensor.meta["val"].shape, self.parts))

    def _rows(self, tensor: fx.Node, cut: Placement) -> fx.Node:
        """The shards of a tensor, one per row (dim 0)."""
        left, run, right = self._extents(tensor.meta["val"].shape, cut)
        apart = self.view(tensor, (left, self.parts, run, right))
        return self.call(aten.permute.default, apart, [1, 0, 2, 3])

    def _joined(self, rows: fx.Node, cut: Placement, shape: tuple[int, ...]) -> fx.Node:
        """The inverse of :meth:`_rows`: a tensor of ``shape`` from its shards."""
        apart = self.view(rows, (self.parts, *self._extents(shape, cut)))
        return self.view(self.call(aten.permute.default, apart, [1, 0, 2, 3]), shape)

    def _extents(self, shape: tuple[int, ...], cut: Placement) -> tuple[int, int, int]:
        """The number of blocks, the length of a rank's run in each, and the elements to the right of the dimension."""
        dim, count = cut_of(cut)
        return math.prod(shape[:dim]) * count, shape[dim] // count // self.parts, math.prod(shape[dim + 1 :])
