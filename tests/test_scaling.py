"""Predictions that follow from how machines work, whatever their constants: how costs grow, and what bounds what."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import shardgraph
from shardgraph import Pipeline
from shardgraph.cost_models.cluster import Cluster

pytestmark = pytest.mark.usefixtures("shared_captures")

TOKENS = torch.zeros(2, 2048, dtype=torch.long, device="meta")


def llama(layers: int = 2) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=32000,
        use_cache=False,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config).bfloat16()


def analysis(plan: str = "fsdp", cluster: Any = "H100", rows: int = 2, **options: Any) -> Any:
    tokens = TOKENS[:1].expand(rows, -1)
    call = {"input_ids": tokens, "labels": tokens}
    return shardgraph.analyze(llama(), (), plan, example_kwargs=call, cluster=cluster, **options)


def seconds(plan: str = "fsdp", **options: Any) -> float:
    return analysis(plan, **options).time.total


@pytest.mark.slow
def test_a_step_of_fsdp_hardly_grows_from_128_to_2048_ranks() -> None:
    """Published runs of a model with 70 billion parameters grow by 2%."""
    few, many = (seconds(mesh={"dp": ranks}, rows=8) for ranks in (128, 2048))
    assert few < many < 1.05 * few


@pytest.mark.slow
def test_a_step_of_fsdp_grows_with_the_logarithm_of_the_nodes_beyond() -> None:
    times = [seconds(mesh={"dp": ranks}) for ranks in (1024, 2048, 4096)]
    assert times[2] - times[1] == pytest.approx(times[1] - times[0], rel=0.25, abs=1e-3)


@pytest.mark.slow
def test_recomputation_never_raises_mfu_nor_lowers_hfu_below_it() -> None:
    found = {each: analysis(mesh={"dp": 8}, recompute=each) for each in ("none", "selective", "full")}
    assert found["none"].mfu == found["none"].hfu
    for each in ("selective", "full"):
        assert found[each].mfu < found["none"].mfu and found[each].mfu <= found[each].hfu
    assert found["full"].mfu < found["full"].hfu


@pytest.mark.slow
def test_a_pipeline_that_computes_its_stages_again_has_no_larger_mfu() -> None:
    never, always = (
        analysis("pp", mesh={"pp": 2}, pipeline=Pipeline(2, stages=("model.layers.1",), checkpoint=each))
        for each in ("never", "always")
    )
    assert always.mfu < never.mfu and always.mfu < always.hfu


@pytest.mark.parametrize("plan", ["ddp", "zero2", "fsdp"])
def test_no_plan_attains_more_than_the_peak(plan: str) -> None:
    assert 0 < analysis(plan, mesh={"dp": 8}).mfu < 1


@pytest.mark.slow
def test_a_slower_network_makes_no_step_faster_and_slows_the_one_that_gathers_most() -> None:
    times = {
        plan: [seconds(plan, mesh={"dp": 32}, cluster=Cluster.of("H100", 4, network=at)) for at in (4e9, 12e9, 47e9)]
        for plan in ("ddp", "fsdp")
    }
    for each in times.values():
        assert each == sorted(each, reverse=True)
    assert times["fsdp"][0] > times["ddp"][0]


@pytest.mark.slow
def test_tensor_parallelism_is_slower_across_nodes_than_inside_one() -> None:
    inside, across = (
        seconds("fsdp+tp", mesh={"dp": 2, "tp": 8}, cluster=Cluster.of("H100", 16 // each, each)) for each in (8, 4)
    )
    assert inside < across


def test_more_devices_for_the_same_tokens_of_each_make_more_tokens_per_second() -> None:
    rates = [analysis(mesh={"dp": ranks}).tokens_per_second for ranks in (8, 64, 512)]
    assert rates == sorted(rates)


@pytest.mark.slow
def test_a_larger_batch_has_no_smaller_mfu() -> None:
    found = [analysis(mesh={"dp": 64}, rows=rows).mfu for rows in (1, 2, 4)]
    assert found == sorted(found)


def test_sharding_more_never_needs_more_memory() -> None:
    peaks = [analysis(plan, mesh={"dp": 8}).peak_memory for plan in ("ddp", "zero1", "zero2", "fsdp")]
    assert peaks == sorted(peaks, reverse=True)


def test_an_interval_contains_its_prediction_and_is_wider_with_more_doubt() -> None:
    known, guessed = analysis(mesh={"dp": 8}), analysis(mesh={"dp": 8}, cluster="TPU-v5p")
    for each in (known, guessed):
        low, high = each.interval
        assert low <= each.time.total <= high
    assert known.cluster.doubt < guessed.cluster.doubt
