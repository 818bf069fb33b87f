"""``shardgraph.compare``: what two plans decide differently, and what each costs in parts that add up."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import shardgraph
from shardgraph import Pipeline, Plan, PlanError, ShardGraphError
from shardgraph.plans.batch import Batch
from shardgraph.plans.differences import differences
from shardgraph.report.parts import ADDITION, parts_of
from tests.machines import toy_cluster

pytestmark = pytest.mark.usefixtures("shared_captures")

DDP, FSDP = (shardgraph.preset(name, {"dp": 4}) for name in ("ddp", "fsdp"))
INPUTS = (torch.zeros(4, 8),)


def net(width: int = 16) -> nn.Module:
    return nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, 8))


def compared(first: object, second: object) -> shardgraph.report.comparison.Comparison:
    return shardgraph.compare(first, second, model=net(), example_inputs=INPUTS, cluster=toy_cluster())


def analysed(plan: Plan, model: nn.Module | None = None, **options) -> shardgraph.Analysis:
    options = {"cluster": toy_cluster()} | options
    return shardgraph.analyze(model or net(), INPUTS, plan, **options)


def test_the_differences_of_two_plans_are_named_part_by_part():
    other = replace(FSDP, recompute="full", bucket=2**20, prefetch=2)
    named = {each.part: (each.first, each.second) for each in differences(DDP, other)}
    assert named.keys() == {"recomputation", "bucket", "prefetch", "parameter *"}
    assert named["recomputation"] == ("none", "full")
    assert "gathered again in backward" in named["parameter *"][1]


def test_parameters_that_a_pattern_decides_alike_do_not_differ():
    ((_, entry),) = FSDP.parameters
    named = replace(FSDP, parameters=(("*", entry), ("0.weight", entry)))
    assert not differences(FSDP, named)


def test_the_stages_of_a_pipeline_are_parts():
    piped = shardgraph.preset("pp+fsdp", {"pp": 2, "dp": 2}, Pipeline(4, "gpipe"))
    named = {each.part: each.second for each in differences(FSDP, piped)}
    assert named["schedule"] == "gpipe" and named["microbatches"] == "4" and named["mesh"] == "pp=2 x dp=2"


@pytest.mark.parametrize("plan", [DDP, FSDP])
def test_seconds_and_bytes_add_up_to_the_analysis(plan):
    analysis = analysed(plan)
    parts = parts_of(analysis)
    assert parts.step == pytest.approx(analysis.time.total) and parts.peak == analysis.peak_memory
    assert parts.seconds["exposed over dp"] == pytest.approx(analysis.time.exposed)


def test_those_of_a_pipeline_do_too():
    plan = shardgraph.preset("pp+fsdp", {"pp": 2, "dp": 2}, Pipeline(2, stages=("2",)))
    loss = {"example_kwargs": {"target": INPUTS[0]}, "loss_fn": nn.functional.mse_loss}
    analysis = analysed(plan, **loss)
    parts = parts_of(analysis)
    assert parts.step == pytest.approx(analysis.time.total) and parts.peak == analysis.peak_memory
    assert {"waiting for stages", "exposed over dp"} <= parts.seconds.keys()
    assert sum(parts.memory.values()) == max(analysis.peak(0), analysis.peak(1))


def test_accumulated_calls_are_part_of_a_step_and_hold_gradients():
    analysis = analysed(replace(DDP, batch=Batch(32, calls=2)))
    once, twice = parts_of(analysed(DDP)), parts_of(analysis)
    assert twice.seconds["computation"] == pytest.approx(2 * once.seconds["computation"])
    assert twice.seconds["update"] == once.seconds["update"] and twice.samples == 2 * once.samples
    assert twice.peak > once.peak


def test_the_gradients_of_accumulated_calls_are_added_up():
    """Once for two calls, twice for three: two reads and a write of every gradient that is held."""
    rate = toy_cluster().device.rate("pointwise")
    held = parts_of(analysed(DDP)).memory
    for calls in (2, 3):
        analysis = analysed(replace(DDP, batch=Batch(16 * calls, calls=calls)))
        nbytes = analysis.rows[-1].memory["gradients"]
        assert nbytes >= held["parameters"]
        parts = parts_of(analysis)
        assert parts.seconds[ADDITION] == pytest.approx((calls - 1) * 3 * nbytes / rate.per_second)
        one = analysed(DDP).time
        of_calls = calls * (one.total - one.optimizer)
        assert parts.step == pytest.approx(of_calls + one.optimizer + parts.seconds[ADDITION])
        assert parts.step == pytest.approx(analysis.time.total) and parts.peak == analysis.peak_memory
    assert ADDITION not in parts_of(analysed(DDP)).seconds


def test_it_reads_as_text():
    comparison = compared(DDP, FSDP)
    assert comparison.ratio == pytest.approx(comparison.parts[1].step / comparison.parts[0].step)
    text = str(comparison)
    assert "exposed over dp" in text and "optimizer state" in text and "-> shard(0) over dp" in text
    assert comparison.table() in text.replace("\n  ", "\n")


def test_equal_plans_cost_the_same():
    text = str(compared(DDP, DDP))
    assert "both decide the same" in text and "as fast and takes as much memory" in text


def test_plans_of_a_global_batch_are_priced_for_their_calls():
    comparison = compared(replace(DDP, batch=Batch(64, calls=2)), replace(DDP, batch=Batch(64, calls=4)))
    assert [each.samples for each in comparison.parts] == [64, 64]
    assert [each.samples for each in (comparison.first, comparison.second)] == [64, 64]
    assert [(each.part, each.second) for each in comparison.decisions] == [("calls in a step", "4")]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda: analysed(DDP, optimizer="sgd"), "the optimizer of plan 'ddp' is adamw, and of plan 'ddp' sgd"),
        (
            lambda: analysed(DDP, cluster=replace(toy_cluster(), name="other")),
            "clusters 'toy' and 'other'",
        ),
        (lambda: analysed(DDP, nn.Sequential(nn.Sequential(nn.Linear(8, 8)))), "only one of them computes in"),
    ],
)
def test_analyses_of_two_jobs_are_refused(other, words):
    with pytest.raises(ShardGraphError, match=words):
        shardgraph.compare(analysed(DDP), other())


def test_the_pipeline_of_a_plan_is_not_one_of_another_model():
    piped = shardgraph.preset("pp+fsdp", {"pp": 2, "dp": 2}, Pipeline(2, stages=("2",)))
    loss = {"example_kwargs": {"target": INPUTS[0]}, "loss_fn": nn.functional.mse_loss}
    comparison = shardgraph.compare(analysed(DDP, **loss), analysed(piped, **loss))
    assert "waiting for stages" in str(comparison) and "microbatches" in str(comparison)


def test_a_plan_without_its_model_is_refused():
    with pytest.raises(PlanError, match="give compare the model"):
        shardgraph.compare(DDP, FSDP)


def test_a_mesh_beside_plans_that_have_their_own_is_refused():
    for other in (FSDP, analysed(FSDP)):
        with pytest.raises(PlanError, match="each of what it compares has a mesh of its own"):
            shardgraph.compare(DDP, other, model=net(), example_inputs=INPUTS, mesh={"dp": 2})


def test_a_plan_says_how_a_step_is_divided_and_keeps_it():
    plan = replace(DDP, batch=Batch(64, calls=2))
    assert (plan.calls, plan.samples_per_call) == (2, 8) and Plan.from_yaml(plan.to_yaml()) == plan
    assert "64 samples a step: 4 data ranks x 2 calls, whose gradients are added up, x 8 samples" in str(plan)
    assert (DDP.calls, DDP.samples_per_call) == (1, None)


def test_a_batch_that_ranks_cannot_divide_is_refused():
    with pytest.raises(PlanError, match="a multiple of the 12 calls"):
        replace(DDP, batch=Batch(64, calls=3))
