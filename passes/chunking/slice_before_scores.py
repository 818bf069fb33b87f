"""Slices hidden states so that rows of scores that a loss does not use, such as a sequence's last, are not computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from shardgraph.ir.attributes import EQUALS, PART_OF, Change, Labels, Part, carried
from shardgraph.ir.fake_values import Propagation
from shardgraph.passes.base import Context, Pass
from shardgraph.passes.builder import Builder
from shardgraph.passes.sharding.by_rows import PRODUCTS
from shardgraph.passes.sharding.options import operands

aten = torch.ops.aten

_SAME_ROWS = frozenset({aten.view.default, aten._unsafe_view.default, aten._to_copy.default, aten.clone.default})


@dataclass(frozen=True)
class SliceBeforeScores(Pass):
    """Takes a captured joint graph; gives one in which hidden states are sliced instead of their scores.

    Causal models shift labels against scores, ``scores[:, :-1]`` against ``labels[:, 1:]``. A product is row-wise, so
    the slice can be applied to its operand; in backward the gradient of hidden states gets the zero rows that the
    gradient of the scores would have had. Scores that anything else reads are left as they are.

    Must not change: what is computed.
    """

    name = "slice-before-scores"
    provides = frozenset({"sliced-hidden-states"})
    excludes = frozenset({"sharded-operators", "split"})

    def run(self, gm: fx.GraphModule, context: Context) -> None:
        for scores in normalizations(gm):
            if (forward := _forward(scores)) and (backward := _backward(gm, forward)) is not None:
                _rewrite(gm, forward, backward, context.values)
                gm.graph.eliminate_dead_code()


def normalizations(gm: fx.GraphModule) -> list[fx.Node]:
    """The log-softmax of every cross-entropy."""
    return gm.graph.find_nodes(op="call_function", target=aten._log_softmax.default)


@dataclass(frozen=True)
class _Forward:
    """``product`` makes scores, ``casts`` change their dtype, and ``cut`` slices their rows."""

    product: fx.Node
    casts: tuple[fx.Node, ...]
    cut: fx.Node

    @property
    def hidden(self) -> fx.Node:
        """The row-wise operand of the product."""
        return operands(self.product)[-2]


@dataclass(frozen=True)
class _Backward:
    """``spread`` pads the gradient of the kept rows with zeros, and ``gradient`` is what products read."""

    spread: fx.Node
    casts: tuple[fx.Node, ...]
    gradient: fx.Node


def _forward(scores: fx.Node) -> _Forward | None:
    """The slice between a product and the normalization of its result; None if none can be moved before the product."""
    node, chain = operands(scores)[0], list[fx.Node]()
    while node.target not in PRODUCTS:
        if node.target not in _SAME_ROWS and node.target is not aten.slice.Tensor:
            return None
        chain.append(node)
        node = operands(node)[0]
    cuts = [each for each in chain if each.target is aten.slice.Tensor and not _keeps_all(each)]
    if len(cuts) != 1 or _before(cuts[0])[-1] != node.meta["val"].shape[1]:
        return None
    if _range(cuts[0].args[1:], _before(cuts[0]))[0] == len(_before(cuts[0])) - 1:
        return None  # a slice of the vocabulary
    above = chain[chain.index(cuts[0]) + 1 :]
    if any(len(each.users) > 1 for each in (node, *above)):
        return None
    return _Forward(node, tuple(each for each in reversed(above) if each.target is aten._to_copy.default), cuts[0])


def _before(node: fx.Node) -> list[int]:
    """The shape of a node's first operand."""
    return list(operands(node)[0].meta["val"].shape)


def _keeps_all(node: fx.Node) -> bool:
    return list(node.meta["val"].shape) == _before(node)


def _backward(gm: fx.GraphModule, forward: _Forward) -> _Backward | tuple[()] | None:
    """The same slice in backward; empty if there is no backward, None if it does not match the expected pattern."""
    whole = _before(forward.cut)
    rows = _range(forward.cut.args[1:], whole)
    nodes = gm.graph.find_nodes(op="call_function", target=aten.slice_backward.default)
    spreads = [each for each in nodes if list(each.args[1]) == whole and _range(each.args[2:], whole) == rows]
    if len(spreads) != 1:
        return None if spreads else ()
    node, casts = spreads[0], list[fx.Node]()
    while len(node.users) == 1:
        (user,) = node.users
        if user.target not in _SAME_ROWS and not (user.target is aten.slice_backward.default and _keeps_all(user)):
            break
        casts += [user] if user.target is aten._to_copy.default else []
        node = user
    ends = node.users and all(_is_end(user, node, forward.hidden) for user in node.users)
    return _Backward(spreads[0], tuple(casts), node) if ends else None


def _range(args: Sequence[Any], shape: Sequence[int]) -> tuple[int, tuple[int, int, int]]:
    dim, start, end, step = [*args, *(0, None, None, 1)[len(args) :]]
    return dim % len(shape), slice(start, end, step).indices(shape[dim])


def _is_end(user: fx.Node, gradient: fx.Node, hidden: fx.Node) -> bool:
    """Whether a user of the gradient does not need its zero rows, or propagates them."""
    if user.target is aten.mm.default:
        left, right = user.args
        return left is gradient or (_is_turned(left) and left.args[0] is hidden and right is gradient)
    if user.target is aten.sum.dim_IntList:
        return list(user.args[1]) == [0]
    products = (each.target is aten.mm.default and each.args == (user, hidden) for each in user.users)
    return _is_turned(user) and all(products)


def _is_turned(node: Any) -> bool:
    """Whether a node is a transposed matrix."""
    if node.target is aten.permute.default:
        return list(node.args[1]) == [1, 0]
    return node.target is aten.t.default or (node.target is aten.transpose.int and node.meta["val"].dim() == 2)


def _rewrite(gm: fx.GraphModule, forward: _Forward, backward: _Backward | tuple[()], values: Propagation) -> None:
    product, cut, hidden = forward.product, forward.cut, forward.hidden
    *rows, _ = operands(cut)[0].meta["val"].shape
    width = hidden.meta["val"].shape[1]

    def call(before: fx.Node, like: fx.Node, meaning: Labels, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A new node before another, labelled as ``like``; ``meaning`` says what it must be."""
        build = Builder(gm.graph, values, {**carried(Change.REWRITTEN, like), **meaning}, after=before.prev)
        return build.call(target, *args, **kwargs)

    def kept_of(node: fx.Node) -> Labels:
        """The rows of a captured matrix that are kept."""
        return {PART_OF: Part(node.name, (*rows, node.meta["val"].shape[1]), cut.args[1:])}

    apart = call(cut, product, {}, aten.view.default, hidden, [*rows, width])
    part = call(cut, product, kept_of(hidden), aten.slice.Tensor, apart, *cut.args[1:])
    dense = call(cut, product, kept_of(hidden), aten.clone.default, part, memory_format=torch.contiguous_format)
    kept = call(cut, product, kept_of(hidden), aten.view.default, dense, [-1, width])
    *bias, _, weight = product.args
    scores = call(cut, product, kept_of(product), product.target, *bias, kept, weight)
    for cast in forward.casts:
        scores = call(cut, cast, {}, cast.target, scores, **cast.kwargs)
    same: Labels = {EQUALS: cut.name}
    cut.replace_all_uses_with(call(cut, cut, same, aten.view.default, scores, list(cut.meta["val"].shape)))
    if not backward:
        return
    spread = backward.spread
    gradient = spread.args[0]
    for cast in backward.casts:
        gradient = call(spread, cast, {}, cast.target, gradient, **cast.kwargs)
    columns = backward.gradient.meta["val"].shape[1]
    part_of_it = kept_of(backward.gradient)
    dense = call(spread, spread, part_of_it, aten.clone.default, gradient, memory_format=torch.contiguous_format)
    gradient = call(spread, spread, part_of_it, aten.view.default, dense, [-1, columns])
    for user in list(backward.gradient.users):
        same = {EQUALS: user.name}
        if _is_turned(user):
            turned = call(user, user, {}, user.target, gradient, *user.args[1:])
            for each in list(user.users):
                each.replace_all_uses_with(call(each, each, {EQUALS: each.name}, each.target, turned, kept))
        elif user.target is aten.mm.default and user.args[1] is backward.gradient:
            left = user.args[0]
            turned = call(user, left, {}, left.target, kept, *left.args[1:])
            user.replace_all_uses_with(call(user, user, same, user.target, turned, gradient))
        elif user.target is aten.mm.default:
            made = call(user, user, kept_of(user), user.target, gradient, user.args[1])
            shape = [*spread.args[0].meta["val"].shape[:-1], width]
            apart = call(user, spread, kept_of(user), aten.view.default, made, shape)
            among = call(user, spread, {}, spread.target, apart, [*rows, width], *spread.args[2:])
            user.replace_all_uses_with(call(user, spread, same, aten.view.default, among, [-1, width]))
        else:
            user.replace_all_uses_with(call(user, user, same, user.target, gradient, *user.args[1:]))
