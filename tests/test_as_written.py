"""A compiled module is used as its model is: methods, submodules, copies, state, new layers, any optimizer."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import shardgraph
from tests import as_written
from tests.standing import on_ranks

pytestmark = pytest.mark.timeout(280)
EXACT = 1e-12  # double precision; what is left is the order of sums
PLANS = ["fsdp", "ddp", "zero2", "tp", "fsdp+tp"]
RANKS = {"fsdp+tp": 4}


@pytest.mark.quick("*-fsdp", "a method-ddp", "a method-tp")
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("of", ["a method", "a submodule", "a layer", "the original"])
def test_what_is_called_as_it_is_written_is_differentiated_on_shards(of, plan):
    assert max(on_ranks(as_written.differentiated, RANKS.get(plan, 2), args=(plan, of))) < EXACT


def test_a_program_that_was_compiled_before_parameters_were_shards_is_that_of_the_first_call():
    assert on_ranks(as_written.compiled_once, args=("fsdp",)) == [1, 1]


def test_within_a_method_parameters_are_gathered_once_however_often_ranks_need_them():
    assert all(on_ranks(as_written.calls_of_ranks_that_differ, args=("fsdp",), timeout=60))


@pytest.mark.quick("fsdp")
@pytest.mark.parametrize("plan", ["fsdp", "ddp"])
def test_a_method_computes_with_a_parameter_by_itself_and_writes_to_it_where_it_is_whole(plan):
    for trained, told, error, refused in on_ranks(as_written.with_parameters_by_themselves, args=(plan,)):
        assert trained < EXACT
        assert "reset() of the model writes to a parameter" in told and "sharded.unsharded()" in told
        assert error == 0
        assert "its gradient would be lost" in refused


@pytest.mark.quick("fsdp")
@pytest.mark.parametrize("plan", ["fsdp", "ddp", "tp"])
def test_a_loss_outside_of_methods_computes_with_parameters_and_methods_of_parts(plan):
    assert max(on_ranks(as_written.outside_of_methods, args=(plan,))) < EXACT


def test_operations_on_shards_that_torch_does_not_have_are_told_with_what_works():
    for told in on_ranks(as_written.told_of_shards):
        for of in ("method of a part", "initialised", "noise", "renormed"):
            assert "with sharded.as_written():" in told[of] and "with sharded.unsharded():" in told[of], of
        assert "on CPUs would draw the same numbers" in told["initialised"] and "randn_like" in told["noise"]
        assert "inside of as_written() writes to a parameter" in told["written"]
        assert "call it inside of `with sharded.unsharded():`" in told["written"]


def test_torch_s_own_error_of_shards_beside_other_tensors_has_a_note_with_what_works():
    with pytest.raises(shardgraph.LaunchError, match=r"mixed torch\.Tensor and DTensor(?s:.*)with sharded\.as_written"):
        shardgraph.launch(as_written.mixed_and_not_caught, 2)


@pytest.mark.quick("fsdp")
@pytest.mark.parametrize("plan", ["fsdp", "ddp"])
def test_a_gradient_penalty_is_differentiated_through_the_original(plan):
    assert max(on_ranks(as_written.gradient_penalty, args=(plan,))) < EXACT


@pytest.mark.quick("fsdp", "tp")
@pytest.mark.parametrize("plan", PLANS)
def test_what_is_written_to_whole_parameters_is_kept_and_a_call_shards_them_again(plan):
    for errors in on_ranks(as_written.written_whole, RANKS.get(plan, 2), args=(plan,)):
        assert max(errors) < EXACT


@pytest.mark.quick("fsdp-clear", "fsdp-optimizer made", "fsdp-step")
@pytest.mark.parametrize("what", ["step", "step of both", "clip", "clear", "optimizer made"])
@pytest.mark.parametrize("plan", ["fsdp", "ddp"])
def test_what_trains_inside_of_unsharded_trains_the_shards(plan, what):
    assert max(on_ranks(as_written.trained_while_whole, args=(plan, what))) < EXACT


@pytest.mark.quick("*-fsdp", "replaced-tp")
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("how", ["replaced", "appended", "one parameter"])
def test_a_layer_that_is_added_after_a_call_is_sharded(how, plan):
    for error, alike in on_ranks(as_written.added, RANKS.get(plan, 2), args=(plan, how)):
        assert error < EXACT and (alike or "tp" in plan)  # where operators say how each parameter lies


def test_a_layer_that_ranks_have_initialised_differently_is_refused_on_all():
    for told in on_ranks(as_written.added_with_other_values):
        assert "the parameters that were added" in told and "1.weight" in told


@pytest.mark.quick("fsdp", "tp")
@pytest.mark.parametrize("plan", PLANS)
def test_whole_parameters_are_read_as_a_vector_with_gradients_and_written(plan):
    assert max(on_ranks(as_written.as_a_vector, RANKS.get(plan, 2), args=(plan,))) < EXACT


def test_a_head_without_values_and_one_under_a_pipeline_are_refused_with_what_to_do():
    for told in on_ranks(as_written.added_where_it_cannot_be):
        assert "'1.weight' was added after shardgraph.compile and is on meta: give it values" in told["meta"]
        assert "'1.late' was added or replaced" in told["pipeline"] and "compile it again" in told["pipeline"]


def test_inputs_in_shards_and_calls_inside_of_transformations_are_refused_with_what_to_do():
    for told in on_ranks(as_written.told_of_inputs):
        assert "input 0 of the call is a DTensor of shape [8, 6]" in told["shards"] and "to_local()" in told["shards"]
        assert "a transformation of torch.func" in told["vmap"] and "functional_call" in told["vmap"]


def test_a_method_may_be_registered_as_with_fsdp2():
    assert max(on_ranks(as_written.registered_as_with_fsdp2, args=("fsdp",))) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["fsdp", "ddp", "tp"])
@pytest.mark.parametrize("name", as_written.LANGUAGE)
def test_models_of_transformers_generate_resize_and_save(name, plan, tmp_path):
    for facts in on_ranks(as_written.of_transformers, args=(plan, name, str(tmp_path))):
        assert facts["generated"] and facts["embedded"] == 0
        assert facts["rows"] == 58 and facts["saved"] < 1e-5
        assert ".safetensors" in facts["files"]


@pytest.mark.quick("Adafactor of transformers-fsdp", "Rprop-fsdp", "fused SGD-fsdp", "its first moments-fsdp")
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", as_written.OPTIMIZERS)
def test_optimizers_with_closures_give_the_weights_of_the_unsharded_model(name, plan):
    tolerance = 1e-6 if "line search" in name else EXACT  # which compares losses, and amplifies how they round
    assert max(on_ranks(as_written.stepped, RANKS.get(plan, 2), args=(plan, name))) < tolerance


def test_an_optimizer_that_needs_all_parameters_is_refused_under_a_pipeline():
    for told in on_ranks(as_written.lbfgs_of_stages):
        assert "LBFGS takes products over all parameters" in told


def test_a_pipeline_says_that_its_submodules_are_on_several_ranks():
    for messages in on_ranks(as_written.method_of_stages):
        assert all("layers on several ranks" in told and "full_state_dict()" in told for told in messages)


@pytest.mark.slow
def test_torch_compile_leaves_a_compiled_module_as_it_is():
    assert max(on_ranks(as_written.compiled_by_torch, args=("fsdp",))) < EXACT


# -- on one rank -------------------------------------------------------------------------------------------


def test_on_one_rank_a_copy_and_the_original_work_too():
    model = nn.Linear(3, 3)
    sharded = shardgraph.compile(model, "single")
    x = torch.ones(2, 3)
    assert torch.equal(copy.deepcopy(sharded)(x), model(x)) and torch.equal(sharded(x), model(x))
    with sharded.unsharded():
        assert torch.equal(sharded.original(x), model(x))


def test_an_optimizer_is_made_by_a_method_of_the_model_from_its_shards():
    sharded = shardgraph.compile(as_written.Retriever(), "single")
    optimizer = sharded.optimizer()
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {*map(id, sharded.parameters())}
