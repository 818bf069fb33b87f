"""Row-wise behaviour of each operation: which operands it reads by row, and what it returns for a chunk of rows.

Rows are tokens. They are the leading dimensions of a value, one or several (``[batch, positions, vocabulary]`` and
``[batch * positions, vocabulary]`` have the same rows), or, if transposed for a product, its last one. In a chunk's
graph they are always one dimension. A rule adds one kind of operation; an operation without a rule is not chunked.
"""

from __future__ import annotations

import math
import operator
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


@dataclass(frozen=True)
class Form:
    """How an operation is computed for a chunk of rows.

    ``takes`` and ``gives`` are the layouts of its operands and results. ``args`` returns its arguments for a number of
    rows, with the original operands; ``target`` is None if the operation disappears. ``mean`` means that the first of
    its sums is to be divided by the second.
    """

    takes: tuple[int, ...]
    gives: tuple[int, ...]
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

    def form(self, takes: Sequence[int], *gives: int, args: Callable[[int], tuple[Any, ...]] | None = None) -> Form:
        """The operation itself, with its own arguments or ``args``."""
        return Form(tuple(takes), gives, self.node.target, args or (lambda rows: self.node.args))


Rule = Callable[[Operation], Form | None]
RULES: dict[Any, Rule] = {}


def form_of(node: fx.Node, rows: int, known: Sequence[int | None]) -> Form | None:
    """How ``node`` is computed for a chunk of ``rows``, given ``known`` layouts of operands; None if it cannot be."""
    operation = Operation(node, rows, tuple(known))
    rule = RULES.get(node.target) or (pointwise if _is_pointwise(node) else None)
    found = None if rule is None else rule(operation)
    if found is None or any(before not in (None, take) for before, take in zip(known, found.takes, strict=True)):
        return None
    return found


def leading(shape: Sequence[int], rows: int) -> int | None:
    """The number of leading dimensions with ``rows`` elements together; None if there is none."""
    return next((count for count in range(1, len(shape) + 1) if math.prod(shape[:count]) == rows), None)


def rule(*targets: Any) -> Callable[[Rule], Rule]:
    """Register a rule for operators."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(targets, function))
        return function

    return register


def _is_pointwise(node: fx.Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


# -- elementwise -------------------------------------------------------------------------------------------


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
    takes = [] if count is None else [_aligned(each, shape, count) for each in operation.shapes]
    if count is None or None in takes:
        return None
    return operation.form([take for take in takes if take is not None], count)


def _aligned(shape: torch.Size, result: torch.Size, count: int) -> int | None:
    """The layout of an operand of ``shape``, if rows are the first ``count`` dimensions of the result."""
    if len(shape) == len(result) and shape[:count] == result[:count]:
        return count
    apart = len(result) - len(shape)
    same_for_all = all(size == 1 for size in shape[: max(0, count - apart)])
    return WHOLE if same_for_all and len(shape) <= len(result) - count + 1 else None


@rule(aten.expand.default, aten.new_zeros.default, aten.new_ones.default)
def sized(operation: Operation) -> Form | None:
    """Expansions and constants, with a size argument."""
    found = pointwise(operation)
    if found is None or operation.node.target is aten.expand.default:
        return found and _in_size(operation, found)
    return _in_size(operation, replace(found, takes=tuple(known or WHOLE for known in operation.known)))


@rule(aten.full.default, aten.zeros.default, aten.ones.default)
def constant(operation: Operation) -> Form | None:
    """Equal elements; the size is the first argument."""
    count = leading(operation.result, operation.rows)
    if count is None:
        return None
    rest = list(operation.result[count:])
    return operation.form([], count, args=lambda rows: ([rows, *rest], *operation.node.args[1:]))


def _in_size(operation: Operation, form: Form) -> Form:
    first, rest = operation.node.args[0], list(operation.result[form.gives[0] :])
    return replace(form, args=lambda rows: (first, [rows, *rest], *operation.node.args[2:]))


# -- layout ------------------------------------------------------------------------------------------------


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
    taken, given = leading(before, rows), leading(shape, rows)
    if taken is None or given is None:
        return None
    rest = list(shape[given:])
    if rest == list(before[taken:]):
        return Form((taken,), (given,), None, lambda rows: ())
    return Form((taken,), (given,), aten.view.default, lambda rows: (operation.node.args[0], [rows, *rest]))


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


# -- along the other dimensions ----------------------------------------------------------------------------

_DIMENSION = {
    aten._log_softmax.default: 1,
    aten._softmax.default: 1,
    aten._log_softmax_backward_data.default: 2,
    aten._softmax_backward_data.default: 2,
    aten.gather.default: 1,
    aten.scatter.src: 1,
    aten.scatter.value: 1,
    aten.scatter_add.default: 1,
    aten.slice.Tensor: 1,
    aten.amax.default: 1,
    aten.mean.dim: 1,
    aten.sum.dim_IntList: 1,
    aten.logsumexp.default: 1,
    aten.argmax.default: 1,
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
    given = operation.node.args[position]
    args = list(operation.node.args)
    args[position] = dims if isinstance(given, (list, tuple)) else dims[0]
    return operation.form([count] * len(operation.shapes), count, args=lambda rows: tuple(args))


def _from_the_end(operation: Operation, position: int) -> list[int]:
    """The dimensions as negative numbers: the same in a chunk, whose rows are one dimension."""
    args, size = operation.node.args, len(operation.shapes[0])
    given = args[position] if len(args) > position else None
    dims = list(given) if isinstance(given, (list, tuple)) else [given]
    return [dim % size - size for dim in dims if isinstance(dim, int)]


@rule(aten.sum.dim_IntList, aten.sum.default)
def sum_over(operation: Operation) -> Form | None:
    """Over dimensions other than the rows, over the rows, or over all."""
    if operation.node.target is aten.sum.dim_IntList:
        if found := along_others(operation):
            return found
        if operation.known[0] != 1 or _from_the_end(operation, 1) != [-len(operation.shapes[0])]:
            return None
    count = operation.known[0] or WHOLE
    return operation.form([count], SUMMED) if count > 0 else None


# -- products ----------------------------------------------------------------------------------------------


@rule(aten.mm.default, aten.addmm.default)
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


# -- the loss ----------------------------------------------------------------------------------------------

_NONE, _MEAN, _SUM = 0, 1, 2


@rule(aten.nll_loss_forward.default)
def nll_loss(operation: Operation) -> Form | None:
    """A loss per row, or their sum, which for a mean is divided by the sum of the rows' weights."""
    scores, target, weight, reduction, ignored = operation.node.args
    if len(operation.shapes[0]) != 2:
        return None
    wanted = _SUM if reduction == _MEAN else reduction
    takes = [1, 1, *[WHOLE] * (weight is not None)]
    found = operation.form(
        takes,
        1 if reduction == _NONE else SUMMED,
        SUMMED,
        args=lambda rows: (scores, target, weight, wanted, ignored),
    )
    return replace(found, mean=reduction == _MEAN)


@rule(aten.nll_loss_backward.default)
def nll_loss_backward(operation: Operation) -> Form | None:
    """The gradient of the scores by row; for a mean it needs the weight of all rows, which is known by then."""
    weight, reduction = operation.node.args[3:5]
    if len(operation.shapes[1]) != 2:
        return None
    by_row = reduction == _NONE
    return operation.form([1 if by_row else WHOLE, 1, 1, *[WHOLE] * (weight is not None), WHOLE], 1)


def is_number(node: fx.Node) -> bool:
    """Whether the node returns a number and not a tensor, such as the position of a rank's first row."""
    return node.target is not operator.getitem and isinstance(node.meta.get("val"), (int, float))
