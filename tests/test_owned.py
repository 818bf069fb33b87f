"""Optimizers whose ranks own parameters whole, and FairScale's names for them, beside the unsharded optimizer."""

from __future__ import annotations

import pytest
import torch

import shardgraph
from shardgraph.optim.ownership import balanced_owners
from tests import owned
from tests.standing import on_ranks

pytestmark = pytest.mark.timeout(280)
EXACT = 1e-12  # double precision; what is left is the order of sums


def test_optimizers_that_need_whole_tensors_are_the_unsharded_ones():
    for found in on_ranks(owned.whole_tensors, 2, args=(["AdamW", "Adafactor", "Muon"],)):
        assert len(found) == 3 and max(found.values()) < EXACT, found


@pytest.mark.parametrize("plan", ["fsdp", "zero2"])
def test_parameters_in_shards_of_rows_are_whole_for_their_owners_optimizer(plan):
    for weights, states in on_ranks(owned.in_rows, 2, args=(plan, None)):
        assert weights < EXACT and states < EXACT


@pytest.mark.slow
def test_parameters_in_uneven_and_empty_shards_are_whole_for_their_owners_optimizer():
    for weights, states in on_ranks(owned.in_rows, 4, args=("fsdp", None)):  # three and five rows
        assert weights < EXACT and states < EXACT


def test_parameters_under_torchs_ddp_are_updated_like_the_unsharded_ones():
    assert max(on_ranks(owned.under_torchs_ddp, 2)) < EXACT


def test_flips_of_requires_grad_new_groups_and_closures_are_followed_in_mid_training():
    for found in on_ranks(owned.changes, 2):
        assert len(found) == 5 and max(found.values()) < EXACT, found


def test_one_module_has_several_optimizers():
    assert max(on_ranks(owned.several, 2)) < EXACT


def test_clipping_counts_a_parameter_whose_first_gradient_comes_late():
    for first, second, clipped in on_ranks(owned.late_norm, 2):
        assert first == pytest.approx(5.0)
        assert second == pytest.approx((5.0**2 + 50.0**2) ** 0.5)  # 50.25
        assert clipped == pytest.approx(1.0, rel=1e-5)


def test_gradients_are_accumulated_without_communication_and_cleared():
    for waits, left in on_ranks(owned.accumulated, 2):
        assert waits and left < EXACT


def test_state_is_consolidated_on_one_rank_and_loads_on_any_number(tmp_path):
    first, second = on_ranks(owned.states, 2, args=(str(tmp_path),))
    assert sorted([*first["own"], *second["own"]]) == [0, 1, 2, 3, 4] and first["own"] and second["own"]
    for said in (first["before"], second["before"], first["other"], second["after a step"]):
        assert "call consolidate_state_dict(recipient_rank) on all ranks" in said

    later = torch.load(tmp_path / "later.pt")
    for kind in (torch.optim.AdamW, shardgraph.ShardedOptimizer):  # torch's own, and one on a single rank
        model = owned.made()
        options = {} if kind is torch.optim.AdamW else {"optim": torch.optim.AdamW}
        optimizer = kind(owned.groups_of(model), lr=1.0, **options)
        model.load_state_dict(torch.load(tmp_path / "model.pt"))
        optimizer.load_state_dict(torch.load(tmp_path / "sharded.pt"))
        model(owned.batch(), True).square().mean().backward()
        optimizer.step()
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, later[name], rtol=0, atol=EXACT)

    assert max(on_ranks(owned.continued, 2, args=(str(tmp_path),))) < EXACT  # the plain optimizer's state


def test_consolidation_holds_the_state_once_and_only_on_the_recipient():
    (at_recipient, whole, largest), (elsewhere, _, _) = on_ranks(owned.consolidation_memory, 2)
    slack = 4096  # descriptions and flags
    assert at_recipient < whole + largest + slack
    assert elsewhere < slack


@pytest.mark.slow
def test_updates_sent_in_float16_are_the_same_on_every_rank():
    for left, is_half in on_ranks(owned.rounded, 2):
        assert left == 0.0 and is_half


def test_a_scaled_loss_is_unscaled_and_an_overflow_skips_the_step_on_all_ranks():
    for left, skipped in on_ranks(owned.scaled, 2):
        assert left < EXACT and skipped


def test_the_state_of_a_module_is_of_plain_whole_tensors_under_fairscales_names():
    for plain, left in on_ranks(owned.plain_states, 2):
        assert plain and left == 0.0


@pytest.mark.slow
def test_adascale_over_a_sharded_optimizer_is_that_over_the_plain_one():
    for pairs in on_ranks(owned.with_adascale, 2):
        assert len(pairs) == 4
        for sharded, plain in pairs:
            assert sharded == pytest.approx(plain, rel=1e-12)
        assert any(gain != 1.0 for gain, _ in pairs[:3])


def test_what_cannot_be_sharded_says_what_would_work():
    for said in on_ranks(owned.refused, 2):
        assert "compile the model with plan 'ddp', 'zero1', 'zero2' or 'fsdp'" in said["columns"]
        assert "evaluates the loss as often as it needs" in said["loss"]
        assert "make it with the groups that the state was saved with" in said["groups"]
        assert "wrap the class" in said["no OSS"]
        assert "compile the model first" in said["not compiled"]


def test_owners_have_equal_shares_as_far_as_whole_parameters_allow():
    loads = [0, 0, 0]
    owners = balanced_owners([1, 9, 2, 8, 3, 7], loads)
    assert loads == [10, 10, 10] and len(set(owners)) == 3
    assert balanced_owners([5, 5], loads) == [0, 1] and loads == [15, 15, 10]
