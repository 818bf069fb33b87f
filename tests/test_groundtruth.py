"""Predictions beside what others published: the ZeRO paper's table, and training runs."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import shardgraph
from benchmarks import groundtruth
from benchmarks.published.decoder import Latent, Mixture, Shape
from benchmarks.published.ranking import Ranking, rank
from benchmarks.published.runs import Run, read
from benchmarks.published.work import work_of
from shardgraph.cost_models.cluster import Cluster
from shardgraph.cost_models.model_state import model_state
from shardgraph.errors import ShardGraphError
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
        held = [row for row in analysis.rows if row.half == "forward"][-1].memory  # a bucket is gone, copied out of
        assert held["gathered parameters"] == state["parameters"] - embedding


@pytest.fixture(scope="module")
def runs() -> dict[str, Run]:
    return {run.row["row_id"]: run for run in read(groundtruth.DATA / "training_runs.csv")[0]}


@pytest.mark.slow
@pytest.mark.parametrize("row", ["MOS-0118", "TT-0035", "MEG-0034", "BS-0237", "BS-0054", "FSDP-0033"])
def test_the_graph_of_a_published_run_is_priced_about_as_it_was_measured(row: str, runs: dict[str, Run]) -> None:
    run = runs[row]
    analysis = run.analysis()
    work = work_of(analysis)
    assert run.seconds_on(work, run.cluster.device) == pytest.approx(run.seconds, rel=0.25)
    # Priced again from what is kept of it, as the fit does, it takes as long.
    assert work.time(run.cluster.device).total == pytest.approx(analysis.time.total, rel=0.01)


def test_every_row_is_priced_or_left_out_for_a_reason(tmp_path: Path) -> None:
    found, left_out = read(groundtruth.DATA / "training_runs.csv")
    assert len(found) + sum(left_out.values()) == 700
    assert len(found) > 400 and all(left_out)


def test_a_mixture_of_experts_has_the_dimensions_of_its_configuration(runs: dict[str, Run]) -> None:
    run = runs["NEMO-0005"]
    assert (run.row["model"], run.row["n_layers"]) == ("GPT OSS 120B", "")
    assert (run.plan, dict(run.mesh)) == ("zero1+ep", {"dp": 4, "ep": 16})
    assert run.shape.mixture is not None and run.shape.mixture.experts == 128
    mixtures = [each for each in runs.values() if each.shape.mixture]
    assert len(mixtures) > 40 and not any("tp" in each.mesh for each in mixtures)


@pytest.mark.slow
@pytest.mark.parametrize("float8", [False, True])
def test_the_graph_of_a_mixture_of_experts_is_priced(float8: bool, runs: dict[str, Run]) -> None:
    shape = Shape(
        2, 64, 4, 4, 128, 64, "swiglu", classic=False, float8=float8,
        mixture=Mixture(experts=16, chosen=2, hidden=32, shared=32, dense=1),
        latent=Latent(query=32, key=16, plain=8, rotary=8, value=8),
    )  # fmt: skip
    rows = replace(runs["NEMO-0144"], shape=shape, rows=2, sequence=16).analysis().rows
    # Tokens travel to their experts and back in one layer of the two, in forward and in backward.
    exchanged = [row for row in rows if "all_to_all" in row.operation]
    assert len(exchanged) == 4
    experts = [row for row in rows if "routed.experts" in row.module and row.kind == "matmul"]
    assert {row.dtype for row in experts} == {"float8_e4m3fn" if float8 else "bfloat16"}
    # Three products of 2 x 16 x 2 tokens, and two gradients of each.
    assert sum(row.flops for row in experts) == 3 * 3 * 2 * (2 * 16 * 2) * 64 * 32


def test_an_odd_word_in_a_cell_leaves_its_row_out(tmp_path: Path) -> None:
    with (groundtruth.DATA / "training_runs.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    row = next(row for row in rows if row["row_id"] == "MOS-0118")
    odd = [row | {"mbs": "auto"}, row | {"tp": "3"}, row | {"status": "lost"}, row]
    with (tmp_path / "odd.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(row))
        writer.writeheader()
        writer.writerows(odd)
    found, left_out = read(tmp_path / "odd.csv")
    assert [run.row["mbs"] for run in found] == [row["mbs"]]
    assert sum(left_out.values()) == 3 and any("'auto'" in reason for reason in left_out)


def run_like(run: Run, seconds: float, **mesh: int) -> Run:
    return replace(run, seconds=seconds, mesh=mesh or run.mesh)


def test_pairs_of_layouts_count_if_they_are_of_one_job_and_differ_by_a_tenth(runs: dict[str, Run]) -> None:
    run = runs["MOS-0118"]
    fast, slow, near = run_like(run, 1.0, dp=8), run_like(run, 2.0, dp=4, tp=2), run_like(run, 1.05, dp=2, tp=4)
    assert rank([(fast, 1.0), (slow, 3.0)]) == Ranking(1, 1, 1.0)
    assert rank([(fast, 3.0), (slow, 1.0)]).right == 0
    assert rank([(fast, 1.0), (near, 3.0)]).pairs == 0
    assert rank([(fast, 1.0), (run_like(run, 2.0, dp=8), 1.0)]).pairs == 0  # the same layout, measured again


def test_what_repeated_measurements_allow_bounds_the_ranking(runs: dict[str, Run]) -> None:
    run = runs["MOS-0118"]
    fast, again, slow = run_like(run, 1.0, dp=8), run_like(run, 1.3, dp=8), run_like(run, 1.2, dp=4, tp=2)
    assert 0.5 < rank([(fast, 1.0), (again, 1.0), (slow, 1.1)]).ceiling < 1.0
