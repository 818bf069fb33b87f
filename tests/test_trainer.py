"""The Hugging Face Trainer under a plan, against itself with its own DistributedDataParallel."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2LMHeadModel

from shardgraph import ShardGraphError
from tests import trained
from tests.accelerated import forget_accelerators
from tests.standing import on_ranks

ROUNDED = 1e-9  # of double precision


@pytest.mark.quick("fsdp-accumulated and evaluated")
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 2},
        {"max_grad_norm": 0.0, "label_smoothing_factor": 0.1, "weight_decay": 0.1},
        {"average_tokens_across_devices": False, "lr_scheduler_type": "cosine", "warmup_steps": 1},
        {"activation_checkpointing": True},
    ],
    ids=["defaults", "accumulated and evaluated", "smoothed labels", "losses of ranks", "checkpointed"],
)
@pytest.mark.parametrize("plan", ["ddp", "zero2", "fsdp"])
def test_it_trains_like_the_trainer(plan: str, arguments: dict[str, Any], tmp_path: Path):
    expected = on_ranks(trained.trains, args=("theirs", str(tmp_path), arguments))
    found = on_ranks(trained.trains, args=(plan, str(tmp_path), arguments))
    for (history, weights), (their_history, their_weights) in zip(found, expected, strict=True):
        assert len(history) >= 4
        for entry, theirs in zip(history, their_history, strict=True):
            assert entry == pytest.approx(theirs, abs=1e-6)
        torch.testing.assert_close(weights, their_weights, rtol=0, atol=ROUNDED)


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "then"), [("fsdp", "fsdp"), ("fsdp", "ddp"), ("theirs", "fsdp"), ("zero2", "theirs")])
def test_it_resumes_from_a_checkpoint_again_and_under_other_plans(plan: str, then: str, tmp_path: Path):
    for unbroken, resumed, again, same in on_ranks(trained.resumes, args=(plan, then, str(tmp_path))):
        assert len(unbroken) == 2 and same
        for entry, *others in zip(unbroken, resumed, again, strict=True):
            for other in others:
                assert other == pytest.approx(entry, abs=1e-6)


@pytest.mark.slow
def test_the_model_it_saves_is_the_one_it_trained(tmp_path: Path):
    (weights, generated, kind), other = on_ranks(trained.saves_and_generates, args=(str(tmp_path),))
    saved = GPT2LMHeadModel.from_pretrained(tmp_path / "saved")
    torch.testing.assert_close([each.detach() for each in saved.parameters()], weights, rtol=0, atol=0)
    assert saved.generate(trained.PROMPT, max_new_tokens=4, do_sample=False).tolist() == generated == other[1]
    assert kind == "GPT2LMHeadModel"


@pytest.mark.slow
def test_it_evaluates_before_it_trains_and_predicts_after(tmp_path: Path):
    expected = on_ranks(trained.evaluates_first, args=("theirs", str(tmp_path)))
    found = on_ranks(trained.evaluates_first, args=("fsdp", str(tmp_path)))
    for (before, history, predictions), (their_before, their_history, theirs) in zip(found, expected, strict=True):
        assert before == pytest.approx(their_before, abs=ROUNDED)
        assert [entry["loss"] for entry in history] == pytest.approx(
            [entry["loss"] for entry in their_history], abs=1e-6
        )
        torch.testing.assert_close(predictions, theirs, rtol=0, atol=ROUNDED)


@pytest.mark.slow
def test_it_loads_the_best_model(tmp_path: Path):
    for losses, left in on_ranks(trained.loads_the_best, args=("fsdp", str(tmp_path))):
        assert left == pytest.approx(max(losses), abs=ROUNDED) and losses[-1] < max(losses)


@pytest.mark.slow
def test_it_computes_in_mixed_precision(tmp_path: Path):
    expected, _ = on_ranks(trained.trains, args=("theirs", str(tmp_path), {}))[0]
    history, computed, stored = on_ranks(trained.computes_in_bf16, args=(str(tmp_path),))[0]
    assert computed == {"torch.bfloat16"} and stored == {torch.float32}
    assert [entry["loss"] for entry in history] == pytest.approx([entry["loss"] for entry in expected], rel=0.05)


@pytest.mark.slow
def test_it_generates_in_an_evaluation(tmp_path: Path):
    expected = on_ranks(trained.generates_in_evaluation, args=("theirs", str(tmp_path)))
    found = on_ranks(trained.generates_in_evaluation, args=("ours", str(tmp_path)))
    for (history, predictions, loss), (their_history, theirs, their_loss) in zip(found, expected, strict=True):
        assert predictions.tolist() == theirs.tolist() and len(theirs) >= 7
        assert float(loss) == pytest.approx(float(their_loss), abs=ROUNDED)
        for entry, their_entry in zip(history, their_history, strict=True):
            assert entry == pytest.approx(their_entry, abs=1e-6)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"fsdp": True}, "fsdp_plugin (or ACCELERATE_USE_FSDP"),
        ({"torch_compile": True}, "torch.compile (dynamo backend"),
        ({"bf16_full_eval": True}, "use bf16=True"),
        ({"auto_find_batch_size": True}, "shardgraph.analyze predicts"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_is_refused_in_words(arguments: dict[str, Any], says: str, tmp_path: Path):
    with pytest.raises(ShardGraphError, match=re.escape(says)):
        trained.trainer_of("fsdp", str(tmp_path), **arguments)
    forget_accelerators()
