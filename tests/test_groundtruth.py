"""Closed forms beside what others published: the ZeRO paper's table, and training runs that no fit has seen."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import shardgraph
from benchmarks import groundtruth
from shardgraph.cost_models.cluster import Cluster
from shardgraph.cost_models.model_state import model_state
from shardgraph.cost_models.transformer import Layout, Transformer, step_time
from shardgraph.errors import ClusterError, ShardGraphError
from tests.machines import toy_cluster


@pytest.mark.parametrize(
    ("plan", "per_parameter"),
    [
        ("ddp", lambda n: 16),
        ("zero1", lambda n: 4 + 12 / n),
        ("zero2", lambda n: 2 + 14 / n),
        ("fsdp", lambda n: 16 / n),
    ],
)
@pytest.mark.parametrize("ranks", [1, 4, 64, 1024])
def test_model_state_in_mixed_precision_is_the_closed_form(
    plan: str, per_parameter: Callable[[int], float], ranks: int
) -> None:
    assert sum(model_state(10**9, ranks, plan).values()) == pytest.approx(10**9 * per_parameter(ranks), rel=1e-12)


def test_every_cell_of_the_zero_papers_table_is_predicted_to_its_digits() -> None:
    with (groundtruth.DATA / "zero_paper_table1.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 54
    for row in rows:
        plan = {"1": "zero1", "2": "zero2", "3": "fsdp"}[row["zero_stage"]]
        predicted = sum(model_state(round(float(row["params_b"]) * 1e9), int(row["dp_degree"]), plan).values()) / 1e9
        digits = len(row["published_gb"].partition(".")[2])
        assert abs(predicted - float(row["published_gb"])) <= 10**-digits, row


def test_a_plan_without_a_closed_form_is_refused() -> None:
    with pytest.raises(ShardGraphError, match=r"no plan 'zero4'.*'zero1'"):
        model_state(10, 2, "zero4")


def llama(layers: int = 2, width: int = 64) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 16,
        vocab_size=128,
        use_cache=False,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def analyze(model: LlamaForCausalLM, plan: str, cluster: Cluster, length: int = 16, **options) -> shardgraph.Analysis:
    ids = torch.zeros(2, length, dtype=torch.long, device="meta")
    call = {"input_ids": ids, "labels": ids}
    return shardgraph.analyze(model, (), plan, example_kwargs=call, cluster=cluster, **options)


@pytest.mark.quick("fsdp")
@pytest.mark.parametrize("plan", ["zero1", "zero2", "fsdp"])
def test_an_analysed_program_keeps_the_closed_forms_bytes(plan: str) -> None:
    """In float32 the shard that the optimizer updates stands for the 32-bit copy: 4, 4 and 4 + 8 bytes."""
    model, ranks = llama(), 4
    analysis = analyze(model, plan, toy_cluster(devices_per_node=ranks))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    state = model_state(parameters, ranks, plan, {"parameters": 4, "gradients": 4, "optimizer": 12})
    most = {kind: max(row.memory.get(kind, 0) for row in analysis.rows) for kind in analysis.peak.memory}
    counters = 4 * sum(1 for _ in model.parameters())  # Adam's steps
    assert most["parameters"] + most["optimizer state"] - counters == state["optimizer"]
    assert analysis.rows[-1].memory["gradients"] == state["gradients"]
    if plan != "fsdp":  # there they come and go; here the embedding does, which backward has no use for
        embedding = 4 * model.get_input_embeddings().weight.numel()
        assert most["gathered parameters"] == state["parameters"] - embedding


class Decoder(nn.Module):
    """The layers that the closed form describes, without rotations."""

    def __init__(self, layers: int, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "qkv": nn.Linear(width, 3 * width, bias=False),
                    "out": nn.Linear(width, width, bias=False),
                    "up": nn.Linear(width, hidden, bias=False),
                    "down": nn.Linear(hidden, width, bias=False),
                    "norms": nn.ModuleList([nn.RMSNorm(width), nn.RMSNorm(width)]),
                }
            )
            for _ in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        for block in self.blocks:
            heads = block["qkv"](block["norms"][0](x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(*heads.unbind(), is_causal=True)
            x = x + block["out"](mixed.transpose(1, 2).reshape(rows, length, width))
            x = x + block["down"](F.gelu(block["up"](block["norms"][1](x))))
        return x


def test_the_closed_form_prices_a_decoder_as_its_graph_is_priced() -> None:
    """On the same device: matrices and attention are the same work, and what is between them about the same."""
    on, layers, width, length = Cluster.of("H100"), 4, 2048, 2048
    with torch.device("meta"):
        decoder, x = Decoder(layers, width, 16, 8192).bfloat16(), torch.empty(2, length, width, dtype=torch.bfloat16)
    graph = shardgraph.analyze(decoder, (x,), "fsdp", cluster=on, backend="inductor").time
    model = Transformer(layers, width, heads=16, kv_heads=16, hidden=8192, vocabulary=1)
    closed = step_time(model, length, Layout(data=8, rows=2), on, "bfloat16")
    assert closed.compute == pytest.approx(graph.compute, rel=0.15)


def test_predictions_of_training_runs_that_the_fit_did_not_see_are_within_15_percent() -> None:
    runs, _ = groundtruth.read(groundtruth.DATA / "training_runs.csv")
    for device in ("A100", "H100"):
        held = [run for run in runs if run.held_out and run.device == device]
        assert len(held) > 30
        assert statistics.median(abs(run.predicted() / run.seconds - 1) for run in held) < 0.15


def test_an_interleaved_pipeline_has_a_smaller_bubble_by_its_stages() -> None:
    model = Transformer(48, 4096, 32, 32, 16384, 50304)
    plain, interleaved = (
        step_time(
            model,
            2048,
            Layout(data=1, pipeline=4, microbatches=16, interleave=stages, sharding="ddp"),
            Cluster.of("A100"),
            "bfloat16",
        )
        for stages in (1, 3)
    )
    assert plain.bubble / (plain.compute + plain.exposed) == pytest.approx(3 / 16, rel=0.01)
    assert interleaved.bubble == pytest.approx(plain.bubble / 3, rel=0.02)  # it sends more often


def test_a_layout_for_more_ranks_than_there_are_is_refused() -> None:
    with pytest.raises(ClusterError, match="needs 16 devices"):
        step_time(Transformer(2, 64, 4, 4, 256, 100), 64, Layout(data=16), Cluster.of("A100"), "bfloat16")


def test_a_layout_with_an_unknown_word_is_refused() -> None:
    with pytest.raises(ShardGraphError, match="recompute='some' is none of none, selective, full"):
        Layout(data=2, recompute="some")
