"""Analyses of whole models: totals, tables, modules, traces, and stacks of layers analysed by a few."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import shardgraph
from shardgraph import ClusterError, ShardGraphError
from shardgraph.cost_models.cluster import Cluster
from shardgraph.cost_models.device import Host, Link, Rate
from shardgraph.report.folding import SHALLOW, extend
from shardgraph.runtime.measure import PeakMemory
from tests.machines import GIB, toy_cluster
from tests.zoo import Deep, make

pytestmark = pytest.mark.usefixtures("shared_captures")


def llama(layers: int, **sizes) -> LlamaForCausalLM:
    options = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**(options | {"vocab_size": 61} | sizes), num_hidden_layers=layers, use_cache=False)
    with torch.device("meta"):
        return LlamaForCausalLM(config).train()


def gpt2(layers: int, vocab_size: int = 61, width: int = 32) -> GPT2LMHeadModel:
    config = GPT2Config(
        n_embd=width, n_layer=layers, n_head=4, vocab_size=vocab_size, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    with torch.device("meta"):
        return GPT2LMHeadModel(config).train()


def text(batch: int = 2, length: int = 16) -> dict[str, torch.Tensor]:
    ids = torch.zeros(batch, length, dtype=torch.long, device="meta")
    return {"input_ids": ids, "labels": ids}


@pytest.fixture(scope="module")
def fsdp() -> shardgraph.Analysis:
    return shardgraph.analyze(llama(2), plan="fsdp", example_kwargs=text(), mesh={"dp": 4}, cluster=toy_cluster())


@pytest.mark.slow
def test_views_cost_what_the_device_says_they_cost_the_host(fsdp):
    cluster = fsdp.cluster
    slow = replace(cluster, device=replace(cluster.device, rates={**cluster.device.rates, "view": Rate(1.0, 1.0)}))
    time = shardgraph.analyze(llama(2), plan="fsdp", example_kwargs=text(), mesh={"dp": 4}, cluster=slow).time
    assert time.compute - fsdp.time.compute == pytest.approx(round(time.compute)) and time.compute > 10


def test_the_parts_of_the_step_add_up(fsdp):
    time = fsdp.time
    assert time.total == pytest.approx(time.compute + time.optimizer + time.exposed) == fsdp.timeline.seconds
    assert 0 <= time.exposed <= time.communication and time.hidden == time.communication - time.exposed


def test_a_single_rank_sends_nothing_however_many_devices_a_node_has():
    single = shardgraph.analyze(llama(2), plan="single", example_kwargs=text(), cluster="H100")
    assert single.plan.world_size == 1 and single.time.communication == 0


def test_the_peak_is_composed_of_the_kinds(fsdp):
    assert sum(fsdp.peak.memory.values()) == fsdp.peak_memory == max(row.live for row in fsdp.rows)
    shards = sum(math.ceil(p.shape[0] / 4) * p[0].numel() for p in llama(2).parameters()) * 4
    assert fsdp.peak.memory["parameters"] == shards
    assert fsdp.peak.memory["optimizer state"] == pytest.approx(2 * shards, rel=0.01)


def test_modules_contain_their_children(fsdp):
    modules = fsdp.by_module()
    assert modules[""]["flops"] == fsdp.flops
    layers = [modules[f"model.layers.{i}"]["flops"] for i in range(2)]
    assert layers[0] == layers[1] > 0 and modules["model.layers"]["flops"] == sum(layers)


def test_the_table_shows_the_longest_operations(fsdp):
    table = fsdp.table(limit=5).splitlines()
    longest = max(fsdp.rows, key=lambda row: row.seconds)
    assert longest.node in table[1] and longest.module in table[1]
    assert table[6].startswith(f"all {len(fsdp.rows)} ") and f"{fsdp.flops / 1e9:,.3f}" in table[6]
    assert f"and {len(fsdp.rows) - 5} other operations" in table[7]
    assert len(fsdp.table(limit=None).splitlines()) == len(fsdp.rows) + 2


def test_json_has_the_summary_and_every_operation(fsdp):
    data = json.loads(fsdp.to_json())
    assert data["summary"]["peak_memory"] == fsdp.peak_memory and len(data["nodes"]) == len(fsdp.rows)


def test_the_trace_is_written_with_a_track_for_computation_and_one_per_axis(fsdp, tmp_path):
    events = json.loads(fsdp.save_trace(tmp_path / "trace.json").read_text())["traceEvents"]
    assert {e["args"]["name"] for e in events if e["ph"] == "M"} == {"compute", "dp"}


def test_mfu_is_flops_over_peak(fsdp):
    assert fsdp.mfu == pytest.approx(fsdp.flops / fsdp.time.total / fsdp.cluster.device.peak["float32"])
    assert fsdp.tokens == 4 * 2 * 16


def test_it_reads_as_text(fsdp):
    assert "plan fsdp on toy, one rank of 4" in str(fsdp) and "optimizer state" in str(fsdp)


def test_waits_for_python_are_told_where_the_host_has_a_price_of_calls():
    cluster = replace(toy_cluster(), device=replace(toy_cluster().device, host=Host(Link(1e10, 0.0), Rate(1e10), 1e-3)))
    given = {"plan": "fsdp", "example_kwargs": text(), "mesh": {"dp": 4}}
    called, without = (shardgraph.analyze(llama(2), cluster=each, **given) for each in (cluster, toy_cluster()))
    assert called.calls > 0.5e-3 * len(called.rows) and "waits for Python" in str(called)
    assert called.time.compute == pytest.approx(without.time.compute + called.calls)
    assert called.summary()["calls"] == called.calls
    assert without.calls == 0 and "Python" not in str(without)


def test_a_forward_has_no_gradients_and_no_optimizer():
    analysis = shardgraph.analyze(
        llama(2), plan="fsdp", example_kwargs=text(), mesh={"dp": 4}, cluster=toy_cluster(), training=False
    )
    assert {row.half for row in analysis.rows} == {"forward"}
    assert "optimizer state" not in analysis.peak.memory and analysis.time.optimizer == 0


def test_fusion_moves_fewer_bytes():
    def moved(backend):
        analysis = shardgraph.analyze(
            llama(2), plan="fsdp", example_kwargs=text(), mesh={"dp": 4}, cluster=toy_cluster(), backend=backend
        )
        return analysis.by_module()[""]["moved"]

    assert moved("inductor") < moved("eager")


def test_an_unknown_operation_is_listed():
    analysis = shardgraph.analyze(Cumulative(), (torch.randn(4, 8),), mesh={"dp": 2}, cluster=toy_cluster())
    assert analysis.unpriced == {"shardgraph_tests.twice.default": 1} or "twice" in str(analysis.unpriced)
    assert "for want of a formula" in str(analysis)


@torch.library.custom_op("shardgraph_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


twice.register_fake(lambda x: torch.empty_like(x))
twice.register_autograd(lambda ctx, grad: grad * 2)


class Cumulative(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return twice(self.linear(x))


# -- bad input -------------------------------------------------------------------------------------


def test_a_mesh_larger_than_the_cluster_is_refused():
    with pytest.raises(ClusterError, match="needs 64 devices, and cluster 'toy' has 1 nodes of 8, 8 in all"):
        shardgraph.analyze(llama(1), example_kwargs=text(), mesh={"dp": 64}, cluster=toy_cluster())


def test_an_unknown_device_is_refused_with_the_nearest():
    with pytest.raises(ClusterError, match="did you mean 'H100'"):
        shardgraph.analyze(llama(1), example_kwargs=text(), mesh={"dp": 2}, cluster="H1000")


def test_an_unknown_optimizer_is_refused_with_the_known_ones():
    with pytest.raises(ShardGraphError, match=r"'adamx' are not described; there are adamw"):
        shardgraph.analyze(llama(1), example_kwargs=text(), mesh={"dp": 2}, cluster=toy_cluster(), optimizer="adamx")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "mesh", "precision"), [("fsdp", {"dp": 2}, None), ("fsdp", {"dp": 2}, "bf16"), ("pp", {"pp": 2}, "bf16")]
)
def test_a_call_with_a_flag_is_analysed_as_without(plan, mesh, precision):
    given = {"mesh": mesh, "cluster": toy_cluster(), "precision": precision}
    plain, flagged = (
        shardgraph.analyze(llama(2), (), plan, example_kwargs=text(4) | flag, **given)
        for flag in ({}, {"use_cache": False})
    )
    assert flagged.peak_memory == plain.peak_memory and flagged.time == plain.time


@pytest.mark.slow
def test_a_cpu_that_nobody_measured_puts_plans_of_small_jobs_in_the_order_in_which_gloo_runs_them():
    times = [
        shardgraph.analyze(llama(2, hidden_size=256, intermediate_size=512), (), plan, mesh={"dp": 2},
                           example_kwargs=text(4, 64), cluster=Cluster.detect()).time.total
        for plan in ("ddp", "zero2", "fsdp")
    ]  # fmt: skip
    assert times == sorted(times)


# -- stacks of equal layers ------------------------------------------------------------------------


class Wide(nn.Module):
    """Equal layers that are larger than a bucket, whose communication takes longer than their computation."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(2048, 1536), nn.ReLU(), nn.Linear(1536, 2048)) for _ in range(layers)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def _folded_and_whole(
    monkeypatch, model: nn.Module, call: dict[str, object], tried: int, mesh: dict[str, int], plan: str
):
    """The analysis from a few layers, which are those of the try of this number, and that of all layers."""
    search, tries = importlib.import_module("shardgraph.search.analysis"), []

    def extended(few, least, layers):
        tries.append(least)
        return extend(few, least, layers)

    monkeypatch.setattr(search, "extend", extended)
    options = {"plan": plan, "mesh": mesh, "cluster": "H100"}
    folded, whole = (shardgraph.analyze(model, **call, **options, fold=fold) for fold in (True, False))
    assert tries == [SHALLOW[tried][1]]  # where two programs differ otherwise than by a layer, nothing is written
    return folded, whole


def _assert_equal(folded: shardgraph.Analysis, whole: shardgraph.Analysis) -> None:
    assert [row.memory for row in folded.rows] == [row.memory for row in whole.rows]
    same = [(row.operation, row.module, row.seconds) for row in folded.rows if row.half != "optimizer"]
    assert same == [(row.operation, row.module, row.seconds) for row in whole.rows if row.half != "optimizer"]
    assert folded.time.optimizer == pytest.approx(whole.time.optimizer)
    assert folded.time.total == pytest.approx(whole.time.total)


def test_layers_whose_communication_is_not_hidden_are_written_down_from_a_few(monkeypatch):
    with torch.device("meta"):
        model, call = Wide(40), {"example_inputs": (torch.zeros(8, 2048),)}
    folded, whole = _folded_and_whole(monkeypatch, model, call, 1, {"dp": 64}, "fsdp")
    _assert_equal(folded, whole)
    assert folded.time.exposed > folded.time.compute


@pytest.mark.slow
def test_so_are_those_of_a_llama(monkeypatch):
    sizes = {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "num_key_value_heads": 8}
    model = llama(40, **sizes, vocab_size=32000)
    _assert_equal(*_folded_and_whole(monkeypatch, model, {"example_kwargs": text(1, 128)}, 1, {"dp": 512}, "fsdp"))


@pytest.mark.slow
def test_so_are_those_whose_small_shards_fall_otherwise_into_what_is_updated_together(monkeypatch):
    with torch.device("meta"):
        model, call = Wide(40), {"example_inputs": (torch.zeros(2**17, 2048),)}
    folded, whole = _folded_and_whole(monkeypatch, model, call, 1, {"dp": 416}, "fsdp")
    live, expected = (sum(each.rows[-1].memory.values()) for each in (folded, whole))
    assert 0 < abs(live - expected) < 4 * 2**20 and live == pytest.approx(expected, rel=1e-3)
    assert folded.peak_memory == whole.peak_memory and folded.time.total == pytest.approx(whole.time.total)


class Towers(nn.Module):
    """Two stacks, of which the second reads what the first gives, and the layer ``reads`` of that by its number."""

    def __init__(self, layers: int, reads: int = -1) -> None:
        super().__init__()
        self.reads = reads
        self.first, self.second = (
            nn.ModuleList(nn.Sequential(nn.Linear(1024, 1024), nn.Tanh()) for _ in range(layers)) for _ in range(2)
        )

    def forward(self, x):
        seen = x
        for layer in self.first:
            seen = layer(seen)
        seen = seen + self.first[self.reads](x) if self.reads >= 0 else seen
        for layer in self.second:
            x = layer(x + seen)
        return x.square().mean()


def _programs_of(monkeypatch) -> list[nn.Module]:
    """The models of which programs are analysed whole from now on."""
    search, models = importlib.import_module("shardgraph.search.analysis"), []
    unfolded = search.unfolded
    monkeypatch.setattr(search, "unfolded", lambda each: models.append(each.question.model) or unfolded(each))
    return models


TWO_STACKS: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "towers": lambda: (Towers(14), {"example_inputs": (torch.zeros(2**16, 1024),)}),
    "a transformer of torch": lambda: (
        nn.Transformer(512, 8, 15, 14, 2048, batch_first=True),
        {"example_inputs": (torch.zeros(8, 12, 512), torch.zeros(8, 10, 512))},
    ),
}


@pytest.mark.quick("ddp-towers")
@pytest.mark.parametrize(("plan", "name"), [("ddp", "towers"), *(("single", name) for name in TWO_STACKS)])
def test_two_stacks_are_written_down_from_a_few_layers_of_each(monkeypatch, plan, name):
    with torch.device("meta"):
        model, call = TWO_STACKS[name]()
    apart = replace(shardgraph.preset(plan, {"dp": 1 if plan == "single" else 2}), bucket=0)
    whole, models = shardgraph.analyze(model, **call, plan=apart, cluster="H100", fold=False), _programs_of(monkeypatch)
    folded = shardgraph.analyze(model, **call, plan=apart, cluster="H100")
    _assert_equal(folded, whole)
    stacks = [[each for each in few.modules() if isinstance(each, nn.ModuleList)] for few in models]
    assert {tuple(map(len, few)) for few in stacks} == {(6, 6), (6, 7), (7, 6), (7, 7)}


def test_a_stack_of_which_forward_reads_a_layer_by_its_number_has_all_its_layers(monkeypatch):
    with torch.device("meta"):
        model, call = Towers(14, reads=12), {"example_inputs": (torch.zeros(8, 1024),)}
    model.second.append(nn.Sequential(nn.Linear(1024, 1024, device="meta"), nn.Tanh()))  # the longest
    models = _programs_of(monkeypatch)
    folded = shardgraph.analyze(model, **call, plan="single", cluster="H100")
    assert {(len(few.first), len(few.second)) for few in models} == {(14, 6), (14, 7)}
    _assert_equal(folded, shardgraph.analyze(model, **call, plan="single", cluster="H100", fold=False))


LARGE = {"hidden_size": 512, "intermediate_size": 1024}  # a layer has more than is updated together


@pytest.mark.slow
def test_a_tensor_that_all_layers_save_in_host_memory_is_fetched_as_late_as_in_the_whole_model(monkeypatch):
    """Its copy back begins before the first of them and is awaited behind the last, however many there are."""
    search, written = importlib.import_module("shardgraph.search.analysis"), []
    monkeypatch.setattr(search, "extend", lambda *given: written.append(extend(*given)) or written[-1])
    with torch.device("meta"):
        model, mesh = llama(9, hidden_size=512, intermediate_size=2048), {"dp": 16}
        ids = torch.zeros(2, 1024, dtype=torch.long)
    options: Any = {"example_kwargs": {"input_ids": ids, "labels": ids}, "cluster": Cluster.of("H100", nodes=2)}
    options |= {"mesh": mesh, "recompute": "full", "offload": "activations"}
    apart = replace(shardgraph.preset("zero2", mesh), bucket=0)
    folded, whole = (shardgraph.analyze(model, (), apart, fold=fold, **options) for fold in (True, False))
    assert len(written) == 1 and max(row.waits for row in whole.rows) > len(whole.rows) / 4
    of_both = [[row for row in each.rows if row.half != "optimizer"] for each in (folded, whole)]
    few, many = ([(row.operation, row.waits, row.memory, row.host) for row in rows] for rows in of_both)
    assert few == many
    assert folded.time.total == pytest.approx(whole.time.total) and folded.peak_memory == pytest.approx(
        whole.peak_memory, rel=1e-4
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "plan"),
    [
        pytest.param(llama(9, **LARGE), "fsdp", id="llama-fsdp", marks=pytest.mark.slow),
        pytest.param(llama(9, **LARGE), "zero2", id="llama-zero2", marks=pytest.mark.slow),
        pytest.param(llama(9, **LARGE), "fsdp+tp+sp", id="llama-tp", marks=pytest.mark.slow),
        pytest.param(gpt2(9, width=512), "ddp", id="gpt2-ddp"),
        pytest.param(gpt2(9, width=512), "fsdp", id="gpt2-fsdp", marks=pytest.mark.slow),
        pytest.param(gpt2(9, width=512), "zero2", id="gpt2-zero2", marks=pytest.mark.slow),
    ],
)
def test_nine_layers_written_down_from_a_few_equal_nine_layers_analysed(model, plan, monkeypatch):
    search, written = importlib.import_module("shardgraph.search.analysis"), []
    monkeypatch.setattr(search, "extend", lambda *given: written.append(extend(*given)) or written[-1])

    def analysis(fold):
        cluster = toy_cluster(memory=16 * GIB)
        mesh = {"dp": 2, "tp": 2} if "tp" in plan else {"dp": 4}
        apart = replace(shardgraph.preset(plan, tuple(mesh.items())), bucket=0)  # one of small layers holds several
        return shardgraph.analyze(model, (), apart, example_kwargs=text(1024), mesh=mesh, cluster=cluster, fold=fold)

    folded, whole = analysis(True), analysis(False)
    assert len(written) == 1
    assert len(folded.rows) == len(whole.rows) and folded.flops == whole.flops
    assert [row.memory for row in folded.rows] == [row.memory for row in whole.rows]
    assert [row.module for row in folded.rows] == [row.module for row in whole.rows]
    sent = [[(row.operation, row.stream) for row in each.rows if row.stream] for each in (folded, whole)]
    assert sent[0] == sent[1]
    assert folded.time.total == pytest.approx(whole.time.total)


class OfKinds(nn.Module):
    """Layers of the ``kinds``, each a width of its own, one after the other."""

    def __init__(self, kinds: str) -> None:
        super().__init__()
        widths = {"a": 512, "b": 768, "c": 1024}
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(512, widths[kind]), nn.ReLU(), nn.Linear(widths[kind], 512)) for kind in kinds
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


KINDS = {
    "other first layers": "ccb" + 26 * "a",
    "two kinds in turns": 16 * "ab",
    "another first layer, then two in turns": "c" + 16 * "ab",
}


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("plan", ["zero2", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_layers_of_several_kinds_are_written_down_from_a_few_units_of_them(kinds, plan, monkeypatch):
    search, written = importlib.import_module("shardgraph.search.analysis"), []
    monkeypatch.setattr(search, "extend", lambda *given: written.append(extend(*given)) or written[-1])
    with torch.device("meta"):
        model, x = OfKinds(KINDS[kinds]), torch.zeros(4096, 512)
    apart = replace(shardgraph.preset(plan, {"dp": 4}), bucket=0)
    folded, whole = (shardgraph.analyze(model, (x,), apart, cluster=toy_cluster(), fold=fold) for fold in (True, False))
    assert len(written) == 1
    _assert_equal(folded, whole)


class Growing(nn.Module):
    """Layers of one form, each of which does more than the one before."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))

    def forward(self, x):
        for count, layer in enumerate(self.layers):
            for _ in range(count % 3 + 1):
                x = layer(x).relu()
        return x


@pytest.mark.slow
def test_layers_that_do_not_repeat_are_analysed_one_by_one():
    model = Growing(13)
    folded, whole = (
        shardgraph.analyze(model, (torch.randn(2, 4),), mesh={"dp": 2}, cluster=toy_cluster(), fold=fold)
        for fold in (True, False)
    )
    assert [row.node for row in folded.rows] == [row.node for row in whole.rows]


@pytest.mark.slow
def test_the_model_is_whole_again_after_a_folded_analysis():
    model = llama(13)
    shardgraph.analyze(model, plan="fsdp", example_kwargs=text(), mesh={"dp": 4}, cluster=toy_cluster())
    assert len(model.model.layers) == 13


@pytest.mark.slow
def test_405b_on_16384_devices_is_analysed_within_a_minute():
    model = llama(
        126,
        hidden_size=16384,
        intermediate_size=53248,
        num_attention_heads=128,
        num_key_value_heads=8,
        vocab_size=128256,
    ).to(torch.bfloat16)
    kwargs = text(1, 8192)
    analysis = shardgraph.analyze(model, plan="fsdp", example_kwargs=kwargs, mesh={"dp": 16384}, cluster="H100")
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(405e9, rel=0.01)
    tokens, width, layers = 8192, 16384, 126
    dense = 6 * tokens * (405.85e9 - 128256 * width)  # the embedding multiplies nothing
    assert analysis.flops == pytest.approx(dense + 12 * layers * width * tokens**2, rel=0.2)


@pytest.mark.slow
def test_the_zoo_is_analysed_under_every_preset():
    model, (args, kwargs) = make("t5", 4)
    for plan in ("ddp", "zero1", "zero2", "fsdp"):
        analysis = shardgraph.analyze(
            model, args, plan, example_kwargs=kwargs, mesh={"dp": 2}, cluster=toy_cluster(memory=GIB)
        )
        assert analysis.fits and analysis.time.total > 0 and not analysis.unpriced


@pytest.mark.parametrize(
    ("plan", "mesh", "updates"), [("single", None, 48), ("ddp", {"dp": 2}, 1.1), ("fsdp", {"dp": 2}, 1.05)]
)
def test_small_shards_are_updated_together_and_the_parameters_of_one_rank_each(plan, mesh, updates):
    h100 = shardgraph.Cluster.of("H100")
    a_second_each = {**h100.device.rates, "optimizer": shardgraph.Rate(1e30, overhead=1.0)}
    cluster = replace(h100, device=replace(h100.device, rates=a_second_each))
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(24)))
    analysis = shardgraph.analyze(model, (torch.zeros(4, 32),), plan, mesh=mesh, cluster=cluster)
    assert analysis.time.optimizer == pytest.approx(updates, rel=0.01)


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd", "sgd+momentum"])
def test_what_torch_takes_to_update_all_parameters_at_once_is_predicted_for_an_accelerator(optimizer):
    kind, _, momentum = optimizer.partition("+")
    make = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}[kind]
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    as_on_one = make(model.parameters(), lr=1e-3, foreach=True, **({"momentum": 0.9} if momentum else {}))
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        as_on_one.step()
    states = [value for state in as_on_one.state.values() for value in state.values() if value is not None]
    held = [*model.parameters(), *(parameter.grad for parameter in model.parameters()), *states]
    with PeakMemory().track(held) as memory:
        as_on_one.step()
    analysis = shardgraph.analyze(model, (torch.zeros(4, 32),), "single", cluster="H100", optimizer=optimizer)
    predicted = analysis.rows[-1].memory.get("temporaries", 0)
    assert predicted == memory.peak_bytes - sum(tensor.nbytes for tensor in held)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd+momentum"])
def test_an_update_of_all_parameters_at_once_is_written_down_from_a_few_layers(optimizer):
    call = {"model": Deep(12).to("meta"), "example_inputs": (torch.zeros(2, 32, device="meta"),)}
    folded, whole = (
        shardgraph.analyze(**call, plan="single", cluster="H100", optimizer=optimizer, fold=fold)
        for fold in (True, False)
    )
    assert "+" in "".join(row.node for row in folded.rows), "was folded"
    assert folded.rows[-1].memory == whole.rows[-1].memory
