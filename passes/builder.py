"""Builds nodes, each with the fake value of its operation and with descriptive attributes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from shardgraph import ir
from shardgraph.ir.attributes import VALUE, Labels, write
from shardgraph.ir.copies import TO_DEVICE, TO_HOST, WAIT_COPY
from shardgraph.ir.fake_values import Propagation

aten = torch.ops.aten


class Builder:
    """Adds nodes to ``graph``, at its end, or one after the other ``after`` a node.

    ``values`` computes their values; ``labels`` are their other attributes. Node names begin with ``prefix`` if given,
    so that no new node takes the name of a later one.
    """

    def __init__(
        self,
        graph: fx.Graph,
        values: Propagation,
        labels: Labels | None = None,
        *,
        after: fx.Node | None = None,
        prefix: str = "",
    ) -> None:
        self.graph, self.values, self.prefix = graph, values, prefix
        self.labels: Labels = labels or {}
        self._after = after

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """One operation."""
        name = f"{self.prefix}_{target.__name__.partition('.')[0]}" if self.prefix else None
        return self.named(name, target, args, kwargs)

    def named(self, name: str | None, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        """One operation with the given name, or one chosen by fx."""
        value = self.values.value(target, args, kwargs)
        if self._after is None:
            node = self.graph.create_node("call_function", target, args, kwargs, name)
        else:
            with self.graph.inserting_after(self._after):
                node = self.graph.create_node("call_function", target, args, kwargs, name)
            self._after = node
        write(node, self.labels)
        VALUE.set(node, value)
        return node

    def on(self, node: fx.Node, tensor: fx.Node) -> fx.Node:
        """The operation of ``node``, with its name, with ``tensor`` as first argument."""
        tensor = self.contiguous(tensor) if ir.is_collective(node) else tensor
        return self.named(node.name, node.target, (tensor, *node.args[1:]), {})

    def contiguous(self, tensor: fx.Node) -> fx.Node:
        """``tensor``, copied if it is not contiguous."""
        if tensor.meta["val"].is_contiguous():
            return tensor
        return self.call(aten.clone.default, tensor, memory_format=torch.contiguous_format)

    def laid_out(self, tensor: fx.Node, like: torch.Tensor) -> fx.Node:
        """The tensor with its dims in the memory order of ``like``: the order in which random numbers are drawn."""
        value = tensor.meta["val"]
        order = sorted(range(like.dim()), key=like.stride, reverse=True)
        if order == sorted(range(value.dim()), key=value.stride, reverse=True):
            return tensor
        if order == [*range(value.dim())]:
            return self.contiguous(tensor)
        dense = self.contiguous(self.call(aten.permute.default, tensor, order))
        return self.call(aten.permute.default, dense, [order.index(dim) for dim in range(value.dim())])

    def view(self, tensor: fx.Node, shape: tuple[int, ...]) -> fx.Node:
        """``tensor`` in another shape, copied if it is not contiguous."""
        if tuple(tensor.meta["val"].shape) == tuple(shape):
            return tensor
        return self.call(aten.view.default, self.contiguous(tensor), list(shape))

    def cast(self, tensor: fx.Node, dtype: torch.dtype) -> fx.Node:
        """``tensor`` in another dtype, contiguous."""
        return self.call(aten._to_copy.default, tensor, dtype=dtype, memory_format=torch.contiguous_format)

    def pad_rows(self, tensor: fx.Node, rows: int) -> fx.Node:
        """``tensor`` zero-padded along dim 0 to ``rows``."""
        return self.call(ir.pad_shard, tensor, rows)

    def rows(self, tensor: fx.Node, count: int) -> fx.Node:
        """The first ``count`` rows."""
        return self.call(aten.slice.Tensor, tensor, 0, 0, count)

    def wait(self, start: fx.Node) -> fx.Node:
        """The result of a started collective."""
        return self.call(ir.WAIT, start)

    def all_gather(self, shard: fx.Node, axis: str) -> fx.Node:
        """The shards of all ranks of ``axis``, concatenated along dim 0."""
        return self.as_bytes(
            shard, lambda sent: self.wait(self.call(ir.ALL_GATHER, sent, self.values.ranks(axis), axis))
        )

    def as_bytes(self, tensor: fx.Node, move: Callable[[fx.Node], fx.Node]) -> fx.Node:
        """``move(tensor)``, as bytes if its numbers have 8 bits: not all backends know such a dtype."""
        dtype = tensor.meta["val"].dtype
        if not (dtype.is_floating_point and dtype.itemsize == 1):
            return move(tensor)
        return self.call(aten.view.dtype, move(self.call(aten.view.dtype, tensor, torch.uint8)), dtype)

    def reduce_scatter(self, full: fx.Node, axis: str) -> fx.Node:
        """This rank's rows (dim 0) of the sum over ``axis``."""
        return self.wait(self.call(ir.REDUCE_SCATTER, self.contiguous(full), "sum", self.values.ranks(axis), axis))

    def all_reduce(self, tensor: fx.Node, axis: str, operation: str = "sum") -> fx.Node:
        """The sum (or ``operation``) over one ``axis`` or several (:func:`shardgraph.mesh.together`), on every rank."""
        return self.wait(self.call(ir.ALL_REDUCE, tensor, operation, axis))

    def to_device(self, tensor: fx.Node, device: torch.device) -> fx.Node:
        """A copy of a host value in the memory of ``device``.

        The graph is the same on every rank, so only the device type is used: the rank's current device of that type.
        """
        return self.call(WAIT_COPY, self.call(TO_DEVICE, tensor, torch.device(device.type)), tensor)

    def to_host(self, tensor: fx.Node) -> fx.Node:
        """A copy in host memory."""
        return self.call(WAIT_COPY, self.call(TO_HOST, tensor), tensor)


def padded_rows(rows: int, parts: int) -> int:
    """The least multiple of ``parts`` that holds ``rows``."""
    return math.ceil(rows / parts) * parts


def can_view(tensor: fx.Node, shape: Sequence[int]) -> bool:
    """Whether the tensor's strides allow a view in another shape."""
    value = tensor.meta["val"]
    try:
        torch.empty_strided(value.shape, value.stride(), device="meta").view(shape)
    except RuntimeError:
        return False
    return True
