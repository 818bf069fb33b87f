"""compile(plan="auto", global_batch=...): layouts whose ranks share a batch, accumulate or have stages are searched."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import shardgraph
from shardgraph import PlanError, ShardGraphError
from shardgraph.api import timed_steps
from shardgraph.api.timed_steps import TimedSteps
from shardgraph.capture.captures import Call
from shardgraph.search.planner import choose_plan
from shardgraph.search.question import Question
from shardgraph.search.source import Source
from tests import global_batches
from tests.machines import toy_cluster
from tests.replanned import net
from tests.standing import on_ranks

ROOM = 2**30
SCARCE = 80 << 10  # bytes with which a rank computes few samples at once
X = torch.ones(2, 8)


@pytest.mark.parametrize("mesh", [pytest.param({"dp": 2}, marks=pytest.mark.slow), {"tp": 2}, {"pp": 2}], ids=str)
def test_a_step_that_is_divided_as_the_plan_says_is_that_of_one_device(mesh):
    for plan, losses in on_ranks(global_batches.divided, 2, args=(mesh, ROOM, None)):
        assert plan.whole_mesh == tuple(mesh.items()) and plan.batch.samples == global_batches.SAMPLES
        assert losses == pytest.approx(global_batches.on_one_device(), rel=1e-5)


def test_calls_are_accumulated_where_one_does_not_fit():
    for plan, losses in on_ranks(global_batches.divided, 2, args=({"dp": 2}, SCARCE, None)):
        assert plan.calls > 1 and plan.calls * plan.samples_per_call * 2 == global_batches.SAMPLES
        assert losses == pytest.approx(global_batches.on_one_device(), rel=1e-5)


def test_one_process_accumulates_too():
    plan, losses = global_batches.divided(None, SCARCE, None)
    assert plan.calls > 1 and losses == pytest.approx(global_batches.on_one_device(), rel=1e-5)


@pytest.mark.parametrize(
    ("mesh", "memory"),
    [
        ({"tp": 2}, ROOM),
        pytest.param({"pp": 2}, ROOM, marks=pytest.mark.slow),
        pytest.param({"dp": 2}, SCARCE, marks=pytest.mark.slow),
    ],
)
def test_candidates_are_measured_with_the_first_rank_s_batch_where_ranks_share_one(mesh, memory):
    """The example inputs differ between ranks, which a plan whose ranks share a batch refuses."""
    for plan, losses in on_ranks(global_batches.divided, 2, args=(mesh, memory, 0.1)):
        assert any(remark.startswith("measured") for remark in plan.remarks)
        assert losses == pytest.approx(global_batches.on_one_device(), rel=1e-5)


class Calls:
    """Counts the calls of its step."""

    def __init__(self, calls: int) -> None:
        self.plan = shardgraph.Plan("ddp", (("dp", 1),), (), batch=shardgraph.plans.batch.Batch(4 * calls, calls))
        self.made = 0

    def parameters(self) -> list[nn.Parameter]:
        return [nn.Parameter(torch.zeros(1))]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.made += 1
        return x.requires_grad_()


def test_a_measured_step_of_many_calls_makes_two_of_them(monkeypatch):
    clock = iter(range(1000))  # a second for each look at it: at the start, before the second call, behind, at the end
    monkeypatch.setattr(timed_steps.time, "perf_counter", lambda: float(next(clock)))
    module = Calls(10)
    steps = TimedSteps(module, ((torch.ones(4, 2),), {}))  # type: ignore[arg-type]
    module.made = 0
    assert steps.step() == 3 + 8 * 1 and module.made == 2


def test_inputs_of_other_sizes_have_the_rows_of_the_example_again():
    call = Call(net(), (torch.arange(6.0).reshape(3, 2),), {"mask": torch.ones(2, 2), "scale": 2.0})
    more, fewer = call.repeated(7), call.repeated(2)
    assert more.args[0][:, 0].tolist() == [0, 2, 4, 0, 2, 4, 0] and fewer.args[0].tolist() == [[0, 1], [2, 3]]
    assert more.kwargs["mask"] is call.kwargs["mask"] and more.kwargs["scale"] == 2.0
    assert call.repeated(3) is call


@pytest.mark.parametrize("mesh", [{"dp": 2, "tp": 2}, pytest.param({"pp": 4}, marks=pytest.mark.slow)], ids=str)
def test_a_total_is_searched_as_plan_searches_it(mesh):
    asked: Any = {"example_kwargs": {"target": X}, "loss_fn": nn.functional.mse_loss, "cluster": toy_cluster(1, 4)}
    expected = shardgraph.plan(net(), (X,), **asked, mesh=mesh, global_batch=16)
    question = Question.of(net(), "auto", lambda _: tuple(mesh.items()), cluster=asked["cluster"], total=16)
    source = Source(question.about((X,), asked["example_kwargs"], asked["loss_fn"]))
    assert choose_plan(source, own_batches=False).to_yaml() == expected.to_yaml()


@pytest.mark.parametrize("mesh", [{"dp": 2, "tp": 2}, pytest.param({"pp": 4}, marks=pytest.mark.slow)], ids=str)
def test_analyze_says_what_the_step_of_the_plan_takes_that_plan_finds(mesh):
    asked: Any = {"example_kwargs": {"target": X}, "loss_fn": nn.functional.mse_loss, "cluster": toy_cluster(1, 4)}
    found = shardgraph.plan(net(), (X,), **asked, mesh=mesh, global_batch=16)
    analysis = shardgraph.analyze(net(), (X,), "auto", **asked, mesh=mesh, global_batch=16)
    assert analysis.plan.batch == found.batch and analysis.plan.whole_mesh == found.whole_mesh
    assert analysis.samples == 16 and analysis.call.batch == found.samples_per_call
    assert analysis.time.total == pytest.approx(found.considered[0].seconds)
    assert analysis.peak_memory == found.considered[0].memory


@pytest.mark.parametrize(
    ("mesh", "memory", "said"),
    [
        pytest.param({"dp": 2}, SCARCE, "in 3 calls of each", marks=pytest.mark.slow),
        ({"tp": 2}, ROOM, "every rank on the whole batch|cut among the ranks"),
        pytest.param({"pp": 2}, ROOM, "the original on undivided batches", marks=pytest.mark.slow),
    ],
)
def test_verify_compares_the_plan_that_is_found_for_the_batch(mesh, memory, said):
    cluster = toy_cluster(1, 4, memory=memory)
    asked: Any = {"mesh": mesh, "cluster": cluster, "global_batch": global_batches.SAMPLES, "steps": 2}
    report = shardgraph.verify(
        net(), (torch.randn(12, 32, 8),), "auto", **asked, loss_fn=lambda out: out.square().mean()
    )
    assert report.ok and re.search(said, report.batch), report
    assert report.plan.batch.samples == global_batches.SAMPLES and report.plan.whole_mesh == tuple(mesh.items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"plan": "single"}, "global_batch is 8; it may be for plan='auto' with example inputs"),
        ({"example_inputs": None}, "global_batch is 8; it may be for plan='auto' with example inputs"),
        ({"model": net().eval()}, r"global_batch is 8; it may be for a model in training mode.*model\.train\(\)"),
        ({"global_batch": 0}, r"compile\(\): global_batch is 0; it may be a whole number from 1"),
        ({"memory": "1KiB"}, "no plan fits 1.0 KiB per rank"),
    ],
)
def test_what_it_is_not_for_is_told(options, message):
    given: dict[str, Any] = {"model": net(), "plan": "auto", "example_inputs": (X,), "global_batch": 8} | options
    with pytest.raises(ShardGraphError, match=message):
        shardgraph.compile(**given)


@pytest.mark.parametrize("function", [shardgraph.analyze, shardgraph.verify], ids=["analyze", "verify"])
@pytest.mark.parametrize("options", [{"plan": "fsdp", "global_batch": 8}, {"plan": "auto", "global_batch": 0}], ids=str)
def test_it_is_for_the_plan_that_is_searched(function, options):
    with pytest.raises(
        ShardGraphError, match=r"global_batch is \d; it may be (a whole number from 1|for .*plan='auto')"
    ):
        function(net(), (X,), **options)


def test_a_model_that_mixes_rows_of_its_batch_is_given_no_stages():
    for error in on_ranks(global_batches.why_no_stages, 2):
        assert "the rows of a batch are not computed apart" in error


def test_stages_need_the_loss():
    with pytest.raises(PlanError, match=r"the mesh \{'pp': 4\} has an axis 'pp'.*'labels'.*a loss_fn and its target"):
        shardgraph.plan(net(), (X,), cluster=toy_cluster(1, 4), mesh={"pp": 4}, global_batch=8)


def test_trainers_whose_loops_divide_no_batch_refuse_it():
    from shardgraph.trainers.batches import check_options

    with pytest.raises(ShardGraphError, match="'global_batch' finds plans whose ranks share a batch"):
        check_options({"global_batch": 8}, "Accelerate")
