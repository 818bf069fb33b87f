"""Graph builder for local shards: collectives along one mesh axis, and redistribution."""

from __future__ import annotations

import math
from typing import ClassVar

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

    maker: ClassVar[str] = "shard-operators"
    """The pass recorded as the maker of new nodes."""

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

    # -- collectives (inputs are made contiguous) ----------------------------------------------------------

    def reduce(self, tensor: fx.Node, operation: str = "sum") -> fx.Node:
        """All-reduce: the sum over ranks, or another reduction."""
        return self.all_reduce(self.contiguous(tensor), self.axis, operation)

    def gather(self, tensor: fx.Node) -> fx.Node:
        """All-gather along dim 0."""
        return self.all_gather(self.contiguous(tensor), self.axis)

    def scatter(self, tensor: fx.Node) -> fx.Node:
        """Reduce-scatter: this rank's rows (dim 0) of the sum."""
        return self.reduce_scatter(self.contiguous(tensor), self.axis)

    def exchange(self, tensor: fx.Node) -> fx.Node:
        """All-to-all over dim 0, which has one row per rank: row ``r`` of the input goes to rank ``r``."""
        splits = [1] * self.parts
        return self.wait(self.call(ir.ALL_TO_ALL, self.contiguous(tensor), splits, splits, self.axis))

    def send(self, tensor: fx.Node) -> fx.Node:
        """Start sending a tensor to the ring's next rank; :meth:`wait` returns the one from the previous rank."""
        return self.call(ir.send, self.contiguous(tensor), self.axis)

    # -- rank-dependent values -----------------------------------------------------------------------------

    def part(self, tensor: fx.Node, cut: Placement, back: int = 0) -> fx.Node:
        """The shard of a replicated tensor that belongs to this rank, or to the rank ``back`` positions before it."""
        return self.call(ir.local_part, tensor, *cut_of(cut), self.axis, *([back] if back else []))

    def first_only(self, tensor: fx.Node) -> fx.Node:
        """Replicated to partial: a tensor per rank, such that they sum to the replicated ``tensor``."""
        return self.call(ir.first_only, tensor, self.axis)

    def first_row(self, rows: int) -> fx.Node:
        """The global number of this rank's first row if every rank has ``rows``."""
        return self.call(ir.first_row, rows, self.axis)

    def from_later(self, steps: int) -> fx.Node:
        """1 on ranks that receive from a higher rank what was sent ``steps`` positions round the ring, 0 on others."""
        return self.call(ir.from_later, steps, self.axis)

    # -- placements --------------------------------------------------------------------------------

    def place(self, tensor: fx.Node, before: Placement, after: Placement, shape: torch.Size) -> fx.Node:
        """Redistribute a tensor of global ``shape`` from one placement to another."""
        if before == after:
            return tensor
        if before == REPLICATE:
            return self.first_only(tensor) if after == PARTIAL else self.part(tensor, after)
        if before == PARTIAL:
            return self.reduce(tensor) if after == REPLICATE else self._scatter(tensor, after)
        if after == REPLICATE:
            return self._gather(tensor, before, shape)
        if cut_of(before)[0] == cut_of(after)[0]:
            return self.part(self._gather(tensor, before, shape), after)
        return self._exchange(tensor, before, after, shape)

    def gradient(self, placement: Placement) -> Placement:
        """The placement of the gradient of a parameter with ``placement``."""
        return placement

    def _gather(self, tensor: fx.Node, before: Placement, shape: torch.Size) -> fx.Node:
        dim, count = cut_of(before)
        run = shape[dim] // count // self.parts
        gathered = self.gather(self.view(tensor, (1, *tensor.meta["val"].shape)))
        apart = self.view(gathered, (self.parts, math.prod(shape[:dim]) * count, run, math.prod(shape[dim + 1 :])))
        return self.view(self.call(aten.permute.default, apart, [1, 0, 2, 3]), tuple(shape))

    def _scatter(self, tensor: fx.Node, after: Placement) -> fx.Node:
        shape = tensor.meta["val"].shape
        dim, count = cut_of(after)
        run = shape[dim] // count // self.parts
        apart = self.view(tensor, (math.prod(shape[:dim]) * count, self.parts, run, math.prod(shape[dim + 1 :])))
        mine = self.scatter(self.call(aten.permute.default, apart, [1, 0, 2, 3]))
        return self.view(mine, local_shape(after, shape, self.parts))

    def _exchange(self, tensor: fx.Node, before: Placement, after: Placement, shape: torch.Size) -> fx.Node:
        """Change the sharded dimension by all-to-all."""
        (old, had), (new, gets) = cut_of(before), cut_of(after)
        local = tensor.meta["val"].shape
        run = shape[new] // gets // self.parts
        sizes = (math.prod(local[:new]) * gets, self.parts, run, math.prod(local[new + 1 :]))
        parcels = self.call(aten.permute.default, self.view(tensor, sizes), [1, 0, 2, 3])
        received = self.exchange(parcels)
        whole = local_shape(after, shape, self.parts)
        run = shape[old] // had // self.parts
        apart = self.view(received, (self.parts, math.prod(whole[:old]) * had, run, math.prod(whole[old + 1 :])))
        return self.view(self.call(aten.permute.default, apart, [1, 0, 2, 3]), whole)
