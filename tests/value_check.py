"""Whether every value in a graph is the one that its operation gives for the values of its inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from shardgraph.errors import GraphInvariantError
from shardgraph.ir.attributes import MADE_BY, VALUE
from shardgraph.ir.fake_values import Propagation, layout_of
from shardgraph.passes.base import Context, Pass


class CheckValues:
    """Recomputes the value of each operation by fake propagation after every pass; compares shapes, dtypes, devices and
    strides. Only what is new since the previous pass is computed. See :func:`shardgraph.passes.base.checking`.
    """

    def __init__(self) -> None:
        # By value: the operation that it was found to be of, with the values of its arguments.
        self._known: Any = WeakIdKeyDictionary()
        # By mesh, default dtype, operation and operands as layouts: the layout of what it gives.
        self._layouts: dict[Any, list[Any]] = {}

    def __call__(self, step: Pass, gm: fx.GraphModule, context: Context) -> None:
        """Check a graph that a pass has changed.

        Raises:
            GraphInvariantError: a value is another than its operation gives.
        """
        try:
            self._check(gm, context.values)
        except GraphInvariantError as error:
            raise GraphInvariantError(f"the pass {step.name!r} left a wrong value: {error}") from error

    def _check(self, gm: fx.GraphModule, values: Propagation) -> None:
        for node in gm.graph.nodes:
            if node.op != "call_function":
                continue
            value = VALUE.of(node)
            call = _call(node)
            tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
            if not tensors or _same(self._known.get(tensors[0]), call):
                continue
            if layout_of(value) != self._due(node, call, values):
                due = values.value(node.target, node.args, node.kwargs)
                maker = f", made by {MADE_BY.of(node)}" if node in MADE_BY else ""
                raise GraphInvariantError(
                    f"{node.format_node()}{maker}, has the value {_text(value)}, and its operation gives {_text(due)}"
                )
            self._known[tensors[0]] = call

    def _due(self, node: fx.Node, call: list[Any], values: Propagation) -> list[Any]:
        """The layout that a node's operation gives."""
        key = values.mesh, torch.get_default_dtype(), *map(_by_layout, call)
        try:
            if key not in self._layouts:
                self._layouts[key] = layout_of(values.value(node.target, node.args, node.kwargs))
            return self._layouts[key]
        except TypeError:  # numbers that only a run knows cannot be compared
            return layout_of(values.value(node.target, node.args, node.kwargs))


def _by_layout(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return type(leaf), leaf
    return tuple(leaf.shape), leaf.stride(), leaf.storage_offset(), leaf.dtype, leaf.device, leaf.requires_grad


def _call(node: fx.Node) -> list[Any]:
    """What determines the value of a node."""
    call = [node.target]
    _add_leaves(node.args, call)
    _add_leaves(node.kwargs, call)
    return call


def _add_leaves(arg: Any, call: list[Any]) -> None:
    """Without pytree, which would take most of the time of these checks: there are millions of arguments."""
    if isinstance(arg, fx.Node):
        call.append(VALUE.get(arg))
    elif isinstance(arg, (tuple, list)):
        call.append(len(arg))
        for each in arg:
            _add_leaves(each, call)
    elif isinstance(arg, dict):
        _add_leaves([*arg, *arg.values()], call)
    else:
        call.append(arg)


def _same(known: list[Any] | None, call: list[Any]) -> bool:
    if known is None or len(known) != len(call):
        return False
    return all(
        mine is theirs or (not isinstance(mine, (torch.Tensor, tuple, list)) and mine == theirs)
        for mine, theirs in zip(known, call, strict=True)
    )


def _text(value: Any) -> str:
    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return ", ".join(f"{list(t.shape)} {t.dtype} on {t.device} with strides {list(t.stride())}" for t in tensors)
