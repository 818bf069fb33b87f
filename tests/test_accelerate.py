"""Hugging Face Accelerate: the loop of its manual under a plan, against its own DistributedDataParallel."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from accelerate import FullyShardedDataParallelPlugin
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs, TorchDynamoPlugin
from transformers import GPT2LMHeadModel

from shardgraph import ShardGraphError
from tests import accelerated
from tests.standing import on_ranks

ROUNDED = 1e-9  # of double precision


@pytest.mark.quick("network-fsdp-2")
@pytest.mark.parametrize("accumulated", [1, 2, 3])
@pytest.mark.parametrize("plan", ["ddp", "zero1", "zero2", "fsdp", "auto"])
@pytest.mark.parametrize("of_language", [True, False], ids=["language model", "network"])
def test_it_trains_like_accelerates_own(of_language: bool, plan: str, accumulated: int):
    expected = on_ranks(accelerated.trains, args=("theirs", of_language, accumulated))
    found = on_ranks(accelerated.trains, args=(plan, of_language, accumulated))
    for (losses, weights), (their_losses, their_weights) in zip(found, expected, strict=True):
        assert losses == pytest.approx(their_losses, abs=ROUNDED) and len({*losses}) == len(losses)
        torch.testing.assert_close(weights, their_weights, rtol=0, atol=ROUNDED)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["fsdp", "hsdp"])
def test_it_trains_on_four_ranks(plan: str):
    expected = on_ranks(accelerated.trains, 4, args=("theirs", True, 1))
    found = on_ranks(accelerated.trains, 4, args=(plan, True, 1))
    for (losses, weights), (their_losses, their_weights) in zip(found, expected, strict=True):
        assert losses == pytest.approx(their_losses, abs=ROUNDED)
        torch.testing.assert_close(weights, their_weights, rtol=0, atol=ROUNDED)


def test_one_process_trains_without_a_process_group():
    expected = accelerated.trains("theirs", False, 2)
    losses, weights = accelerated.trains("fsdp", False, 2)
    accelerated.forget_accelerators()
    assert losses == pytest.approx(expected[0], abs=ROUNDED) and len(losses) == 12
    torch.testing.assert_close(weights, expected[1], rtol=0, atol=ROUNDED)


def test_every_rank_has_the_first_ones_weights_and_buffers():
    expected = [parameter.detach() for parameter in accelerated.Net(seed=0).parameters()]
    for weights, flags in on_ranks(accelerated.takes_weights_of_first_rank):
        torch.testing.assert_close(weights, expected, rtol=0, atol=0)
        assert flags == [False, True]


def test_what_is_prepared_or_compiled_stays_as_it_is():
    assert on_ranks(accelerated.prepares_again) == [[True] * 5] * 2


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "then"), [("fsdp", "fsdp"), ("zero2", "ddp"), ("ddp", "fsdp")])
@pytest.mark.parametrize("optimizer", ["AdamW", "Adafactor"])
def test_a_run_continues_from_its_saved_state(plan: str, then: str, optimizer: str, tmp_path: Path):
    for unbroken, continued in on_ranks(accelerated.continues, args=(plan, then, str(tmp_path), optimizer)):
        assert (
            continued == pytest.approx(unbroken, abs=ROUNDED) and len(unbroken) == 6
        )  # losses, and norms of every second


@pytest.mark.slow
def test_models_are_saved_whole(tmp_path: Path):
    first, second = on_ranks(accelerated.saves_models, args=(str(tmp_path),))
    names = [name for name, _ in accelerated.language_model().named_parameters()]
    torch.testing.assert_close([first["state"][name] for name in names], first["weights"], rtol=0, atol=0)
    assert second["state"] == {}
    saved, pretrained = accelerated.language_model(seed=3), GPT2LMHeadModel.from_pretrained(tmp_path / "pretrained")
    safetensors.torch.load_model(saved, tmp_path / "model" / "model.safetensors")
    for model in (saved, pretrained):
        weights = [parameter.detach() for parameter in model.parameters()]
        torch.testing.assert_close(weights, first["weights"], rtol=0, atol=0)


@pytest.mark.slow
def test_the_original_can_be_called_while_parameters_are_whole():
    for generated, expected, sharded_again in on_ranks(accelerated.calls_the_original, args=(3,)):
        assert generated == expected and len(generated[0]) == 5
        assert sharded_again


def test_outputs_are_gathered_without_what_fills_the_last_batch():
    expected = torch.stack([accelerated.Net()(**point)["output"] for point in accelerated.points(7)])
    for found in on_ranks(accelerated.evaluates, args=("fsdp", 7)):
        torch.testing.assert_close(found, expected.detach(), rtol=0, atol=ROUNDED)


def test_gradients_are_clipped_by_value():
    expected = on_ranks(accelerated.clips_values, args=("theirs",))[0]
    found = on_ranks(accelerated.clips_values, args=("fsdp",))[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=ROUNDED)


FULL, BF16 = torch.float32, {"torch.bfloat16"}


@pytest.mark.quick("bf16")
@pytest.mark.parametrize(
    ("mixed_precision", "options", "computed", "output"),
    [
        ("bf16", {}, BF16, FULL),
        ("fp16", {}, {"torch.float16"}, FULL),
        ("no", {"precision": "bf16"}, BF16, torch.bfloat16),
    ],
    ids=["bf16", "fp16", "precision"],
)
def test_it_computes_in_mixed_precision(mixed_precision: str, options: Any, computed: Any, output: torch.dtype):
    expected, _ = on_ranks(accelerated.trains, args=("theirs", False, 1))[0]
    found = on_ranks(accelerated.in_mixed_precision, args=(mixed_precision, options))[0]
    assert found["computed"] == computed and found["output"] == output and found["stored"] == {FULL}
    assert found["losses"][::2] == pytest.approx(expected[::2], rel=0.05)


def test_an_overflow_on_one_rank_skips_the_step_on_all():
    for skipped, scales, finite in on_ranks(accelerated.overflows):
        assert skipped == [False, False, True, False] and finite
        assert scales[3] == scales[2] / 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"fsdp_plugin": FullyShardedDataParallelPlugin}, "fsdp_plugin"),
        ({"dynamo_backend": "inductor"}, "torch.compile (dynamo backend 'INDUCTOR')"),
        ({"dynamo_plugin": lambda: TorchDynamoPlugin(backend="eager")}, "dynamo backend 'EAGER'"),
        ({"options": {"loss_fn": torch.nn.functional.mse_loss}}, "'loss_fn' is for train_step"),
        (
            {"kwargs_handlers": lambda: [DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.BF16)]},
            "the communication hook 'bf16'",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_is_refused_in_words(arguments: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch):
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(variable, raising=False)
    given = {
        name: value() if name not in ("options",) and callable(value) else value for name, value in arguments.items()
    }
    with pytest.raises(ShardGraphError, match=re.escape(says)):
        accelerated.accelerator_of("fsdp", **given)
    accelerated.forget_accelerators()


def test_ranks_that_share_a_batch_or_have_none_are_refused_in_words():
    of_tp, of_replicas, uneven, alone = on_ranks(accelerated.refusals)[0]
    assert "'tp' has ranks that share a batch" in of_tp and "'local-sgd' has ranks" in of_replicas
    assert "even_batches=True" in uneven
    assert "Accelerate sees 1 process and the process group has 2 ranks" in alone
