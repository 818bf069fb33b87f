"""Published training runs as questions to ``shardgraph.analyze``: rows of a table, or the reason why one cannot be."""

from __future__ import annotations

import csv
import re
import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

import shardgraph
from benchmarks.published.decoder import Decoder, Shape
from benchmarks.published.mixtures import MIXTURES
from benchmarks.published.work import Operation, PipelineWork, Work
from shardgraph.cost_models.cluster import Cluster
from shardgraph.cost_models.device import Device
from shardgraph.plans.pipeline_plan import Pipeline
from shardgraph.plans.precision import Precision

DIMENSIONS = ["n_layers", "d_model", "n_heads", "d_ff", "vocab"]
LAYOUT = ["n_gpus", "seq_len", "mbs", "gbs_seqs", "tp", "pp", "dp"]
DOUBTFUL = ("SOURCE INCONSISTENT", "PROXY", "UNVERIFIED", "LOW reliability", "WARNING")
DEVICES = {
    "A100-SXM": "A100",
    "H100-SXM": "H100",
    "H100": "H100",
    "H100-SXM-HBM2e-500W": "H100-500W",
    "H200-SXM": "H200",
    "H200": "H200",
    "B200": "B200",
    "B200-SXM": "B200",
    "B300": "B300",
    "GB200": "GB200",
    "GB300": "GB300",
    "V100-SXM2": "V100",
    "MI300X": "MI300X",
    "RTX 4090": "RTX-4090",
}
MICROBATCHES = (1, 2, 4, 8)
"""The sequences of a microbatch that a row may have meant which leaves them out."""
NETWORK = ((re.compile(r"(\d+)x(\d+) ?Gb"), 1), (re.compile(r"(\d+) ?Gbps (?:node-node|per node)"), 0))
"""What an interconnect says of a node's network in Gb/s: NICs times a rate, or a rate."""


@dataclass(frozen=True)
class Run:
    """A published run; ``seconds`` is its step, nan if it was not published."""

    row: Mapping[str, str]
    shape: Shape
    plan: str
    mesh: Mapping[str, int]
    pipeline: Pipeline | None
    recompute: str
    precision: Precision
    cluster: Cluster
    seconds: float
    rows: int
    sequence: int
    accumulated: int
    """Microbatches of a step without a pipeline, one after the other, of which one is analysed."""

    def seconds_on(self, work: Work | PipelineWork, device: Device) -> float:
        """Seconds of the whole step, from the work of its analysis."""
        time = work.time(device)
        if self.accumulated == 1 or isinstance(work, PipelineWork):
            return time.total
        # Replicas reduce gradients after the last microbatch only; shards are gathered and reduced in each.
        replicas = any(name in self.plan for name in ("ddp", "zero1", "ep"))
        each = work.time(device, without=self._reduces) if replicas else time
        return time.total + (self.accumulated - 1) * (each.compute + each.exposed)

    def _reduces(self, operation: Operation) -> bool:
        """Whether an operation is for gradients or, once a step, for parameters: not for tokens of experts."""
        axes = operation.stream.split("+")
        return "dp" in axes or ("ep" in axes and operation.dtype == self.precision.reduce)

    @property
    def makers_kernels(self) -> bool:
        """Whether it is one of NVIDIA's own programs of 2024 and later, whose kernels are not PyTorch's."""
        recent = self.row["date"][:4] >= "2024" or self.row["date"][:2] in ("25", "26")
        return recent and any(name in self.row["framework"] for name in ("NeMo", "Megatron", "MaxText"))

    @property
    def held_out(self) -> bool:
        """Whether the fit does not see it."""
        return zlib.crc32(self.row["row_id"].encode()) % 2 == 1

    @property
    def device(self) -> str:
        """The name of its device."""
        return self.cluster.device.name

    @cached_property
    def question(self) -> tuple[object, ...]:
        """Equal for runs whose prediction is the same."""
        return (
            self.shape, self.plan, tuple(self.mesh.items()), self.pipeline, self.recompute, self.precision,
            self.cluster.name, self.cluster.inter and self.cluster.inter.bandwidth, self.rows, self.sequence,
        )  # fmt: skip

    def analysis(self, cluster: Cluster | None = None) -> Any:
        """What :func:`shardgraph.analyze` predicts for it."""
        with torch.device("meta"):
            model = Decoder(self.shape)
            tokens = torch.empty(self.rows, self.sequence, dtype=torch.long)
        return shardgraph.analyze(
            model,
            (tokens, tokens),
            self.plan,
            mesh=dict(self.mesh),
            pipeline=self.pipeline,
            recompute=self.recompute,
            precision=self.precision,
            cluster=cluster or self.cluster,
            backend="inductor",  # published programs have fused kernels, compiled or written by hand
        )


def read(path: Path, *, timed: bool = True) -> tuple[list[Run], Counter[str]]:
    """The runs of a table, and how many rows were left out for which reason.

    Unless ``timed``, also those whose layout is published but whose time is not, or derived. Of those that leave out
    the size of a microbatch there is one run for each in ``MICROBATCHES`` that divides the batch of a data rank.
    """
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    if not timed:
        rows = [each for row in rows for each in _with_microbatches(row)]
    runs: list[Run] = []
    left_out: Counter[str] = Counter()
    for row in rows:
        if reason := why_not(row, timed):
            left_out[reason] += 1
            continue
        try:
            runs.append(run_of(row))
        except (ValueError, shardgraph.ShardGraphError) as error:
            left_out[f"a cell that cannot be: {str(error)[:80]}"] += 1
    return runs, left_out


def _with_microbatches(row: dict[str, str]) -> list[dict[str, str]]:
    if row["mbs"] or not row["gbs_seqs"] or not row["dp"]:
        return [row]
    each = float(row["gbs_seqs"]) / float(row["dp"])
    return [row | {"mbs": str(size)} for size in MICROBATCHES if each % size == 0]


def why_not(row: Mapping[str, str], timed: bool = True) -> str | None:
    """Why a row is left out, or None; ``timed`` as for :func:`read`."""
    if row["status"] != "ok":
        return "ran out of memory or was degraded"
    if row["provenance"] != "retrieved_primary" or any(word in row["notes"] for word in DOUBTFUL):
        return "the source is secondary, or doubts the row itself"
    if "offload" in (row["recompute"] + row["sharding"]).lower():
        return "offload"
    if "lora" in row["task"].lower():
        return "adapters of frozen weights"
    if "unpacked" in row["notes"]:
        return "its sequences are padded, to lengths that are not published"
    if timed and not row["step_time_s"] and not row["tokens_per_s_per_gpu"]:
        return "neither step time nor throughput"
    if timed and row["step_time_kind"].lower().startswith(("derived from eq", "derived assuming")):
        return "its step time is derived from a formula of FLOPs"
    known = row["model"].lower() in MIXTURES
    if missing := [name for name in ([] if known else DIMENSIONS) + LAYOUT if not row[name]]:
        return "not published: " + ", ".join(missing)
    if row["gpu"] not in DEVICES:
        return f"a device that is not described: {row['gpu'][:30]}"
    if "nvfp4" in row["precision"].lower():
        return "a format of 4 bits, which has no published kernels to price it by"
    if row["ep"] not in ("", "1") and not known:
        return "its experts are not published"
    if known and row["tp"] != "1":
        return "experts over ranks that divide each other's tensors"
    return None


def run_of(row: Mapping[str, str]) -> Run:
    """The question that a row asks.

    Raises:
        ValueError, ShardGraphError: a cell is no number, or numbers contradict each other.
    """
    optional = ("n_kv_heads", "vp", "fsdp_shard", "cp", "ep")
    number = {name: int(float(row[name])) for name in (*DIMENSIONS, *LAYOUT, *optional) if row[name]}
    shape = _shape(row, number)
    data, tensor, stages = number["dp"], number["tp"], number["pp"]
    context, rows = number.get("cp", 1), number["mbs"]
    if data * tensor * stages * context != number["n_gpus"]:
        raise ValueError("its degrees do not multiply to its devices")
    microbatches = max(1, round(number["gbs_seqs"] / (rows * data)))
    experts = number.get("ep", 1)
    if data % experts:
        raise ValueError("its experts are not divided over ranks of data parallelism")
    plan, mesh = _sharding(row, data // experts, number.get("fsdp_shard", 0))
    if experts > 1:
        # Experts are divided over ranks that have batches of their own.
        plan, mesh = (f"{plan}+ep", mesh | {"ep": experts}) if data > experts else ("ep", {"ep": experts})
    for name, size in (("cp", context), ("tp", tensor)):
        if size > 1:
            mesh[name], plan = size, f"{plan}+{name}"
    if tensor > 1 and _sequence_parallel(row):
        plan += "+sp"
    pipeline = None
    if stages > 1:
        mesh, plan = {"pp": stages} | mesh, f"pp+{plan}"
        interleaved = 2 if "interleaved" in row["pp_schedule"].lower() else 1  # the least, if a number is not stated
        pipeline = _pipeline(stages, number.get("vp", interleaved), shape.layers, microbatches)
    tokens = number["gbs_seqs"] * number["seq_len"]
    reported = row["step_time_kind"].startswith("reported") or not row["tokens_per_s_per_gpu"]
    seconds = float(row["step_time_s"] or "nan")
    if not reported:
        seconds = tokens / float(row["tokens_per_s_per_gpu"]) / number["n_gpus"]
    return Run(
        row,
        shape,
        plan,
        mesh,
        pipeline,
        _recompute(row),
        _precision(row),
        _cluster(row, number["n_gpus"]),
        seconds,
        rows * (microbatches if pipeline else 1),
        number["seq_len"],
        1 if pipeline else microbatches,
    )


def _sharding(row: Mapping[str, str], data: int, shard: int) -> tuple[str, dict[str, int]]:
    """The data-parallel plan, and its mesh."""
    text = row["sharding"]
    if "FSDP=0" in text or "distributed optimizer" in text or "ZeRO-1" in text:
        return "zero1", {"dp": data}
    if "ZeRO-2" in text or "SHARD_GRAD_OP" in text:
        return "zero2", {"dp": data}
    if "FSDP" in text or "HSDP" in text or "ZeRO-3" in text:
        if shard and 1 < shard < data and data % shard == 0:
            return "hsdp", {"dp_replicate": data // shard, "dp_shard": shard}
        return "fsdp", {"dp": data}
    # Megatron's programs of 2023 and later shard the optimizer, as their recipes say; before, replicas were whole.
    return ("zero1" if row["date"][:4] >= "2023" or row["date"][:2] in ("25", "26") else "ddp"), {"dp": data}


def _sequence_parallel(row: Mapping[str, str]) -> bool:
    """Whether norms and residuals are divided too: stated, or a program of after 2022, when it became the default."""
    if "no sequence parallel" in row["recompute"]:
        return False
    recent = row["date"][:4] >= "2023" or row["date"][:2] in ("25", "26")
    return "sequence parallel" in row["recompute"] or recent


def _pipeline(ranks: int, interleaved: int, layers: int, microbatches: int) -> Pipeline:
    count = ranks * interleaved
    if layers % count == 0:
        balance = [layers // count] * count
    else:  # the first and the last stage, which have the vocabulary, get a layer fewer
        balance = [layers // count + (stage < layers % count) for stage in range(count)]
        balance = balance[layers % count :] + balance[: layers % count]
    schedule = "1f1b" if interleaved == 1 else "interleaved-1f1b"
    return Pipeline(microbatches, schedule, balance=tuple(balance), ranks=ranks)


def _recompute(row: Mapping[str, str]) -> str:
    text = row["recompute"]
    if text.startswith(("full", "MaxText")) or "activation checkpointing on" in text:
        return "full"
    # A flash kernel keeps no scores, so what is called selective there recomputes next to nothing.
    return "selective" if text.startswith("selective") and not _flash(row) else "none"


def _flash(row: Mapping[str, str]) -> bool:
    """Whether attention is one kernel: FlashAttention came out in mid-2022."""
    return row["date"][:4] >= "2023" or row["date"][:2] in ("25", "26")


def _precision(row: Mapping[str, str]) -> Precision:
    half = "float16" if row["precision"].startswith("fp16") else "bfloat16"
    return Precision(parameters=half, reduce=half if "PURE" in row["sharding"] else "float32")


def _cluster(row: Mapping[str, str], ranks: int) -> Cluster:
    name = DEVICES[row["gpu"]] + ("-40GB" if row["gpu_mem_gb"] == "40" else "")
    one = Cluster.of(name)
    per_node = 4 if "4 GPU/node" in row["interconnect"] else one.devices_per_node
    network = None
    for pattern, is_product in NETWORK:
        if found := pattern.search(row["interconnect"]):
            gigabits = float(found[1]) * (float(found[2]) if is_product else 1.0)
            network = 0.94 * gigabits * 1e9 / 8 / per_node  # of which 94% carries data
            break
    return Cluster.of(name, -(-ranks // per_node), per_node, network)


def _shape(row: Mapping[str, str], number: Mapping[str, int]) -> Shape:
    text = row["precision"].lower()
    float8 = any(word in text for word in ("fp8", "float8", "mx"))
    if known := MIXTURES.get(row["model"].lower()):
        return replace(known, float8=float8)
    classic = not any(name in row["model"].lower() for name in ("llama", "qwen", "mistral", "nemotron", "internlm"))
    plain = Shape(
        layers=number["n_layers"],
        width=number["d_model"],
        heads=number["n_heads"],
        kv_heads=number.get("n_kv_heads", number["n_heads"]),
        hidden=number["d_ff"],
        vocabulary=number["vocab"],
        mlp="relu2" if "nemotron" in row["model"].lower() else "gelu",
        classic=classic,
        flash=_flash(row),
        float8=float8,
    )
    if not row["params_b"]:
        return plain
    gated = replace(plain, mlp="swiglu")  # which of the two it is, its published size tells
    published = float(row["params_b"]) * 1e9
    return min(plain, gated, key=lambda shape: abs(shape.parameters - published))
