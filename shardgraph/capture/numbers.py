"""Python numbers that change between calls, as 0-dimensional tensors that compute what the number would.

A Python number does not take part in type promotion as a tensor does: ``loss * 0.5`` keeps the dtype of a
0-dimensional loss, and a float64 tensor in the place of 0.5 would not. So a captured graph is checked: every operation
on such a tensor is one that gives the same dtype and value for it as for the number, or the number stays a constant.
https://docs.pytorch.org/docs/stable/tensor_attributes.html#type-promotion-doc
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from shardgraph.errors import CaptureError
from shardgraph.ir import Buffer, Input, Output, outputs, placeholders
from shardgraph.ir.attributes import SOURCE

_aten = torch.ops.aten
_MARK = "_shardgraph_number"
_ALONE = {_aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Tensor, _aten.neg.default, _aten.rsub.Scalar}
_COMPARED = {getattr(_aten, name).Tensor for name in ("eq", "ne", "lt", "le", "gt", "ge")}
_WITH_TENSORS = {_aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Tensor, _aten.div.Tensor, _aten.where.self, *_COMPARED}


def as_tensor(number: int | float, floating: torch.dtype) -> torch.Tensor:
    """A 0-dimensional tensor for a number: on the CPU, from where it combines with tensors of every device.

    An int has dtype int64, a float ``floating``.
    """
    tensor = torch.tensor(number, dtype=torch.int64 if isinstance(number, int) else floating, device="cpu")
    setattr(tensor, _MARK, True)
    return tensor


def constant_key(leaf: Any) -> tuple[type, Any]:
    """The key of an input that is a constant of a program, equal only for equal type and value; nan equals itself."""
    return type(leaf), repr(leaf) if isinstance(leaf, (float, complex)) else leaf


def is_number(leaf: Any) -> bool:
    """Whether an input is from :func:`as_tensor`."""
    return hasattr(leaf, _MARK)


def input_key(leaf: Any) -> tuple[Any, ...]:
    """All of an input that a captured graph depends on: five entries for a tensor, else its :func:`constant_key`."""
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.stride(), leaf.requires_grad, is_number(leaf)
    return constant_key(leaf)


def check_numbers(gm: fx.GraphModule, args: Any, kwargs: Any, counted: Set[str], returned: int) -> None:
    """Raise CaptureError unless the graph computes with the numbers among its inputs, and with the ``counted`` ones
    that modules have, what Python numbers would. The first ``returned`` outputs are the model's."""
    inputs, leaves = placeholders(gm), pytree.tree_leaves((args, kwargs))
    alone = {inputs[Input(i)] for i, leaf in enumerate(leaves) if is_number(leaf) and Input(i) in inputs}
    counts = {inputs[Buffer(fqn)] for fqn in counted}
    alone |= counts
    if not alone:
        return
    for node in gm.graph.nodes:
        used = alone & set(node.all_input_nodes)
        if node.op == "output":
            used &= _results(gm, returned)
        if not used:
            continue
        if used <= counts and _counts_up(node):
            counts.add(node)
            alone.add(node)
            continue
        if len(used) == len(node.all_input_nodes):
            _check_alone(node)
            alone.add(node)
        else:
            _check_with_tensors(node, used)


def _results(gm: fx.GraphModule, returned: int) -> set[Any]:
    """What a graph returns but for the attributes that it sets, which become numbers again."""
    attributes = {role for role, _ in outputs(gm) if isinstance(role, Output) and role.index >= returned}
    return {value for role, value in outputs(gm) if role not in attributes}


def _counts_up(node: fx.Node) -> bool:
    """Whether a step of a count: of a size that takes more calls than there will be to leave int64."""
    step = node.args[1] if node.target in (_aten.add.Tensor, _aten.sub.Tensor) and not node.kwargs else None
    return isinstance(step, int) and abs(step) < 2**31


def _check_alone(node: fx.Node) -> None:
    """Operations on numbers alone are float64 arithmetic, as Python's. Its ints have no largest one."""
    dtypes = {each.meta["val"].dtype for each in (node, *node.all_input_nodes)} if "val" in node.meta else set()
    if node.target not in _ALONE or dtypes != {torch.float64}:
        _refuse(node)


def _check_with_tensors(node: fx.Node, numbers: set[fx.Node]) -> None:
    if node.target not in _WITH_TENSORS or node.kwargs:
        _refuse(node)
    operands = node.args[1:] if node.target is _aten.where.self else node.args
    others = [each for each in operands if isinstance(each, fx.Node) and each not in numbers]
    divided = node.target is _aten.div.Tensor and node.args[0] in numbers  # as reciprocal(tensor) * number
    if not others or not set(operands) & numbers or divided:
        _refuse(node)
    for number in set(operands) & numbers:
        assert isinstance(number, fx.Node)
        tensor = number.meta["val"]
        python = 1.0 if tensor.is_floating_point() else 1
        for other in others:
            promoted = torch.result_type(other.meta["val"], tensor)
            whole = not promoted.is_floating_point and not promoted.is_complex
            rounded = tensor.dtype not in (torch.int64, torch.float64, promoted) or (whole and promoted != torch.int64)
            if promoted != torch.result_type(other.meta["val"], python) or rounded:
                _refuse(node)


def _refuse(node: fx.Node) -> None:
    raise CaptureError(
        f"a Python number that changes from call to call is used by {node.op} {node.name} at "
        f"{SOURCE.get(node) or 'the end of forward'} as no tensor can be"
    )
