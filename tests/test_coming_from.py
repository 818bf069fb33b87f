"""What users of DDP and FSDP2 call on a model does the same on a compiled one, or says what does."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import FSDPModule

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


@pytest.mark.parametrize("accumulate", [False, True])
def test_power_sgd_trains_as_under_ddp(accumulate):
    for error, from_plain in on_ranks(coming_from.powers, args=(accumulate,)):
        assert error < EXACT < from_plain


def test_a_hook_of_the_user_gets_buckets_of_this_rank_s_gradients_and_says_what_parameters_get():
    for seen, error in on_ranks(coming_from.own_hook):
        shapes = [(3,), (3, 16), (16,), (16,), (16,), (16, 6)]
        assert seen == [(0, True, shapes, shapes)]
        assert error < EXACT


def test_buckets_of_a_hook_are_those_of_ddp():
    for theirs, ours in on_ranks(coming_from.buckets):
        assert len(ours) == 2 and ours == theirs


def test_a_whole_step_with_a_hook_is_that_step():
    assert max(on_ranks(coming_from.stepped_with_a_hook)) < EXACT


def test_join_is_refused_beside_a_hook():
    for told in on_ranks(coming_from.joined_with_a_hook):
        assert "join() cannot be with a communication hook" in told


def test_other_communication_hooks_are_refused_under_other_plans_with_what_works():
    for told in on_ranks(coming_from.refused_hook):
        assert "'powerSGD_hook'" in told and "use plan 'ddp'" in told and "LocalSGD" in told


def test_dtensors_of_the_user_are_refused_by_name():
    for parameter, given, buffer in on_ranks(coming_from.tensors_of_the_user):
        assert "'weight'" in parameter and "DTensor" in parameter
        assert "input 0" in given and "DTensor" in given and "to_local()" in given
        assert "'mask'" in buffer and "DTensor" in buffer


@pytest.mark.quick("ddp", "fsdp")
@pytest.mark.parametrize("plan", ["ddp", "zero1", "zero2", "fsdp"])
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


# -- every method that FSDP2 and DDP have ------------------------------------------------------------

THEIRS = {  # of nn.Module's own kind, or of use inside of the wrapper alone
    *("_apply", "_get_fsdp_state", "_orig_cls_mro_index", "_set_unshard_async_op"),
    *("gather", "scatter", "to_kwargs"),
}


def public(kind: type) -> set[str]:
    """What a wrapper has for its users beyond ``nn.Module``."""
    methods = {name for name, value in vars(kind).items() if callable(value) and not name.startswith("_")}
    return methods - set(dir(nn.Module)) - THEIRS


@pytest.mark.parametrize("kind", [FSDPModule, nn.parallel.DistributedDataParallel])
def test_every_method_of_other_wrappers_is_there_or_says_what_to_do_instead(kind):
    sharded = shardgraph.compile(nn.Linear(4, 4), "single")
    for name in sorted(public(kind)):
        if not hasattr(type(sharded), name):
            with pytest.raises(AttributeError, match=f"has '{name}'; instead: ") as told:
                getattr(sharded, name)
            assert len(str(told.value).splitlines()) == 1


def test_what_is_there_has_the_arguments_of_fsdp2_and_ddp():
    sharded = type(shardgraph.compile(nn.Linear(4, 4), "single"))
    for kind in (FSDPModule, nn.parallel.DistributedDataParallel):
        for name in public(kind) & set(vars(sharded)):
            theirs, ours = (inspect.signature(getattr(each, name)).parameters for each in (kind, sharded))
            assert set(theirs) <= set(ours), name


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("set_modules_to_forward_prefetch", "Plan.prefetch"),
        ("set_reshard_after_forward", "keep_gathered()"),
        ("set_gradient_divide_factor", "scale the loss"),
        ("set_all_reduce_hook", "between backward and the optimizer's step"),
        ("_set_static_graph", "leave this call out"),
        ("module", "leave out '.module'"),
        ("summon_full_params", "sharded.unsharded()"),
        ("save_checkpoint", "torch.distributed.checkpoint"),
    ],
)
def test_a_method_that_is_not_there_says_what_to_do_instead(name, told):
    sharded = shardgraph.compile(nn.Linear(4, 4), "single")
    with pytest.raises(AttributeError, match=rf"neither a compiled module nor Linear has '{name}'.*") as error:
        getattr(sharded, name)
    assert told in str(error.value)
    assert not hasattr(sharded, name)


def test_an_attribute_of_the_model_goes_before_a_name_of_other_wrappers():
    model = nn.Linear(4, 4)
    model.module = "mine"
    assert shardgraph.compile(model, "single").module == "mine"


def test_what_no_wrapper_has_is_told_as_of_any_module():
    with pytest.raises(AttributeError, match="'Linear' object has no attribute 'nothing'"):
        _ = shardgraph.compile(nn.Linear(4, 4), "single").nothing


def test_a_second_communication_hook_is_refused_as_by_ddp():
    sharded = shardgraph.compile(nn.Linear(4, 4), "single")
    sharded.register_comm_hook(None, default_hooks.bf16_compress_hook)
    with pytest.raises(shardgraph.ShardGraphError, match=r"'allreduce_hook'.* by 'bf16_compress_hook' already"):
        sharded.register_comm_hook(None, default_hooks.allreduce_hook)


def test_gradients_of_a_part_of_the_model_are_not_synchronised_by_themselves():
    sharded = shardgraph.compile(nn.Linear(4, 4), "single")
    with pytest.raises(shardgraph.ShardGraphError, match=r"whole model are reduced by one program.*recurse=True"):
        sharded.set_requires_gradient_sync(False, recurse=False)


def test_unshard_has_no_handle_and_the_last_backward_needs_no_word():
    sharded = shardgraph.compile(nn.Linear(4, 4), "single")
    sharded.set_is_last_backward(False)
    with pytest.raises(shardgraph.ShardGraphError, match=r"unshard\(async_op=False\)"):
        sharded.unshard(async_op=True)
