"""Ranks with batches of unlike sizes: they train as DDP and FSDP2 do, or all are told at once."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.algorithms import Join

import shardgraph
from shardgraph.passes.lowering import build_program
from shardgraph.proof.prove import prove
from tests import uneven
from tests.standing import on_ranks

pytestmark = pytest.mark.timeout(280)
EXACT = 1e-9  # double precision
AT_ONCE = 20.0  # seconds, on a busy machine: what is not at once takes 300


@pytest.mark.quick("fsdp")
@pytest.mark.parametrize("plan", ["ddp", "zero1", "zero2", "fsdp"])
def test_ranks_with_unlike_batches_train_as_the_unsharded_model_and_as_ddp_and_fsdp2(plan):
    for errors in on_ranks(uneven.unlike_batches, 2, args=(plan,)):
        assert max(errors.values()) < EXACT, errors


@pytest.mark.slow
def test_ranks_with_unlike_batches_train_under_hybrid_sharding():
    for errors in on_ranks(uneven.unlike_batches, 4, args=("hsdp", {"dp_replicate": 2, "dp_shard": 2})):
        assert max(errors.values()) < EXACT, errors


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["ddp", "fsdp"])
def test_losses_of_unlike_batches_may_count_by_their_elements(plan):
    assert max(on_ranks(uneven.weighted_by_rows, 2, args=(plan,))) < EXACT


@pytest.mark.slow
def test_collectives_of_a_long_batch_start_in_the_order_of_a_short_one_on_another_rank():
    for error, ordered in on_ranks(uneven.short_beside_long):
        assert error < EXACT and ordered


@pytest.mark.slow
def test_a_program_takes_the_order_of_collectives_of_another_batch():
    batches = (torch.zeros(shape, dtype=torch.long) for shape in (uneven.SHORT, uneven.LONG))
    short, long = (build_program(uneven.Words(), uneven.ONE_BY_ONE, (ids,)) for ids in batches)
    assert long.communication != short.communication
    following = long.following(short.communication)
    assert following.communication == short.communication
    assert prove(following).ok


def test_a_rank_compiles_by_itself_for_a_batch_that_only_it_has():
    assert on_ranks(uneven.compiled_by_one_rank) == [[1, 2, 2, 2], [1, 1, 2, 2]]


def test_a_synchronized_batch_norm_counts_the_rows_of_each_rank():
    assert max(on_ranks(uneven.synchronized_batch_norm)) < EXACT


@pytest.mark.quick("fsdp")
@pytest.mark.parametrize("plan", ["fsdp", "ddp"])
def test_ranks_that_use_other_parameters_of_one_shape_are_told_so(plan):
    for told, seconds in shardgraph.launch(uneven.other_parameters, 2, args=(plan,), timeout=90):
        assert told.startswith("RankMismatchError: the ranks differ") and "input" in told, told
        assert seconds < AT_ONCE


@pytest.mark.slow
@pytest.mark.parametrize("known", [True, False])
def test_ranks_that_share_batches_are_told_at_once_of_another_size(known):
    for told, seconds in shardgraph.launch(uneven.unlike_batches_that_are_shared, 2, args=(known,), timeout=90):
        assert "rank 0 has gone on" in told and "rank 1" in told, told
        assert "-input 0: shape [2, 4]" in told and "+input 0: shape [3, 4]" in told, told
        assert seconds < AT_ONCE


@pytest.mark.slow
def test_ranks_of_a_pipeline_are_told_at_once_of_another_size():
    for told, seconds in shardgraph.launch(uneven.unlike_batches_in_a_pipeline, 2, timeout=90):
        assert "rank 0 has gone on" in told and "[2, 3, 32]" in told and "[3, 3, 32]" in told, told
        assert seconds < AT_ONCE


def test_an_error_of_the_rank_that_compiles_alone_is_told_on_the_others():
    (told, seconds), (own, _) = shardgraph.launch(uneven.one_rank_cannot_compile, 2, timeout=90)
    assert own.startswith("CaptureError") and "three rows are too many" in own
    assert told.startswith("RankMismatchError: rank 1 failed at the compiled program") and "three rows" in told
    assert seconds < AT_ONCE


@pytest.mark.slow
def test_a_rank_that_evaluates_while_others_train_is_told_at_once():
    for told, seconds in shardgraph.launch(uneven.one_rank_evaluates, 2, args=("fsdp",), timeout=90):
        assert "RankMismatchError" in told and "-gradients on" in told and "+gradients off" in told, told
        assert seconds < AT_ONCE


# -- ranks with unequally many batches -------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["ddp", "zero1", "zero2", "fsdp"])
def test_ranks_with_unequally_many_batches_train_inside_of_join_as_ddp_does(plan):
    for errors in on_ranks(uneven.unequally_many, 2, args=(plan,)):
        assert max(errors.values()) < EXACT, errors


@pytest.mark.parametrize("plan", ["ddp", "fsdp"])
def test_a_rank_without_any_batch_follows_from_the_first_step_on(plan):
    assert max(on_ranks(uneven.without_any, 2, args=(plan,))) < EXACT


@pytest.mark.slow
def test_ranks_with_unequally_many_batches_train_inside_of_join_under_hybrid_sharding():
    for errors in on_ranks(uneven.unequally_many, 4, args=("hsdp", {"dp_replicate": 2, "dp_shard": 2})):
        assert max(errors.values()) < EXACT, errors


@pytest.mark.parametrize("plan", ["ddp", "fsdp"])
def test_a_rank_without_data_follows_training_and_evaluation_of_a_batch_norm(plan):
    for error, apart in on_ranks(uneven.evaluated_beside, 2, args=(plan,)):
        assert error < EXACT and apart == 0.0


@pytest.mark.slow
def test_a_rank_without_data_follows_mixed_precision():
    first, second = on_ranks(uneven.half_precision_beside)
    assert first == second


def test_losses_inside_of_join_may_count_by_their_elements():
    assert max(on_ranks(uneven.weighted_beside)) < EXACT


@pytest.mark.parametrize("plan", ["ddp", "fsdp"])
def test_a_rank_without_data_follows_losses_that_leave_parameters_out(plan):
    assert max(on_ranks(uneven.heads_beside, 2, args=(plan,))) < EXACT


def test_join_is_refused_where_ranks_share_batches_and_stops_where_it_is_asked_to():
    for told in on_ranks(uneven.refusals_of_join):
        assert "join() cannot be under plan 'tp'" in told["tp"]
        assert "inside of another join() of the same module" in told["twice"]
        assert "run out of data" in told["stopped"]
        assert "never made such a call" in told["never called"]
        assert "never stepped the optimizer" in told["never stepped"]
        assert told["as written"].startswith("Linear, which runs as it is written, communicates")


@pytest.mark.slow
def test_what_is_accumulated_of_other_parameters_inside_of_join_is_told_on_the_rank_that_has_it():
    with pytest.raises(shardgraph.LaunchError, match=r"none of \['first\.bias', 'first\.weight'\].*end no_sync\(\)"):
        shardgraph.launch(uneven.left_over, 2, timeout=90)


def test_the_join_of_torch_is_refused_with_what_to_do():
    sharded = shardgraph.compile(torch.nn.Linear(4, 2), "single", progress=False)
    with pytest.raises(shardgraph.ShardGraphError, match=r"algorithms\.Join does not take.*`with sharded\.join\(\):`"):
        Join([sharded])
