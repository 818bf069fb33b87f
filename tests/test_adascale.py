"""AdaScale: gains from gradients as backward reduces them, against the paper's formulas on whole ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import shardgraph
from shardgraph import Plan, ir, preset
from shardgraph.passes.lowering import build_program
from shardgraph.proof.prove import prove
from tests import adascale
from tests.standing import on_ranks

pytestmark = pytest.mark.timeout(280)
EXACT = 1e-9


@pytest.mark.quick("fsdp")
@pytest.mark.parametrize("plan", ["ddp", "fsdp"])
def test_gains_and_weights_are_those_of_the_paper_on_whole_gradients(plan):
    assert max(on_ranks(adascale.against_the_paper, 2, args=(plan, {"dp": 2}))) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "mesh"),
    [
        ("hsdp", {"dp_replicate": 2, "dp_shard": 2}),
        ("fsdp+tp", {"dp": 2, "tp": 2}),
        ("fsdp+tp+sp", {"dp": 2, "tp": 2}),
    ],
)
def test_gains_on_two_axes_are_those_of_the_paper(plan, mesh):
    assert max(on_ranks(adascale.against_the_paper, 4, args=(plan, mesh, 2))) < EXACT


@pytest.mark.parametrize("debias", [True, False])
def test_each_accumulated_gradient_is_a_sample(debias):
    assert max(on_ranks(adascale.against_the_paper, 2, args=("fsdp", {"dp": 2}, 3, debias))) < EXACT


def test_gradients_that_are_noise_have_the_number_of_ranks_as_gain_and_equal_ones_have_1():
    gains, others = on_ranks(adascale.noise_then_signal, 2)
    assert gains == others == pytest.approx([2.0, 1.0])


def test_an_optimizer_that_was_made_before_compiling_has_the_gain_of_its_first_step():
    assert on_ranks(adascale.gain_of_an_optimizer_from_before, 2) == pytest.approx([2.0, 2.0])


def test_a_step_reduces_two_numbers_for_each_parameter_at_once():
    for sizes, same in on_ranks(adascale.reductions_of_a_step, 2, args=("fsdp",)):
        assert sizes == [2 * len(list(adascale.made().parameters()))]
        assert same


def test_averages_are_saved_and_loaded_with_the_optimizer():
    for mine, loaded in on_ranks(adascale.continued, 2):
        assert mine == loaded
        assert mine[0] != mine[1]


def test_what_cannot_be_measured_says_what_would_work():
    for said in on_ranks(adascale.refused, 2):
        assert "accumulate under no_sync()" in said["two reductions"]
        assert "call set_num_gradients_to_accumulate" in said["two passes"]
        assert "gradient_statistics=True" in said["not measured"]


def test_a_single_rank_has_a_gain_of_1_and_a_schedule_multiplies_the_rate():
    model = nn.Linear(2, 1, bias=False)
    before = model.weight.detach().clone()
    sharded = shardgraph.compile(model, "single", gradient_statistics=True)
    optimizer = shardgraph.AdaScale(torch.optim.SGD(sharded.parameters(), lr=1.0), sharded)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    for _ in range(2):
        optimizer.zero_grad()
        sharded(torch.ones(1, 2)).sum().backward()
        assert optimizer.gain() == 1.0
        optimizer.step()
        schedule.step()
    assert torch.allclose(sharded.weight, before - 1.0 - 0.5)


@pytest.mark.parametrize("name", ["pp+ddp", "ep"])
def test_plans_that_cannot_measure_gradients_are_refused(name):
    pipeline = shardgraph.Pipeline(2) if name.startswith("pp") else None
    mesh = {"pp": 2, "dp": 2} if pipeline else {"ep": 2}
    with pytest.raises(shardgraph.PlanError, match=r"gradient_statistics is True; .* use a plan without"):
        replace(preset(name, mesh, pipeline), gradient_statistics=True)


def test_a_plan_that_measures_gradients_round_trips_through_yaml():
    plan = replace(preset("fsdp", {"dp": 2}), gradient_statistics=True)
    assert Plan.from_yaml(plan.to_yaml()) == plan
    assert "measured" in str(plan)


@pytest.fixture
def program():
    plan = replace(preset("fsdp+tp+sp", {"dp": 2, "tp": 2}), gradient_statistics=True)
    return build_program(adascale.made(), plan, (torch.randn(3, 4, dtype=torch.float64),))


def test_under_no_sync_own_gradients_alone_are_measured(program):
    roles = [role for role, _ in ir.outputs(program.graph("local")) if isinstance(role, ir.SquaredNorm)]
    assert len(roles) == 6 and not any(role.reduced for role in roles)


def test_the_graph_that_ends_no_sync_for_another_program_measures_reduced_gradients_alone(program):
    roles = [role for role, _ in ir.outputs(program.graph("reduce")) if isinstance(role, ir.SquaredNorm)]
    assert len(roles) == 6 and all(role.reduced for role in roles)


def test_verify_finds_a_program_that_measures_gradients_equal(program):
    report = shardgraph.verify(adascale.made(), (torch.randn(3, 4, dtype=torch.float64),), program.plan)
    assert report.ok, report


def test_a_program_that_measures_gradients_is_proved(program):
    assert prove(program).ok


@pytest.mark.parametrize("other", [("0.weight", True), ("3.weight", False)], ids=["reduced", "another parameter"])
def test_squared_norms_of_other_gradients_are_not_proved(program, other):
    one, two = (ir.SquaredNorm(ir.Parameter(fqn), reduced) for fqn, reduced in (("0.weight", False), other))
    results = dict(ir.outputs(program.backward))
    results[one], results[two] = results[two], results[one]
    ir.set_outputs(program.backward, list(results.items()))
    proof = prove(program)
    assert {each.what for each in (*proof.wrong, *proof.unknown)} == {str(one), str(two)}
