"""Backward without zero tangents, for calls in which the loss does not depend on some outputs."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from shardgraph.ir import WAIT, Output, Tangent, is_collective, local_part, outputs, placeholders
from shardgraph.ir.attributes import REDUCES, Change, carried
from shardgraph.ir.fake_values import layout_of
from shardgraph.ir.operations import makes_view
from shardgraph.passes.base import Context, Pass
from shardgraph.passes.builder import Builder
from shardgraph.torch_api import OpOverload

aten = torch.ops.aten

# The result is zero if the first argument is zero; for the products, if any argument is.
_LINEAR = frozenset(
    {
        aten._to_copy.default,
        aten._unsafe_view.default,
        aten.clone.default,
        aten.div.Scalar,
        aten.div.Tensor,
        aten.mul.Scalar,
        aten.neg.default,
        aten.sum.default,
        aten.sum.dim_IntList,
        local_part,
        operator.getitem,
    }
)
_PRODUCTS = frozenset({aten.mul.Tensor, aten.mm.default, aten.bmm.default})


@dataclass(frozen=True)
class DropZeroTangents(Pass):
    """Takes a backward graph; specialises it to calls in which the tangents ``absent`` are undefined.

    Values that are zero as a result are not computed, as in eager autograd, where an undefined gradient skips the
    operations behind it: a language model that returns its logits beside its loss would otherwise allocate and add a
    zero for every logit. Operations that need the zero as an operand get a constant.

    Must not change: the collectives, which ranks whose losses use other outputs issue too.
    """

    absent: frozenset[Tangent]

    name = "drop-zero-tangents"
    requires = frozenset({"split"})

    def run(self, gm: fx.GraphModule, context: Context) -> None:
        zero = {node for role, node in placeholders(gm).items() if role in self.absent}
        for node in gm.graph.nodes:
            if node.op == "call_function" and node not in REDUCES:
                if (rest := _other_term(node, zero)) is not None:
                    node.replace_all_uses_with(_laid_out(gm, rest, node, context))
                elif _is_zero(node, zero):
                    zero.add(node)
        for node in [n for n in gm.graph.nodes if n in zero]:
            _materialize(gm, node, [user for user in node.users if user not in zero], context)
        for node in list(reversed(gm.graph.nodes)):
            kept = node.op == "output" or is_collective(node) or node.target is WAIT
            if not kept and not node.users:
                gm.graph.erase_node(node)


def _other_term(node: fx.Node, zero: set[fx.Node]) -> fx.Node | None:
    """The other operand of an addition with a zero, if it has the sum's shape and dtype."""
    if node.target is not aten.add.Tensor or node.kwargs or not zero.intersection(node.all_input_nodes):
        return None
    left, right = node.args
    rest: Any = right if left in zero else left
    if not isinstance(rest, fx.Node) or rest in zero:
        return None
    value, total = rest.meta["val"], node.meta["val"]
    return rest if (value.shape, value.dtype) == (total.shape, total.dtype) else None


def _laid_out(gm: fx.GraphModule, term: fx.Node, total: fx.Node, context: Context) -> fx.Node:
    """The term with the strides of the sum, which views of the sum rely on."""
    value = total.meta["val"]
    if layout_of(term.meta["val"]) == layout_of(value):
        return term
    return Builder(gm.graph, context.values, carried(Change.REWRITTEN, total), after=total).laid_out(term, value)


def _is_zero(node: fx.Node, zero: set[fx.Node]) -> bool:
    if node.target in _PRODUCTS:
        return any(value in zero for value in node.all_input_nodes)
    if node.target is aten.add.Tensor:
        return all(isinstance(value, fx.Node) and value in zero for value in node.args)
    if gradients := _incoming(node):
        return gradients <= zero
    return (node.target in _LINEAR or makes_view(node.target)) and node.args[0] in zero


def _incoming(node: fx.Node) -> set[fx.Node]:
    """The gradients from which an operation's backward operation computes those of its operands: linear in them, as any
    backward is."""
    name = getattr(node.target, "__name__", "")
    if not isinstance(node.target, OpOverload) or "_backward" not in name or "double" in name:
        return set()
    tensors = zip(node.target._schema.arguments, node.args, strict=False)
    return {value for given, value in tensors if given.name.startswith("grad") and isinstance(value, fx.Node)}


def _materialize(gm: fx.GraphModule, node: fx.Node, users: list[fx.Node], context: Context) -> None:
    """Replace ``node`` by a constant zero of the same memory layout in its ``users``."""
    if not users:
        return
    value = node.meta["val"]
    outermost_first = sorted(range(value.dim()), key=value.stride, reverse=True)
    # What is the same along a dimension, as the gradient of a sum is, stays so: results are laid out by it.
    own = [size if stride else 1 for size, stride in zip(value.shape, value.stride(), strict=True)]
    shape = [own[dim] for dim in outermost_first]
    first = next(user for user in gm.graph.nodes if user in users)
    build = Builder(gm.graph, context.values, carried(Change.REWRITTEN, node), after=first.prev)
    made = build.call(aten.full.default, shape, 0, dtype=value.dtype, device=value.device, pin_memory=False)
    if outermost_first != sorted(outermost_first):
        inverse = [outermost_first.index(dim) for dim in range(value.dim())]
        made = build.call(aten.permute.default, made, inverse)
    if own != list(value.shape):
        made = build.call(aten.expand.default, made, list(value.shape))
    for user in users:
        user.replace_input_with(node, made)


def absent_beside_a_scalar(forward: fx.GraphModule, backward: fx.GraphModule) -> frozenset[Tangent]:
    """The tangents that are absent if the loss is the first scalar that forward returns; none if it returns none."""
    values = {
        role.index: value.meta["val"]
        for role, value in outputs(forward)
        if isinstance(role, Output) and isinstance(value, fx.Node) and isinstance(value.meta["val"], torch.Tensor)
    }
    scalar = next((i for i, v in values.items() if v.dim() == 0 and v.is_floating_point()), None)
    tangents = [role for role in placeholders(backward) if isinstance(role, Tangent)]
    return frozenset(role for role in tangents if scalar is not None and role != Tangent(scalar))
