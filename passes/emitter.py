"""Writing new nodes: each with its value's shape and with what people need to recognise it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from shardgraph import ir
from shardgraph.ir.copies import TO_DEVICE, TO_HOST, WAIT_COPY
from shardgraph.passes.base import Context


class Emitter:
    """Appends nodes after a point of a graph, each labelled with the ``subject`` it serves.

    ``source`` is the user's line that the nodes belong to; ``labels`` are further entries of every node's meta.
    """

    def __init__(
        self, gm: fx.GraphModule, context: Context, after: fx.Node, subject: str, source: str, **labels: Any
    ) -> None:
        self.graph, self.context, self.point = gm.graph, context, after
        self.meta = {"subject": subject, "source": source, **labels}

    def call(
        self, target: Any, args: tuple[Any, ...], shape: tuple[int, ...], like: torch.Tensor, **meta: Any
    ) -> fx.Node:
        """One node calling ``target``; its value has ``shape`` and the dtype and device of ``like``."""
        with self.graph.inserting_after(self.point):
            node = self.graph.call_function(target, args)
        with self.context.fake_mode:
            value = torch.empty(shape, dtype=like.dtype, device=like.device)
        node.meta.update(self.meta | {"val": value} | meta)
        self.point = node
        return node

    def cast(self, tensor: fx.Node, dtype: torch.dtype, **meta: Any) -> fx.Node:
        """``tensor`` in another dtype, its elements in order."""
        value = tensor.meta["val"]
        with self.context.fake_mode:
            like = torch.empty(0, dtype=dtype, device=value.device)
        node = self.call(torch.ops.aten._to_copy.default, (tensor,), tuple(value.shape), like, **meta)
        node.kwargs = {"dtype": dtype, "memory_format": torch.contiguous_format}
        return node

    def all_gather(self, shard: fx.Node, axis: str, **meta: Any) -> fx.Node:
        """Start and wait: the shards of every rank of ``axis``, one after the other along dim 0."""
        value, size = shard.meta["val"], self.context.sizes[axis]
        shape = (value.shape[0] * size, *value.shape[1:])
        start = self.call(ir.ALL_GATHER, (shard, size, axis), shape, value, axis=axis, **meta)
        return self.call(ir.WAIT, (start,), shape, value, **meta)

    def reduce_scatter(self, full: fx.Node, axis: str) -> fx.Node:
        """Start and wait: this rank's rows of the sum over ``axis``."""
        value, size = full.meta["val"], self.context.sizes[axis]
        shape = (value.shape[0] // size, *value.shape[1:])
        start = self.call(ir.REDUCE_SCATTER, (full, "sum", size, axis), shape, value, axis=axis)
        return self.call(ir.WAIT, (start,), shape, value)

    def all_reduce(self, tensor: fx.Node, axis: str) -> fx.Node:
        """Start and wait: the sum over ``axis`` (or several, :func:`shardgraph.mesh.together`), on every rank of it."""
        value = tensor.meta["val"]
        start = self.call(ir.ALL_REDUCE, (tensor, "sum", axis), tuple(value.shape), value, axis=axis)
        return self.call(ir.WAIT, (start,), tuple(value.shape), value)

    def to_device(self, tensor: fx.Node, device: torch.device, **meta: Any) -> fx.Node:
        """Start and wait: a copy in the memory of ``device`` of a value that is on the host.

        The graph is the same text on every rank, so the device is any of its kind: the rank's current one.
        """
        return self._copied(TO_DEVICE, (tensor, torch.device(device.type)), tensor, device, **meta)

    def to_host(self, tensor: fx.Node, **meta: Any) -> fx.Node:
        """Start and wait: a copy in host memory."""
        return self._copied(TO_HOST, (tensor,), tensor, torch.device("cpu"), **meta)

    def _copied(
        self, target: Any, args: tuple[Any, ...], tensor: fx.Node, device: torch.device, **meta: Any
    ) -> fx.Node:
        with self.context.fake_mode:
            copies = [torch.empty_like(tensor.meta["val"], device=device) for _ in range(2)]
        start = self.call(target, args, (), copies[0], **{**meta, "val": copies[0]})
        return self.call(WAIT_COPY, (start, tensor), (), copies[0], **{**meta, "val": copies[1]})

    def pad_rows(self, tensor: fx.Node, rows: int, **meta: Any) -> fx.Node:
        """``tensor`` zero-padded along dim 0 to ``rows``."""
        value = tensor.meta["val"]
        return self.call(ir.pad_shard, (tensor, rows), (rows, *value.shape[1:]), value, **meta)

    def rows(self, tensor: fx.Node, count: int, **meta: Any) -> fx.Node:
        """The first ``count`` rows."""
        value = tensor.meta["val"]
        return self.call(torch.ops.aten.slice.Tensor, (tensor, 0, 0, count), (count, *value.shape[1:]), value, **meta)

    def scale(self, tensor: fx.Node, divisor: int) -> fx.Node:
        """``tensor / divisor``."""
        value = tensor.meta["val"]
        return self.call(torch.ops.aten.div.Tensor, (tensor, divisor), tuple(value.shape), value)


def padded_rows(rows: int, parts: int) -> int:
    """The least multiple of ``parts`` that holds ``rows``."""
    return math.ceil(rows / parts) * parts
