"""Branches on random numbers: both ways are computed, and one is chosen, with the random numbers of that way alone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import shardgraph


class Dropping(nn.Module):
    """Layers that are dropped at random, with dropout and batch norm."""

    def __init__(self) -> None:
        super().__init__()
        layer = lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3), nn.BatchNorm1d(4))  # noqa: E731
        self.layers = nn.ModuleList(layer() for _ in range(2))
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.training and torch.rand([]) < 0.5:
                continue
            x = x + layer(x)
        return self.head(x)


class Early(Dropping):
    """A function that returns early."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.residual(layer, x)
        return self.head(x)

    def residual(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if torch.rand(1) < 0.5:
            return x
        return x + layer(x)


@pytest.mark.parametrize("kind", [Dropping, Early])
def test_what_is_dropped_leaves_nothing_behind_and_draws_nothing(kind):
    torch.manual_seed(0)
    original, x = kind().train(), torch.randn(6, 4)
    sharded = shardgraph.compile(copy.deepcopy(original), "single", progress=False)
    dropped = set()
    for seed in range(6):
        results = []
        for model in (sharded, original):
            torch.manual_seed(seed)
            out = model(x)
            model.zero_grad()
            out.square().sum().backward()
            gradients = [p.new_zeros(p.shape) if p.grad is None else p.grad for p in model.parameters()]
            results.append([out, *gradients, *map(torch.clone, model.buffers()), torch.rand(3)])
        torch.testing.assert_close(*results)
        dropped.add(sum(p.grad is None for p in original.parameters()))
    assert len(dropped) > 1


@pytest.mark.parametrize("plan", ["fsdp", "tp"])
def test_layers_are_dropped_alike_under_a_plan(plan):
    torch.manual_seed(0)
    mesh = {"dp" if plan == "fsdp" else "tp": 2}
    report = shardgraph.verify(Dropping().train(), (torch.randn(8, 4),), plan, mesh=mesh, steps=2)
    assert report.ok, str(report)


class Unequal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.rand([]) < 0.5:
            x = self.layer(x)
        return x


def test_ways_that_give_other_shapes_are_refused_with_the_line():
    with pytest.raises(shardgraph.CaptureError, match=r"(?s)test_random_branches\.py:\d+|x.*same|shapes"):
        shardgraph.compile(Unequal(), "single", example_inputs=(torch.ones(2, 4),), progress=False)


class Marked(nn.Module):
    """A parameter in place of what a mask chooses, as SpecAugment has it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.mark = nn.Linear(4, 4), nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        x[mask] = self.mark
        return x


@pytest.mark.parametrize("plan", ["fsdp", "tp"])
def test_a_parameter_is_written_where_a_mask_is(plan):
    torch.manual_seed(0)
    mesh = {"dp" if plan == "fsdp" else "tp": 2}
    call = (torch.randn(4, 3, 4), torch.rand(4, 3) < 0.5)
    report = shardgraph.verify(Marked(), call, plan, mesh=mesh, steps=2)
    assert report.ok, str(report)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        return grad * b, grad * a


class Square(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return Twice.apply(y, y)


def test_a_function_of_autograd_may_be_given_one_tensor_twice():
    torch.manual_seed(0)
    report = shardgraph.verify(Square(4, 4), (torch.randn(4, 4),), "fsdp", mesh={"dp": 2}, steps=2)
    assert report.ok, str(report)


class Finally(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            missing = {}["key"]
        finally:
            x = x + 1
        return x + missing


@pytest.mark.skipif(torch.__version__ < "2.12", reason="the tracer of torch 2.11 has a line of the finally for it")
def test_an_error_inside_of_try_and_finally_names_the_line_that_raised_it():
    with pytest.raises(shardgraph.CaptureError, match=r"missing = \{\}\[\"key\"\]"):
        shardgraph.compile(Finally(), "single", example_inputs=(torch.ones(2),), progress=False)


def test_lint_tells_that_dropped_layers_have_gradients():
    sharded = shardgraph.compile(Dropping().train(), "single", example_inputs=(torch.randn(6, 4),), progress=False)
    found = [each for each in shardgraph.lint(sharded) if each.rule == "dropped-layers"]
    assert [each.severity for each in found] == ["warning"] * len(found) and found
    assert "test_random_branches.py" in found[0].where


class Telling(nn.Module):
    """A layer that tells what it computed, if it is not dropped."""

    def __init__(self, always: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        if always:
            self.last = "nothing"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.rand([]) < 0.5:
            x = self.layer(x)
            self.last = "the layer"
        return x


def test_an_attribute_that_only_one_way_adds_is_there_in_any_case():
    sharded = shardgraph.compile(Telling(always=False), "single", progress=False)
    sharded(torch.randn(2, 4))
    assert sharded.last == "the layer"


def test_an_attribute_that_a_random_number_decides_is_refused():
    with pytest.raises(shardgraph.CaptureError, match=r"(?s)if torch\.rand\(\[\]\) < 0\.5:.*both"):
        shardgraph.compile(Telling(always=True), "single", progress=False)(torch.randn(2, 4))


class Deciding(nn.Module):
    """A branch on an input's values, and an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 4), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kind = x.dtype
        self.calls += 1
        if x.sum() > 0:
            x = self.layer(x)
        return x * 2


def test_attributes_are_set_beside_branches_on_values_of_inputs():
    model, x = Deciding(), torch.ones(2, 4)
    sharded = shardgraph.compile(copy.deepcopy(model), "single", progress=False)
    for each in (x, -x, x):
        torch.testing.assert_close(sharded(each), model(each))
    assert (sharded.calls, sharded.kind) == (model.calls, model.kind)


class Box:
    """An object that forward makes."""

    def __init__(self) -> None:
        self.on, self.count = True, 3


class Switched(nn.Module):
    """A branch that gives something another value, by which Python decides later."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.layer, self.what = nn.Linear(4, 4), what

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        box, named, listed = Box(), {"on": True}, [True]
        if torch.rand([]) < 0.5:
            if self.what == "attribute":
                box.on = False
            elif self.what == "none":
                box.on = None
            elif self.what == "count":
                box.count = 0
            elif self.what == "entry":
                named["on"] = False
            else:
                listed[0] = False
        scale = 2 if box.on and box.count and named["on"] and listed[0] else 1
        return self.layer(x) * scale


@pytest.mark.parametrize("what", ["attribute", "none", "count", "entry", "item"])
def test_what_one_way_switches_off_is_not_taken_for_something_that_it_leaves_alone(what):
    with pytest.raises(shardgraph.CaptureError, match=r"(?s)if torch\.rand\(\[\]\) < 0\.5:.*both"):
        shardgraph.compile(Switched(what), "single", example_inputs=(torch.ones(2, 4),), progress=False)
