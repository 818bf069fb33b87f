"""Where a NaN comes from, and replicas that are not equal any more."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from shardgraph import Pipeline
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


@pytest.mark.quick("logarithm-*-ddp", "masked away-*-fsdp")
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


PIPELINES = {
    "1f1b": (2, {"pp": 2}, Pipeline(2, stages=("down",))),
    "recomputed": (2, {"pp": 2}, Pipeline(2, stages=("mid",), checkpoint="always")),
    "halves": (2, {"pp": 2}, Pipeline(2, "interleaved-zero-bubble", stages=("mid",))),
    "two-stages-each": (2, {"pp": 2}, Pipeline(2, "interleaved-1f1b", stages=("positive", "mid", "down"))),
    "shards": (4, {"pp": 2, "dp": 2}, Pipeline(2, stages=("mid",))),
}


@pytest.mark.quick("*-two-stages-each")
@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize(
    ("kind", "value", "operation", "text", "graph"),
    [
        ("logarithm", "NaN", "log", "torch.log(x + 1)", "forward"),
        ("masked away", "NaN", "softmax", "torch.softmax(self.mid(hidden) + gone", "forward"),
        ("root", "inf", "", "torch.sqrt(", "backward"),
    ],
)
def test_in_a_pipeline_it_is_named_with_stage_and_microbatch(pipeline, kind, value, operation, text, graph):
    count, mesh, options = PIPELINES[pipeline]
    plan = "pp+fsdp" if "dp" in mesh else "pp"
    results = on_ranks(numeric_faults.found, count, args=(kind, plan, mesh, count // 4, options))
    made = results[0][0]
    assert all(result == made and unchanged for result, unchanged in results)
    assert (made.value, made.graph, made.microbatch) == (value, graph, 1) and operation in made.operation
    assert f"numeric_faults.py:{line_of(text)}" in made.source and "Fragile" in made.module, str(made)
    before_down = "down" in options.stages and kind != "logarithm"
    assert made.stage == len(options.stages) - before_down
    assert f"in {graph} of microbatch 1 in stage {made.stage}" in str(made)


@pytest.mark.quick("1f1b-masked away")
@pytest.mark.parametrize("kind", ["root", "masked away"])
@pytest.mark.parametrize("pipeline", ["1f1b", "halves"])
def test_what_a_microbatch_made_is_not_said_of_the_next_one_that_adds_to_its_gradients(pipeline, kind):
    results = on_ranks(numeric_faults.found, 2, args=(kind, "pp", {"pp": 2}, 0, PIPELINES[pipeline][2], 0))
    made = results[0][0]
    assert all(result == made and unchanged for result, unchanged in results)
    assert made.microbatch == 0 and made.graph == ("backward" if kind == "root" else "forward")


def test_a_parameter_that_was_not_finite_before_is_named():
    made = found("parameter", "fsdp", PLANS["fsdp"])
    assert made.operation == "what was there before the step: parameter 'mid.weight'" and made.rank == 1
    assert any(each.startswith("rank 0 saw NaN by") for each in made.seen)


@pytest.mark.parametrize("plan", PLANS)
def test_nothing_is_found_where_the_loss_and_gradients_are_finite(plan):
    assert found("nothing", plan, PLANS[plan]) is None


@pytest.mark.quick("gradient-*", "state-*")
@pytest.mark.parametrize(
    ("where", "named"),
    [
        ("parameter", "parameter mid.bias"),
        ("gradient", "gradient of mid.bias"),
        ("state", "exp_avg of mid.bias"),
    ],
)
def test_one_bit_that_differs_names_the_tensor_and_the_rank(where, named):
    for told in on_ranks(numeric_faults.compared, 4, args=("ddp", {"dp": 4}, where, 2)):
        assert f"{named}" in told and "rank 2 differs from rank 0, 1, 3" in told


@pytest.mark.quick("ddp-*", "pp+ddp-*")
@pytest.mark.parametrize(
    ("plan", "mesh", "told"),
    [
        ("ddp", {"dp": 2}, "rank 0 and rank 1 differ: which is wrong cannot be told"),
        ("tp", {"tp": 2}, "1 differ"),
        ("hsdp", {"dp_replicate": 2, "dp_shard": 2}, "rank 1 and rank 3 differ"),
        ("pp+ddp", {"pp": 2, "dp": 2}, "differ: which is wrong"),
    ],
)
def test_what_is_replicated_is_compared_under_every_plan(plan, mesh, told):
    count = torch.tensor([*mesh.values()]).prod().item()
    for wrong in range(count):
        found = on_ranks(numeric_faults.compared, count, args=(plan, mesh, "parameter", wrong))
        if any("differ" in each for each in found):
            assert len({*found}) == 1 and "mid.bias" in found[0]
            if told in found[0]:
                return
    raise AssertionError(found)


@pytest.mark.slow
def test_what_has_no_replica_is_said_to_be_unseen():
    for told in on_ranks(numeric_faults.compared, 2, args=("fsdp", {"dp": 2}, "parameter", None)):
        assert "6 parameters have none" in told


@pytest.mark.slow
def test_replicas_are_compared_by_themselves_every_few_calls():
    assert on_ranks(numeric_faults.watched, 2, args=("ddp", {"dp": 2}, 4)) == [4, 4]
    assert on_ranks(numeric_faults.watched, 2, args=("ddp", {"dp": 2}, 0)) == [None, None]
