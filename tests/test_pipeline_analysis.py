"""What a step of a pipeline is predicted to take, and where its stages are put for that."""

from __future__ import annotations

import importlib
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

import shardgraph
from shardgraph import Pipeline, PlanError, preset, recompute
from shardgraph.capture.stacks import Stack
from shardgraph.report.pipeline import PipelineAnalysis
from shardgraph.report.pipeline_folding import extend_stages, units_of_stages
from tests import pipelines
from tests.machines import toy_cluster
from tests.standing import on_ranks
from tests.test_analysis import OfKinds, gpt2, llama, text
from tests.zoo import make

pytestmark = pytest.mark.usefixtures("shared_captures")


def analysis(layers: int, ranks: int, pipeline: Pipeline, plan: str = "pp", **mesh: int) -> PipelineAnalysis:
    wanted = preset(plan, {"pp": ranks, **mesh}, pipeline)
    return shardgraph.analyze(gpt2(layers), (), wanted, example_kwargs=text(8), cluster=toy_cluster())


@pytest.mark.slow
def test_stages_are_of_equal_length_where_no_one_says_where_to_cut():
    seconds = [stage.cost.forward + stage.cost.backward for stage in analysis(8, 4, Pipeline(8)).stages]
    assert max(seconds) < 1.25 * min(seconds)


@pytest.mark.quick("zbv")
@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "zbv"])
def test_every_stage_has_a_parameter_where_no_one_says_where_to_cut(schedule):
    """An optimizer refuses a rank without one."""
    model, (args, kwargs) = make("gpt2", 8)
    plan = preset("pp", {"pp": 4}, Pipeline(8, schedule))
    found = shardgraph.analyze(model, args, plan, example_kwargs=kwargs, cluster=toy_cluster())
    assert len(found.stages) == 8 and all(stage.state["parameters"] for stage in found.stages)


@pytest.mark.slow
def test_more_microbatches_make_smaller_bubbles_and_gpipe_holds_them_all():
    half = ("transformer.h.1",)
    few, many = (analysis(2, 2, Pipeline(count, stages=half)) for count in (2, 8))
    assert many.bubble_fraction < few.bubble_fraction
    gpipe = analysis(2, 2, Pipeline(8, "gpipe", stages=half))
    assert gpipe.peak(0) > many.peak(0) + 4 * many.stages[0].cost.saved


@pytest.mark.slow
def test_recomputed_stages_save_what_they_are_given_and_take_longer():
    kept, again = (
        analysis(2, 2, Pipeline(4, checkpoint=each, stages=("transformer.h.1",))) for each in ("never", "always")
    )
    assert again.stages[1].cost.saved < 0.3 * kept.stages[1].cost.saved
    assert again.stages[1].cost.backward > kept.stages[1].cost.backward


def test_adding_up_the_gradients_of_microbatches_is_computation_of_all_but_the_first():
    """Of 4 microbatches 3 add: each reads two gradients and writes one. A split backward adds in its second part."""
    priced = analysis(2, 2, Pipeline(4, stages=("transformer.h.1",)))
    per_second = priced.cluster.device.rate("pointwise").per_second
    for stage in priced.stages:
        added = [row for row in stage.rows if row.operation == "accumulate"]
        seconds = sum(row.seconds for row in added)
        assert sum(row.written for row in added) == stage.gradients
        assert 4 * seconds == pytest.approx(3 * 3 * stage.gradients / per_second)
        rest = sum(row.seconds for row in stage.rows if row.half == "backward" and row not in added)
        assert stage.cost.backward == pytest.approx(rest + seconds)
        assert stage.cost.backward_input + stage.cost.backward_weight == pytest.approx(stage.cost.backward)
        assert stage.cost.backward_weight > seconds
    assert priced.time.exposed == 0


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_a_microbatch_adds_each_gradient_as_soon_as_it_has_it(schedule):
    """So that it holds one gradient beside those that it adds to, and not all of them."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
    wanted, one = preset("pp", {"pp": 2}, Pipeline(4, schedule)), 64 * 64 * 4
    priced = shardgraph.analyze(model, (torch.randn(8, 64),), wanted, cluster=toy_cluster())
    for stage in priced.stages:
        for kind in "BW":
            assert stage.gradients <= stage.working[kind] + stage.cost.saved < stage.gradients + one
            assert one <= stage.adding[kind] + stage.cost.saved < 2 * one


def test_states_of_a_stage_are_sharded_over_the_axes_beside_the_pipeline():
    half = Pipeline(4, stages=("transformer.h.1",))
    alone, sharded = analysis(2, 2, half), analysis(2, 2, half, "pp+fsdp", dp=2)
    for one, other in zip(alone.stages, sharded.stages, strict=True):
        assert other.state["optimizer state"] == pytest.approx(one.state["optimizer state"] / 2, rel=0.05)


@pytest.mark.slow
def test_states_of_a_stage_are_stored_in_full_precision_where_it_computes_in_less():
    half = preset("pp", {"pp": 2}, Pipeline(4, stages=("transformer.h.1",)))
    given = {"example_kwargs": text(8), "cluster": toy_cluster()}
    full, low = (shardgraph.analyze(gpt2(2), (), half, precision=each, **given) for each in (None, "bf16"))
    for one, other in zip(full.stages, low.stages, strict=True):
        assert other.state["parameters"] == one.state["parameters"]
        assert other.state["optimizer state"] == one.state["optimizer state"]


def test_stages_that_no_cut_makes_fit_name_the_least_memory():
    small = toy_cluster(memory=50_000)
    with pytest.raises(PlanError, match="is the least that would do"):
        shardgraph.analyze(gpt2(4), (), preset("pp", {"pp": 2}, Pipeline(4)), example_kwargs=text(8), cluster=small)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", pytest.param("1f1b", marks=pytest.mark.slow)])
def test_a_budget_is_kept_by_every_rank_and_a_smaller_one_has_no_larger_peak(schedule):
    plan = preset("pp", {"pp": 2}, Pipeline(4, schedule, stages=("transformer.h.1",)))
    given = {"example_kwargs": text(8), "cluster": toy_cluster()}
    most = shardgraph.analyze(gpt2(2), (), plan, **given).peak_memory
    found = [shardgraph.analyze(gpt2(2), (), plan, memory=int(most * part), **given) for part in (0.9, 0.8)]
    assert 0.8 * most >= found[1].peak_memory < found[0].peak_memory <= 0.9 * most
    with pytest.raises(PlanError, match=r"the smallest peak is.*checkpoint='always'"):
        shardgraph.analyze(gpt2(2), (), plan, memory=int(0.2 * most), **given)


@pytest.mark.slow
def test_a_pipeline_within_a_budget_equals_the_unsharded_model():
    (model, (args, kwargs)), plan = make("gpt2", 8), preset("pp", {"pp": 2}, Pipeline(4, stages=("transformer.h.1",)))
    most = shardgraph.analyze(model, args, plan, example_kwargs=kwargs).peak_memory
    report = shardgraph.verify(model, args, plan, example_kwargs=kwargs, memory=int(0.9 * most))
    assert report.ok, report
    assert report.plan.recompute not in ("none", "budget")


@pytest.mark.slow
def test_the_picture_has_the_plan_and_the_schedule(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = shardgraph.visualize(
            analysis(4, 2, Pipeline(4, "zbv")), tmp_path / "plan.svg", model=gpt2(4), example_kwargs=text(8)
        )
    drawn = path.read_text()
    assert "Schedule zbv of 4 microbatches" in drawn
    assert "gradients of weights" in drawn


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("schedule", "vocabulary"),
    [
        ("1f1b", 300),
        ("1f1b", 5000),
        ("zbv", 5000),
        ("gpipe", 300),
        ("zbv", 300),
        ("interleaved-1f1b", 5000),
    ],
)
def test_the_predicted_peak_of_every_rank_is_the_measured_one(schedule, vocabulary):
    """Where activations are most of the memory, and where parameters, of which one is tied, are."""
    for measured, predicted in on_ranks(pipelines.peaks, 2, args=(Pipeline(4, schedule), vocabulary, 0.1)):
        assert predicted == pytest.approx(measured, rel=0.02)


# -- pipelines of which a few layers are analysed --------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "mesh", "pipeline"),
    [
        pytest.param("pp+fsdp", {"dp": 2}, Pipeline(8, balance=(3, 4, 4, 3)), id="1f1b"),
        pytest.param(
            "pp+tp+sp",
            {"tp": 2},
            Pipeline(8, "interleaved-1f1b", balance=(2, 2, 2, 1) * 2),
            id="interleaved",
            marks=pytest.mark.slow,
        ),
        pytest.param("pp", {}, Pipeline(8, "zbv", balance=(2, 2, 2, 1) * 2), id="zbv"),
        pytest.param("pp", {}, Pipeline(8, checkpoint="always", balance=(3, 4, 4, 3)), id="checkpoint"),
    ],
)
def test_a_pipeline_of_equal_layers_is_analysed_from_two_short_ones_with_the_same_result(plan, mesh, pipeline):
    wanted = preset(plan, {"pp": 4, **mesh}, pipeline)
    given = {"example_kwargs": text(8), "cluster": toy_cluster()}
    folded, whole = (shardgraph.analyze(llama(14), (), wanted, fold=fold, **given) for fold in (True, False))
    assert folded.peak_memory == whole.peak_memory and folded.flops == whole.flops
    assert folded.time.total == pytest.approx(whole.time.total, rel=1e-4)
    assert folded.plan.pipeline == whole.plan.pipeline


@pytest.mark.parametrize(
    ("names", "pipeline", "lengths"),
    [
        pytest.param(
            ["[0-2]", "10", "11", "20", "21"],
            Pipeline(8, balance=(10, 10, 10, 10)),
            [2, 3, 3, 1, 2],
            id="first ones of some stages",
            marks=pytest.mark.slow,
        ),
        pytest.param(["*[05].1"], Pipeline(8, "zbv", balance=(5,) * 8), [2, 3], id="part of a layer"),
        pytest.param(
            ["[5-9]"],
            Pipeline(8, balance=(5, 5, 15, 15)),
            [1, 2, 1, 2],
            id="all of a stage",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_so_is_one_whose_stages_recompute_some_of_their_layers(names, pipeline, lengths, monkeypatch):
    """A short pipeline has one of each kind of layers, and one more of one of them; or another of a kind alone."""
    search, analysed = importlib.import_module("shardgraph.search.analysis"), []

    def extended(analyse, *given):
        return extend_stages(lambda units: analysed.append(len(units)) or analyse(units), *given)

    monkeypatch.setattr(search, "extend_stages", extended)
    wanted = preset("pp", {"pp": 4}, pipeline)
    wanted = replace(wanted, annotations=tuple((f"layers.{name}", recompute()) for name in names))
    with torch.device("meta"):
        model, x = OfKinds(40 * "a"), torch.zeros(64, 512)
    short, whole = (shardgraph.analyze(model, (x,), wanted, cluster=toy_cluster(), fold=fold) for fold in (True, False))
    assert analysed == lengths
    assert short.peak_memory == whole.peak_memory and short.flops == whole.flops
    assert short.time.total == pytest.approx(whole.time.total, rel=1e-4)
    assert (short.plan.pipeline, short.plan.annotations) == (whole.plan.pipeline, whole.plan.annotations)


@pytest.mark.parametrize(
    ("kinds", "balance"),
    [
        pytest.param("ccb" + 11 * "a", (5, 4, 3, 2), id="other first layers"),
        pytest.param("c" + 8 * "ab", (5, 4, 6, 2), id="another first layer, then two in turns", marks=pytest.mark.slow),
    ],
)
def test_so_is_one_of_layers_of_several_kinds(kinds, balance, monkeypatch):
    search, folded = importlib.import_module("shardgraph.search.analysis"), []
    monkeypatch.setattr(search, "extend_stages", lambda *given: folded.append(extend_stages(*given)) or folded[-1])
    wanted = preset("pp", {"pp": 4}, Pipeline(8, balance=balance))
    with torch.device("meta"):
        model, x = OfKinds(kinds), torch.zeros(64, 512)
    short, whole = (shardgraph.analyze(model, (x,), wanted, cluster=toy_cluster(), fold=fold) for fold in (True, False))
    assert len(folded) == 1
    assert short.peak_memory == whole.peak_memory and short.flops == whole.flops
    assert short.time.total == pytest.approx(whole.time.total, rel=1e-4)
    assert short.plan.pipeline == whole.plan.pipeline


def test_stages_that_begin_within_a_unit_of_layers_are_analysed_whole():
    stack = Stack("layers", 17, head=1, period=2)
    assert units_of_stages(Pipeline(8, balance=(5, 4, 6, 2), ranks=4), stack) == (2, 2, 3, 1)
    for balance in ((4, 5, 6, 2), (1, 8, 6, 2), (5, 4, 6, 1)):
        assert units_of_stages(Pipeline(8, balance=balance, ranks=4), stack) == ()


@pytest.mark.slow
def test_stages_that_begin_inside_of_a_layer_are_analysed_whole():
    inside = ("model.layers.3.mlp", "model.layers.7", "model.layers.10")
    plan = preset("pp", {"pp": 4}, Pipeline(8, stages=inside))
    found = shardgraph.analyze(llama(14), (), plan, example_kwargs=text(8), cluster=toy_cluster())
    assert found.plan.pipeline is not None and found.plan.pipeline.stages == inside
