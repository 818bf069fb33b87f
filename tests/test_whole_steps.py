"""``sharded.step``: a whole training step, with the numbers of one that is taken apart."""

from __future__ import annotations

import pytest

from shardgraph.cost_models.optimizers import UPDATED_TOGETHER
from tests import whole_steps
from tests.standing import on_ranks

pytestmark = pytest.mark.timeout(280)


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "bucket"), [("fsdp", 1 << 20), ("ddp", 0)])
def test_every_optimizer_gives_the_weights_of_the_unsharded_one_clipped_and_under_a_schedule(plan, bucket):
    for errors in on_ranks(whole_steps.errors_by_optimizer, 2, args=(plan, bucket)):
        assert len(errors) == 20
        assert {name: error for name, error in errors.items() if not error < 1e-12} == {}


@pytest.mark.quick("zero2-2")
@pytest.mark.parametrize(("plan", "ranks"), [("zero1", 2), ("zero2", 2), ("tp", 2), ("hsdp", 4), ("fsdp+tp", 4)])
def test_every_plan_gives_the_weights_of_the_unsharded_model(plan, ranks):
    for error in on_ranks(whole_steps.error_of_plan, ranks, args=(plan,)):
        assert error < 1e-12


def test_the_optimizer_may_step_by_itself_in_between_and_its_state_is_saved_and_loaded():
    for errors in on_ranks(whole_steps.mixed, 2):
        assert {name: error for name, error in errors.items() if not error < 1e-12} == {}


def test_groups_parameters_that_are_frozen_for_a_while_and_those_that_come_late():
    for error in on_ranks(whole_steps.some_only, 2):
        assert error < 1e-12


def test_gradients_of_earlier_backward_passes_count():
    for errors in on_ranks(whole_steps.accumulated, 2):
        assert max(errors.values()) < 1e-12, errors


def test_a_step_that_overflows_on_one_rank_is_left_out_on_all():
    for facts in on_ranks(whole_steps.scaled, 2):
        assert facts["scales"] == [1024.0, 1024.0, 512.0, 512.0]
        assert facts["error"] < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["fsdp", "ddp"])
def test_bits_are_those_of_the_step_taken_apart(plan):
    for same in on_ranks(whole_steps.bits, 2, args=(plan,)):
        # The fused kernel rounds the last elements of a tensor otherwise than those of a whole vector register.
        assert [name for name, equal in same.items() if not equal and "one kernel" not in name] == []


def test_an_update_takes_as_many_kernels_for_many_parameters_as_for_few():
    for facts in on_ranks(whole_steps.kernels, 2):
        assert facts["addcdiv_"][2] == facts["addcdiv_"][6] <= 2
        assert facts["gradients"]


def test_groups_whose_parameters_alternate_take_a_kernel_each():
    assert on_ranks(whole_steps.kernels_of_groups, 2) == [2, 2]


@pytest.mark.quick("fsdp")
@pytest.mark.parametrize("plan", ["fsdp", "zero2", "ddp"])
def test_a_whole_step_takes_more_memory_than_one_taken_apart_only_for_an_update_of_a_megabyte(plan):
    for found in on_ranks(whole_steps.peaks, 2, args=(plan,)):
        assert found["whole"][1] <= found["apart"][1] + 2 * UPDATED_TOGETHER, found


def test_what_makes_no_sense_is_refused():
    for inside, foreign, stale in on_ranks(whole_steps.refused, 2):
        assert "inside no_sync()" in inside
        assert "has none of this module's parameters" in foreign
        assert "changed in place between forward and backward" in stale


@pytest.mark.parametrize("kind", ["Adafactor", "hooks", "pipeline"])
def test_what_cannot_be_done_on_buckets_is_the_same_step_taken_apart(kind):
    for error in on_ranks(whole_steps.others, 2, args=(kind,)):
        assert error < 1e-12


def test_statistics_of_gradients_are_cleared_with_them():
    assert on_ranks(whole_steps.statistics_left, 2) == [0, 0]


def test_parameters_in_host_memory_stay_there():
    for error, on_host in on_ranks(whole_steps.with_a_parameter_in_host_memory, 2):
        assert error < 1e-12 and on_host
