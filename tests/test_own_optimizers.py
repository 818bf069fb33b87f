"""Optimizers of users' own step on many parameters at a time where that gives the same bits, and alone elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardgraph.module.by_element import STEPS, Kind, NotByElementError, Watched
from shardgraph.module.local_step import is_elementwise
from tests import own_optimizers
from tests.own_optimizers import BY_ELEMENT, NOT_BY_ELEMENT
from tests.standing import on_ranks

pytestmark = pytest.mark.timeout(280)


def watched_steps(make, count):
    """Check so many steps of an optimizer of five parameters, and take them; returns what each check returned."""
    parameters = [nn.Parameter(torch.randn(3)) for _ in range(5)]
    optimizer = make(parameters)
    assert is_elementwise(optimizer)  # so it has been met
    watched, found = Watched(optimizer, STEPS[type(optimizer)]), []
    for _ in range(count):
        kind = Kind.of(0, parameters[0], optimizer.state.get(parameters[0], {}))
        found.append(watched.check(optimizer, {kind: 5}))
        for parameter in parameters:
            parameter.grad = torch.randn(3)
        optimizer.step()
    return found


@pytest.mark.parametrize("name", ["signs", "Adam by hand"])
def test_a_step_that_computes_by_element_may_be_called_for_some_parameters_after_others(name):
    assert watched_steps(BY_ELEMENT[name], 4) == [True] * 4


def test_a_step_that_counts_its_calls_may_not():
    assert watched_steps(BY_ELEMENT["counts steps"], 4) == [False] * 4


@pytest.mark.parametrize("name", NOT_BY_ELEMENT)
def test_what_else_a_step_does_is_seen_before_it_is_done(name):
    make, reason = NOT_BY_ELEMENT[name]
    with pytest.raises(NotByElementError, match=reason):
        watched_steps(make, 4)


@pytest.mark.quick("fsdp")
@pytest.mark.parametrize("plan", ["fsdp", "ddp"])
def test_weights_are_those_of_the_same_optimizer_on_plain_torch_to_the_bit(plan):
    for errors in on_ranks(own_optimizers.differences, 2, args=(plan,)):
        assert {name: error for name, error in errors.items() if error} == {}


@pytest.mark.slow
def test_shards_of_unequal_sizes_give_the_weights_of_plain_torch():
    for errors in on_ranks(own_optimizers.differences, 3, args=("fsdp",)):  # a mean of three gradients is rounded
        assert {name: error for name, error in errors.items() if not error < 1e-12} == {}


@pytest.mark.quick("tp-2")
@pytest.mark.parametrize(("plan", "ranks"), [("fsdp", 3), ("tp", 2)])
def test_numbers_that_a_step_reads_of_shards_are_those_of_whole_tensors(plan, ranks):
    assert max(on_ranks(own_optimizers.of_numbers, ranks, args=(plan,))) < 1e-12


@pytest.mark.slow
def test_state_is_that_of_plain_torch_and_goes_on_from_what_was_loaded():
    for errors in on_ranks(own_optimizers.after_loading, 2):
        assert {name: error for name, error in errors.items() if error} == {}


def test_a_step_is_one_of_plain_tensors_for_many_parameters():
    assert on_ranks(own_optimizers.counted, 2) == [{"kernels": 1, "DTensors": False}] * 2
