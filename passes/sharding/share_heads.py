"""Gives attention the heads of keys and values that a model has, in place of copies of them for all heads of queries.

Models whose heads of queries share heads of keys and values (J. Ainslie et al., "GQA", 2023,
https://arxiv.org/abs/2305.13245) often repeat these before attention, since not every kernel takes fewer. The operator
of a captured graph does, on every device. Without copies less is saved for backward and goes round a ring.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import fx

from shardgraph.ir.attributes import EQUALS, Change, Labels, captured_name, carried
from shardgraph.ir.fused import ATTENTION, ATTENTION_BACKWARD
from shardgraph.passes.base import Context, Pass
from shardgraph.passes.builder import Builder

aten = torch.ops.aten

_HEADS = 1  # the dimension of heads in [batch, heads, positions, width]
_IN_ANOTHER_SHAPE = frozenset({aten.view.default, aten._unsafe_view.default, aten.clone.default})
_WITHOUT_A_DIMENSION = frozenset({aten.squeeze.dim, aten.squeeze.dims, aten.view.default})


@dataclass(frozen=True)
class ShareHeads(Pass):
    """Takes a joint graph; gives one in which attention without a mask reads keys and values before they are repeated.

    A backward returns their gradients, of which a graph has the sums over repetitions. Attention under a mask keeps
    the copies, since the kernels that take a mask on a GPU make them too.

    Must not change: what is computed. Operators whose heads are divided among ranks are divided already: more ranks
    than heads of keys have parts of their copies.
    """

    name = "share-heads"
    excludes = frozenset({"split"})

    def run(self, gm: fx.GraphModule, context: Context) -> None:
        for forward, backward in _attentions(gm):
            pair = [_before_repetition(tensor) for tensor in forward.args[1:3]]
            sums = {} if backward is None else _sums_over_repetitions(backward, pair)
            if None in pair or sums is None:
                continue
            query, _, _, *rest = forward.args
            build = Builder(gm.graph, context.values, carried(Change.REWRITTEN, forward), after=forward.prev)
            _take(build, {each: each.args[1] for each in forward.users}, build.call(ATTENTION, query, *pair, *rest))
            if backward is not None:
                gradient, _, _, _, *rest = backward.args
                build = Builder(gm.graph, context.values, carried(Change.REWRITTEN, backward), after=backward.prev)
                _take(build, sums, build.call(ATTENTION_BACKWARD, gradient, query, *pair, *rest))
        gm.graph.eliminate_dead_code()


def repeats_heads(gm: fx.GraphModule) -> bool:
    """Whether the pass may change a graph, however its operators are divided."""
    return any(_before_repetition(forward.args[1]) is not None for forward, _ in _attentions(gm))


def _attentions(gm: fx.GraphModule) -> list[tuple[fx.Node, fx.Node | None]]:
    """Every attention without a mask, with its backward."""
    forwards, backwards = (
        gm.graph.find_nodes(op="call_function", target=each) for each in (ATTENTION, ATTENTION_BACKWARD)
    )
    of_operands = {node.args[1:4]: node for node in backwards}
    return [(node, of_operands.get(node.args[:3])) for node in forwards if node.args[3] is None]


def _before_repetition(tensor: fx.Node) -> fx.Node | None:
    """``[batch, heads, positions, width]`` of which ``tensor`` has each head several times, one after the other; None
    if it has not."""
    repeated = tensor
    while repeated.target in _IN_ANOTHER_SHAPE:
        repeated = repeated.all_input_nodes[0]
    if repeated.target is not aten.expand.default or repeated.all_input_nodes[0].target is not aten.unsqueeze.default:
        return None
    given, dim = cast(tuple[fx.Node, int], repeated.all_input_nodes[0].args)
    if given.meta["val"].dim() != 4 or dim % 5 != _HEADS + 1:
        return None
    (batch, heads, *rest), times = given.meta["val"].shape, repeated.meta["val"].shape[_HEADS + 1]
    shapes = [tuple(each.meta["val"].shape) for each in (repeated, tensor)]
    return given if shapes == [(batch, heads, times, *rest), (batch, heads * times, *rest)] else None


def _sums_over_repetitions(backward: fx.Node, pair: Sequence[fx.Node | None]) -> dict[fx.Node, int] | None:
    """What an attention's backward returns for queries, and the sums over repetitions of what it returns for keys and
    values, each with its index; None if something else is read."""
    found: dict[fx.Node, int] = {}
    for gradient in backward.users:
        index = cast(int, gradient.args[1])
        if index == 0:
            found[gradient] = 0
        elif gradient.users:
            given = pair[index - 1]
            if given is None or (summed := _summed(gradient, given.meta["val"].shape)) is None:
                return None
            found[summed] = index
    return found


def _summed(gradient: fx.Node, shape: torch.Size) -> fx.Node | None:
    """The sum of a gradient over repetitions, if that is all that is read of it."""
    batch, heads, *rest = shape
    times = gradient.meta["val"].shape[_HEADS] // heads
    node, apart = gradient, False
    while len(node.users) == 1:
        (node,) = node.users
        if node.target is aten.sum.dim_IntList and not apart:
            given, dims = node.args[:2]
            if tuple(given.meta["val"].shape) != (batch, heads, times, *rest) or list(dims) != [_HEADS + 1]:
                return None
            apart = True
        elif node.target not in (_WITHOUT_A_DIMENSION if apart else _IN_ANOTHER_SHAPE):
            return None
        if apart and node.meta["val"].shape == shape:
            return node
    return None


def _take(build: Builder, replaced: Mapping[fx.Node, int], results: fx.Node) -> None:
    """Put elements of ``results`` in place of nodes, each by its index, in the memory layout that it has."""
    for node, index in replaced.items():
        equals: Labels = {} if (name := captured_name(node)) is None else {EQUALS: name}
        build.labels = {**carried(Change.REWRITTEN, node), **equals}
        element = build.call(operator.getitem, results, index)
        node.replace_all_uses_with(build.laid_out(element, node.meta["val"]))
