"""Grouped products, one matrix per group of rows: experts with tokens sorted by expert.

``_grouped_mm`` takes ``offs``, the end row of each group: ``[rows, inner] x [groups, inner, columns]``, and for the
gradient of the matrices ``[inner, rows] x [rows, columns] -> [groups, inner, columns]``. transformers' fallback for
dtypes that it does not support is another operator with the same meaning. The inner dimension and the columns are
sharded as in any product. Groups can be sharded too: a rank then multiplies only its own groups' rows, and the result
is partial.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch import fx
from torch.distributed.tensor import Shard

from shardgraph.passes.sharding.axis_builder import AxisBuilder
from shardgraph.passes.sharding.lowerings import lowering
from shardgraph.passes.sharding.options import Operation, Option
from shardgraph.passes.sharding.placements import PARTIAL, REPLICATE
from shardgraph.passes.sharding.rules import rule

aten = torch.ops.aten


@rule(aten._grouped_mm.default, "transformers.grouped_mm_fallback.default", replaces=True)
def product(operation: Operation) -> Iterator[Option]:
    """Shards columns, the inner dimension, or groups."""
    dims = [tensor.dim() for tensor in operation.tensors]
    if dims == [2, 3, 1]:
        yield Option((REPLICATE, Shard(2), REPLICATE), (Shard(1),))
        yield Option((Shard(1), Shard(1), REPLICATE), (PARTIAL,))
        yield Option((PARTIAL, REPLICATE, REPLICATE), (PARTIAL,))
        yield Option((REPLICATE, Shard(0), REPLICATE), (PARTIAL,), "grouped_product")
    elif dims == [2, 2, 1]:
        yield Option((Shard(0), REPLICATE, REPLICATE), (Shard(1),))
        yield Option((REPLICATE, Shard(1), REPLICATE), (Shard(2),))
        yield Option((REPLICATE, REPLICATE, REPLICATE), (Shard(0),), "grouped_gradient")


@rule("transformers.grouped_mm_fallback_backward.default")
def backward(operation: Operation) -> Iterator[Option]:
    """Gradients of rows and matrices, from rows, matrices, ``offs`` and the gradient of the result."""
    yield Option((REPLICATE, Shard(2), REPLICATE, Shard(1)), (PARTIAL, Shard(2)))
    yield Option((Shard(1), Shard(1), REPLICATE, REPLICATE), (Shard(1), Shard(1)))
    yield Option((REPLICATE, Shard(0), REPLICATE, REPLICATE), (PARTIAL, Shard(0)), "grouped_backward")


@lowering
def grouped_product(write: AxisBuilder, node: fx.Node, option: Option, tensors: list[fx.Node]) -> list[fx.Node]:
    """This rank's rows times its matrices, zeros in other rows."""
    rows, matrices, offs = tensors
    mine = _Rows(write, offs, rows.meta["val"].shape[0])
    return [mine.back(write.call(node.target, mine.first(rows), matrices, mine.offs))]


@lowering
def grouped_gradient(write: AxisBuilder, node: fx.Node, option: Option, tensors: list[fx.Node]) -> list[fx.Node]:
    """The gradients of this rank's matrices, from its rows."""
    left, right, offs = tensors
    mine = _Rows(write, offs, right.meta["val"].shape[0])
    rows = mine.first(write.call(aten.t.default, left))
    return [write.call(node.target, write.call(aten.t.default, rows), mine.first(right), mine.offs)]


@lowering
def grouped_backward(write: AxisBuilder, node: fx.Node, option: Option, tensors: list[fx.Node]) -> list[fx.Node]:
    """Both gradients, for this rank's rows and matrices."""
    rows, matrices, offs, gradient = tensors
    mine = _Rows(write, offs, rows.meta["val"].shape[0])
    both = write.call(node.target, mine.first(rows), matrices, mine.offs, mine.first(gradient))
    to_rows, to_matrices = (write.call(operator.getitem, both, index) for index in range(2))
    return [mine.back(to_rows), to_matrices]


class _Rows:
    """Index of this rank's groups in ``count`` replicated rows; ``offs`` is relative to the first of its rows."""

    def __init__(self, write: AxisBuilder, offs: fx.Node, count: int) -> None:
        self.write = write
        none = write.call(aten.new_zeros.default, offs, [1])
        before = write.call(aten.slice.Tensor, offs, 0, 0, offs.meta["val"].shape[0] - 1)
        starts = write.part(write.call(aten.cat.default, [none, before]), Shard(0))
        start = write.call(aten.slice.Tensor, starts, 0, 0, 1)
        self.offs = write.call(aten.sub.Tensor, write.part(offs, Shard(0)), start)
        numbers = write.call(aten.arange.default, count, device=offs.meta["val"].device)
        own = self.offs.meta["val"].shape[0]
        end = write.call(aten.slice.Tensor, self.offs, 0, own - 1, own)
        self.own = write.call(aten.unsqueeze.default, write.call(aten.lt.Tensor, numbers, end), 1)
        self.there = write.call(aten.remainder.Scalar, write.call(aten.add.Tensor, numbers, start), max(count, 1))
        self.here = write.call(aten.remainder.Scalar, write.call(aten.sub.Tensor, numbers, start), max(count, 1))

    def first(self, rows: fx.Node) -> fx.Node:
        """The rows rotated so that this rank's come first."""
        return self.write.call(aten.index_select.default, rows, 0, self.there)

    def back(self, rows: fx.Node) -> fx.Node:
        """Undo :meth:`first`, with zeros in rows of other ranks' groups, which the product leaves unwritten."""
        zero = self.write.call(aten.new_zeros.default, rows, [])
        kept = self.write.call(aten.where.self, self.own, rows, zero)
        return self.write.call(aten.index_select.default, kept, 0, self.here)
