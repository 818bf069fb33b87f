"""Checks of matrices, which ``torch.linalg.solve``, ``inv``, ``cholesky`` and their relatives make while they run.

Such an operation computes, with its result, a number for each matrix that is 0 if it could; another one, without a
result, raises by these numbers. In the graph that is a condition, checked as the model's own are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from shardgraph.ir.attributes import MODULES, STACK_TRACE

_CHECK = torch.ops.aten._linalg_check_errors.default
_ORDERED = torch.ops.higher_order.with_effects
fx.has_side_effect(_CHECK)  # or torch 2.11 drops it from the graph as unused


def check_matrices(gm: fx.GraphModule, line: Callable[[fx.Node], str]) -> None:
    """Make these operations of a lowered graph conditions with their ``line``, as those of ``assert`` are."""
    for node in [*gm.graph.nodes]:
        ordered = node.target is _ORDERED and node.args[1] is _CHECK
        if ordered or node.target is _CHECK:
            info, name = node.args[2:4] if ordered else node.args[:2]
            at = f"{line(node)}: {name} of a matrix that is singular, or not positive definite"
            with gm.graph.inserting_before(node):
                good = _added(node, torch.ops.aten.eq.Scalar, info, 0)
                condition = _added(node, torch.ops.aten.all.default, good)
                _added(node, torch.ops.aten._assert_async.msg, condition, at)
            for taken in [*node.users]:  # the token that orders effects, as it was before
                taken.replace_all_uses_with(node.args[0])
                gm.graph.erase_node(taken)
            gm.graph.erase_node(node)
    if not gm.graph.find_nodes(op="call_function", target=_ORDERED):
        _drop_tokens(gm)


def _added(of: fx.Node, target: Any, *args: Any) -> fx.Node:
    """An operation in the place of another, and with its lines."""
    node = of.graph.call_function(target, args)
    values = [each.meta["val"] if isinstance(each, fx.Node) else each for each in args]
    for attribute in (MODULES, STACK_TRACE):
        if (known := attribute.get(of)) is not None:
            attribute.set(node, known)
    if target is not torch.ops.aten._assert_async.msg:
        node.meta["val"] = target(*values)
    return node


def _drop_tokens(gm: fx.GraphModule) -> None:
    """Without effects nothing is to be ordered."""
    output = gm.graph.output_node()
    results = zip(output.args[0], output.meta["desc"], strict=True)
    kept = [(value, desc) for value, desc in results if not _is_token(desc)]
    output.args = ([value for value, _ in kept],)
    output.meta["desc"] = [desc for _, desc in kept]
    for node in gm.graph.find_nodes(op="placeholder"):
        if _is_token(node.meta["desc"]):
            gm.graph.erase_node(node)


def _is_token(desc: Any) -> bool:
    return "Token" in type(desc).__name__
