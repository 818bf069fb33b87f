"""Optimizers that compute with whole tensors, and those that users write, are under every plan what they are alone."""

from __future__ import annotations

import pytest

import shardgraph
from tests import whole_tensors
from tests.standing import on_ranks

pytestmark = pytest.mark.timeout(280)


@pytest.mark.quick("fsdp-2")
@pytest.mark.parametrize(
    ("plan", "ranks"),
    [("ddp", 2), ("zero1", 2), ("zero2", 2), ("fsdp", 2), ("fsdp", 3), ("tp", 2), ("hsdp", 4), ("fsdp+tp", 4)],
)
def test_every_plan_gives_the_weights_of_the_unsharded_optimizer(plan, ranks):
    for errors in on_ranks(whole_tensors.errors, ranks, args=(plan,)):
        assert {name: error for name, error in errors.items() if not error < 1e-12} == {}


@pytest.mark.slow
def test_classes_derived_of_those_step_on_whole_tensors_too_and_refuse_closures_but_for_lbfgs():
    for error, alike, told in on_ranks(whole_tensors.with_closures):
        assert error < 1e-12 and alike
        assert "Counting has a step of its own" in told and "call loss.backward() before" in told


@pytest.mark.slow
def test_a_class_that_is_imported_after_compiling_steps_on_whole_tensors():
    assert max(shardgraph.launch(whole_tensors.imported_late, 2)) < 1e-12


def test_state_is_that_of_the_unsharded_optimizer_in_shards_and_goes_on_from_what_was_loaded():
    for facts in on_ranks(whole_tensors.state, 2):
        assert facts["kinds"] == {"step": "Tensor", "row_var": "DTensor", "col_var": "DTensor"}
        assert facts["same objects"] and facts["whole memory"] == []
        assert facts["difference"] < 1e-12 and facts["after loading"] < 1e-12


@pytest.mark.slow
def test_no_more_is_gathered_at_a_time_than_the_largest_parameter():
    for gathered, largest in on_ranks(whole_tensors.largest_gathered, 2):
        assert gathered == largest
