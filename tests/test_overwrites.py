"""What works in place as a graph runs: only on memory of the graph itself that nobody reads later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx

from shardgraph import ir
from shardgraph.ir.attributes import IN_PLACE, ROLE, ROLES, VALUE
from shardgraph.passes.analysis.liveness import settle_memory

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
    return [build(aten.div.Tensor, made, 2), build(aten.exp.default, made)]


def read_later_through_a_view(build: Build) -> Sequence[fx.Node]:
    made = build(aten.neg.default, build.x)
    view = build(aten.view.default, made, [4, 4])
    return [build(aten.div.Tensor, made, 2), build(aten.exp.default, view)]


def still_being_sent(build: Build) -> Sequence[fx.Node]:
    made = build(aten.neg.default, build.x)
    start = build(ir.ALL_GATHER, made, 1, "dp")
    divided = build(aten.div.Tensor, made, 2)
    return [build(ir.WAIT, start), divided]


def part_of_more(build: Build) -> Sequence[fx.Node]:
    made = build(aten.neg.default, build.x)
    return [build(aten.div.Tensor, build(aten.slice.Tensor, made, 0, 0, 4), 2)]


def by_a_tensor(build: Build) -> Sequence[fx.Node]:
    made = build(aten.neg.default, build.x)
    return [build(aten.div.Tensor, made, made)]


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
        still_being_sent,
        part_of_more,
        by_a_tensor,
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


def _overwritten(case: Callable[[Build], Sequence[fx.Node]]) -> list[Any]:
    build = Build()
    results = tuple(case(build))
    ROLES.set(build.graph.output(results), [None] * len(results))
    gm = fx.GraphModule({}, build.graph)
    settle_memory(gm)
    return [node.target for node in gm.graph.nodes if IN_PLACE.get(node)]
