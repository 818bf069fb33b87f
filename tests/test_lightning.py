"""Lightning's Trainer under plans: what it trains, evaluates and saves is what its own strategy does."""

from __future__ import annotations

import pytest
import torch

from tests import lightened
from tests.standing import on_ranks


def close(ours, theirs, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=1e-12)


OPTIONS = {
    "fsdp": ("fsdp", {}),
    "ddp": ("ddp", {}),
    "accumulated": ("fsdp", {"accumulate_grad_batches": 2}),
    "clipped by norm": ("zero2", {"gradient_clip_val": 0.05}),
    "clipped by value": ("fsdp", {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}),
}


@pytest.mark.quick("fsdp")
@pytest.mark.timeout(280)
@pytest.mark.parametrize("case", OPTIONS)
def test_it_trains_like_lightnings_own_strategy(case, tmp_path):
    plan, options = OPTIONS[case]
    ours = on_ranks(lightened.trained, args=(plan, str(tmp_path), options))
    theirs = on_ranks(lightened.trained, args=("theirs", str(tmp_path), options))
    for (losses, weights, validation), (their_losses, their_weights, their_validation) in zip(
        ours, theirs, strict=True
    ):
        close(losses, their_losses)
        for name in set(weights) - {name for name in weights if "running" in name or "batches" in name}:
            close(weights[name], their_weights[name])
        assert validation == pytest.approx(their_validation, rel=0.2)  # running means are averaged, theirs are rank 0's


@pytest.mark.timeout(280)
def test_it_tests_and_predicts_without_training(tmp_path):
    ours = on_ranks(lightened.evaluated, args=("fsdp", str(tmp_path)))
    theirs = on_ranks(lightened.evaluated, args=("theirs", str(tmp_path)))
    for one, other in zip(ours, theirs, strict=True):
        close(one, other)


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize(("first", "second"), [("fsdp", "fsdp"), ("fsdp", "theirs"), ("theirs", "zero1")])
def test_a_run_continues_from_its_checkpoint_under_another_strategy_too(first, second, tmp_path):
    ranks = on_ranks(lightened.resumed, args=(first, second, str(tmp_path)))
    whole = on_ranks(lightened.trained, args=("fsdp", str(tmp_path), {}))
    for (losses, weights), (all_losses, all_weights, _) in zip(ranks, whole, strict=True):
        close(losses, all_losses[len(losses) :], 1e-6)  # Lightning's own strategy loads in single precision
        close(weights["heads.1.weight"], all_weights["heads.1.weight"], 1e-6)


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_a_checkpoint_loads_into_the_module_without_a_trainer(tmp_path):
    assert on_ranks(lightened.saved_is_plain, args=(str(tmp_path),)) == [[], []]


def test_mixed_precision_of_the_trainer_computes_in_it(tmp_path):
    assert on_ranks(lightened.in_bfloat16, args=(str(tmp_path),)) == ["torch.bfloat16"] * 2


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("parameter", "the LightningModule has the parameter 'shift' itself"),
        ("shared", "'layer' and 'other' of the LightningModule share a parameter"),
        ("tp", "plan 'tp' has ranks that share a batch"),
        ("precision", "precision='bf16-true' of the Trainer cannot be under a plan"),
        ("start", "start_method='spawn'"),
        ("loss", "the option 'loss_fn' is for train_step"),
    ],
)
def test_what_cannot_be_is_refused_in_words(case, words, tmp_path):
    assert all(words in found for found in on_ranks(lightened.refused, args=(case, str(tmp_path))))
