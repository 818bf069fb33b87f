"""A compiled module is copied, averaged, saved and loaded as its model is."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn

import shardgraph
from tests import module_state
from tests.standing import on_ranks

pytestmark = pytest.mark.timeout(280)
EXACT = 1e-12  # double precision; what is left is the order of sums
RANKS = {"fsdp+tp": 4}


# -- copies ------------------------------------------------------------------------------------------------


@pytest.mark.quick("fsdp")
@pytest.mark.parametrize("plan", ["fsdp", "ddp", "zero2", "tp", "fsdp+tp"])
def test_a_copy_has_values_of_its_own_and_trains_also_with_a_copy_of_the_optimizer(plan):
    for copied, trained, alike, with_optimizer in on_ranks(module_state.copied, RANKS.get(plan, 2), args=(plan,)):
        assert max(copied, trained, with_optimizer) < EXACT and alike


@pytest.mark.parametrize("plan", ["fsdp", "tp"])
def test_a_copy_of_a_submodule_computes_and_trains_inside_of_as_written(plan):
    for errors in on_ranks(module_state.part_copied, args=(plan,)):
        assert max(errors) < EXACT


def test_a_compiled_module_is_not_pickled_and_says_what_to_save():
    sharded = shardgraph.compile(nn.Linear(3, 3), "single")
    with pytest.raises(shardgraph.ShardGraphError, match=r"cannot be pickled.*full_state_dict"):
        pickle.dumps(sharded)


def test_nor_are_its_parts_and_copies_that_share_its_programs_are_refused():
    for told in on_ranks(module_state.parts_in_files):
        assert all(
            "cannot be pickled" in told[of] and "full_state_dict" in told[of] for of in ("a part", "the original")
        )
        assert "copy.deepcopy makes one with shards of its own" in told["shallow"]


# -- averages ----------------------------------------------------------------------------------------------


@pytest.mark.quick("equal, of buffers too-fsdp")
@pytest.mark.parametrize("plan", ["fsdp", "ddp", "tp"])
@pytest.mark.parametrize("how", module_state.AVERAGES)
def test_averages_of_torch_are_those_of_the_unsharded_model(how, plan):
    assert max(on_ranks(module_state.averaged, args=(plan, how))) < EXACT


def test_batch_statistics_that_are_made_anew_are_told_what_to_call():
    sharded, x = shardgraph.compile(nn.Sequential(nn.BatchNorm1d(3)), "single", progress=False), torch.randn(4, 3)
    with pytest.raises(shardgraph.CaptureError, match=r"(?s)give it a momentum.*update_bn.*sharded\.original"):
        torch.optim.swa_utils.update_bn([x], sharded)


# -- checkpoints -------------------------------------------------------------------------------------------


@pytest.mark.quick("*-fsdp")
@pytest.mark.parametrize("plan", ["fsdp", "ddp", "tp"])
@pytest.mark.parametrize("kind", ["of shards", "whole", "local", "saved", "of torch"])
def test_a_checkpoint_of_a_model_with_hooks_and_extra_state_is_one_of_that_model(kind, plan, tmp_path):
    for error, calls, count in on_ranks(module_state.of_its_own, args=(plan, kind, str(tmp_path))):
        assert error == 0 and calls == 5 and count == 7


def test_shards_of_other_ranks_are_refused_by_name_and_nothing_is_loaded():
    sharded = shardgraph.compile(nn.Linear(3, 3, bias=False), "single")
    before = sharded.weight.clone()
    with pytest.raises(shardgraph.CheckpointError, match=r"are not of this rank.*\['weight'\].*on as many ranks"):
        sharded.load_local_state_dict({"weight": torch.zeros(2, 3)})
    assert torch.equal(sharded.weight, before)


def test_what_is_written_to_whole_parameters_is_kept_where_the_state_has_other_names():
    assert on_ranks(module_state.written_under_hooks, args=("fsdp",)) == [0.0, 0.0]


def test_a_model_that_loads_its_own_way_does_so(tmp_path):
    for calls, error, told, after in on_ranks(module_state.loaded_its_own_way, args=("fsdp", str(tmp_path))):
        assert calls == 3 and error < EXACT
        assert "nothing was loaded" in told and "projection" in told and after < EXACT


def test_hooks_that_translate_names_of_a_checkpoint_are_called():
    assert max(on_ranks(module_state.renamed, args=("fsdp",))) < EXACT


def test_a_layer_that_overrides_how_it_loads_does_so():
    assert max(on_ranks(module_state.grown, args=("fsdp",))) < EXACT


def test_hooks_of_the_root_and_of_its_state_are_called_as_of_the_original():
    for ours, theirs in on_ranks(module_state.hooked, args=("fsdp",)):
        assert ours == theirs
