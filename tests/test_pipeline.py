"""Pipelines on real processes: schedules of torch.distributed.pipelining run the stages of a captured model."""

from __future__ import annotations

import math

import pytest
import torch

import shardgraph
from shardgraph import Pipeline
from tests import pipelines
from tests.standing import on_ranks
from tests.zoo import make

pytestmark = pytest.mark.timeout(900)

ONE_STAGE = ["gpipe", "1f1b"]
MORE_STAGES = ["interleaved-1f1b", "looped-bfs", "interleaved-zero-bubble", "zbv", "dualpipev"]


def errors(
    name: str,
    plan: str,
    mesh: dict[str, int],
    several: list[Pipeline],
    rows: int = 8,
    steps: int = 2,
    called: bool = False,
) -> list[float]:
    """For each pipeline the largest difference of a loss, gradient, norm or weight from the unsharded model's."""
    count, args = math.prod(mesh.values()), (name, plan, mesh, several, rows, steps, called)
    found = on_ranks(pipelines.pipeline_errors, count, args=args, timeout=800)
    return [max(each) for each in zip(*found, strict=True)]


# -- equal to the unsharded model ------------------------------------------------------------------------------


def test_every_schedule_trains_a_transformer_like_the_unsharded_model():
    found = errors("tied-transformer", "pp", {"pp": 2}, [Pipeline(4, each) for each in ONE_STAGE + MORE_STAGES])
    assert max(found) < 1e-6, found


@pytest.mark.parametrize("name", [pytest.param("gpt2", marks=pytest.mark.slow), "conv-batch-norm"])
def test_tied_weights_and_batch_norm_train_like_the_unsharded_model(name):
    assert max(errors(name, "pp", {"pp": 2}, [Pipeline(4, "1f1b"), Pipeline(4, "zbv")])) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tied-transformer", "gpt2", "t5", "unet", "conv-batch-norm"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_schedule_trains_every_model_like_the_unsharded_model(name, ranks):
    schedules = [Pipeline(8, schedule) for schedule in ONE_STAGE]
    if ranks == 2 or name != "conv-batch-norm":  # which can be cut in five stages at most
        schedules += [Pipeline(8, schedule) for schedule in MORE_STAGES]
    assert max(errors(name, "pp", {"pp": ranks}, schedules, steps=5)) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tied-transformer", pytest.param("gpt2", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("plan", "mesh", "schedule"),
    [
        ("pp+fsdp", {"pp": 2, "dp": 2}, "1f1b"),
        pytest.param("pp+zero2", {"pp": 2, "dp": 2}, "zbv", marks=pytest.mark.slow),
        ("pp+tp", {"pp": 2, "tp": 2}, "interleaved-zero-bubble"),
    ],
)
def test_stages_are_sharded_as_whole_models_are_and_the_norm_counts_tied_weights_once(name, plan, mesh, schedule):
    pipelines = [Pipeline(2, schedule), Pipeline(2, schedule, checkpoint="except_last")]
    assert max(errors(name, plan, mesh, pipelines)) < 1e-6


@pytest.mark.slow
def test_four_ranks_with_a_smaller_last_microbatch():
    assert max(errors("tied-transformer", "pp", {"pp": 4}, [Pipeline(4, "1f1b")], rows=7)) < 1e-6


@pytest.mark.slow
def test_steps_under_no_sync_are_added_up_and_reduced_once():
    found = on_ranks(pipelines.accumulated, 4, args=("tied-transformer", Pipeline(2, "1f1b")))
    assert max(found) < 1e-6


def test_gradients_that_share_memory_are_not_added_to_in_place():
    assert max(on_ranks(pipelines.shared_gradients_error, 2)) < 1e-12


@pytest.mark.slow
def test_running_statistics_are_those_of_the_whole_batch():
    found = on_ranks(pipelines.running_statistics, 2, args=(Pipeline(4, "1f1b", stages=("2",)),))
    assert max(found) < 1e-5


# -- forward alone ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_outputs_in_eval_mode_are_on_every_rank(schedule):
    assert max(on_ranks(pipelines.outputs_in_eval, 2, args=("tied-transformer", Pipeline(4, schedule)))) < 1e-12


# -- called like the model, by loss.backward() -------------------------------------------------------------------


@pytest.mark.slow
def test_a_loss_of_the_outputs_trains_like_the_unsharded_model():
    several = [
        Pipeline(4, "gpipe", checkpoint="except_last"),
        Pipeline(4, "zbv"),
        Pipeline(4, "interleaved-zero-bubble"),
    ]
    assert max(errors("tied-transformer", "pp", {"pp": 2}, several, called=True)) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tied-transformer", "gpt2", "t5", "conv-batch-norm"])
@pytest.mark.parametrize(("plan", "mesh"), [("pp+fsdp", {"pp": 2, "dp": 2}), ("pp+tp", {"pp": 2, "tp": 2})])
def test_a_loss_of_the_outputs_trains_beside_every_other_axis(name, plan, mesh):
    assert max(errors(name, plan, mesh, [Pipeline(2, "1f1b")], called=True)) < 1e-6


def test_one_loss_may_be_of_the_outputs_of_two_calls():
    assert max(on_ranks(pipelines.two_calls_before_backward, 2)) < 1e-12


def test_parameters_that_a_loss_leaves_out_have_no_gradient():
    first, last = on_ranks(pipelines.a_loss_of_one_output, 2)
    assert (first, last) == ([], ["other.weight", "other.bias"])


def test_a_batch_that_was_computed_gets_its_gradient_on_every_rank():
    assert max(on_ranks(pipelines.gradient_of_the_input, 2)) < 1e-12


def test_backward_that_cannot_be_right_is_refused():
    for again, changed in on_ranks(pipelines.refused_backward, 2):
        assert "backward of a pipeline's step has run, and runs once: call the module again" in again
        assert "was changed in place between forward and backward" in changed


def test_a_batch_whose_rows_are_combined_goes_through_as_one_microbatch_and_says_so():
    for error, (told, *rest) in on_ranks(pipelines.rows_that_are_combined, 2):
        assert error < 1e-12
        assert "goes through the pipeline as one microbatch" in told
        assert not rest


# -- checkpoints -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_checkpoint_of_a_pipeline_loads_into_any_other_plan(tmp_path):
    name, mesh = "tied-transformer", {"pp": 2, "dp": 2}
    saved = on_ranks(
        pipelines.save_under_pipeline, 4, args=(str(tmp_path), name, "pp+fsdp", mesh, Pipeline(2, "1f1b"))
    )[0]
    original, _ = make(name, 8)
    assert list(saved) == list(original.state_dict())
    others = [("fsdp", {"dp": 2}, None), ("pp", {"pp": 2}, Pipeline(4, "zbv"))]
    for plan, other, pipeline in others:
        loaded = on_ranks(pipelines.load_under, 2, args=(str(tmp_path), name, plan, other, pipeline))[0]
        assert loaded.keys() == saved.keys()
        for key, value in saved.items():
            assert torch.equal(loaded[key], value), key


# -- what fails --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_rank_that_dies_in_a_step_is_named_by_all_others(victim):
    told = shardgraph.launch(pipelines.left_in_a_step, 3, args=("odd-mlp", Pipeline(4, "1f1b"), victim), timeout=120)
    assert told.pop(victim) == ""
    for message in told:
        assert f"rank {victim} has ended" in message and "of the pipeline" in message


@pytest.mark.slow
def test_a_step_may_have_other_shapes_if_it_has_them_on_all_ranks():
    assert max(on_ranks(pipelines.other_shapes, 2, args=(False,))) < 1e-6
    with pytest.raises(shardgraph.LaunchError, match="rank 0 has gone on with what all last agreed on"):
        shardgraph.launch(pipelines.other_shapes, 2, args=(True,), timeout=120)


@pytest.mark.slow
def test_train_step_works_for_plans_without_a_pipeline_with_the_model_s_own_loss():
    for mine, theirs in on_ranks(pipelines.own_losses, 2, args=("llama", "fsdp")):
        assert mine == pytest.approx(theirs, rel=1e-6)
