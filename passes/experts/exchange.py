"""Graph builder with token exchange: redistribution along an expert axis."""

from __future__ import annotations

import torch
from torch import fx
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from shardgraph.passes.sharding.axis_builder import AxisBuilder
from shardgraph.passes.sharding.placements import REPLICATE, Exchanged, Summed

aten = torch.ops.aten


class ExchangeBuilder(AxisBuilder):
    """Builder along an axis whose ranks have different batches; ``Replicate()`` is a tensor of the rank's own batch."""

    maker = "divide-experts"

    def place(self, tensor: fx.Node, before: Placement, after: Placement, shape: torch.Size) -> fx.Node:
        """Redistribute a tensor, of ``shape`` on the rank's own batch, from one placement to another."""
        if isinstance(before, Exchanged) and after != before:
            own = self._swap(tensor, before.tokens, before.experts)
            return self.place(own, REPLICATE, after, shape)
        if isinstance(after, Exchanged) and before == REPLICATE:
            return self._swap(tensor, after.experts, after.tokens)
        if isinstance(after, Summed) and before == REPLICATE:
            return self._scatter(tensor, Shard(after.dim))
        return super().place(tensor, before, after, shape)

    def gradient(self, placement: Placement) -> Placement:
        """The gradient of a sharded weight is summed over all ranks' tokens."""
        return Summed(placement.dim) if isinstance(placement, Shard) else placement

    def _swap(self, tensor: fx.Node, cut: int, joined: int) -> fx.Node:
        """All-to-all: scatter dim ``cut`` over the ranks, and concatenate along dim ``joined``."""
        shape = tensor.meta["val"].shape
        dims = list(range(len(shape)))
        apart = self.view(tensor, (*shape[:cut], self.parts, shape[cut] // self.parts, *shape[cut + 1 :]))
        received = self.exchange(self._permuted(apart, [cut, *dims[:cut], *(dim + 1 for dim in dims[cut:])]))
        whole = list(received.meta["val"].shape[1:])
        whole[joined] *= self.parts
        order = [dim + 1 for dim in dims]
        return self.view(self._permuted(received, [*order[:joined], 0, *order[joined:]]), tuple(whole))

    def _permuted(self, tensor: fx.Node, order: list[int]) -> fx.Node:
        return tensor if order == sorted(order) else self.call(aten.permute.default, tensor, order)
