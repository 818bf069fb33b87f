"""Predicted peak memory of whole programs beside what ranks really held."""

from __future__ import annotations

import pytest

from tests import ranks
from tests.standing import on_ranks
from tests.zoo import ZOO


@pytest.mark.slow
def test_a_group_of_one_rank_takes_what_its_updates_copy():
    (found,) = on_ranks(ranks.peak_memory, 1, args=(["gpt2", "vit"], ["ddp"], 1), timeout=280)
    for case, figures in found.items():
        predicted, measured = figures["train"]
        assert predicted == pytest.approx(measured, rel=0.01), case


@pytest.mark.quick("every plan of data")
@pytest.mark.parametrize(
    ("kinds", "plans"),
    [
        (["odd-mlp", "tied-transformer", "mixture"], ["fsdp"]),
        (["conv-batch-norm"], ["ddp", "zero1", "zero2", "fsdp kept"]),
        (["vit"], ["zero1"]),
        (["llama"], ["tp", "tp+sp"]),
        (["tied-transformer"], ["fsdp bf16"]),
        pytest.param(list(ZOO), ["fsdp"], marks=pytest.mark.slow),
        pytest.param(
            ["llama"],
            ["ddp", "zero1", "zero2", "fsdp kept", "ddp bf16", "zero2 bf16", "fsdp bf16"],
            marks=pytest.mark.slow,
        ),
        pytest.param(["gpt2"], ["tp", "tp+sp"], marks=pytest.mark.slow),
    ],
    ids=[
        "some models",
        "every plan of data",
        "gradients copied for the update",
        "divided operators",
        "mixed precision",
        "every model",
        "data parallel Llama",
        "divided GPT-2",
    ],
)
def test_the_predicted_peak_is_within_a_percent_of_the_measured_one_on_every_rank(kinds, plans):
    for found in on_ranks(ranks.peak_memory, 2, args=(kinds, plans), timeout=280):
        for case, figures in found.items():
            for what, (predicted, measured) in figures.items():
                assert predicted == pytest.approx(measured, rel=0.01), f"{case}, {what}"
