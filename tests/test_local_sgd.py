"""Replicas that are averaged now and then, against the papers' formulas on whole replicas in one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import shardgraph
from shardgraph import Plan, preset
from tests import local_sgd
from tests.standing import on_ranks

pytestmark = pytest.mark.timeout(280)
EXACT = 1e-12  # double precision; what is left is the order of sums


def test_local_sgd_slowmo_and_diloco_are_those_of_the_papers():
    for found in on_ranks(local_sgd.against_the_papers, 2, args=("local-sgd", None, list(local_sgd.KINDS))):
        assert len(found) == 4 and max(found.values()) < EXACT, found


@pytest.mark.slow
@pytest.mark.parametrize("inside", ["ddp", "fsdp"])
def test_replicas_of_several_ranks_are_those_of_the_papers(inside):
    mesh = {"replicas": 2, "dp": 2}
    for found in on_ranks(local_sgd.against_the_papers, 4, args=(f"local-sgd+{inside}", mesh, ["slowmo", "diloco"])):
        assert len(found) == 2 and max(found.values()) < EXACT, found


@pytest.mark.parametrize("pushes", [False, True])
def test_a_run_that_was_saved_in_the_middle_of_a_round_continues(pushes):
    assert on_ranks(local_sgd.continued, 2, args=(pushes,)) == [0.0, 0.0]


def test_replicas_communicate_draw_and_normalise_by_themselves_until_a_round_ends():
    one, other = on_ranks(local_sgd.alone_and_together, 2)
    assert one["communication"] == other["communication"] == ""
    assert not torch.equal(one["drawn"], other["drawn"])
    assert not torch.equal(one["own means"], other["own means"])
    assert torch.equal(one["means"], other["means"])
    assert one["state"] == other["state"] == 6  # half of ten values, padded to twice three


def test_fairscales_slowmo_steps_beside_the_optimizer():
    assert max(on_ranks(local_sgd.fairscales, 2, args=(0.5, 2, "localsgd"))) < EXACT
    # On two ranks, one neighbour is all: push takes the mean in every step.
    assert max(on_ranks(local_sgd.fairscales, 2, args=(0.5, 1, "sgp"))) < EXACT


@pytest.mark.parametrize(("staleness", "frequency"), [(0, None), (2, None), (1, 3)])
def test_stochastic_gradient_push_is_that_of_the_paper(staleness, frequency):
    for left, weight in on_ranks(local_sgd.pushed, 2, args=(staleness, frequency)):
        assert left < EXACT
        assert (weight == 1.0) == (staleness == 0 or frequency is not None)


def test_a_parameter_group_is_added_while_messages_are_on_their_way():
    assert max(on_ranks(local_sgd.grown, 2)) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize(("staleness", "frequency"), [(0, None), (3, None), (1, 3)])
def test_stochastic_gradient_push_over_four_ranks_goes_round_by_powers_of_two(staleness, frequency):
    for left, _ in on_ranks(local_sgd.pushed, 4, args=(staleness, frequency)):
        assert left < EXACT


def test_what_has_no_replicas_says_what_would_work():
    for said in on_ranks(local_sgd.refused, 2):
        assert "compile it with plan='local-sgd'" in said["reduced"] and "plan 'ddp'" in said["reduced"]
        assert "it may be 'localsgd' or 'sgp'" in said["base"]
        assert "give mesh={'replicas': R, 'dp': N}" in said["no inner axis"]


def test_a_single_replica_takes_outer_steps_too():
    sharded = shardgraph.compile(torch.nn.Linear(1, 1, bias=False), "local-sgd")
    before = sharded.weight.item()
    optimizer = shardgraph.SlowMo(
        torch.optim.SGD(sharded.parameters(), lr=0.5), sharded, frequency=2, momentum=0.0, lr=2
    )
    for _ in range(2):
        optimizer.zero_grad()
        sharded(torch.ones(1, 1)).sum().backward()
        optimizer.step()
    assert sharded.weight.item() == pytest.approx(before - 2 * (0.5 + 0.5))


def test_a_plan_with_replicas_round_trips_through_yaml_and_says_what_it_is():
    plan = preset("local-sgd+fsdp", {"nodes": 2, "dp": 4})
    assert Plan.from_yaml(plan.to_yaml()) == plan
    assert (plan.world_size, plan.copies, plan.data_size, plan.mesh) == (8, 2, 4, (("dp", 4),))
    assert "replicas along 'nodes'" in str(plan)


def test_replicas_of_a_pipeline_are_refused():
    with pytest.raises(shardgraph.PlanError, match=r"replicas is .* use a plan without 'pp'"):
        replace(preset("pp", {"pp": 2}, shardgraph.Pipeline(2)), replicas=(("nodes", 2),))


def test_verify_finds_a_replica_equal():
    report = shardgraph.verify(local_sgd.made(), (local_sgd.rows(0, 0),), "local-sgd+fsdp", mesh={"nodes": 2, "dp": 2})
    assert report.ok, report
