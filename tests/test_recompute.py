"""Recomputation by name, by hand and for a budget; what is never computed twice; how good the choice is."""

from __future__ import annotations

import itertools
import random
import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import shardgraph
from shardgraph import (
    Plan,
    PlanError,
    RandomStateError,
    ShardGraphError,
    annotate,
    preset,
    recompute,
    save,
)
from shardgraph.capture.capture import capture
from shardgraph.ir.attributes import RECOMPUTE
from shardgraph.passes import milp
from shardgraph.passes.analysis.names import Name, module_of, names_of
from shardgraph.passes.analysis.random_state import check_random_state
from shardgraph.passes.analysis.rows import Prices
from shardgraph.passes.lowering import build_program
from shardgraph.passes.partition.split import split
from shardgraph.passes.program import Program
from shardgraph.passes.recompute.checkmate import backward_steps
from shardgraph.passes.recompute.checkmate import least_seconds as least_seconds_of_any
from shardgraph.passes.recompute.names import chosen_by, rules_for
from shardgraph.passes.recompute.problem import problem_of
from shardgraph.passes.recompute.values import draws, values_of
from shardgraph.plans.plan import Recomputation
from shardgraph.plans.remembered import annotated
from shardgraph.plans.shards import named_shapes
from shardgraph.runtime.measure import PeakMemory
from shardgraph.search import recomputation
from shardgraph.search.recomputation import Recomputations
from tests import ranks
from tests.machines import toy_cluster
from tests.standing import on_ranks
from tests.zoo import Deep, make

pytestmark = pytest.mark.usefixtures("shared_captures")

CPU = torch.device("cpu")
DP, TP, BOTH = {"dp": 2}, {"tp": 2}, {"dp": 2, "tp": 2}
ROWS = 512


def rows(count: int = ROWS) -> torch.Tensor:
    return torch.randn(count, 32, generator=torch.Generator().manual_seed(0))


def names_in(layers: int) -> dict[fx.Node, Name]:
    return names_of(values_of(capture(Deep(layers), (rows(),), {}, device=CPU).module).makes)


def choices_for(model: nn.Module, *args: torch.Tensor, plan: str = "fsdp", mesh=DP, **kwargs) -> Recomputations:
    chosen = annotated(replace(preset(plan, mesh), recompute="budget"), model)
    joint = capture(model, args, kwargs, device=CPU, annotations=chosen.annotations)
    return Recomputations(joint, chosen, named_shapes(model), toy_cluster())


@pytest.fixture(scope="module")
def deep() -> Recomputations:
    return choices_for(Deep(), rows())


def program_under(recomputation: Recomputation, model: nn.Module | None = None) -> Program:
    model = model or Deep(4)
    plan = annotated(replace(preset("single", ()), recompute=recomputation), model)
    return build_program(model, plan, (rows(),))


def computed_again(program: Program) -> set[str]:
    """Operations that are in both halves, as ``"module operation"``."""
    both = {n.name for n in program.forward.graph.nodes} & {n.name for n in program.backward.graph.nodes}
    nodes = [n for n in program.forward.graph.nodes if n.name in both and n.op == "call_function"]
    return {f"{module_of(n)} {n.target.__name__.split('.')[0]}" for n in nodes if not getattr(n.target, "is_view", 0)}


# -- by name -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "plan", "mesh"),
    [("full", "ddp", DP), ("selective", "fsdp", DP), ("full", "fsdp+tp+sp", BOTH), ("selective", "tp", TP)],
)
def test_a_mode_trains_like_the_unsharded_model(mode, plan, mesh):
    model, (args, _) = make("tied-transformer", 4)
    report = shardgraph.verify(model, args, plan, mesh=mesh, recompute=mode, steps=3, fp64=True)
    assert report.ok and report.plan.recompute == mode, str(report)


def test_more_is_computed_again_under_full_than_under_selective_than_under_none():
    given = {"mesh": DP, "cluster": toy_cluster()}
    none, selective, full = (
        shardgraph.analyze(Deep(), (rows(),), "fsdp", **given, recompute=mode) for mode in ("none", "selective", "full")
    )
    assert full.peak_memory < selective.peak_memory < none.peak_memory
    assert full.time.total > selective.time.total > none.time.total


def test_selective_keeps_products_with_weights_and_full_computes_them_again():
    cheap = {f"layers.{i}.{part}" for i in range(4) for part in ("0 native_layer_norm", "2 gelu")}
    assert computed_again(program_under("none")) == set()
    assert computed_again(program_under("selective")) - {f"layers.{i}.0 getitem" for i in range(4)} == cheap
    full = computed_again(program_under("full"))
    assert full >= cheap | {f"layers.{i}.1 addmm" for i in range(4)} and "layers.0.3 addmm" not in full


def test_layers_are_computed_again_one_after_the_other_from_the_last():
    model = Deep(4)
    for layer in model.layers:
        layer[2] = nn.Tanh()  # whose derivative reads its result through a view that stands in forward
    program = program_under("full", model)
    forward = {node.name for node in program.forward.graph.nodes}
    again = [n for n in program.backward.graph.nodes if n.op == "call_function" and n.name in forward]
    layers = [module_of(node).split(".")[1] for node in again if module_of(node)]
    assert layers == sorted(layers, reverse=True) and set(layers) == set("0123")


def test_annotations_come_before_the_mode():
    model = Deep(4)
    annotate(model, {"layers.1": save(), "layers.2": recompute()})
    again = computed_again(program_under("selective", model))
    assert not any(name.startswith("layers.1") for name in again)
    assert "layers.2.1 addmm" in again and "layers.3.1 addmm" not in again


# -- by hand -------------------------------------------------------------------------------------------------


def test_a_plan_names_operations_by_module_and_the_rest_is_kept():
    again = computed_again(program_under((("layers.[0-1].2", ("gelu",)), ("layers.3.*", ("*",)))))
    assert {"layers.0.2 gelu", "layers.1.2 gelu", "layers.3.1 addmm", "layers.3.2 gelu"} <= again
    assert not any(name.startswith("layers.2") for name in again)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (("layer.*.2", ("gelu",)), r"recompute names the module 'layer\.\*\.2', and none .* mean 'layers\.\d\.2'"),
        (("layers.*.2", ("gelo",)), r"names the operation 'gelo' of 'layers\.\*\.2', which is not there; did you mean"),
        (("layers.*.2", ("gelu.2",)), r"names the operation 'gelu\.2'"),
    ],
)  # fmt: skip
def test_a_rule_that_names_nothing_is_an_error_that_names_the_nearest(rule, message):
    with pytest.raises(PlanError, match=message):
        program_under((rule,))


def test_a_plan_with_rules_round_trips():
    rules = (("model.layers.*.mlp", ("silu", "mul.2")), ("model.layers.[0-5].self_attn", ("*",)))
    plan = replace(preset("fsdp", DP), recompute=rules)
    assert Plan.from_yaml(plan.to_yaml()) == plan and "silu, mul.2 of model.layers.*.mlp" in str(plan)
    assert Plan.from_yaml(replace(plan, recompute="full").to_yaml()).recompute == "full"


@pytest.mark.parametrize("text", ["fully", "3", "{mlp: silu}", "{mlp: []}", "[mlp]"])
def test_a_malformed_recompute_of_a_plan_file_is_an_error(text):
    with pytest.raises(PlanError, match="recompute"):
        Plan.from_yaml(preset("fsdp", DP).to_yaml() + f"recompute: {text}\n")


def test_rules_name_any_set_of_operations_and_no_others():
    names = names_in(13)
    for seed in range(5):
        chosen = set(random.Random(seed).sample(list(names), 12 * seed))
        assert chosen_by(rules_for(chosen, names), names) == chosen


def test_a_run_of_equal_layers_is_few_rules():
    names = names_in(13)
    every = {node for node, (_, kind, _) in names.items() if kind == "gelu"}
    assert rules_for(every, names) == (("layers.*.2", ("gelu",)),)
    most = {node for node in every if names[node][0] not in ("layers.4.2", "layers.12.2")}
    patterns = [pattern for pattern, _ in rules_for(most, names)]
    assert patterns == [f"layers.{numbers}.2" for numbers in ("[0-3]", "[5-9]", "1[0-1]")]


# -- for a budget --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_peak_is_never_above_the_budget_and_a_smaller_budget_never_gives_a_larger_peak(deep):
    peaks = [deep.peak(choice) for choice in deep.choices]
    budgets = range(min(peaks), max(peaks) + 2, (max(peaks) - min(peaks)) // 40)
    chosen = [deep.fastest_within(budget) for budget in budgets]
    assert all(deep.peak(choice) <= budget for choice, budget in zip(chosen, budgets, strict=True))
    for smaller, larger in itertools.pairwise(chosen):
        assert deep.peak(smaller) <= deep.peak(larger) and smaller.seconds >= larger.seconds
    assert len(set(chosen)) > 10


def test_with_memory_for_everything_nothing_is_computed_again(deep):
    assert deep.fastest_within(deep.peak(deep.choices[0])).rules == "none"


def test_with_memory_for_everything_no_integer_program_is_solved(monkeypatch):
    monkeypatch.setattr(milp.Program, "solve", lambda *args, **kwargs: pytest.fail("something was solved"))
    fresh = choices_for(Deep(2), rows(8))
    assert fresh.fastest_within(fresh.peak(fresh.first)) == fresh.first


@pytest.mark.slow
def test_a_budget_that_nothing_fits_is_an_error_that_says_the_smallest_that_can(deep):
    least = min(deep.peak(choice) for choice in deep.choices)
    with pytest.raises(PlanError, match=r"within .* per rank: the smallest peak is .*, with a predicted step of"):
        deep.fastest_within(least - 1)
    assert deep.peak(deep.fastest_within(least)) == least


@pytest.mark.slow
def test_what_is_passed_over_without_being_simulated_could_not_fit(deep):
    assert all(deep._least_peak(choice) <= deep.peak(choice) for choice in deep.choices)


def test_the_peak_of_full_recomputation_is_had_in_no_more_time(deep):
    full = shardgraph.analyze(Deep(), (rows(),), "fsdp", mesh=DP, cluster=toy_cluster(), recompute="full")
    assert deep.seconds(deep.fastest_within(full.peak_memory)) <= full.time.total


def test_equal_layers_are_decided_once():
    def folded(layers: int) -> int:
        gm = capture(Deep(layers), (rows(),), {}, device=CPU).module
        problem = problem_of(gm, values_of(gm), Prices(toy_cluster(), ()))
        return sum(len(nodes) == layers - 1 for nodes in problem.members.values())

    assert folded(4) == folded(8) == 4  # the first layer, whose input needs no gradient, is not like the others


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "plan", "mesh"),
    [
        ("tied-transformer", "tp", TP),
        pytest.param("mixture", "fsdp", DP, marks=pytest.mark.slow),
        pytest.param("llama", "fsdp+tp+sp", BOTH, marks=pytest.mark.slow),
        pytest.param("gpt2", "ddp", DP, marks=pytest.mark.slow),
        pytest.param("conv-batch-norm", "zero2", DP, marks=pytest.mark.slow),
        pytest.param("t5", "fsdp", DP, marks=pytest.mark.slow),
    ],
)
def test_the_smallest_choice_trains_like_the_unsharded_model(name, plan, mesh):
    model, (args, kwargs) = make(name, 4)
    found = choices_for(model, *args, plan=plan, mesh=mesh, **kwargs)
    chosen = replace(preset(plan, mesh), recompute=found.nearest(1).rules)
    assert chosen.recompute != "none"
    report = shardgraph.verify(model, args, chosen, mesh=mesh, example_kwargs=kwargs, steps=3, fp64=True)
    assert report.ok, str(report)


@pytest.mark.slow
def test_verify_finds_the_recomputation_for_the_memory():
    everything = shardgraph.analyze(Deep(), (rows(ROWS // 2),), "fsdp", mesh=DP).peak_memory
    report = shardgraph.verify(Deep(), (rows(),), "fsdp", memory=everything - 1, steps=2)
    assert report.ok and not isinstance(report.plan.recompute, str), str(report)


@pytest.mark.slow
def test_annotated_modules_are_left_to_their_annotations():
    model = Deep(4)
    annotate(model, {"layers.0": recompute(), "layers.1.2": save()})
    rules = {pattern for choice in choices_for(model, rows()).choices[1:] for pattern, _ in choice.rules}
    assert rules and not any(pattern.startswith(("layers.0", "layers.1.2")) for pattern in rules)


@pytest.mark.slow
def test_auto_takes_what_fits_only_with_recomputation():
    def choose(memory: int | None, **options: str) -> Plan:
        given = {"mesh": {"dp": 2}, "cluster": toy_cluster(), "memory": memory}
        return shardgraph.analyze(Deep(), (rows(),), "auto", **given, **options).plan

    smallest = min(candidate.memory for candidate in choose(None, recompute="none").considered)
    with pytest.raises(PlanError, match="no plan fits"):
        choose(smallest - 1, recompute="none")
    chosen = choose(smallest - 1)
    assert chosen.recompute not in ("none", "budget") and "chosen by 'auto'" in chosen.note


class Scored(nn.Module):
    """A layer, and a loss over many classes."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.scores = nn.Linear(16, 16), nn.Linear(16, 20_000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.scores(self.hidden(x).relu()), torch.zeros(len(x), dtype=torch.long))


def test_a_budget_that_cannot_be_met_is_told_with_what_offload_and_chunks_would_come_to():
    with pytest.raises(PlanError) as error:
        given = {"mesh": {}, "cluster": "H100", "memory": "3MiB", "recompute": "none"}
        shardgraph.analyze(Scored(), (torch.randn(1024, 16),), "single", **given)
    number = r": [\d.]+ [KM]iB, [\d.]+ \w+ a step"
    assert re.search(rf"loss_chunk='64MiB'{number}", str(error.value)), error.value
    assert re.search(rf"offload='all'{number}", str(error.value)), error.value


def test_a_compiled_model_stays_within_the_memory_it_was_given_as_measured():
    model, x, budget = Deep(), rows(), int(2.5 * 2**20)
    expected = torch.autograd.grad(model(x), list(model.parameters()))
    sharded = shardgraph.compile(model, "single", example_inputs=(x,), memory="2.5 MiB", cluster=toy_cluster())
    assert "2.5 MiB" in sharded.plan.note and sharded.plan.recompute not in ("none", "budget")
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.0)
    sharded(x).backward()
    for parameter, gradient in zip(sharded.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    optimizer.step()
    optimizer.zero_grad()
    states = [value for state in optimizer.state.values() for value in state.values()]
    with PeakMemory().track([*sharded.parameters(), *states, x]) as memory:
        sharded(x).backward()
        optimizer.step()
    assert 0.9 * budget < memory.peak_bytes <= budget


def test_a_plan_that_was_found_gives_the_same_program_from_its_file(tmp_path):
    found = shardgraph.compile(Deep(), "single", example_inputs=(rows(),), memory="2.5 MiB", cluster=toy_cluster())
    found.plan.save(tmp_path / "plan.yaml")
    again = shardgraph.compile(Deep(), tmp_path / "plan.yaml", example_inputs=(rows(),))
    assert again.program.text == found.program.text


def test_a_model_with_a_recomputation_still_runs_without_gradients():
    sharded = shardgraph.compile(Deep(), "single", recompute="full")
    with torch.no_grad():
        assert sharded(rows()).isfinite()


def test_a_plan_that_says_what_is_computed_again_is_only_held_against_the_memory():
    given = {"example_inputs": (rows(),), "cluster": toy_cluster(), "recompute": "none"}
    with pytest.raises(PlanError, match="no recomputation brings plan 'single'"):
        shardgraph.compile(Deep(), "single", **given, memory="2.5 MiB")
    assert shardgraph.compile(Deep(), "single", **given, memory="1 GiB").plan.recompute == "none"


@pytest.mark.slow
def test_what_other_options_come_to_is_told_where_no_recomputation_fits():
    with pytest.raises(PlanError) as error:
        shardgraph.analyze(Deep(), (rows(),), "fsdp", mesh={"dp": 2}, cluster="H100", memory="1 KiB")
    told = [line.strip() for line in str(error.value).splitlines()[1:]]
    cost = r"[\d.]+ [KM]iB, [\d.]+ [mu]s a step, which is still too much"
    assert told and all(re.match(rf"offload='\w+', recompute='full': {cost}", line) for line in told)


def test_without_example_inputs_there_is_nothing_to_find():
    with pytest.raises(PlanError, match="finds what fits the memory by what is computed with them: give"):
        shardgraph.compile(Deep(), "single", memory="1GiB")


def test_a_budget_that_is_no_size_is_an_error():
    with pytest.raises(ShardGraphError, match="memory is 'much'; it may be a positive number of bytes"):
        shardgraph.analyze(Deep(), (rows(),), mesh=DP, cluster=toy_cluster(), memory="much")


@pytest.mark.slow
def test_layers_that_rules_tell_apart_are_analysed_one_by_one():
    plan = replace(preset("fsdp", DP), recompute=(("layers.[0-6].2", ("gelu",)),))
    given = {"plan": plan, "cluster": toy_cluster()}
    folded, whole = (shardgraph.analyze(Deep(13), (rows(),), **given, fold=fold) for fold in (True, False))
    assert folded.peak_memory == whole.peak_memory and folded.time == whole.time


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_ranks_compile_the_recomputation_that_the_first_finds():
    found = on_ranks(ranks.within_memory, 2, args=(ROWS,), timeout=100)
    assert found[0] == found[1] and found[0][0] not in ("none", "budget") and found[0][1]


# -- what is never computed twice ----------------------------------------------------------------------------


def test_dropout_is_kept_and_said_to_be_where_a_plan_names_it():
    model, (args, _) = make("tied-transformer", 4)
    program = build_program(model, replace(preset("fsdp", DP), recompute=(("**", ("*",)),)), args)
    assert program.random and not any(draws(node) for node in program.backward.graph.nodes)
    assert any("draws random numbers: it is kept" in note for note in program.notes)


def test_a_budget_never_has_random_numbers_drawn_again():
    model, (args, kwargs) = make("tied-transformer", 4)
    found = choices_for(model, *args, **kwargs)
    for choice in found.choices[:: len(found.choices) // 3]:
        assert not any(draws(node) for node in found.program(choice).backward.graph.nodes)


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.linear(x), 0.5).square()


def test_a_program_that_would_draw_other_numbers_in_backward_is_refused():
    joint = capture(Dropped(), (torch.randn(4, 8),), {}, device=CPU)
    for node in joint.module.graph.nodes:
        if node.op == "call_function":
            RECOMPUTE.set(node, True)
    halves = split(joint.module)
    with pytest.raises(RandomStateError, match=r"test_recompute\.py:\d+\) draws random numbers in forward"):
        check_random_state(*halves)


# -- how good the choice is ----------------------------------------------------------------------------------


class Wide(nn.Module):
    """No layers to fold, and operations of unlike price."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.mid, self.down = nn.Linear(16, 256), nn.Linear(256, 64), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.up(x)) * 2
        x = torch.sin(self.mid(x)).exp() + 1
        return torch.sigmoid(self.down(x)).square().mean()


def gaps(model: nn.Module, x: torch.Tensor) -> dict[float, float]:
    """By how much of forward's time each choice is above what no schedule is below, by the part of the memory it has.

    Memory is what there is beside parameters, optimizer state and inputs; the bound is that of Checkmate's program.
    """
    found = choices_for(model, x, plan="single", mesh=())
    gm = found.joint.module
    values = values_of(gm)
    problem = problem_of(gm, values, Prices(toy_cluster(), ()))
    seconds = problem.seconds_of
    steps, stays = backward_steps(gm, values), 3 * sum(p.nbytes for p in model.parameters()) + x.nbytes
    most, measured = found.peak(found.choices[0]) - stays, {}
    for budget in sorted({found.peak(choice) for choice in found.choices})[::3]:
        bound, chosen = least_seconds_of_any(values, steps, seconds, budget - stays), found.fastest_within(budget)
        assert bound is not None and bound.seconds <= chosen.seconds * (1 + 1e-6) + 1e-12
        measured[(budget - stays) / most] = (chosen.seconds - bound.seconds) / sum(seconds.values())
    return measured


@pytest.mark.slow
def test_the_fast_method_is_optimal_down_to_three_quarters_of_the_memory_and_near_it_below(monkeypatch):
    monkeypatch.setattr(recomputation, "_TRACTABLE", 0)
    measured = gaps(Deep(4), torch.randn(256, 32))
    assert max(gap for part, gap in measured.items() if part >= 3 / 4) < 1e-6
    assert min(measured) < 0.45 and max(measured.values()) < 0.05


@pytest.mark.parametrize(("model", "width"), [(Wide(), 16), (Deep(2), 32)], ids=["wide", "deep"])
def test_with_the_exact_program_a_small_graph_has_hardly_a_gap(model, width):
    assert max(gaps(model, torch.randn(256, width)).values()) < 0.05
