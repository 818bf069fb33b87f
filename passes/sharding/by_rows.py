"""Row-wise behaviour of each operation: which operands it reads by row, and what it returns for a chunk of rows.

Rows are tokens. They are the leading dimensions of a value, one or several (``[batch, positions, vocabulary]`` and
``[batch * positions, vocabulary]`` have the same rows), or, if transposed for a product, its last one. In a chunk's
graph they are always one dimension. A rule adds one kind of operation; an operation without a rule is not chunked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from shardgraph import ir
from shardgraph.passes.sharding.options import operands, results

aten = torch.ops.aten

WHOLE, TURNED, SUMMED = 0, -1, -2
"""Layouts other than a count of leading row dimensions: no rows, a matrix whose rows are the last dimension, or a
sum over rows."""

PRODUCTS = (aten.mm.default, aten.addmm.default)


@dataclass(frozen=True)
class Form:
    """How an operation is computed for a chunk of rows.

    ``inputs`` and ``results`` are layouts of its operands and results. ``args`` returns its arguments for a number of
    rows, with the original operands; ``target`` is None if the operation disappears. ``mean`` means that the first of
    its sums is to be divided by the second.
    """

    inputs: tuple[int, ...]
    results: tuple[int, ...]
    target: Any
    args: Callable[[int], tuple[Any, ...]]
    mean: bool = False


@dataclass(frozen=True)
class Operation:
    """A rule's view of a node: the number of rows, and the layouts of operands already chunked (None for others)."""

    node: fx.Node
    rows: int
    known: tuple[int | None, ...]

    @property
    def shapes(self) -> list[torch.Size]:
        """The shapes of the operands."""
        return [operand.meta["val"].shape for operand in operands(self.node)]

    @property
    def result(self) -> torch.Size:
        """The shape of the first result."""
        return results(self.node)[0].shape

    def form(self, inputs: Sequence[int], *results: int, args: Callable[[int], tuple[Any, ...]] | None = None) -> Form:
        """The operation itself, with its own arguments or ``args``."""
        return Form(tuple(inputs), results, self.node.target, args or (lambda rows: self.node.args))


Rule = Callable[[Operation], Form | None]
RULES: dict[Any, Rule] = {}


def form_of(node: fx.Node, rows: int, known: Sequence[int | None]) -> Form | None:
    """How ``node`` is computed for a chunk of ``rows``, given ``known`` layouts of operands; None if it cannot be."""
    elementwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    rule = RULES.get(node.target) or (pointwise if elementwise else None)
    form = None if rule is None else rule(Operation(node, rows, tuple(known)))
    fits = form and all(layout in (None, take) for layout, take in zip(known, form.inputs, strict=True))
    return form if fits else None


def leading(shape: Sequence[int], rows: int) -> int | None:
    """The number of leading dimensions with ``rows`` elements together; None if there is none."""
    return next((count for count in range(1, len(shape) + 1) if math.prod(shape[:count]) == rows), None)


def rule(*targets: Any) -> Callable[[Rule], Rule]:
    """Register a rule for operators."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(targets, function))
        return function

    return register


@rule(
    aten._to_copy.default,
    aten.clone.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    ir.ALL_REDUCE,
    ir.WAIT,
)
def pointwise(operation: Operation) -> Form | None:
    """Elementwise, with broadcast operands."""
    shape = operation.result
    count = leading(shape, operation.rows)
    if count is None:
        return None
    inputs = [take for each in operation.shapes if (take := _aligned(each, shape, count)) is not None]
    return operation.form(inputs, count) if len(inputs) == len(operation.shapes) else None


def _aligned(shape: torch.Size, result: torch.Size, count: int) -> int | None:
    """The layout of an operand of ``shape``, if rows are the first ``count`` dimensions of the result."""
    if len(shape) == len(result) and shape[:count] == result[:count]:
        return count
    missing = len(result) - len(shape)
    same_for_all = all(size == 1 for size in shape[: max(0, count - missing)])
    return WHOLE if same_for_all and missing >= count - 1 else None


@rule(aten.expand.default, aten.new_zeros.default, aten.new_ones.default)
def sized(operation: Operation) -> Form | None:
    """Expansions and constants, with a size argument."""
    form, node = pointwise(operation), operation.node
    if form is None:
        return None
    inputs = form.inputs if node.target is aten.expand.default else tuple(known or WHOLE for known in operation.known)
    rest = list(operation.result[form.results[0] :])
    return replace(form, inputs=inputs, args=lambda rows: (node.args[0], [rows, *rest], *node.args[2:]))


@rule(aten.full.default, aten.zeros.default, aten.ones.default)
def constant(operation: Operation) -> Form | None:
    """Equal elements; the size is the first argument."""
    count = leading(operation.result, operation.rows)
    if count is None:
        return None
    rest = list(operation.result[count:])
    return operation.form([], count, args=lambda rows: ([rows, *rest], *operation.node.args[1:]))


@rule(
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.alias.default,
    aten.detach.default,
)
def view(operation: Operation) -> Form | None:
    """Views: nothing to do if only the row dimensions change."""
    (before,), shape, rows = operation.shapes, operation.result, operation.rows
    take, give = leading(before, rows), leading(shape, rows)
    if take is None or give is None:
        return None
    rest = list(shape[give:])
    if rest == list(before[take:]):
        return Form((take,), (give,), None, lambda rows: ())
    return Form((take,), (give,), aten.view.default, lambda rows: (operation.node.args[0], [rows, *rest]))


@rule(aten.t.default, aten.transpose.int, aten.permute.default)
def turn(operation: Operation) -> Form | None:
    """A transposed matrix, as a product that sums over rows takes it."""
    (shape,) = operation.shapes
    if len(shape) != 2 or operation.result != shape[::-1]:
        return None
    turned = operation.known[0] == TURNED
    if shape[1 if turned else 0] != operation.rows:
        return None
    return operation.form([TURNED if turned else 1], 1 if turned else TURNED)


_DIMENSION = {
    **dict.fromkeys((aten._log_softmax.default, aten._softmax.default), 1),
    **dict.fromkeys((aten._log_softmax_backward_data.default, aten._softmax_backward_data.default), 2),
    **dict.fromkeys((aten.gather.default, aten.scatter.src, aten.scatter.value, aten.scatter_add.default), 1),
    **dict.fromkeys((aten.amax.default, aten.mean.dim, aten.sum.dim_IntList, aten.logsumexp.default), 1),
    **dict.fromkeys((aten.slice.Tensor, aten.argmax.default), 1),
}
"""Operators along one dimension or several, with the position of the argument that names it."""


@rule(*_DIMENSION)
def along_others(operation: Operation) -> Form | None:
    """Rows are independent if the operation is along other dimensions."""
    shape, position = operation.shapes[0], _DIMENSION[operation.node.target]
    count = leading(shape, operation.rows)
    dims = _from_the_end(operation, position)
    if count is None or not dims or min(dims) < count - len(shape):
        return None
    if any(leading(each, operation.rows) != count for each in (*operation.shapes, operation.result)):
        return None
    args = list(operation.node.args)
    args[position] = dims if isinstance(args[position], (list, tuple)) else dims[0]
    return operation.form([count] * len(operation.shapes), count, args=lambda rows: tuple(args))


def _from_the_end(operation: Operation, position: int) -> list[int]:
    """The dimensions as negative numbers: the same in a chunk, whose rows are one dimension."""
    args, size = operation.node.args, len(operation.shapes[0])
    argument = args[position] if len(args) > position else None
    dims = argument if isinstance(argument, (list, tuple)) else [argument]
    return [dim % size - size for dim in dims if isinstance(dim, int)]


@rule(aten.sum.dim_IntList, aten.sum.default)
def sum_over(operation: Operation) -> Form | None:
    """Over dimensions other than the rows, over the rows, or over all."""
    if operation.node.target is aten.sum.dim_IntList:
        if form := along_others(operation):
            return form
        if operation.known[0] != 1 or _from_the_end(operation, 1) != [-len(operation.shapes[0])]:
            return None
    count = operation.known[0] or WHOLE
    return operation.form([count], SUMMED) if count > 0 else None


@rule(*PRODUCTS)
def product(operation: Operation) -> Form | None:
    """Rows times a matrix are rows; two matrices multiplied along their rows give a sum over rows."""
    rows, bias = operation.rows, len(operation.shapes) - 2
    (left, right), (of_left, of_right) = operation.shapes[-2:], operation.known[-2:]
    if of_left == TURNED or of_right == 1:
        summed = left[1] == rows and right[0] == rows and not bias
        return operation.form([TURNED, 1], SUMMED) if summed else None
    if left[0] != rows or of_right is not None or any(operation.known[:bias]):
        return None
    if bias and leading(operation.shapes[0], rows) and len(operation.shapes[0]) > 1:
        return None
    return operation.form([*[WHOLE] * bias, 1, WHOLE], 1)


_NONE, _MEAN, _SUM = 0, 1, 2


@rule(aten.nll_loss_forward.default)
def nll_loss(operation: Operation) -> Form | None:
    """A loss per row, or their sum, which for a mean is divided by the sum of the rows' weights."""
    scores, target, weight, reduction, ignored = operation.node.args
    if len(operation.shapes[0]) != 2:
        return None
    of_chunk = _SUM if reduction == _MEAN else reduction
    inputs = [1, 1, *[WHOLE] * (weight is not None)]
    args = (scores, target, weight, of_chunk, ignored)
    form = operation.form(inputs, 1 if reduction == _NONE else SUMMED, SUMMED, args=lambda rows: args)
    return replace(form, mean=reduction == _MEAN)


@rule(aten.nll_loss_backward.default)
def nll_loss_backward(operation: Operation) -> Form | None:
    """The gradient of the scores by row; for a mean it needs the weight of all rows, which is known by then."""
    weight, reduction = operation.node.args[3:5]
    if len(operation.shapes[1]) != 2:
        return None
    by_row = reduction == _NONE
    return operation.form([1 if by_row else WHOLE, 1, 1, *[WHOLE] * (weight is not None), WHOLE], 1)
