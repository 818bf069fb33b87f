"""Operations whose results have shapes that depend on values, in forms that are told the shape.

The tracer has a symbol for such a size, and a program has none. Where the values are known while a model is traced, a
node of its graph becomes one that computes the same, given the number.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.nn import functional

_MAKERS = (torch.arange, torch.zeros, torch.ones, torch.empty, torch.full)
_OF_NUMBERS = {
    *(function.__name__ for function in _MAKERS),
    *("new_zeros", "new_ones", "new_empty", "new_full"),
    *("view", "reshape", "expand", "repeat", "tile", "unflatten", "narrow", "pad"),
    *("split", "split_with_sizes", "tensor_split", "chunk"),
}
"""Functions and methods whose arguments are numbers, but for the first one of all but the makers."""

Ask = Callable[[Any], Any]
"""The number that a node of the tracer's graph computes; None if it is not known."""


def tell_shapes(node: fx.Node, ask: Ask, fake: Ask) -> None:
    """Have a new ``node``, the last one of the tracer's graph, told the numbers on which its shape depends, if ``ask``
    knows them. ``fake`` gives the fake tensor of a node."""
    if node.op not in ("call_function", "call_method") or not _is_torchs(node.target):
        return
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    with node.graph.inserting_before(node):
        if name == "repeat_interleave":
            _tell_repeats(node, ask, fake)
        elif name in ("nonzero", "argwhere", "where"):
            _tell_nonzero(node, name, ask)
        elif name == "masked_select":
            _tell_selection(node, ask, fake)
        elif name in ("unique", "unique_consecutive"):
            _tell_unique(node, name, ask, fake)
        elif name in ("expand_as", "view_as", "reshape_as") and len(node.args) == 2:
            # Of a value that is computed from inputs alone this is too, whatever the other one is computed from.
            value, other = node.args
            node.op, node.target = "call_method", name.removesuffix("_as")
            node.args = (value, *fake(other).shape)
        elif node.target in (operator.getitem, operator.setitem) or name in ("__getitem__", "__setitem__"):
            _tell_masks(node, ask, fake)
        elif name in _OF_NUMBERS:
            _tell_numbers(node, ask, fake)


def _is_torchs(target: Any) -> bool:
    """Whether it is a method of tensors or a function of torch's, not one of the model's that has its name."""
    module = getattr(target, "__module__", None) or "torch"
    return isinstance(target, str) or module.partition(".")[0] in ("torch", "_operator")


def _tell_repeats(node: fx.Node, ask: Ask, fake: Ask) -> None:
    given: dict[str, Any] = {**dict(zip(("input", "repeats", "dim"), node.args, strict=False)), **node.kwargs}
    repeats = given.get("repeats", given.get("input"))
    if given.get("output_size") is not None or not isinstance(repeats, fx.Node):
        return
    total = ask(node.graph.call_function(torch.sum, (repeats,)))
    if total is not None and "repeats" in given and fake(repeats).numel() == 1:
        of, dim = fake(given["input"]), given.get("dim")
        total *= of.numel() if dim is None else of.shape[dim]
    if total is not None:
        node.kwargs = {**node.kwargs, "output_size": total}


def _tell_nonzero(node: fx.Node, name: str, ask: Ask) -> None:
    if len(node.args) != 1 or not {*node.kwargs} <= {"as_tuple"}:
        return
    as_tuple = name == "where" or node.kwargs.get("as_tuple", False)
    if (places := _places(node.graph, node.args[0], ask)) is not None:
        node.op, node.kwargs = "call_function", {}
        node.target, node.args = (torch.unbind, (places, 1)) if as_tuple else (torch.clone, (places,))


def _places(graph: fx.Graph, mask: Any, ask: Ask) -> fx.Node | None:
    """Where a tensor is not zero, one row of numbers each; None if it is not known how many there are."""
    count = ask(graph.call_function(torch.count_nonzero, (mask,)))
    return None if count is None else graph.call_function(torch.nonzero_static, (mask,), {"size": count})


def _index(mask: fx.Node, dims: int, ask: Ask) -> list[fx.Node] | None:
    """The index of what a mask of so many dimensions chooses, along each of them; None if it is not known how long."""
    function = mask.graph.call_function
    if (places := _places(mask.graph, mask, ask)) is None:
        return None
    unbound = function(torch.unbind, (places, 1))
    return [function(operator.getitem, (unbound, axis)) for axis in range(dims)]


def _tell_selection(node: fx.Node, ask: Ask, fake: Ask) -> None:
    given: dict[str, Any] = {**dict(zip(("input", "mask"), node.args, strict=False)), **node.kwargs}
    shape = torch.broadcast_shapes(*(fake(given[name]).shape for name in ("input", "mask")))
    whole, mask = (node.graph.call_function(torch.broadcast_to, (given[name], shape)) for name in ("input", "mask"))
    if (index := _index(mask, len(shape), ask)) is not None:
        node.op, node.target, node.args, node.kwargs = "call_function", operator.getitem, (whole, tuple(index)), {}


def _tell_unique(node: fx.Node, name: str, ask: Ask, fake: Ask) -> None:
    """Values without repetitions, alone, are the first ones of those that follow each other."""
    alone = len(node.args) == 1 and not any(node.kwargs[each] for each in node.kwargs if each != "sorted")
    if not alone or not (value := fake(node.args[0])).numel():
        return
    function = node.graph.call_function
    flat = function(torch.flatten, node.args)
    if name == "unique":
        flat = function(operator.getitem, (function(torch.sort, (flat,)), 0))
    later, earlier = (function(operator.getitem, (flat, part)) for part in (slice(1, None), slice(None, -1)))
    first = function(torch.ones, (1,), {"dtype": torch.bool, "device": value.device})
    begins = function(torch.cat, ([first, function(torch.ne, (later, earlier))],))
    if (places := _places(node.graph, begins, ask)) is not None:
        node.op, node.target, node.kwargs = "call_function", operator.getitem, {}
        node.args = (flat, function(operator.getitem, (places, (slice(None), 0))))


def _tell_masks(node: fx.Node, ask: Ask, fake: Ask) -> None:
    """Masks in an index become the numbers of what they choose, where there is a result or gradient of as many rows: a
    constant is written without, and one value for all as a choice."""
    whole, index, *written = node.args
    for value in (_tensor(each, fake) for each in written):
        each_its_own = isinstance(index, tuple) or value.dim() > fake(whole).dim() - _tensor(index, fake).dim()
        if not (value.requires_grad and each_its_own):
            return
    told: list[Any] = []
    parts: Any = index if isinstance(index, tuple) else (index,)
    for each in parts:
        mask = _tensor(each, fake)
        if mask.dtype is not torch.bool or not mask.dim():
            told.append(each)
            continue
        if (index_of_mask := _index(each, mask.dim(), ask)) is None:
            return
        told += index_of_mask
    node.args = (whole, tuple(told) if isinstance(index, tuple) or len(told) > 1 else told[0], *written)


def _tensor(given: Any, fake: Ask) -> torch.Tensor:
    """The fake tensor of an argument, of no dimension for a number."""
    value = fake(given) if isinstance(given, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else torch.empty((), device="meta")


def _tell_numbers(node: fx.Node, ask: Ask, fake: Ask) -> None:
    """Tensors of one whole number that stand for numbers become these."""
    tensor = node.args[:1] if isinstance(node.target, str) or node.target not in _MAKERS else ()

    def number(given: fx.Node) -> Any:
        value = fake(given)
        single = isinstance(value, torch.Tensor) and not value.dim() and not value.is_floating_point()
        known = ask(given) if single else None
        return given if known is None else known

    def told(name: str, given: Any) -> Any:
        return given if name in ("fill_value", "value") else fx.map_arg(given, number)

    filled = node.target in ("new_full", torch.full, functional.pad)
    sizes = len(tensor) + 1 if filled else len(node.args)  # what comes after is a value
    node.args = (*tensor, *fx.map_arg(node.args[len(tensor) : sizes], number), *node.args[sizes:])
    node.kwargs = {name: told(name, given) for name, given in node.kwargs.items()}
