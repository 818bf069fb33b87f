"""Optimizers of torch step on shards, and nobody can tell but by the time that it takes."""

from __future__ import annotations

import pytest

from tests import local_steps
from tests.standing import on_ranks

pytestmark = pytest.mark.timeout(280)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["fsdp", "zero1", "ddp"])
def test_every_optimizer_that_computes_by_element_gives_the_weights_of_the_unsharded_one(plan):
    for errors in on_ranks(local_steps.errors_by_optimizer, 2, args=(plan,)):
        assert len(errors) == 20
        assert {name: error for name, error in errors.items() if not error < 1e-12} == {}


def test_the_state_is_of_dtensors_and_goes_on_from_what_was_loaded():
    for facts in on_ranks(local_steps.state, 2):
        assert facts["kinds"] == {"exp_avg": "DTensor", "exp_avg_sq": "DTensor", "step": "Tensor"}
        assert facts["same objects at the next step"]
        assert facts["after loading"] < 1e-12


def test_a_state_of_whole_tensors_or_of_another_plan_is_loaded_into_shards_and_shards_into_whole_ones_not():
    for facts in on_ranks(local_steps.loaded, 2):
        assert facts["placed"]
        assert max(facts[of] for of in ("another plan", "whole tensors", "made before", "after the refusal")) < 1e-12
        assert "the state is that of shards" in facts["told"] and "full_state_dict=True" in facts["told"]


def test_operations_of_a_step_are_on_plain_tensors():
    for seen in on_ranks(local_steps.operands, 2):
        assert seen == {"step": False, "subclass": True, "closure": False, "foreign parameter": True}


def test_backward_sets_the_gradients_of_all_parameters_without_an_operation_on_dtensors():
    assert on_ranks(local_steps.backward_operands, 2) == [False, False]


def test_hooks_of_an_optimizer_see_the_parameters():
    for seen in on_ranks(local_steps.hooks, 2):
        assert seen == ["before: True", "after: True"] * 2


def test_a_step_that_raises_leaves_the_optimizer_as_it_was():
    for facts in on_ranks(local_steps.failing, 2):
        assert facts == {"raised": True, "parameters": True, "gradients": True}


def test_a_step_between_forward_and_backward_is_still_noticed():
    for message in on_ranks(local_steps.step_before_backward, 2):
        assert "was changed in place between forward and backward" in message
