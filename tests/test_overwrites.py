"""What works in place as a graph runs: only on memory of the graph itself that nobody reads later."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx

from shardgraph import ir
from shardgraph.ir.attributes import IN_PLACE, ROLE, ROLES, VALUE
from shardgraph.passes.analysis.liveness import settle_memory
from shardgraph.runtime.backends import eager

aten = torch.ops.aten


class Build:
    """Graphs of one input ``x`` of 16 numbers, with the values that their operations give."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.x = self._with(self.graph.placeholder("x"), torch.ones(16))
        ROLE.set(self.x, ir.Input(0))

    def __call__(self, target: Callable[..., Any], *args: Any) -> fx.Node:
        first, *others = fx.map_arg(args, lambda node: node.meta["val"])
        started = target is ir.WAIT or target in ir.COLLECTIVES
        value = (first if target is ir.WAIT else first.clone()) if started else target(first, *others)
        return self._with(self.graph.call_function(target, args), value)

    def reduced(self, node: fx.Node) -> fx.Node:
        return self(ir.WAIT, self(ir.ALL_REDUCE, node, "sum", "dp"))

    def _with(self, node: fx.Node, value: Any) -> fx.Node:
        VALUE.set(node, value)
        return node


def gradient(build: Build) -> Sequence[fx.Node]:
    """Reduced, and divided twice."""
    made = build.reduced(build(aten.neg.default, build.x))
    return [build(aten.div.Tensor, build(aten.div.Tensor, made, 2), 2)]


def of_the_caller(build: Build) -> Sequence[fx.Node]:
    return [build(aten.div.Tensor, build.x, 2)]


def view_of_the_caller(build: Build) -> Sequence[fx.Node]:
    return [build(aten.div.Tensor, build(aten.view.default, build.x, [4, 4]), 2)]


def also_a_result(build: Build) -> Sequence[fx.Node]:
    made = build(aten.neg.default, build.x)
    return [made, build(aten.div.Tensor, made, 2)]


def read_later(build: Build) -> Sequence[fx.Node]:
    made = build(aten.neg.default, build.x)
    return [build(aten.div.Tensor, made, 2), build(aten.cumsum.default, made, 0)]


def read_later_through_a_view(build: Build) -> Sequence[fx.Node]:
    made = build(aten.neg.default, build.x)
    view = build(aten.view.default, made, [4, 4])
    return [build(aten.div.Tensor, made, 2), build(aten.cumsum.default, view, 0)]


def still_being_sent(build: Build) -> Sequence[fx.Node]:
    made = build(aten.neg.default, build.x)
    start = build(ir.ALL_GATHER, made, 1, "dp")
    divided = build(aten.div.Tensor, made, 2)
    return [build(ir.WAIT, start), divided]


def read_later_through_an_undeclared_view(build: Build) -> Sequence[fx.Node]:
    made = build(aten.neg.default, build.x)
    pieces = build(aten.unsafe_split.Tensor, made, 8)
    return [build(aten.div.Tensor, made, 2), build(aten.cumsum.default, build(operator.getitem, pieces, 1), 0)]


def part_of_more(build: Build) -> Sequence[fx.Node]:
    made = build(aten.neg.default, build.x)
    return [build(aten.div.Tensor, build(aten.slice.Tensor, made, 0, 0, 4), 2)]


def by_a_view_of_itself(build: Build) -> Sequence[fx.Node]:
    made = build(aten.view.default, build(aten.clone.default, build.x), [4, 4])
    return [build(aten.div.Tensor, made, build(aten.t.default, made))]


def of_another_shape(build: Build) -> Sequence[fx.Node]:
    return [build(aten.mul.Tensor, build(aten.neg.default, build.x), torch.ones(2, 1))]


def of_another_dtype(build: Build) -> Sequence[fx.Node]:
    return [build(aten.gt.Scalar, build(aten.neg.default, build.x), 0)]


def of_another_layout(build: Build) -> Sequence[fx.Node]:
    turned = build(aten.t.default, build(aten.view.default, build(aten.neg.default, build.x), [2, 8]))
    return [build(aten.add.Tensor, turned, turned)]


def that_does_not_commute(build: Build) -> Sequence[fx.Node]:
    return [build(aten.sub.Tensor, build.x, build(aten.clone.default, build.x))]


def that_needs_a_whole_operand(build: Build) -> Sequence[fx.Node]:
    made = build(aten.view.default, build(aten.clone.default, build.x), [4, 4])
    return [build(aten.mm.default, made, made)]


def repeated_elements(build: Build) -> Sequence[fx.Node]:
    total = build(aten.sum.default, build.x)
    return [build(aten.div.Tensor, build(aten.expand.default, total, [4]), 2)]


def of_unknown_operation(build: Build) -> Sequence[fx.Node]:
    return [build(aten.div.Tensor, build(torch.neg, build.x), 2)]


@pytest.mark.parametrize(
    "case",
    [
        of_the_caller,
        view_of_the_caller,
        also_a_result,
        read_later,
        read_later_through_a_view,
        read_later_through_an_undeclared_view,
        still_being_sent,
        part_of_more,
        by_a_view_of_itself,
        of_another_shape,
        of_another_dtype,
        of_another_layout,
        that_does_not_commute,
        that_needs_a_whole_operand,
        repeated_elements,
        of_unknown_operation,
    ],
)
def test_nothing_is_overwritten_that_is_not_the_graph_s_own_or_is_read_later(case):
    assert _overwritten(case) == []


def test_what_is_reduced_and_divided_stays_where_it_is():
    assert _overwritten(gradient) == [ir.ALL_REDUCE, aten.div.Tensor, aten.div.Tensor]


def test_what_was_read_before_is_overwritten():
    def read_before(build: Build) -> Sequence[fx.Node]:
        made = build(aten.neg.default, build.x)
        return [build(aten.exp.default, made), build(aten.div.Tensor, made, 2)]

    assert _overwritten(read_before) == [aten.div.Tensor]


def activation(build: Build) -> Sequence[fx.Node]:
    """A function, its square beside it, their product, and a sum whose second operand dies."""
    made = build(aten.tanh.default, build(aten.clone.default, build.x))
    product = build(aten.mul.Tensor, build(aten.pow.Tensor_Scalar, made, 2), made)
    return [build(aten.add.Tensor, build.x, product)]


def test_what_computes_element_by_element_writes_an_operand_that_dies():
    """The square may not: what it reads is read once more, as the second operand of the product."""
    assert _overwritten(activation) == [aten.tanh.default, aten.mul.Tensor, aten.add.Tensor]


@pytest.mark.parametrize(
    "target",
    [
        aten.tanh_backward.default,
        aten.sigmoid_backward.default,
        aten.silu_backward.default,
        aten.gelu_backward.default,
    ],
    ids=str,
)
def test_backward_of_an_activation_writes_where_the_gradient_was(target):
    def backward(build: Build) -> Sequence[fx.Node]:
        gradient = build(aten.clone.default, build.x)
        other = {aten.silu_backward.default: [build.x], aten.gelu_backward.default: [build.x]}
        return [build(target, gradient, *other.get(target, [build(aten.sigmoid.default, build.x)]))]

    gm = _settled(backward)
    expected = gm(torch.linspace(-2, 2, 16))
    eager.backend(gm)
    (node,) = (each for each in gm.graph.nodes if IN_PLACE.get(each))
    gm.recompile()
    assert node.kwargs["grad_input"] is node.args[0]
    assert torch.equal(gm(torch.linspace(-2, 2, 16))[0], expected[0])


def test_numbers_are_those_without_memory_of_operands():
    gm = _settled(activation)
    x = torch.linspace(-2, 2, 16)
    expected = gm(x)
    run = eager.backend(gm)
    (found,) = run([x])
    assert torch.equal(found, expected[0]) and torch.equal(x, torch.linspace(-2, 2, 16))


def _overwritten(case: Callable[[Build], Sequence[fx.Node]]) -> list[Any]:
    return [node.target for node in _settled(case).graph.nodes if IN_PLACE.get(node)]


def _settled(case: Callable[[Build], Sequence[fx.Node]]) -> fx.GraphModule:
    build = Build()
    results = tuple(case(build))
    ROLES.set(build.graph.output(results), [None] * len(results))
    gm = fx.GraphModule({}, build.graph)
    settle_memory(gm)
    return gm
