"""Where a NaN comes from, and replicas that are not equal any more."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from tests import numeric_faults
from tests.standing import on_ranks

PLANS = {"fsdp": {"dp": 2}, "tp": {"tp": 2}, "ddp": {"dp": 2}}


def line_of(text: str) -> int:
    """The line of the model that has this text."""
    lines, first = inspect.getsourcelines(numeric_faults.Fragile)
    return first + next(number for number, line in enumerate(lines) if text in line)


def found(*args: Any) -> Any:
    """What all ranks are told."""
    (first, unchanged), (second, unchanged_there) = on_ranks(numeric_faults.found, 2, args=args)
    assert first == second and unchanged and unchanged_there
    return first


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    ("kind", "value", "operation", "text", "graph"),
    [
        ("logarithm", "NaN", "log", "torch.log(x + 1)", "forward"),
        ("overflow", "inf", "exp", "torch.exp(x * -400).mean()", "forward"),
        ("masked away", "NaN", "softmax", "torch.softmax(self.mid(hidden) + gone", "forward"),
    ],
)
def test_the_first_operation_that_made_it_is_named_with_its_line(kind, value, operation, text, graph, plan):
    bad = 1 if plan != "tp" else 0
    made = found(kind, plan, PLANS[plan], bad)
    assert (made.value, made.graph) == (value, graph) and operation in made.operation
    assert made.rank == bad
    assert f"numeric_faults.py:{line_of(text)}" in made.source, str(made)
    assert "Fragile" in made.module


@pytest.mark.parametrize("plan", PLANS)
def test_a_derivative_that_is_not_finite_is_named_by_the_line_that_it_is_of(plan):
    made = found("root", plan, PLANS[plan], 1 if plan != "tp" else 0)
    assert made.graph == "backward" and f"numeric_faults.py:{line_of('torch.sqrt(')}" in made.source, str(made)


def test_a_parameter_that_was_not_finite_before_is_named():
    made = found("parameter", "fsdp", PLANS["fsdp"])
    assert made.operation == "what was there before the step: parameter 'mid.weight'" and made.rank == 1
    assert any(each.startswith("rank 0 saw NaN by") for each in made.seen)


@pytest.mark.parametrize("plan", PLANS)
def test_nothing_is_found_where_the_loss_and_gradients_are_finite(plan):
    assert found("nothing", plan, PLANS[plan]) is None
