"""Replacements for operations that cannot simply run on local shards; rules refer to them by name.

A lowering takes the builder, the node and its operands as placed, and returns the results as the option places them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from shardgraph import ir
from shardgraph.passes.sharding.axis_builder import AxisBuilder
from shardgraph.passes.sharding.options import Option, operands, results
from shardgraph.passes.sharding.placements import local_shape

aten = torch.ops.aten

Lowering = Callable[[AxisBuilder, fx.Node, Option, list[fx.Node]], list[Any]]

LOWERINGS: dict[str, Lowering] = {}


def lowering(function: Lowering) -> Lowering:
    """Register a lowering under its function name."""
    LOWERINGS[function.__name__] = function
    return function


@lowering
def sized(write: AxisBuilder, node: fx.Node, option: Option, tensors: list[fx.Node]) -> list[fx.Node]:
    """An operation that creates a tensor of a given size: create only the shard."""
    assert option.results[0] is not None
    shape = list(local_shape(option.results[0], results(node)[0].shape, write.parts))
    return [write.call(node.target, *tensors, shape, *node.args[len(tensors) + 1 :], **node.kwargs)]


def _mine(write: AxisBuilder, index: fx.Node, rows: int) -> tuple[fx.Node, fx.Node]:
    """Which elements of ``index`` are among this rank's rows, and their local row numbers; 0 for the others."""
    below = write.call(aten.sub.Tensor, index, write.call(ir.first_row, rows, write.axis))
    first, last = write.call(aten.ge.Scalar, below, 0), write.call(aten.lt.Scalar, below, rows)
    inside = write.call(aten.logical_and.default, first, last)
    return inside, write.call(aten.mul.Tensor, below, inside)


@lowering
def embedding(write: AxisBuilder, node: fx.Node, option: Option, tensors: list[fx.Node]) -> list[fx.Node]:
    """Looks up this rank's rows, with zeros for the others: partial."""
    table, index = tensors
    inside, row = _mine(write, index, table.meta["val"].shape[0])
    rows = write.call(aten.embedding.default, table, row)
    return [write.call(aten.mul.Tensor, rows, write.call(aten.unsqueeze.default, inside, -1))]


@lowering
def embedding_backward(write: AxisBuilder, node: fx.Node, option: Option, tensors: list[fx.Node]) -> list[fx.Node]:
    """Gradients of this rank's rows; those of other rows go to an extra row that is sliced off."""
    gradient, index = tensors
    total, padding, by_count = node.args[2:5]
    rows = total // write.parts
    if padding >= 0:  # no gradient for the padding row, on whichever rank it is
        kept = write.call(aten.unsqueeze.default, write.call(aten.ne.Scalar, index, padding), -1)
        gradient = write.call(aten.mul.Tensor, gradient, kept)
    inside, row = _mine(write, index, rows)
    outside = write.call(aten.mul.Scalar, write.call(aten.logical_not.default, inside), rows)
    row = write.call(aten.add.Tensor, row, outside)
    result = write.call(aten.embedding_dense_backward.default, gradient, row, rows + 1, -1, by_count)
    return [write.call(aten.slice.Tensor, result, 0, 0, rows)]


@lowering
def largest(write: AxisBuilder, node: fx.Node, option: Option, tensors: list[fx.Node]) -> list[fx.Node]:
    """The largest of all ranks' elements."""
    return [write.reduce(write.call(node.target, *tensors), "max")]


@lowering
def log_softmax(write: AxisBuilder, node: fx.Node, option: Option, tensors: list[fx.Node]) -> list[fx.Node]:
    """``x - max - log(sum(exp(x - max)))`` with maximum and sum all-reduced."""
    (logits,) = tensors
    dim = node.args[1]
    if node.args[2]:  # half-precision input, single-precision output
        logits = write.call(aten._to_copy.default, logits, dtype=torch.float32)
    largest = write.reduce(write.call(aten.amax.default, logits, [dim], True), "max")
    shifted = write.call(aten.sub.Tensor, logits, largest)
    total = write.reduce(write.call(aten.sum.dim_IntList, write.call(aten.exp.default, shifted), [dim], True))
    return [write.call(aten.sub.Tensor, shifted, write.call(aten.log.default, total))]


@lowering
def log_softmax_backward(write: AxisBuilder, node: fx.Node, option: Option, tensors: list[fx.Node]) -> list[fx.Node]:
    """``gradient - exp(output) * sum(gradient)`` with the sum all-reduced."""
    gradient, output = tensors
    total = write.reduce(write.call(aten.sum.dim_IntList, gradient, [node.args[2]], True))
    spread = write.call(aten.mul.Tensor, write.call(aten.exp.default, output), total)
    return [write.converted(write.call(aten.sub.Tensor, gradient, spread), node.args[3])]


@lowering
def nll_loss(write: AxisBuilder, node: fx.Node, option: Option, tensors: list[fx.Node]) -> list[fx.Node]:
    """Minus the sum over the targets in this rank's classes, divided by the number of targets for a mean."""
    scores, target = tensors
    reduction, ignored = node.args[3], node.args[4]
    kept = write.call(aten.ne.Scalar, target, ignored)
    inside, column = _mine(write, target, scores.meta["val"].shape[1])
    inside = write.call(aten.logical_and.default, inside, kept)
    picked = write.call(aten.gather.default, scores, 1, write.call(aten.unsqueeze.default, column, 1))
    picked = write.call(aten.mul.Tensor, write.call(aten.squeeze.dim, picked, 1), inside)
    dtype = scores.meta["val"].dtype
    weight = write.call(aten.sum.default, write.call(aten._to_copy.default, kept, dtype=dtype))
    loss = write.call(aten.neg.default, write.call(aten.sum.default, picked))
    if reduction == 1:
        loss = write.call(aten.div.Tensor, loss, weight)
    return [loss, weight]


@lowering
def nll_loss_of_rows(write: AxisBuilder, node: fx.Node, option: Option, tensors: list[fx.Node]) -> list[fx.Node]:
    """The sum over this rank's targets, divided by the global number of targets for a mean."""
    reduction, ignored = node.args[3], node.args[4]
    local = write.call(aten.nll_loss_forward.default, *tensors, None, 2, ignored)
    scores, target = tensors
    kept = write.call(aten.ne.Scalar, target, ignored)
    kept = write.call(aten._to_copy.default, kept, dtype=scores.meta["val"].dtype)
    weight = write.reduce(write.call(aten.sum.default, kept))
    loss = write.call(operator.getitem, local, 0)
    return [write.call(aten.div.Tensor, loss, weight) if reduction == 1 else loss, weight]


@lowering
def nll_loss_backward(write: AxisBuilder, node: fx.Node, option: Option, tensors: list[fx.Node]) -> list[fx.Node]:
    """Minus the gradient at the targets that this rank has, divided by their number for a mean."""
    gradient, scores, target, weight = tensors
    reduction, ignored = node.args[4], node.args[5]
    kept = write.call(aten.ne.Scalar, target, ignored)
    inside, column = _mine(write, target, scores.meta["val"].shape[1])
    inside = write.call(aten.logical_and.default, inside, kept)
    scale = write.call(aten.neg.default, gradient)
    if reduction == 1:
        scale = write.call(aten.div.Tensor, scale, weight)
    at = write.call(aten.unsqueeze.default, write.call(aten.mul.Tensor, inside, scale), 1)
    zeros = write.call(aten.zeros_like.default, scores)
    return [write.call(aten.scatter.src, zeros, 1, write.call(aten.unsqueeze.default, column, 1), at)]


@lowering
def convolution_backward(write: AxisBuilder, node: fx.Node, option: Option, tensors: list[fx.Node]) -> list[Any]:
    """The gradients for this rank's output channels, with the bias size set to match."""
    gradient, images, weight = tensors
    sizes, *rest = node.args[3:]
    sizes = None if sizes is None else [size // write.parts for size in sizes]
    outs = write.call(node.target, gradient, images, weight, sizes, *rest)
    return [p and write.call(operator.getitem, outs, i) for i, p in enumerate(option.results)]


def _ones(write: AxisBuilder, node: fx.Node, shard: fx.Node) -> fx.Node:
    """A tensor for which to draw random numbers: in memory order, so with the strides of the whole operand."""
    value, whole = shard.meta["val"], operands(node)[0].meta["val"]
    order = sorted(range(whole.dim()), key=whole.stride, reverse=True)
    sizes = [whole.shape[dim] for dim in order]
    ones = write.call(aten.full.default, sizes, 1, dtype=value.dtype, device=value.device)
    return write.call(aten.permute.default, ones, [order.index(dim) for dim in range(whole.dim())])


@lowering
def drawn(write: AxisBuilder, node: fx.Node, option: Option, tensors: list[fx.Node]) -> list[fx.Node]:
    """This rank's shard of what is drawn for the whole tensor, of whose operand only the shape is read."""
    assert option.results[0] is not None
    made = write.call(node.target, _ones(write, node, tensors[0]), *node.args[1:], **node.kwargs)
    return [write.part(made, option.results[0])]


@lowering
def dropout(write: AxisBuilder, node: fx.Node, option: Option, tensors: list[fx.Node]) -> list[fx.Node]:
    """This rank's shard of a mask drawn for the whole tensor: every rank of the axis draws the same."""
    (tensor,), (_, probability, training) = tensors, node.args
    assert option.results[0] is not None
    made = write.call(aten.native_dropout.default, _ones(write, node, tensor), probability, training)
    mask = write.part(write.call(operator.getitem, made, 1), option.results[0])
    scale: Any = 0.0 if probability == 1 else 1.0 / (1.0 - probability)
    kept = write.call(aten.mul.Tensor, tensor, mask)
    return [write.call(aten.mul.Scalar, kept, scale if training else 1.0), mask]
