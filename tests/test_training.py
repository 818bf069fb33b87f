"""Training on real processes: the sharded module against the unsharded one."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_model

import shardgraph
from tests import ranks
from tests.standing import on_ranks
from tests.zoo import ZOO, make

pytestmark = pytest.mark.timeout(280)
EXACT = 1e-9  # double precision; what is left is the order of sums
ROUNDED = 1e-5  # models of transformers compute their loss in single precision


@pytest.mark.parametrize("plan", ["ddp", "zero1", "zero2", "fsdp"])
def test_five_steps_equal_the_unsharded_model_on_two_ranks(plan):
    for worst in on_ranks(ranks.parity, 2, args=("odd-mlp", plan, None, 0.5)):
        assert worst < EXACT


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [["conv-batch-norm", "mixture", "gpt2"], pytest.param(list(ZOO), marks=pytest.mark.slow)],
    ids=["some", "every one"],
)
def test_models_of_the_zoo_train_sharded_over_two_ranks(names):
    for facts in on_ranks(ranks.parity_of_several, 2, args=(names, "fsdp")):
        assert {name: worst for name, worst in facts.items() if not worst < ROUNDED} == {}


def test_losses_are_those_of_fsdp2_and_ddp():
    for differences in on_ranks(ranks.against_torch, 2):
        assert max(differences.values()) < ROUNDED, differences


def test_hybrid_sharding_on_four_ranks():
    mesh = {"dp_replicate": 2, "dp_shard": 2}
    for worst in on_ranks(ranks.parity, 4, args=("odd-mlp", "hsdp", mesh, 0.5)):
        assert worst < EXACT


@pytest.mark.slow
def test_three_ranks_with_shards_of_different_lengths():
    for worst in shardgraph.launch(ranks.parity, 3, args=("odd-mlp", "fsdp", None)):
        assert worst < EXACT


def test_what_a_sharded_module_offers():
    for facts in on_ranks(ranks.features, 2):
        assert facts["names"] and facts["dtensors"] and facts["structure"] and facts["cached"]
        assert facts["eval"] and facts["train"]
        assert facts["output"] < EXACT
        assert facts["no_sync leaves no gradient"]
        assert facts["accumulated"] < EXACT
        assert facts["inference"] == (False, None)
        assert facts["graphs print"]
        assert facts["full state"]


def test_a_number_that_changes_at_every_call_needs_two_programs():
    assert on_ranks(ranks.numbers_that_change, 2) == [2, 2]


def test_dropout_differs_between_ranks_and_repeats_under_a_seed():
    (one, again, other), (second, *_) = on_ranks(ranks.dropout_per_rank, 2)
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert not torch.equal(one, second)


def test_a_model_on_meta_gets_the_values_of_the_unsharded_initialisation():
    assert max(on_ranks(ranks.meta_initialisation, 2)) == 0.0


def test_a_checkpoint_reshards_to_other_ranks_and_plans(tmp_path):
    saved = on_ranks(ranks.save, 2, args=(str(tmp_path), "fsdp"))[0]
    meshes = {4: {"dp_replicate": 2, "dp_shard": 2}}
    for nproc, plan in ((1, "auto"), (3, "zero1"), (4, "hsdp")):
        loaded = shardgraph.launch(ranks.load, nproc, args=(str(tmp_path), plan, meshes.get(nproc)))[0]
        torch.testing.assert_close(loaded, saved, rtol=0, atol=0)
    original, _ = make("odd-mlp", 2, seed=9)
    load_model(original.double(), tmp_path / "model.safetensors")
    torch.testing.assert_close(dict(original.state_dict()), dict(saved), rtol=0, atol=0)


@pytest.mark.quick("different_plans-*", "killed_*")
@pytest.mark.parametrize(
    ("fn", "args", "message"),
    [
        (ranks.different_models, (), r"(?s)the model and the plan.*from one seed.*torch.float32 values "),
        (ranks.different_plans, (), r"the model and the plan"),
        (ranks.different_batches, (False,), r"input 0: shape \[2, 4\]"),
        (ranks.different_batches, (True,), r"inputs of a call|rank 0"),
        (ranks.one_rank_changes_an_attribute, (), r"rank 1 has gone on with what all last agreed on"),
        (ranks.one_rank_cannot_compile, (), r"(?s)Data-dependent.*return y \+ 1 if"),
        (ranks.killed_between_steps, (), r"rank 1.*SIGKILL|rank 1.*signal 9"),
    ],
)
def test_what_would_hang_is_an_error(fn, args, message):
    with pytest.raises(shardgraph.LaunchError, match=message):
        shardgraph.launch(fn, 2, args=args, timeout=90)


def test_a_failed_collective_names_its_parameter():
    told, _ = shardgraph.launch(ranks.lost_peer, 2, timeout=90)
    assert "all_gather_into_tensor of weight (2, 4) float32 over 'dp'" in told
    assert "rank 1 has ended: its function returned" in told
