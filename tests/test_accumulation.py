"""Steps of several calls, whose gradients are reduced in each call or, for all of them, in the last."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import fx, nn

import shardgraph
from shardgraph import PlanError, ir
from shardgraph.passes.base import Context
from shardgraph.passes.parameters.accumulate_gradients import AddAccumulated
from shardgraph.passes.parameters.reduce_gradients import ReduceGradients
from shardgraph.plans.batch import Batch
from shardgraph.plans.pipeline_plan import Pipeline
from shardgraph.report.parts import ADDITION, parts_of
from tests import accumulations
from tests.machines import toy_cluster
from tests.standing import on_ranks
from tests.test_analysis import llama, text
from tests.zoo import make

X = torch.zeros(16, 64, device="meta")


def analysed(name: str, reduce: str, calls: int = 4) -> shardgraph.Analysis:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    plan = replace(shardgraph.preset(name, {"dp": 4}), batch=Batch(64 * calls, calls, reduce))
    return shardgraph.analyze(model, (X,), plan, cluster=toy_cluster(1, 4))


@pytest.mark.quick("zero2-last")
@pytest.mark.parametrize("reduce", ["each", "last"])
@pytest.mark.parametrize("name", ["ddp", "zero1", "zero2", "fsdp"])
def test_three_steps_are_those_of_one_device(name, reduce):
    for found, expected in on_ranks(accumulations.losses, 2, args=(name, reduce)):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.quick("fsdp-last")
@pytest.mark.parametrize("reduce", ["each", "last"])
@pytest.mark.parametrize("name", ["ddp", "zero2", "fsdp"])
def test_the_predicted_peak_of_a_step_is_the_measured_one(name, reduce):
    for predicted, measured in on_ranks(accumulations.peaks, 2, args=(name, reduce)):
        assert predicted == pytest.approx(measured, rel=0.01)


def test_reductions_of_the_last_call_are_those_of_one():
    sent = {reduce: analysed("ddp", reduce).time.communication for reduce in ("each", "last")}
    assert sent["last"] == pytest.approx(analysed("ddp", "each", calls=1).time.communication)
    assert sent["each"] == pytest.approx(4 * sent["last"])


def test_parameters_are_gathered_in_each_call():
    once, each = (analysed("fsdp", reduce).time.communication for reduce in ("last", "each"))
    one = analysed("fsdp", "each", calls=1)
    reductions = sum(row.seconds for row in one.rows if row.operation.startswith("reduce_scatter"))
    assert each == pytest.approx(4 * one.time.communication) and reductions > 0
    assert once == pytest.approx(each - 3 * reductions)


def test_between_calls_whole_gradients_are_held_that_are_not_reduced():
    whole = sum(p.nbytes for p in nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))).parameters())
    for name, shards in (("ddp", 1), ("zero2", 4)):
        first = {reduce: analysed(name, reduce).rows[0].memory.get("gradients", 0) for reduce in ("each", "last")}
        assert first == {"each": whole / shards, "last": whole}


@pytest.mark.parametrize("reduce", ["each", "last"])
def test_a_step_adds_up_to_its_parts(reduce):
    analysis = analysed("fsdp", reduce)
    parts = parts_of(analysis)
    assert parts.step == pytest.approx(analysis.time.total) and parts.peak == analysis.peak_memory
    assert parts.samples == analysis.samples == 256
    assert parts.seconds["exposed over dp"] == pytest.approx(analysis.time.exposed)
    assert (ADDITION in parts.seconds) == (reduce == "each")  # else additions are rows


@pytest.mark.slow
@pytest.mark.parametrize("reduce", ["each", "last"])
def test_a_deep_model_is_analysed_from_a_few_of_its_layers(reduce):
    plan = replace(shardgraph.preset("fsdp", {"dp": 4}), batch=Batch(64, 4, reduce))
    few, whole = (
        shardgraph.analyze(llama(9), plan=plan, example_kwargs=text(4), cluster=toy_cluster(1, 4), fold=fold)
        for fold in (True, False)
    )
    assert few.rows == whole.rows and few.time == whole.time
    assert few.earlier == whole.earlier and (few.earlier is None) == (reduce == "each")


def test_where_nothing_is_reduced_calls_are_alike():
    x, model = torch.zeros(16, 64, device="meta"), nn.Linear(64, 64, device="meta")
    plans = (replace(shardgraph.preset("tp", {"tp": 2}), batch=Batch(64, 4, reduce)) for reduce in ("each", "last"))
    each, last = (shardgraph.analyze(model, (x,), plan, cluster=toy_cluster(1, 2)) for plan in plans)
    assert last.rows == each.rows and last.earlier is None and last.time == each.time


def test_an_analysis_is_of_the_whole_step():
    one, four = analysed("ddp", "each", calls=1), analysed("ddp", "each")
    assert four.flops == 4 * one.flops and four.samples == 4 * one.samples
    assert four.time.optimizer == one.time.optimizer and four.peak_memory > one.peak_memory
    assert "4 data ranks x 4 calls, whose gradients are added up, x 16 samples" in str(four)


def test_a_plan_says_which_calls_reduce():
    plan = replace(shardgraph.preset("ddp", {"dp": 4}), batch=Batch(64, 4, "last"))
    assert [plan.reduces(call) for call in range(8)] == 2 * [False, False, False, True]
    assert shardgraph.Plan.from_yaml(plan.to_yaml()) == plan
    assert "4 calls, whose gradients are added up and reduced in the last, x 4 samples" in str(plan)
    for batch in (None, Batch(64, 4), Batch(4, 1, "last")):
        assert all(replace(plan, batch=batch).reduces(call) for call in range(4))


def test_what_cannot_be_reduced_so_is_told():
    with pytest.raises(PlanError, match=r"batch\.reduce is 'first'; it may be 'each' or 'last'"):
        Batch(64, 4, "first")
    staged = shardgraph.preset("pp+fsdp", {"pp": 2, "dp": 2}, Pipeline(4))
    with pytest.raises(PlanError, match=r"batch\.reduce is 'last'; it may be 'each' with a pipeline"):
        replace(staged, batch=Batch(64, 4, "last"))


@pytest.mark.slow
def test_a_search_reduces_once_where_links_are_slow():
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    x = torch.zeros(1024, 256, device="meta")
    asked = {"cluster": toy_cluster(2, 1), "global_batch": 1 << 14, "mesh": {"dp": 2}}
    room = shardgraph.plan(model, (x,), **asked)
    plan = shardgraph.plan(model, (x,), **asked, memory=room.considered[0].memory // 2)
    assert room.calls == 1 < plan.calls and plan.batch.reduce == "last"
    found = {each.plan.batch.reduce for each in plan.considered if each.plan is not None and each.plan.calls > 1}
    assert found == {"each", "last"}
    assert f"dp=2, {plan.calls} microbatches reduced once" in plan.explain()
    front = shardgraph.front(model, (x,), (2,), cluster=toy_cluster(2, 1), global_batch=1 << 14)
    assert any(each.reduces_once for each in front.points) and " reduced once " in str(front)


@pytest.mark.slow
@pytest.mark.parametrize("reduce", ["each", "last"])
def test_what_is_recomputed_leaves_room_for_what_is_held_between_calls(reduce):
    with torch.device("meta"):
        model, x = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8))), torch.zeros(512, 64)
    plan = replace(shardgraph.preset("ddp", {"dp": 2}), batch=Batch(4096, 4, reduce))
    asked = {"cluster": toy_cluster(1, 2)}
    room = int(0.8 * shardgraph.analyze(model, (x,), plan, **asked).peak_memory)
    assert shardgraph.analyze(model, (x,), plan, **asked, memory=room).peak_memory <= room


# -- verify ------------------------------------------------------------------------------------------------


def accumulated(name: str, reduce: str, **changes: int) -> shardgraph.Report:
    model, (args, kwargs) = make(name, 12)
    plan = replace(shardgraph.preset("fsdp", {"dp": 2}), batch=Batch(64, 4, reduce), **changes)
    return shardgraph.verify(model, args, plan, example_kwargs=kwargs, steps=2)


@pytest.mark.quick("each-conv-batch-norm", "last-odd-mlp")
@pytest.mark.parametrize("name", ["odd-mlp", "conv-batch-norm", "tied-transformer", "llama"])
@pytest.mark.parametrize("reduce", ["each", "last"])
def test_verify_makes_the_calls_of_a_step(name, reduce):
    report = accumulated(name, reduce)
    assert report.ok, report
    calls = f"a batch of 12 cut among the ranks, in 3 calls of each{' reduced in the last' * (reduce == 'last')}"
    assert report.batch == calls and any(compared.endswith("call 2") for compared in report.errors)


def test_verify_sees_that_earlier_gradients_are_not_added(monkeypatch):
    run = AddAccumulated.run

    def forgets(self: AddAccumulated, gm: fx.GraphModule, context: Context) -> None:
        run(self, gm, context)
        for role, node in ir.placeholders(gm).items():
            if isinstance(role, ir.Accumulated):
                (total,) = node.users
                total.replace_input_with(node, total.args[0])

    monkeypatch.setattr(AddAccumulated, "run", forgets)
    report = accumulated("odd-mlp", "last")
    assert not report.ok and report.worst[0].startswith("gradient of"), report
    assert accumulated("odd-mlp", "each").ok


@pytest.mark.parametrize("reduce", ["each", "last"])
def test_verify_finds_the_pass_whose_node_differs_in_one_of_several_calls(reduce, monkeypatch):
    run = ReduceGradients.run

    def largest(self: ReduceGradients, gm: fx.GraphModule, context: Context) -> None:
        run(self, gm, context)
        for node in gm.graph.find_nodes(op="call_function", target=ir.REDUCE_SCATTER):
            node.update_arg(1, "max")

    monkeypatch.setattr(ReduceGradients, "run", largest)
    found = accumulated("odd-mlp", reduce, bucket=0).first_divergence
    assert found is not None and found.made_by == "reduce-gradients"
