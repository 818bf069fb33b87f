"""Values of a graph that depend on lengths alone, found without computing the squares of them.

A mask of a million million scores is known from few numbers: the same along most dimensions, and along two of them, of
queries and keys, it depends on their difference alone (a Toeplitz matrix), since it was made by comparing positions.
:class:`Known` holds such values, and the operations that make masks are computed on what it holds. All other operations
are computed as they are, on values of up to :data:`LARGEST` elements.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from shardgraph.torch_api import FakeTensor, OpOverload, pytree

LARGEST = 2**22
"""Elements of the largest value that is computed whole."""

aten = torch.ops.aten


@dataclass(frozen=True)
class Known:
    """A known value of a ``shape``.

    ``held`` has as many dimensions, of size 1 where all values are the same. Where ``diagonals`` are given, two
    dimensions counted from the last one, ``(row, column)``, it has size 1 along rows, and along columns an element for
    each difference ``column - row``, of ``1 - rows`` to ``columns - 1``.
    """

    held: Tensor
    shape: tuple[int, ...]
    diagonals: tuple[int, int] | None = None

    def whole(self) -> Tensor | None:
        """All of it; None if that is too large."""
        if torch.Size(self.shape).numel() > LARGEST:
            return None
        if self.diagonals is None:
            return self.held.expand(self.shape)
        row, column = self.diagonals
        rows, columns = self.shape[row], self.shape[column]
        differences = torch.arange(columns, device="cpu") - torch.arange(rows, device="cpu")[:, None] + rows - 1
        by_difference = self.held.movedim((row, column), (-2, -1)).squeeze(-2)
        return by_difference[..., differences].movedim((-2, -1), (row, column)).expand(self.shape)


def known(node: fx.Node, values: dict[fx.Node, Known | None]) -> Known | None:
    """The value of ``node``, on the CPU; None if it depends on inputs, parameters or random numbers, or is too large.

    ``values`` are those that are known of other nodes, and are added to.
    """
    for each in _ancestors(node, values):
        try:
            values[each] = _value(each, values)
        except RuntimeError:  # a CPU has no kernel for it
            values[each] = None
    return values[node]


def _ancestors(node: fx.Node, values: dict[fx.Node, Known | None]) -> list[fx.Node]:
    """``node`` after all it depends on, without what is in ``values``."""
    found: dict[fx.Node, None] = {}
    pending = [node]
    while pending:
        last = pending[-1]
        needed = [] if last.target in _FILLED else last.all_input_nodes
        missing = [each for each in needed if each not in values and each not in found]
        if last in values or last in found or not missing:
            pending.pop()
            if last not in values:
                found[last] = None
        else:
            pending += missing
    return list(found)


def _value(node: fx.Node, values: dict[fx.Node, Known | None]) -> Known | None:
    result = node.meta.get("val")
    if node.op == "get_attr":
        constant = operator.attrgetter(str(node.target))(node.graph.owning_module)
        plain = isinstance(constant, Tensor) and not isinstance(constant, FakeTensor) and constant.numel() <= LARGEST
        return Known(constant.detach().cpu(), tuple(constant.shape)) if plain else None
    target: Any = node.target
    if not isinstance(target, OpOverload) or not isinstance(result, Tensor):
        return None
    shape = tuple(result.shape)
    if target in _FILLED:
        return Known(torch.full([1] * len(shape), _FILLED[target](node), dtype=result.dtype, device="cpu"), shape)
    operands = [values[each] for each in node.all_input_nodes]
    if None in operands or target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags:
        return None
    rule = _RULES.get(target.overloadpacket, _elementwise if torch.Tag.pointwise in target.tags else None)
    made = rule(node, values, shape) if rule is not None else None
    return made or _computed(node, values, shape)


def _computed(node: fx.Node, values: dict[fx.Node, Known | None], shape: tuple[int, ...]) -> Known | None:
    """The operation on whole operands."""
    wholes = {each: values[each].whole() for each in node.all_input_nodes}
    small = torch.Size(shape).numel() <= LARGEST and all(each is not None for each in wholes.values())
    return Known(_narrowed(_call(node, wholes)), shape) if small else None


def _narrowed(value: Tensor) -> Tensor:
    """Of size 1 along the dimensions along which all values are the same."""
    for axis, size in enumerate(value.shape):
        first = value.narrow(axis, 0, min(size, 1))
        value = first if size > 1 and bool((value == first).all()) else value
    return value


def _call(node: fx.Node, operands: dict[fx.Node, Any]) -> Tensor:
    options = {name: value for name, value in node.kwargs.items() if name != "pin_memory"}
    args, kwargs = fx.map_arg((node.args, options), operands.__getitem__)
    args, kwargs = pytree.tree_map_only(torch.device, lambda _: torch.device("cpu"), (tuple(args), dict(kwargs)))
    made: Tensor = node.target(*args, **kwargs)
    return made


_Rule = Callable[[fx.Node, dict[fx.Node, Known | None], tuple[int, ...]], Known | None]


def _elementwise(node: fx.Node, values: dict[fx.Node, Known | None], shape: tuple[int, ...]) -> Known | None:
    """On what is held, if all operands that have diagonals have them along the same dimensions, and no other varies
    along these."""
    operands = {each: values[each] for each in node.all_input_nodes}
    if node.target in _DIFFERENCES and (made := _difference(node, values, shape)) is not None:
        return made
    diagonals = {each.diagonals for each in operands.values() if each is not None and each.diagonals}
    if len(diagonals) > 1:
        return None
    along = next(iter(diagonals), None)
    if along and not all(each is not None and _fits(each, along, shape) for each in operands.values()):
        return None
    sizes = torch.broadcast_shapes(*(each.held.shape for each in operands.values() if each is not None))
    if sizes.numel() > LARGEST:
        return None
    held = _call(node, {each: value.held for each, value in operands.items() if value is not None})
    return Known(held.reshape([1] * (len(shape) - held.dim()) + list(held.shape)), shape, along)


def _fits(value: Known, along: Sequence[int], shape: tuple[int, ...]) -> bool:
    """Whether a value of ``shape`` can depend on it and keep its diagonals, or be given those of another operand."""
    if value.diagonals:
        return all(value.shape[axis] == shape[axis] for axis in along)
    return not any(_varies(value, axis) for axis in along)


def _varies(value: Known, axis: int) -> bool:
    return -axis <= value.held.dim() and value.held.shape[axis] > 1


def _difference(node: fx.Node, values: dict[fx.Node, Known | None], shape: tuple[int, ...]) -> Known | None:
    """A function of ``x - y``, of numbers ``x`` that follow one another along a dimension, and ``y`` along another."""
    if node.kwargs or len(node.args) != 2 or not all(isinstance(each, fx.Node) for each in node.args):
        return None
    first, second = (_counted(values[each]) for each in node.args)
    if first is None or second is None or first[0] == second[0]:
        return None
    (axis, start), (other, other_start) = first, second
    row, column = sorted((axis, other))
    difference = torch.arange(1 - shape[row], shape[column], device="cpu")
    x = start - other_start + (difference if axis == column else -difference)
    held = node.target(x, torch.zeros_like(x))
    sizes = [1] * len(shape)
    sizes[column] = held.numel()
    return Known(held.reshape(sizes), shape, (row, column))


def _counted(value: Known | None) -> tuple[int, int] | None:
    """The one dimension, counted from the last, along which whole numbers follow one another, and the first of them."""
    if value is None or value.diagonals or value.held.is_floating_point() or value.held.dtype is torch.bool:
        return None
    along = [axis for axis in range(-value.held.dim(), 0) if value.held.shape[axis] > 1]
    numbers = value.held.flatten()
    counted = len(along) == 1 and bool((numbers.diff() == 1).all())
    return (along[0], int(numbers[0])) if counted else None


def _expand(node: fx.Node, values: dict[fx.Node, Known | None], shape: tuple[int, ...]) -> Known | None:
    (value,) = (values[each] for each in node.all_input_nodes)
    assert value is not None
    held = value.held.reshape([1] * (len(shape) - len(value.shape)) + [*value.held.shape])
    return Known(held, shape, value.diagonals) if _fits(value, value.diagonals or (), shape) else None


def _view(node: fx.Node, values: dict[fx.Node, Known | None], shape: tuple[int, ...]) -> Known | None:
    """A view that adds or drops dimensions of size 1."""
    (value,) = (values[each] for each in node.all_input_nodes)
    assert value is not None
    old, new = ([axis for axis in range(-len(sizes), 0) if sizes[axis] > 1] for sizes in (value.shape, shape))
    if [value.shape[axis] for axis in old] != [shape[axis] for axis in new]:
        return None
    moved, sizes = dict(zip(old, new, strict=True)), [1] * len(shape)
    for before, after in moved.items():
        sizes[after] = value.held.shape[before]
    if value.diagonals and not all(axis in moved for axis in value.diagonals):
        return None
    diagonals = (moved[value.diagonals[0]], moved[value.diagonals[1]]) if value.diagonals else None
    return Known(value.held.reshape(sizes), shape, diagonals)


def _slice(node: fx.Node, values: dict[fx.Node, Known | None], shape: tuple[int, ...]) -> Known | None:
    """A slice along a dimension that does not vary, or of all of it."""
    (value,) = (values[each] for each in node.all_input_nodes)
    assert value is not None
    if value.diagonals is None:
        cut = [axis for axis in range(-len(shape), 0) if shape[axis] != value.shape[axis]]
        return None if any(_varies(value, axis) for axis in cut) else Known(value.held, shape)
    return Known(value.held, shape, value.diagonals) if _fits(value, value.diagonals, shape) else None


def _triangle(node: fx.Node, values: dict[fx.Node, Known | None], shape: tuple[int, ...]) -> Known | None:
    """What is above or below a diagonal of the last two dimensions, and 0 elsewhere."""
    (value,) = (values[each] for each in node.all_input_nodes)
    assert value is not None
    if value.diagonals not in (None, (-2, -1)) or (
        value.diagonals is None and (_varies(value, -2) or _varies(value, -1))
    ):
        return None
    offset = node.args[1] if len(node.args) > 1 else node.kwargs.get("diagonal", 0)
    difference = torch.arange(1 - shape[-2], shape[-1], device="cpu")
    kept = difference >= offset if node.target is aten.triu.default else difference <= offset
    return Known(torch.where(kept, value.held, torch.zeros((), dtype=value.held.dtype, device="cpu")), shape, (-2, -1))


def _argument(position: int, name: str) -> Callable[[fx.Node], Any]:
    return lambda node: node.args[position] if len(node.args) > position else node.kwargs[name]


def _number(value: float) -> Callable[[fx.Node], float]:
    return lambda _: value


_FILLED: dict[Any, Callable[[fx.Node], Any]] = {
    aten.full.default: _argument(1, "fill_value"),
    aten.full_like.default: _argument(1, "fill_value"),
    aten.new_full.default: _argument(2, "fill_value"),
    aten.scalar_tensor.default: _argument(0, "s"),
    **dict.fromkeys((aten.ones.default, aten.ones_like.default, aten.new_ones.default), _number(1)),
    **dict.fromkeys((aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default), _number(0)),
}
"""Operations that give one number for all elements, whatever the operands' values are."""

_DIFFERENCES: Sequence[Any] = (
    aten.sub.Tensor,
    *(getattr(aten, name).Tensor for name in ("le", "lt", "ge", "gt", "eq", "ne")),
)
"""Functions of the difference of two whole numbers."""

_VIEWS = (aten.view, aten._unsafe_view, aten.reshape, aten.unsqueeze, aten.squeeze)
_AS_THEY_ARE = (aten._to_copy, aten.clone, aten.detach, aten.alias, aten.lift_fresh_copy, aten.where, aten.masked_fill)

_RULES: dict[Any, _Rule] = {
    **dict.fromkeys(_VIEWS, _view),
    **dict.fromkeys(_AS_THEY_ARE, _elementwise),
    **dict.fromkeys((aten.triu, aten.tril), _triangle),
    aten.expand: _expand,
    aten.slice: _slice,
}
