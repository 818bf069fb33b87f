"""What users of DDP and FSDP2 call on a model does the same on a compiled one, or says what does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import shardgraph
from shardgraph import Plan, ignored, preset
from tests import coming_from
from tests.standing import on_ranks

pytestmark = pytest.mark.timeout(280)
EXACT = 1e-9  # double precision


@pytest.mark.parametrize(
    ("one", "other", "ranks"), [("fsdp", "FSDP2", 2), ("FSDP2", "fsdp", 1), ("FSDP2", "zero2", 2), ("ddp", "FSDP2", 1)]
)
def test_checkpoints_of_model_and_optimizer_go_between_fsdp2_and_plans_on_other_numbers_of_ranks(
    one, other, ranks, tmp_path
):
    expected = on_ranks(coming_from.saved, 2, args=(one, str(tmp_path)))[0]
    assert max(on_ranks(coming_from.loaded, ranks, args=(other, str(tmp_path), expected))) < EXACT


@pytest.mark.parametrize("plan", ["ddp", "zero1", "fsdp"])
def test_whole_states_of_model_and_optimizer_are_got_and_set_as_of_fsdp2(plan):
    assert max(on_ranks(coming_from.whole_states, 2, args=(plan,))) < EXACT


@pytest.mark.parametrize("plan", ["ddp", "fsdp"])
def test_gradients_are_not_reduced_until_they_are_to_be_synchronised_as_with_fsdp2(plan):
    for kept, error in on_ranks(coming_from.gradients_synchronised_now_and_then, 2, args=(plan,)):
        assert kept and error < EXACT


def test_communication_hooks_that_say_a_dtype_are_those_of_ddp():
    for errors in on_ranks(coming_from.hooked):
        assert errors["allreduce_hook"] < EXACT
        assert errors["bf16_compress_hook"] < 1e-2 and errors["fp16_compress_hook"] < 1e-3


def test_other_communication_hooks_are_refused_with_what_works():
    for told in on_ranks(coming_from.refused_hook):
        assert "'powerSGD_hook'" in told and "LocalSGD" in told


def test_dtensors_of_the_user_are_refused_by_name():
    for parameter, given, buffer in on_ranks(coming_from.tensors_of_the_user):
        assert "'weight'" in parameter and "DTensor" in parameter
        assert "input 0" in given and "DTensor" in given and "to_local()" in given
        assert "'mask'" in buffer and "DTensor" in buffer


@pytest.mark.parametrize("plan", ["ddp", "fsdp"])
def test_ignored_parameters_are_each_rank_s_own_as_with_fsdp2(plan):
    first, second = on_ranks(coming_from.left_alone, 2, args=(plan,))
    for found in (first, second):
        assert found["apart"] < EXACT
        assert found[plan] == found["FSDP2"] == ["Tensor", "DTensor"]
        assert found["norm"] == first["norm"] and not found["clipped"]


def test_gradients_of_ignored_parameters_are_proved_to_be_the_rank_s_own():
    proof = shardgraph.prove(coming_from.plain_with_ignored(), (torch.ones(2, 6).double(),), "fsdp")
    assert proof.ok, proof


def test_a_plan_carries_what_it_ignores():
    plan = replace(preset("fsdp", {"dp": 2}), annotations=(("0.*", ignored()),))
    assert Plan.from_yaml(plan.to_yaml()) == plan
    assert plan.ignores("0.weight") and not plan.ignores("3.weight")


def test_ignored_parameters_are_refused_where_operators_are_divided_and_by_verify():
    model, x = coming_from.plain_with_ignored(), torch.ones(2, 6).double()
    with pytest.raises(shardgraph.PlanError, match=r"ignored\(\).* a plan of data alone works"):
        shardgraph.verify(model, (x,), "tp", mesh={"tp": 2})
    with pytest.raises(shardgraph.ShardGraphError, match="each rank trains its own"):
        shardgraph.verify(model, (x,), "fsdp")


def test_a_profile_has_ranges_of_modules_and_collectives():
    for names, same in on_ranks(coming_from.profiled):
        assert same
        assert {"shardgraph forward", "shardgraph backward", "0", "3"} <= {*names}
        assert any(name.startswith("all_gather") and " of 2.weight" in name for name in names)
        assert any(name.startswith("wait for") and " of gradient of 2.weight" in name for name in names)
