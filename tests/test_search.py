"""The search for a plan against what it must not be worse than: presets, and pricing every layout exactly."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

import shardgraph
from shardgraph import Offload, keep_gathered, offload, precision, recompute, replicate, reshard, save
from shardgraph.capture.stacks import Stack
from shardgraph.cost_models.cluster import Cluster
from shardgraph.cost_models.device import Host, Link, Rate
from shardgraph.errors import PlanError, ShardGraphError
from shardgraph.nn import MoE
from shardgraph.plans.pipeline_plan import Pipeline
from shardgraph.plans.plan import Plan
from shardgraph.plans.remembered import remembered
from shardgraph.report.analysis import Analysis
from shardgraph.report.pipeline_folding import units_of_stages
from shardgraph.search import analysis, auto
from shardgraph.search.batches import Batches
from shardgraph.search.cost_table import CostTable, program_of
from shardgraph.search.estimate import Estimate
from shardgraph.search.estimates import Estimated, Estimates, per_sample
from shardgraph.search.exact import Priced, UnlikeError, cheapest, price
from shardgraph.search.layer_costs import layer_costs, takes_another, whole_costs
from shardgraph.search.layouts import Layout, layouts
from shardgraph.search.machine import resolve_axes
from shardgraph.search.mixtures import mixed
from shardgraph.search.question import Question
from shardgraph.search.source import Source
from shardgraph.torch_api import map_tensors
from tests.machines import GIB, toy_cluster
from tests.test_analysis import OfKinds, gpt2, llama, text
from tests.zoo import Deep, make

pytestmark = pytest.mark.usefixtures("shared_captures")


def source_of(
    ranks: int,
    cluster: Cluster,
    model: nn.Module,
    args: tuple[torch.Tensor, ...] = (),
    kwargs: Mapping[str, torch.Tensor] | None = None,
    loss_fn: Callable[..., torch.Tensor] | None = None,
) -> Source:
    """What is searched for a call on so many ranks."""
    mesh_of = partial(resolve_axes, mesh={"dp": ranks}, cluster=cluster)
    return Source(Question.of(model, "auto", mesh_of, True, cluster=cluster).about(args, kwargs or {}, loss_fn))


# -- presets -----------------------------------------------------------------------------------------------------------


def deep(layers: int = 12) -> dict[str, object]:
    """A call of many small layers with a loss, so that stages are searched too."""
    kwargs = {"target": torch.ones(8, device="meta")}
    return {
        "model": Deep(layers).to("meta"),
        "example_inputs": (torch.zeros(8, 32, device="meta"),),
        "example_kwargs": kwargs,
        "loss_fn": lambda output, target: output,
    }


def of_zoo(name: str) -> dict[str, object]:
    model, (args, kwargs) = make(name, 4)
    return {"model": model, "example_inputs": args, "example_kwargs": kwargs}


CALLS = {
    "deep": deep,
    "mlp": partial(of_zoo, "odd-mlp"),
    "conv": partial(of_zoo, "conv-batch-norm"),
    "tied": partial(of_zoo, "tied-transformer"),
    "llama": lambda: {"model": llama(12, hidden_size=128), "example_kwargs": text()},
    "llama-few": lambda: {"model": llama(2), "example_kwargs": text()},
    "gpt2": lambda: {"model": gpt2(12), "example_kwargs": text()},
    **{name: partial(of_zoo, name) for name in ("unet", "mixture", "mixtral", "bert", "vit", "t5")},
}


def presets_on(devices: int, stages: bool) -> Iterator[tuple[str, dict[str, int]]]:
    """Names of plans with their meshes, of axes inside nodes of 8 devices; those with ``stages`` if asked for."""
    inside, nodes = min(devices, 8), max(1, devices // 8)
    yield from ((name, {"dp": devices}) for name in ("ddp", "zero1", "zero2", "fsdp"))
    if nodes > 1:
        yield "hsdp", {"dp_replicate": nodes, "dp_shard": inside}
    for name in ("tp", "tp+sp", "cp", "ep"):
        axis = name.removesuffix("+sp")
        yield (name, {axis: inside}) if nodes == 1 else (f"fsdp+{name}", {"dp": nodes, axis: inside})
        if devices > 2:
            yield f"zero2+{name}", {"dp": devices // 2, axis: 2}
    if stages:
        yield "pp", {"pp": devices}
        if devices > 2:
            yield "pp+fsdp", {"pp": 2, "dp": devices // 2}


@pytest.mark.quick("conv-4")
@pytest.mark.parametrize("devices", [2, 4, 8, 64])
@pytest.mark.parametrize("name", CALLS)
def test_no_preset_that_fits_is_faster(name, devices):
    call = CALLS[name]()
    cluster = Cluster.of("H100", nodes=-(-devices // 8))
    found = shardgraph.plan(**call, cluster=cluster, devices=devices)
    best = found.considered[0]
    if name == "deep":  # of many layouts some are not priced
        assert "they take per sample at least" in found.explain() and "so none of them is" in found.explain()
    tried = 0
    for plan, mesh in presets_on(devices, stages="labels" in call.get("example_kwargs", {})):
        with suppress(ShardGraphError):  # experts that are not there, sequences that cannot be divided
            analysis = shardgraph.analyze(**call, plan=plan, mesh=mesh, cluster=cluster)
            tried += 1
            assert best.per_sample <= analysis.time.total / analysis.samples * (1 + 1e-9), plan
    assert tried >= 4


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("devices", [2, 8])
@pytest.mark.parametrize("name", CALLS)
def test_no_preset_that_fits_a_limit_of_memory_is_faster(name, devices):
    """With as little recomputed as fits."""
    call = CALLS[name]()
    cluster = Cluster.of("H100")
    roomy = shardgraph.plan(**call, cluster=cluster, devices=devices).considered[0]
    memory = int(0.6 * roomy.memory)
    try:
        best = shardgraph.plan(**call, cluster=cluster, devices=devices, memory=memory).considered[0]
    except PlanError as error:
        assert "no plan fits" in str(error)
        best = None
    for plan, mesh in presets_on(devices, stages=False):
        if plan == "zero1" and name in ("deep", "llama", "gpt2"):
            continue  # of deep models it is not searched
        for again in ("none", "selective", "full"):
            with suppress(ShardGraphError):
                analysis = shardgraph.analyze(**call, plan=plan, mesh=mesh, cluster=cluster, recompute=again)
                if analysis.peak_memory <= memory:
                    assert best is not None, f"{plan} fits"
                    few = 1 + 1e-5  # what few layers tell of many, to rounding
                    assert best.per_sample <= analysis.time.total / analysis.samples * few, plan


@pytest.mark.slow
@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize(("layers", "devices"), [(2, 2), (12, 8)])
def test_estimates_of_larger_batches_than_the_example_know_what_does_not_grow_with_them(layers, devices, precision):
    """Most of the time of a small batch is that of starting operations, and of casting parameters and gradients."""
    call = {"example_kwargs": text(1), "cluster": "H100", "devices": devices, "global_batch": 32 * devices}
    found = shardgraph.plan(llama(layers, hidden_size=512), **call, precision=precision)
    ratios = re.search(r"estimates were ([\d.]+) to ([\d.]+) of the exact prices", found.explain())
    assert 0.95 < float(ratios[1]) <= float(ratios[2]) < 1.05


@pytest.mark.slow
def test_what_fits_is_not_priced_again_in_more_calls(monkeypatch):
    """They are no faster, and their smaller batch would have to be traced."""
    monkeypatch.setattr(auto, "_DOUBT_OF_FEW", 5.0)  # else estimates show that
    monkeypatch.setattr(auto, "_FINALISTS", 6)
    found = shardgraph.plan(**CALLS["llama-few"](), cluster="H100", devices=2, global_batch=8)
    in_calls = [priced for priced in found.considered if "pp" not in dict(priced.mesh)]
    assert {priced.microbatches for priced in in_calls} == {1}
    assert "or save memory that they need not" in found.explain()


def test_what_is_too_large_takes_no_place_of_what_fits(monkeypatch):
    """Estimates of memory may be too high, so what they say is a little too large is priced; once, if it is."""
    with torch.device("meta"):
        model, x = Deep(12), torch.zeros(8, 32)
    source = source_of(64, Cluster.of("H100", nodes=8), model, (x,)).of_few_layers
    budget, asked = 100, []

    def exactly(source: Source, plan: Plan, budget: int, whole: bool) -> Priced:
        layout, guess = next(pair for pair in estimated if pair[0].plan().whole_mesh == plan.whole_mesh)
        asked.append(layout)
        return Priced(plan, int(guess.memory), guess.seconds, {"exposed": 0.0}, layout.samples)

    shards = [Layout(replicate=64 // shard, shard=shard, batch=8) for shard in (2, 4, 8, 16, 32)]
    smaller, slow = Layout(shard=64, batch=8, recompute="full"), Layout(shard=16, tp=4, batch=8)
    estimated = [(layout, Estimate(1.0, 110, 1.0)) for layout in shards]
    estimated += [(smaller, Estimate(1.2, 90, 1.2)), (slow, Estimate(3.0, 90, 3.0))]
    monkeypatch.setattr(auto, "price", exactly)
    finals = auto.Finals(source, Estimates(source, budget, pipelines=False), budget)
    finals.bound(estimated)
    assert asked == [smaller]
    asked.clear()
    finals = auto.Finals(source, Estimates(source, budget, pipelines=False), budget)
    finals.price_all([slow])
    finals.price_best(sorted(estimated, key=per_sample))
    assert asked == [slow, shards[0], smaller]


def test_of_copies_that_few_layers_do_not_tell_apart_one_layout_is_tried(monkeypatch):
    """A price that cannot be found takes as long as several that can."""
    with torch.device("meta"):
        model, x = Deep(12), torch.zeros(8, 32)
    source, asked = source_of(64, Cluster.of("H100", nodes=8), model, (x,)).of_few_layers, []

    def exactly(source: Source, plan: Plan, budget: int, accumulated: int = 1, *, whole: bool = True) -> Priced:
        asked.append(plan.world_size // plan.data_size)
        raise UnlikeError("its layers are not alike")

    monkeypatch.setattr(auto, "price", exactly)
    finals = auto.Finals(source, Estimates(source, 100, pipelines=False), 100)
    layouts = [Layout(shard=64 // tp, tp=tp, batch=8, offload="activations") for tp in (2, 4, 8, 1)]
    finals.price_best([(layout, Estimate(1.0 + 0.01 * i, 90, 1.0)) for i, layout in enumerate(layouts)])
    assert asked[:2] == [2, 1], "one with operators that are divided, and one without"
    assert 4 not in asked and 8 not in asked
    assert any("its layers are not alike" in remark for remark in finals.remarks)


@pytest.mark.parametrize(("saved", "from_all"), [(0.05, True), (0.005, False)], ids=["much", "little"])
def test_all_layers_are_analysed_for_a_layout_that_saves_much_where_few_do_not_tell_its_price(
    monkeypatch, saved, from_all
):
    with torch.device("meta"):
        model, x = Deep(12), torch.zeros(8, 32)
    source, asked = source_of(64, Cluster.of("H100", nodes=8), model, (x,)).of_few_layers, []

    def exactly(source: Source, plan: Plan, budget: int, *, whole: bool = True) -> Priced:
        degree = plan.world_size // plan.data_size
        asked.append((degree, whole))
        if degree > 1 and not whole:
            raise UnlikeError("its layers are not alike")
        return Priced(plan, 50, 1.0 if degree == 1 else 1.0 - saved, {}, 512)

    monkeypatch.setattr(auto, "price", exactly)
    finals = auto.Finals(source, Estimates(source, 100, pipelines=False), 100)
    layouts = [Layout(shard=64 // tp, tp=tp, batch=8 * tp) for tp in (2, 1)]
    finals.price_best([(layouts[0], Estimate(1.0 - saved, 50, 1.0)), (layouts[1], Estimate(1.0, 50, 1.0))])
    assert asked == [(2, False), (1, False), *from_all * [(2, True)]]
    assert bool(finals.remarks) is not from_all


class FewRows(nn.Module):
    """Layers most of whose parameters are in a matrix of two long rows, as experts' are in few large parts."""

    def __init__(self) -> None:
        super().__init__()
        layer = lambda: nn.ParameterList([torch.zeros(2, 2**18), torch.zeros(64, 64)])  # noqa: E731
        self.layers = nn.ModuleList([_Scaled(layer()) for _ in range(12)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class _Scaled(nn.Module):
    def __init__(self, weights: nn.ParameterList) -> None:
        super().__init__()
        self.weights = weights

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weights[1] * torch.linalg.vector_norm(self.weights[0])


@pytest.mark.parametrize("data", ["zero2", "fsdp"])
def test_estimates_know_that_parameters_of_fewer_rows_than_ranks_are_padded(data):
    """On 32 ranks each has a row of them, or of nothing: 16 times as much is stored, gathered and reduced."""
    with torch.device("meta"):
        model, x = FewRows(), torch.zeros(8, 64)
    source = source_of(32, toy_cluster(4, 8), model, (x,)).of_few_layers
    estimates = Estimates(source, GIB, pipelines=False)
    layout = Layout(shard=32, data=data, batch=8)
    (guess,) = [guess for each, guess in estimates.all(32, toy_cluster(4, 8), Batches(8)) if each == layout]
    exact = price(source, source.question.with_options(layout.plan()), GIB)
    assert guess.seconds == pytest.approx(exact.seconds, rel=0.1)
    assert 0.5 < guess.memory / exact.memory < 1.1, "of fsdp, estimates leave out what is gathered ahead"


def test_what_surely_fits_bounds_the_search_without_a_price():
    """However wrong estimates may be: those of stages and of several nodes are least known. What divides operators,
    whose placements would have to be found, has no price either."""
    with torch.device("meta"):
        model, x = Deep(12), torch.zeros(8, 32)
    source = source_of(64, Cluster.of("H100", nodes=8), model, (x,)).of_few_layers
    finals = auto.Finals(source, Estimates(source, 100, pipelines=False), 100)
    small, barely = Layout(shard=64, batch=8), Layout(shard=16, tp=4, batch=8)
    bound = finals.bound([(small, Estimate(64.0, 70, 64.0)), (barely, Estimate(1.0, 99, 1.0))])
    assert 1.0 < bound / per_sample((small, Estimate(64.0, 70, 64.0))) < 1.1
    assert finals.bound([(barely, Estimate(1.0, 99, 1.0))]) == math.inf
    for doubtful in (Layout(shard=4, tp=16, batch=8), Layout(stages=2, shard=32, batch=8)):
        assert finals.bound([(doubtful, Estimate(1.0, 50, 1.0))]) == math.inf
    assert not finals.layouts


@pytest.mark.slow
def test_small_layers_that_are_updated_together_are_all_looked_at():
    """Up to a limit, which a few layers do not reach and all of them do."""
    call = {"model": Deep(36).to("meta"), "example_inputs": (torch.zeros(2, 32, device="meta"),)}
    plan = replace(shardgraph.preset("ddp", {"dp": 2}), bucket=0)
    folded, whole = (shardgraph.analyze(**call, plan=plan, cluster=toy_cluster(), fold=fold) for fold in (True, False))
    assert "+" not in "".join(row.node for row in folded.rows), "was folded"
    assert folded.rows[-1].memory == whole.rows[-1].memory
    assert folded.peak_memory == whole.peak_memory and folded.time.total == pytest.approx(whole.time.total)


@pytest.mark.quick("deep")
@pytest.mark.parametrize("name", ["deep", "gpt2"])
def test_the_cost_of_a_layer_is_what_one_more_layer_costs(name):
    """It is read off one program where nothing runs beside the computation, from the end of a layer to the next."""
    call = CALLS[name]()
    cluster = Cluster.of("H100", nodes=1)
    asked = call["model"], call.get("example_inputs", ()), call.get("example_kwargs", {}), call.get("loss_fn")
    source = source_of(8, cluster, *asked).of_few_layers
    for again in ("none", "full"):
        plan = replace(source.question.with_options(Layout(data="ddp").plan()), recompute=again, bucket=0)
        costs, wholes = [], []
        for layers in (4, 5):
            program = program_of(source.at(source.depths, layers, plan), plan)
            assert not takes_another(program[1], source.depths.stack)
            costs.append(layer_costs(program, None, source.depths.stack, layers))
            wholes.append(replace(costs[-1], layers=layers).whole)
        assert costs[0].layer == pytest.approx(wholes[1].plus(wholes[0], -1), rel=1e-6)
        assert costs[0].layers == source.depths.stack.layers


def of_kinds(kinds: str) -> dict[str, object]:
    with torch.device("meta"):
        return {"model": OfKinds(kinds), "example_inputs": (torch.zeros(4096, 512),)}


KINDS = {"other first layers": "ccb" + 9 * "a", "two kinds in turns": "b" + 6 * "ac"}


@pytest.mark.parametrize("name", KINDS)
def test_the_costs_of_a_few_units_are_those_of_all_layers(name):
    """Unlike first layers are a part of what comes before the others, of which each costs as much as the mean."""
    call = of_kinds(KINDS[name])
    source = source_of(8, Cluster.of("H100", nodes=1), call["model"], call["example_inputs"]).of_few_layers
    assert source.depths is not None
    stack, plan = source.depths.stack, replace(shardgraph.preset("ddp", {"dp": 1}), bucket=0)
    few, whole = (program_of(source.at(source.depths, units, plan), plan) for units in (4, stack.units))
    costs, rows = layer_costs(few, None, stack, 4), whole[1].rows
    assert costs.layers == len(KINDS[name]) - stack.head and costs.unit == stack.period
    assert costs.whole == pytest.approx(whole_costs(*whole).whole, rel=1e-6)
    first = next(i for i, row in enumerate(rows) if row.module.startswith(f"layers.{stack.head}."))
    assert costs.head.forward == pytest.approx(sum(row.seconds for row in rows[:first]))


TRANSFORMERS = {"a long encoder": (24, 14), "a long decoder": (14, 24)}


@pytest.mark.slow
@pytest.mark.parametrize("again", ["none", "full"])
@pytest.mark.parametrize("layers", TRANSFORMERS.values(), ids=TRANSFORMERS)
def test_the_costs_of_a_few_layers_of_two_stacks_are_those_of_all(layers, again):
    """The shorter one is a part of what comes before the layers of the longer one, or after them."""
    with torch.device("meta"):
        model, call = nn.Transformer(512, 8, *layers, 2048, batch_first=True), 2 * (torch.zeros(8, 128, 512),)
    source = source_of(8, Cluster.of("H100", nodes=1), model, call).of_few_layers
    assert source.depths is not None and len(source.depths.others) == 1
    plan = replace(shardgraph.preset("ddp", {"dp": 1}), bucket=0, recompute=again)
    found = CostTable(source, 8)._analysed(plan, None)
    whole = whole_costs(*program_of(replace(source, depths=None), plan))
    assert found.layers == max(layers) and found.whole == pytest.approx(whole.whole, rel=1e-6)
    assert found.working == pytest.approx(whole.working, rel=0.02)
    shorter, longer = (found.head, found.tail) if layers[1] > layers[0] else (found.tail, found.head)
    assert shorter.forward > 100 * longer.forward


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_models_of_several_kinds_of_layers_are_planned_from_a_few_of_them(name, monkeypatch):
    programs, lower = [], analysis.unfolded

    def unfolded(source: Source) -> Analysis:
        programs.append(len(source.question.model.layers))
        return lower(source)

    monkeypatch.setattr(analysis, "unfolded", unfolded)
    call = of_kinds(KINDS[name][:3] + 22 * KINDS[name][3:5])
    found = shardgraph.plan(**call, cluster="H100", devices=64)
    assert programs and max(programs) < len(call["model"].layers)
    whole = shardgraph.analyze(**call, plan=found, cluster=Cluster.of("H100", nodes=8), fold=False)
    assert found.considered[0].memory == whole.peak_memory
    assert found.considered[0].seconds == pytest.approx(whole.time.total)


@pytest.mark.parametrize("name", KINDS)
def test_stages_begin_with_a_unit_of_layers(name):
    call = of_kinds(KINDS[name])
    source = source_of(8, Cluster.of("H100", nodes=1), call["model"], call["example_inputs"]).of_few_layers
    assert source.depths is not None
    estimates, stack = Estimates(source, 80 * GIB, pipelines=True), source.depths.stack
    finals = auto.Finals(source, estimates, 80 * GIB)
    layout = Layout(stages=2, shard=4, microbatches=4)
    plan = finals._plan(layout)
    assert plan.pipeline is not None and sum(plan.pipeline.balance) == stack.layers
    assert units_of_stages(plan.pipeline, stack)


def test_layers_that_are_not_treated_alike_are_those_behind_the_first_ones():
    plan, stack = shardgraph.preset("fsdp", {"dp": 2}), Stack("layers", 10, head=3)
    again = mixed(plan, Layout(shard=2, full=2), stack)
    assert [pattern for pattern, _ in again.annotations] == ["layers.[3-4]"]
    kept = mixed(plan, Layout(shard=2, kept=7), stack)
    assert [pattern for pattern, _ in kept.parameters] == ["*", "layers.[3-9].*"]


def test_of_a_pipeline_they_are_the_first_ones_of_each_stage():
    plan = shardgraph.preset("pp", {"pp": 2}, Pipeline(4, balance=(6, 4), ranks=2))
    again = mixed(plan, Layout(stages=2, full=2), Stack("layers", 10, head=3))
    assert [pattern for pattern, _ in again.annotations] == ["layers.[3-4]", "layers.[6-7]"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_some_layers_of_each_stage_are_recomputed_where_all_or_none_would_be_slower():
    config = llama(16).config
    call = {"model": llama(16), "example_kwargs": text(8), "cluster": toy_cluster()}
    found = shardgraph.plan(**call, devices=2, mesh={"pp": 2}, global_batch=8, memory=5_904_128)
    best, *others = found.considered
    assert best.recompute == "some" and found.annotations
    assert all(other.per_sample > best.per_sample for other in others if other.fits)
    assert {other.recompute for other in others if other.fits} > {"some"}
    whole = shardgraph.analyze(**call, plan=found, fold=False)
    assert (best.memory, best.seconds) == (whole.peak_memory, pytest.approx(whole.time.total))
    torch.manual_seed(0)
    call["example_kwargs"] = {name: torch.arange(8 * 16).view(8, 16) % 61 for name in call["example_kwargs"]}
    report = shardgraph.verify(**{**call, "model": LlamaForCausalLM(config)}, plan=found, fp64=True)
    assert report.ok, str(report)


def test_layers_that_save_in_host_memory_are_far_from_each_other():
    """So that each copy has the time until the next one begins."""
    plan, stack = shardgraph.preset("fsdp", {"dp": 2}), Stack("layers", 10, head=3)
    away = mixed(plan, Layout(shard=2, away=3), stack)
    assert away.annotations == tuple((f"layers.{layer}", offload()) for layer in (3, 5, 7))


@pytest.mark.quick("8-False")
@pytest.mark.parametrize(("tp", "known"), [(2, True), (4, True), (8, False)])
def test_ranks_of_several_nodes_that_do_not_divide_the_heads_have_no_estimate(tp, known):
    """Attention of four heads, which eight ranks would do all of."""
    cluster = toy_cluster(4, 2)
    estimates = Estimates(source_of(8, cluster, llama(8), kwargs=text(8)).of_few_layers, 80 * GIB, pipelines=False)
    assert (estimates.again(Layout(shard=8 // tp, tp=tp), cluster) is not None) is known


@pytest.mark.slow
def test_more_memory_is_worth_what_a_search_with_it_finds():
    """Of the layers, fewer are recomputed then, not as many as without it."""
    cluster = Cluster.of("H100")
    cluster = replace(cluster, device=replace(cluster.device, host=None))  # to which activations could be offloaded
    source = source_of(8, cluster, llama(12).to(torch.bfloat16), kwargs=text(8)).of_few_layers
    alone, batches = partial(Estimates, source, pipelines=False, own_batches=True), Batches(source.call.batch)

    def best(estimated: Sequence[Estimated], budget: float) -> float:
        return min(per_sample(pair) for pair in estimated if pair[1].memory <= budget)

    each = Layout(shard=8, batch=8)
    full, none = (alone(0).again(replace(each, recompute=kind), cluster).memory for kind in ("full", "none"))
    budget, more = full + 0.4 * (none - full), full + 0.7 * (none - full)
    estimates = alone(budget)
    known = estimates.all(8, cluster, batches)
    then = best(estimates.within(more, known, cluster), more)
    assert then == best(alone(more).all(8, cluster, batches), more) < best(known, more)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", [1.0, 0.6], ids=["", "less memory"])
@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("name", ["odd-mlp", "conv-batch-norm", "tied-transformer", "gpt2", "llama"])
def test_every_plan_that_is_found_trains_like_the_model(name, devices, part):
    """The runners-up, too."""
    call, cluster = of_zoo(name), toy_cluster(1, devices)
    found = shardgraph.plan(**call, cluster=cluster)
    if part < 1:
        try:
            found = shardgraph.plan(**call, cluster=cluster, memory=int(part * found.considered[0].memory))
        except PlanError as error:
            assert "no plan fits" in str(error)
            return
    for plan in (found, *found.alternatives):
        inputs = call["example_inputs"], call["example_kwargs"]  # of a data rank; a pipeline cuts them further
        args, kwargs = map_tensors(lambda each: torch.cat(plan.data_size * [each]), inputs)  # noqa: B023
        report = shardgraph.verify(call["model"], args, plan, example_kwargs=kwargs, steps=2)
        assert report.ok, f"{plan}\n{report}"


ANNOTATIONS = {
    "recompute": {"layers.*": recompute()},
    "save": {"layers.*": save()},
    "keep_gathered": {"re:layers.*": keep_gathered()},
    "reshard": {"re:layers.*": reshard()},
    "replicate": {"re:layers.*bias": replicate()},
    "offload": {"layers.*": offload()},
    "precision": {"layers.*": precision("bfloat16")},
    "some layers": {"layers.[0-2]": recompute()},
}


@pytest.mark.slow
@pytest.mark.quick("reshard")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ANNOTATIONS)
def test_annotations_hold_in_every_plan_that_is_found(kind):
    model, x = Deep(8), torch.randn(16, 32)
    shardgraph.annotate(model, ANNOTATIONS[kind])
    asked = remembered(model)
    found = shardgraph.plan(model, (x,), cluster=linked(toy_cluster(1, 4)))
    assert asked and found.alternatives
    assert all(each.annotations[: len(asked)] == asked for each in (found, *found.alternatives))
    assert shardgraph.verify(model, (x,), found, steps=2).ok


# -- every layout ------------------------------------------------------------------------------------------------------


class Layered(nn.Module):
    """A random little network: layers of random widths and kinds, some of them around a shortcut."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.width = width = draw.choice((4, 12, 32, 96))
        self.layers = nn.ModuleList()
        for _ in range(draw.randint(1, 3)):
            inner = draw.choice((4, 8, 48, 200))
            activation = draw.choice((nn.ReLU, nn.GELU, nn.Tanh))()
            layer = nn.Sequential(nn.Linear(width, inner), activation, nn.Linear(inner, width))
            self.layers.append(nn.Sequential(nn.LayerNorm(width), *layer) if draw.random() < 0.5 else layer)
        self.shortcuts = [draw.random() < 0.5 for _ in self.layers]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, shortcut in zip(self.layers, self.shortcuts, strict=True):
            x = x + layer(x) if shortcut else layer(x)
        return x.square().mean()


@pytest.mark.quick("case0")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(100), ids="case{}".format)
def test_the_answer_is_that_of_pricing_every_layout(seed, monkeypatch):
    draw = random.Random(seed)
    with torch.device("meta"):
        model = Layered(draw)
        rows = draw.choice((1, 4, 64, 512))
        x = torch.zeros(rows, model.width)
    devices, total = draw.choice((2, 4, 8)), draw.choice((None, None, 16))
    cluster = toy_cluster(*draw.choice(((1, 8), (2, 4))), memory=16 * GIB)
    if devices < 8:
        cluster = toy_cluster(1, devices, memory=16 * GIB)
    source = source_of(devices, cluster, model, (x,))
    plain = shardgraph.analyze(model, (x,), "ddp", mesh={"dp": devices}, cluster=cluster)
    budget = int(plain.peak_memory * draw.choice((0.3, 0.5, 0.7, 0.9, 2.0)))
    batches = Batches(rows, total)

    known: dict[object, object] = {}

    def once(source, plan, budget):
        key = plan, source.call.batch
        if key not in known:
            known[key] = cheapest(source, plan, budget)
        return known[key]

    monkeypatch.setattr(auto, "cheapest", once)
    found = auto.search(source, batches, budget, pipelines=False).priced[0]
    every = auto.Finals(source, Estimates(source, budget, pipelines=False), budget)
    for base in layouts(devices, cluster, 0, pipelines=False):
        for layout in batches.of(replace(base, recompute="budget")):
            every._price(layout)
            if layout.data == "zero2" and layout.plain and layout.microbatches == 1:
                every._price(replace(layout, data="zero1"))
            if layout.tp > 1:
                every._price(replace(layout, whole_activations=True))
    every.finish([])
    assert found.rank(budget)[0] == every.ranked()[0].rank(budget)[0], "whether any fits"
    if found.memory <= budget:
        assert found.per_sample == pytest.approx(every.ranked()[0].per_sample, rel=1e-9)


def test_what_fits_nowhere_else_is_kept_in_host_memory():
    """Where no layout fits without it, layouts with it are compared too, and the fastest of them is the answer."""
    model, x = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64)), torch.randn(8, 64)
    cluster = Cluster.of("H100", nodes=1)
    sharded = shardgraph.analyze(model, (x,), "fsdp", mesh={"dp": 2}, cluster=cluster)
    memory = sharded.peak.memory["optimizer state"] + 2 * sharded.peak.memory["parameters"]
    plan = shardgraph.plan(model, (x,), cluster=cluster, devices=2, memory=memory)
    assert plan.offload.parameters and "nothing fits without offload" in plan.explain()
    analysis = shardgraph.analyze(model, (x,), plan, cluster=cluster)
    assert analysis.peak_memory == plan.considered[0].memory <= memory
    assert shardgraph.verify(model, (x,), plan, steps=1).ok


def linked(cluster: Cluster, bandwidth: float = 1e10, memory: float = math.inf) -> Cluster:
    """The cluster with devices whose host has so much memory, behind a link of so many bytes per second."""
    host = Host(Link(bandwidth, 0.0), Rate(1e10), memory=memory)
    return replace(cluster, device=replace(cluster.device, host=host))


@pytest.mark.slow
@pytest.mark.quick("some layers")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("layers", [8, 48], ids=["some layers", "all of many layers"])
def test_what_layers_save_is_in_host_memory_where_copies_take_less_than_recomputation(layers):
    with torch.device("meta"):
        model, x = Deep(layers), torch.zeros(64, 32)
    alone = toy_cluster(1, 2)

    def found(cluster: Cluster, **options: Any) -> tuple[Plan, float]:
        plan = shardgraph.plan(model, (x,), cluster=cluster, **options)
        return plan, plan.considered[0].seconds / plan.considered[0].samples

    roomy, least = found(alone)
    memory = int(0.8 * roomy.considered[0].memory)
    _, recomputed = found(linked(alone, 1e12), memory=memory, offload=Offload())
    plan, seconds = found(linked(alone, 1e12), memory=memory)
    assert least <= seconds < recomputed and plan.considered[0].memory <= memory
    assert plan.offload.activations or any(isinstance(each, offload) for _, each in plan.annotations)
    for cluster in (linked(alone, 1e6), linked(alone, 1e12, memory=1e4)):  # slow, and small
        assert found(cluster, memory=memory)[1] == pytest.approx(recomputed)


class Experts(nn.Module):
    """A layer with more parameters than activations."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = MoE(d_model=32, d_hidden=2048, num_experts=4, k=1, capacity_factor=1.0, activation="relu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, aux = self.moe(x)
        return (x + out).square().mean() + aux


# -- what is emitted ---------------------------------------------------------------------------------------------------

EMITTED = {
    "interleaved-1f1b": (partial(Deep, 8), Layout(stages=2, chunks=2, shard=2, data="zero2", batch=2, microbatches=4)),
    "interleaved-zero-bubble": (partial(Deep, 8), Layout(stages=2, zero_bubble=True, shard=2, batch=2, microbatches=4)),
    "zbv": (partial(Deep, 8), Layout(stages=2, chunks=2, zero_bubble=True, shard=2, batch=2, microbatches=4)),
    "hsdp+tp": (partial(Deep, 8), Layout(replicate=2, shard=2, tp=2, recompute="full")),
    "cp": (partial(make, "tied-transformer", 4), Layout(shard=2, cp=2)),
    "cp+tp": (partial(make, "tied-transformer", 4), Layout(cp=2, tp=2, whole_activations=True)),
    "cp+tp+sp": (partial(make, "tied-transformer", 4), Layout(cp=2, tp=2)),
    "ep": (Experts, Layout(shard=2, ep=2)),
    "ep+tp": (Experts, Layout(ep=2, tp=2)),
    "ep+cp+tp+sp": (Experts, Layout(ep=2, cp=2, tp=2)),
    "some recomputed": (partial(Deep, 8), Layout(shard=2, data="zero2", recompute="selective", full=3)),
    "some kept gathered": (partial(Deep, 8), Layout(shard=2, kept=3)),
    "some on the host": (partial(Deep, 8), Layout(shard=2, recompute="selective", away=3)),
}
"""Models, and layouts of them that a search may find best."""


@pytest.mark.quick("ep")
@pytest.mark.parametrize("name", EMITTED)
def test_plans_of_every_kind_of_layout_verify(name):
    """A plan is what the search would return if this layout were the best."""
    makes, layout = EMITTED[name]
    made = makes()
    model, (args, kwargs) = made if isinstance(made, tuple) else (made, ((torch.randn(16, 32),), {}))
    if isinstance(model, Experts):
        args = (torch.randn(4, 16, 32),)
    cluster = linked(toy_cluster(2, 4, memory=16 * GIB))
    source = source_of(layout.ranks, cluster, model, args, kwargs).of_few_layers
    finals = auto.Finals(source, Estimates(source, 16 * GIB, pipelines=True), 16 * GIB)
    finals.price_all([layout])
    (priced,) = finals.ranked()
    assert shardgraph.verify(model, args, priced.plan, example_kwargs=kwargs).ok


FEWER = {
    "recomputed": (8, toy_cluster(1, 2, memory=16 * GIB), {"recompute": "full"}, "full"),
    "on the host": (64, linked(toy_cluster(1, 2, memory=16 * GIB), 2e10), {"offload": "activations"}, "away"),
}
"""Rows, a cluster, what takes less memory and more time if all layers have it, and the number of those that do."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("way", FEWER)
def test_no_other_number_of_layers_that_take_less_memory_is_faster(way):
    """In a memory between that of all such layers and that of none; not all copies to the host are hidden."""
    rows, cluster, of_all, number = FEWER[way]
    with torch.device("meta"):
        model, x = Deep(8), torch.zeros(rows, 32)
    source = source_of(2, cluster, model, (x,)).of_few_layers
    every = auto.Finals(source, Estimates(source, 16 * GIB, pipelines=False), 16 * GIB)
    layout = Layout(shard=2, batch=rows)
    every.price_all([layout, replace(layout, **of_all)])
    fast, small = sorted(every.ranked(), key=lambda each: each.seconds)
    assert fast.memory > small.memory and fast.seconds < small.seconds
    budget = (fast.memory + small.memory) // 2
    found = auto.search(source, Batches(rows), budget, pipelines=False).priced[0]
    every.price_all(replace(layout, **{number: layers}) for layers in range(1, 9))
    best = min((each for each in every.ranked() if each.memory <= budget), key=lambda each: each.seconds)
    assert best.per_sample < small.per_sample, "which no layout that treats all layers alike is"
    assert found.memory <= budget and found.per_sample <= best.per_sample * (1 + 1e-9)


class Wordy(nn.Module):
    """Equal layers, and a loss over so many words that its scores are most of the memory."""

    def __init__(self, layers: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(layers))
        self.head = nn.Linear(32, 2**16, bias=False)

    def forward(self, x: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), words.flatten())


def test_the_loss_of_a_deep_model_is_in_chunks_where_nothing_else_fits():
    with torch.device("meta"):
        model, call = Wordy(), (torch.zeros(8, 256, 32), torch.zeros(8, 256, dtype=torch.long))
    plan = shardgraph.plan(model, call, cluster=toy_cluster(1, 2, memory=400 * 2**20))
    assert plan.loss_chunk is not None and plan.considered[0].memory <= 400 * 2**20
    assert "loss in chunks" in plan.explain()


@pytest.mark.parametrize(("budget", "may_do"), [(400 * 2**20, True), (2**20, False)])
def test_chunks_of_a_loss_have_estimates_only_if_memory_suffices_without_it(budget, may_do):
    """So many layers are not treated one by one, which would make room as well."""
    with torch.device("meta"):
        model, call = Wordy(48), (torch.zeros(8, 256, 32), torch.zeros(8, 256, dtype=torch.long))
    machine = toy_cluster(1, 2)
    estimates = Estimates(source_of(2, machine, model, call).of_few_layers, budget, pipelines=False)
    assert any(layout.chunked for layout, _ in estimates.all(2, machine, Batches(8))) == may_do


class Returning(Wordy):
    """Returns its scores too, so that only a step that needs the loss alone can do without them."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = x + layer(x)
        scores = self.head(x)
        return {"loss": nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten()), "scores": scores}


@pytest.mark.slow
@pytest.mark.parametrize("samples", [1, 4])  # of the call that costs are of; a microbatch has 512 MiB of scores
def test_the_loss_of_the_last_stage_is_in_chunks_where_nothing_else_fits(samples):
    with torch.device("meta"):
        model, x = Returning(), torch.zeros(samples, 2048, 32)
        labels = torch.zeros(samples, 2048, dtype=torch.long)
    budget = 500 * 2**20
    call = {"example_kwargs": {"labels": labels}, "global_batch": 4}
    plan = shardgraph.plan(model, (x,), **call, cluster=toy_cluster(1, 2, memory=budget), mesh={"pp": 2})
    assert plan.pipeline is not None and plan.pipeline.parts == 4
    assert plan.loss_chunk == 64 * 2**20 and plan.considered[0].memory <= budget


@pytest.mark.slow
def test_stages_of_a_model_without_a_loss_are_left_out_where_memory_is_short():
    class NoLoss(Returning):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return super().forward(x, labels)["scores"]

    with torch.device("meta"):
        model, x = NoLoss(), torch.zeros(4, 2048, 32)
        labels = torch.zeros(4, 2048, dtype=torch.long)
    given = {"example_kwargs": {"labels": labels}, "cluster": toy_cluster(1, 2, memory=GIB // 4)}
    with pytest.raises(shardgraph.PlanError, match="no plan fits"):
        shardgraph.plan(model, (x,), **given, global_batch=8)


def test_large_chunks_are_taken_where_they_fit():
    with torch.device("meta"):
        model, x, words = Wordy(), torch.zeros(4, 2048, 32), torch.zeros(4, 2048, dtype=torch.long)
    plan = shardgraph.plan(model, (x, words), cluster=toy_cluster(1, 2, memory=3 * GIB))
    assert plan.loss_chunk == 512 * 2**20 and plan.considered[0].memory <= 3 * GIB


@pytest.mark.slow
def test_a_loss_whose_scores_are_returned_is_not_priced_in_chunks():
    with torch.device("meta"):
        model, x = Returning(), torch.zeros(4, 2048, 32)
        labels = torch.zeros(4, 2048, dtype=torch.long)
    given = {"example_kwargs": {"labels": labels}, "cluster": toy_cluster(1, 2, memory=3 * GIB)}
    with pytest.raises(shardgraph.PlanError, match="no plan fits") as error:
        shardgraph.plan(model, (x,), **given, mesh={"dp": 2})
    assert "loss_chunk" not in str(error.value)


@pytest.mark.slow
def test_a_batch_of_fewer_samples_than_nodes_divides_the_model_over_them():
    model, (args, kwargs) = make("tied-transformer", 1)
    plan = shardgraph.plan(model, args, example_kwargs=kwargs, cluster=toy_cluster(2, 4), global_batch=1)
    assert plan.data_size == 1 and plan.world_size == 8


def test_experts_sequences_and_operators_are_divided_together_over_whole_nodes():
    every = layouts(64, toy_cluster(16, 4), 0, pipelines=False, axes=("tp", "cp", "ep"))
    found = [layout for layout in every if len(layout.dividing) == 3]
    assert {each.degree % 4 for each in found} == {0} and {2, 4, 8, 16} <= {each.ep for each in found}
    assert all(each.tp == 4 or each.cp * each.tp == 4 for each in found)
    plans = [each.plan() for each in found]
    assert {plan.operators for plan in plans} == {(("cp", "context"), ("tp", "sequence"))}
    assert {plan.experts for plan in plans} == {"ep"}


def test_experts_are_divided_where_they_are_large():
    model, x = Experts(), torch.zeros(1, 16, 32)
    plan = shardgraph.plan(model, (x,), cluster=toy_cluster(1, 4))
    assert plan.experts == "ep" and plan.data_size == 4
    fsdp = shardgraph.analyze(model, (x,), "fsdp", mesh={"dp": 4}, cluster=toy_cluster(1, 4))
    assert plan.considered[0].per_sample < fsdp.time.total / fsdp.samples
