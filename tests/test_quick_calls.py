"""The code of a graph: joined views and torch's own methods compute what the graph's operations do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from shardgraph import torch_api
from shardgraph.runtime.layouts import suit_layouts
from shardgraph.runtime.quick_calls import quickened

aten = torch.ops.aten


def traced(function: Callable[..., Any], *args: torch.Tensor) -> fx.GraphModule:
    gm = make_fx(function, tracing_mode="fake")(*args)
    suit_layouts(gm)
    return gm


def calls(gm: fx.GraphModule) -> list[str]:
    """The operations by name, in order."""
    operations = [node for node in gm.graph.nodes if node.op in ("call_function", "call_method")]
    return [getattr(node.target, "__name__", str(node.target)) for node in operations]


def quick(function: Callable[..., Any], *args: torch.Tensor) -> list[str]:
    """The calls that are made of a function, which give what the function gives."""
    result = quickened(traced(function, *args))
    with torch.no_grad():
        ours = torch_api.boxed(result)([each.clone() for each in args])
        theirs = function(*(each.clone() for each in args))
    theirs = theirs if isinstance(theirs, tuple) else (theirs,)
    ours = ours if isinstance(ours, (tuple, list)) else (ours,)
    torch.testing.assert_close(tuple(ours), theirs, rtol=0, atol=0)
    assert [each.stride() for each in ours] == [each.stride() for each in theirs]
    return calls(result)


X = torch.arange(24.0).reshape(2, 3, 4) / 7 - 1


def test_a_view_of_a_view_is_one_of_the_tensor():
    joined = quick(lambda x: x.exp().view(6, 4).view(24).view(4, 6).sin(), X)
    assert joined == ["exp.default", "reshape", "sin.default"]


def test_the_transposition_of_a_transposition_is_the_tensor():
    def function(x: torch.Tensor) -> torch.Tensor:
        return aten.t.default(aten.t.default(x[0])).sin() + aten.transpose.int(aten.transpose.int(x, 0, 1), 0, 1).cos()

    assert "t" not in quick(function, X) and "transpose" not in quick(function, X)


def test_another_transposition_is_kept():
    assert quick(lambda x: aten.transpose.int(aten.transpose.int(x, 0, 1), 1, 2).sin(), X).count("transpose") == 2


def test_equal_views_are_one():
    assert quick(lambda x: x.view(6, 4).sin() + x.view(6, 4).cos(), X).count("reshape") == 1


def test_a_copy_that_is_made_twice_is_made_twice():
    def function(x: torch.Tensor) -> torch.Tensor:
        other = x.transpose(0, 1)
        return other.reshape(24).sin() + other.reshape(24).cos()

    assert quick(function, X).count("clone") == 2


def test_a_view_that_is_returned_is_a_tensor_of_its_own():
    result = quickened(traced(lambda x: (x.view(24), x.view(24), aten.detach.default(x)), X))
    with torch.no_grad():
        first, second, third = torch_api.boxed(result)([X])
    assert len({id(first), id(second), id(third), id(X)}) == 4


def test_views_of_what_is_written_in_place_see_it():
    def function(x: torch.Tensor) -> torch.Tensor:
        own = x.clone()
        before = own.view(6, 4)
        return aten.mul_.Tensor(own, 3.0).view(6, 4) + before

    quick(function, X)


@pytest.mark.parametrize(
    "ends", [(), (0,), (1, 1), (-1, 0, 2), (2, 1, 2**63 - 1), (1, -2), (1, 0, -1), (2, 3, 99), (2, 0, 4, 2)], ids=str
)
def test_a_slice_is_that_in_brackets(ends):
    assert "slice.Tensor" not in quick(lambda x: aten.slice.Tensor(x, *ends).sin(), X)


@pytest.mark.parametrize(
    ("function", "method"),
    [
        (lambda x: aten._to_copy.default(x, dtype=torch.bfloat16), "to"),
        (lambda x: aten._to_copy.default(x, dtype=torch.float64, memory_format=torch.contiguous_format), "to"),
        (lambda x: aten._to_copy.default(x.transpose(0, 1), dtype=torch.bfloat16), "to"),
        (lambda x: aten._to_copy.default(x), "_to_copy.default"),
        (lambda x: aten._to_copy.default(x, dtype=torch.float32), "_to_copy.default"),
        (lambda x: aten.add.Tensor(x, 2), "add"),
        (lambda x: aten.add.Tensor(x, x, alpha=3), "add"),
        (lambda x: aten.mul.Scalar(x, 1.5), "mul"),
        (lambda x: aten.div.Scalar(x, 3), "div"),
        (lambda x: aten.pow.Tensor_Scalar(x, 3), "pow"),
        (lambda x: aten.sum.dim_IntList(x, [0, 2], True), "sum"),
        (lambda x: aten.sum.dim_IntList(x, None, dtype=torch.float64), "sum"),
        (lambda x: aten.mean.dim(x, [-1], True), "mean"),
        (lambda x: aten.expand.default(aten.unsqueeze.default(x, 1), [2, 5, 3, 4]), "expand"),
        (lambda x: aten.cat.default([x, x], -1), "cat"),
        (lambda x: aten.bmm.default(x, aten.transpose.int(x, 1, 2)), "bmm"),
        (lambda x: aten.clone.default(x.transpose(0, 1), memory_format=torch.contiguous_format), "clone"),
    ],
)  # fmt: skip
def test_a_method_takes_what_the_operation_takes(function, method):
    assert method in quick(function, X)


def test_the_graph_itself_keeps_its_operations():
    gm = traced(lambda x: aten.reshape.default(aten.reshape.default(x, [24]), [4, 6]).sin(), X)
    before = calls(gm)
    quickened(gm)
    assert calls(gm) == before
