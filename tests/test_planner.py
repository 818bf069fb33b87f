"""plan="auto": the fastest preset that fits, and why."""

from __future__ import annotations

import functools

import pytest
import torch

import shardgraph
from shardgraph import Plan, PlanError
from shardgraph.capture.capture import capture
from shardgraph.plans.shards import named_shapes
from shardgraph.search.planner import choose_plan, plans_of, plans_on
from tests import ranks
from tests.machines import GIB, toy_cluster
from tests.standing import on_ranks
from tests.zoo import make

pytestmark = pytest.mark.usefixtures("shared_captures")


@pytest.fixture(scope="module")
def captured():
    model, (args, kwargs) = make("tied-transformer", 2)
    return capture(model, args, kwargs, device=torch.device("cpu")), named_shapes(model)


@pytest.fixture(scope="module")
def choose(captured):
    @functools.cache
    def chosen(memory, nodes=1):
        cluster = toy_cluster(nodes, devices_per_node=4, memory=memory)
        return choose_plan(*captured, plans_of(cluster.world_size, cluster), cluster)

    return chosen


@pytest.fixture(scope="module")
def divided(choose):
    """What is chosen for a byte less than the smallest plan of data takes."""
    return choose(min(candidate.memory for candidate in choose(GIB).considered) - 1)


def test_with_less_memory_more_is_sharded(choose):
    everything = {candidate.name: candidate.memory for candidate in choose(GIB).considered}
    assert everything["fsdp"] < everything["zero2"] < everything["ddp"]
    assert choose(everything["fsdp"]).name == "fsdp"


def test_the_choice_is_the_fastest_of_those_that_fit(choose):
    plan = choose(GIB)
    fastest = min((c for c in plan.considered if c.fits), key=lambda c: (c.seconds, c.memory))
    assert (plan.name, plan.mesh) == (fastest.name, fastest.mesh)


def test_when_no_plan_of_data_fits_operators_are_divided(divided):
    assert divided.operators and divided.mesh[-1][0] == "tp"
    assert {candidate.batches for candidate in divided.considered} >= {1, 2, 4}


def test_plans_are_compared_by_the_time_of_a_batch(divided):
    times = [candidate.seconds / candidate.batches for candidate in divided.considered]
    assert times == sorted(times)


def test_several_nodes_bring_hybrid_sharding_into_play(choose):
    plan = choose(GIB, nodes=2)
    assert ("hsdp", (("dp_replicate", 2), ("dp_shard", 4))) in {(c.name, c.mesh) for c in plan.considered}


def test_without_a_plan_that_fits_the_error_says_what_the_smallest_takes(choose):
    with pytest.raises(PlanError, match=r"no plan fits 1\.0 KiB per rank: the smallest is 'tp\+sp' on \{'tp': 4\}"):
        choose(1024)


def test_a_chosen_plan_explains_itself_and_round_trips(choose):
    plan = choose(GIB)
    assert Plan.from_yaml(plan.to_yaml()) == plan
    text = plan.explain()
    assert "<- chosen" in text and all(candidate.name in text for candidate in plan.considered)


def test_a_given_plan_says_that_it_was_not_chosen():
    assert "not chosen" in shardgraph.preset("fsdp", {"dp": 2}).explain()


def test_analyze_plans_too():
    model, (args, kwargs) = make("odd-mlp", 4)
    analysis = shardgraph.analyze(model, args, "auto", example_kwargs=kwargs, cluster=toy_cluster())
    assert analysis.plan.considered and analysis.plan.world_size == 8


def test_ranks_compile_the_plan_that_was_found_fastest():
    found = on_ranks(ranks.automatic_plan, 2, timeout=100)
    assert found[0] == found[1] and "<- chosen" in found[0][1]


def test_auto_takes_no_axis_of_pipeline_stages_for_one_of_data():
    with pytest.raises(PlanError, match=r"ask for 'pp', or 'pp\+' and a plan for the other axes"):
        plans_on((("pp", 2), ("dp", 2)))
