"""A whole step without clipping updates parameters while backward runs, with the numbers of an update at its end."""

from __future__ import annotations

import pytest

from tests import early_updates
from tests.standing import on_ranks

pytestmark = pytest.mark.timeout(280)


@pytest.mark.quick("fsdp-full-1048576")
@pytest.mark.parametrize(
    ("plan", "recompute", "bucket"),
    [
        ("ddp", "none", 1 << 20),
        ("ddp", "full", 0),
        ("zero1", "none", 0),
        ("zero2", "none", 1 << 20),
        ("zero2", "full", 256),
        ("fsdp", "none", 256),
        ("fsdp", "full", 1 << 20),
        ("fsdp", "full", 0),
    ],
)
def test_no_parameter_changes_before_its_last_reader_whatever_is_gathered_and_recomputed(plan, recompute, bucket):
    for errors in on_ranks(early_updates.errors, 2, args=(plan, recompute, bucket)):
        assert {name: error for name, error in errors.items() if not error < 1e-12} == {}


@pytest.mark.slow
def test_kernels_that_inductor_compiles_read_parameters_before_they_change():
    for errors in on_ranks(early_updates.errors, 2, args=("fsdp", "full", 256, "inductor")):
        assert {name: error for name, error in errors.items() if not error < 1e-9} == {}


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["fsdp", "ddp"])  # under zero2 the peak is before backward, of all parameters
def test_gradients_are_freed_in_backward_as_predicted(plan):
    for found in on_ranks(early_updates.peaks, 2, args=(plan,)):
        predicted, measured = found["whole"]
        gradients = 32 * 512 * 512 * 4 // (1 if plan == "ddp" else 2)
        assert measured < found["apart"][1] - gradients // 3, found
        assert measured < found["clipped"][1] - gradients // 3, found
        assert predicted == pytest.approx(measured, rel=0.02), found


def test_a_schedule_counts_one_step_and_a_replaced_step_is_called_once_for_all():
    for facts in on_ranks(early_updates.calls, 2):
        assert facts["without clipping"] > 3
        assert facts["warnings"] == []
        assert facts["clipped"] == facts["replaced"] == facts["replaced step saw"] == 1


def test_a_batch_in_the_memory_of_a_parameter_is_read_before_that_changes():
    for error in on_ranks(early_updates.aliased, 2):
        assert error < 1e-12


def test_gradients_of_another_optimizers_parameters_are_left_for_it():
    for errors in on_ranks(early_updates.others_gradients, 2):
        assert max(errors.values()) < 1e-12


def test_a_step_that_fails_in_the_middle_leaves_the_optimizer_whole_and_is_noticed_by_earlier_forwards():
    for facts in on_ranks(early_updates.failing, 2):
        assert facts == {"raised": True, "noticed": True, "parameters": True, "state": True}
