"""Predictions beside published figures: the ZeRO paper's table of memory, and training runs on A100 and H100.

    make groundtruth                               # all rows, and how far off those are that the fit did not see
    python benchmarks/groundtruth.py --fit         # fits the devices' constants again, and reports with those
    python benchmarks/groundtruth.py --rows x.csv  # rows of your own, with the columns of groundtruth/training_runs.csv

Half of the rows, chosen by a checksum of their names, fit three constants for each type of device (what a training step
sustains of the rates of matmul, of attention and of memory), which ``cost_models/devices.yaml`` holds. The other half
was never looked at by the fit.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardgraph.cost_models.cluster import Cluster
from shardgraph.cost_models.model_state import model_state
from shardgraph.cost_models.transformer import Layout, Transformer, step_time

DATA = Path(__file__).parent / "groundtruth"
NEEDED = ["n_layers", "d_model", "n_heads", "d_ff", "vocab", "n_gpus", "seq_len", "mbs", "gbs_seqs", "tp", "pp", "dp"]
DOUBTFUL = ("SOURCE INCONSISTENT", "PROXY", "UNVERIFIED", "LOW reliability", "WARNING")
DEVICES = {"A100-SXM": "A100", "H100-SXM": "H100", "H100": "H100"}
CONSTANTS = ("matmul", "attention", "memory")


@dataclass(frozen=True)
class Run:
    """A published run, as the cost models see it; ``seconds`` is its step."""

    row: Mapping[str, str]
    model: Transformer
    sequence: int
    layout: Layout
    cluster: Cluster
    dtype: str
    seconds: float

    @property
    def held_out(self) -> bool:
        """Whether the fit does not see it."""
        return zlib.crc32(self.row["row_id"].encode()) % 2 == 1

    @property
    def device(self) -> str:
        """The name of its device."""
        return DEVICES[self.row["gpu"]]

    def predicted(self, sustained: Mapping[str, float] | None = None) -> float:
        """Seconds of a step, with the constants of ``devices.yaml`` or with others."""
        cluster = self.cluster
        if sustained is not None:
            cluster = replace(cluster, device=replace(cluster.device, sustained=sustained))
        return step_time(self.model, self.sequence, self.layout, cluster, self.dtype).total


# -- reading ---------------------------------------------------------------------------------------


def why_not(row: Mapping[str, str]) -> str | None:
    """Why a row is left out, or None."""
    if row["status"] != "ok":
        return "ran out of memory or was degraded"
    if row["gpu"] not in DEVICES:
        return "another device (such as H100s of 500 W with slower memory)"
    if row["provenance"] != "retrieved_primary" or any(word in row["notes"] for word in DOUBTFUL):
        return "the source is secondary, or doubts the row itself"
    if row["task"] != "pretrain" or "offload" in row["recompute"] + row["sharding"]:
        return "fine-tuning or offload"
    if row["cp"] not in ("", "1") or row["ep"] not in ("", "1"):
        return "context or expert parallelism"
    if not row["recompute"] or row["recompute"].startswith("not stated"):
        return "recomputation is not stated"
    if missing := [name for name in NEEDED if not row[name]]:
        return "not published: " + ", ".join(missing)
    return None if row["tokens_per_s_per_gpu"] or row["step_time_s"] else "neither step time nor throughput"


def read(path: Path) -> tuple[list[Run], Counter[str]]:
    """The runs of a file, and how many rows were left out for which reason."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    reasons = [why_not(row) for row in rows]
    runs = [_run(row) for row, reason in zip(rows, reasons, strict=True) if reason is None]
    return runs, Counter(reason for reason in reasons if reason is not None)


def _run(row: Mapping[str, str]) -> Run:
    count = {name: int(float(row[name])) for name in (*NEEDED, "n_kv_heads", "vp", "fsdp_shard") if row[name]}
    data, rows = count["dp"], count["mbs"]
    shard = count.get("fsdp_shard", 0)
    layout = Layout(
        data=data,
        tensor=count["tp"],
        pipeline=count["pp"],
        rows=rows,
        microbatches=max(1, round(count["gbs_seqs"] / (rows * data))),
        interleave=count.get("vp", 1),
        sharding=_sharding(row["sharding"]),
        shard=shard if shard and data % shard == 0 else 0,
        recompute=next(kind for kind in ("full", "selective", "none") if row["recompute"].startswith(kind)),
        sequence_parallel="+ sequence parallel" in row["recompute"],
        reduced=2 if "PURE" in row["sharding"] else 4,
    )
    name = DEVICES[row["gpu"]] + ("-40GB" if row["gpu_mem_gb"] == "40" else "")
    one = Cluster.of(name)
    cluster = Cluster.of(name, nodes=-(-count["n_gpus"] // one.devices_per_node))
    tokens = count["gbs_seqs"] * count["seq_len"]
    reported = row["step_time_kind"] == "reported" or not row["tokens_per_s_per_gpu"]
    seconds = float(row["step_time_s"]) if reported else tokens / float(row["tokens_per_s_per_gpu"]) / count["n_gpus"]
    eight_bits = any(word in row["precision"].lower() for word in ("fp8", "float8"))
    dtype = "float8_e4m3fn" if eight_bits else "bfloat16"
    return Run(row, _model(row, count), count["seq_len"], layout, cluster, dtype, seconds)


def _model(row: Mapping[str, str], count: Mapping[str, int]) -> Transformer:
    plain = Transformer(
        layers=count["n_layers"],
        width=count["d_model"],
        heads=count["n_heads"],
        kv_heads=count.get("n_kv_heads", count["n_heads"]),
        hidden=count["d_ff"],
        vocabulary=count["vocab"],
        flash=row["date"][:4] >= "2023",  # FlashAttention came out in mid-2022
    )
    if not row["params_b"]:
        return plain
    gated = replace(plain, gated=True)  # which of the two it is, its published size tells
    published = float(row["params_b"]) * 1e9
    return min(plain, gated, key=lambda model: abs(model.parameters - published))


def _sharding(text: str) -> str:
    if "ZeRO-2" in text:
        return "zero2"
    if ("FSDP" in text and "FSDP=0" not in text) or "HSDP" in text or "ZeRO-3" in text:
        return "fsdp"
    return "zero1" if "ZeRO-1" in text or "distributed optimizer" in text else "ddp"


# -- fitting ---------------------------------------------------------------------------------------


def fit(runs: Sequence[Run]) -> dict[str, float]:
    """The constants of the runs' device with the least mean of ``|log(predicted / published)|``."""
    from scipy.optimize import minimize

    def parts(values: Sequence[float]) -> dict[str, float]:
        return {kind: min(max(value, 0.05), 1.0) for kind, value in zip(CONSTANTS, values, strict=True)}

    def loss(values: Sequence[float]) -> float:
        return statistics.fmean(abs(math.log(run.predicted(parts(values)) / run.seconds)) for run in runs)

    return parts(minimize(loss, [0.8, 0.6, 0.6], method="Nelder-Mead", options={"maxiter": 1000, "xatol": 1e-3}).x)


# -- reporting -------------------------------------------------------------------------------------


def report_memory() -> None:
    """The ZeRO paper's table 1: bytes of model state per device."""
    plans = {"1": "zero1", "2": "zero2", "3": "fsdp"}
    with (DATA / "zero_paper_table1.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    print(f"ZeRO paper, table 1: GB of model state per device\n{'model':>6}{'ranks':>7}{'plan':>7}"
          f"{'published':>11}{'predicted':>11}")  # fmt: skip
    worst = 0.0
    for row in rows:
        plan, published = plans[row["zero_stage"]], float(row["published_gb"])
        state = model_state(round(float(row["params_b"]) * 1e9), int(row["dp_degree"]), plan)
        predicted = sum(state.values()) / 1e9
        worst = max(worst, abs(predicted / published - 1))
        print(f"{row['model']:>6}{row['dp_degree']:>7}{plan:>7}{published:>11.2f}{predicted:>11.2f}")
    print(f"{len(rows)} cells, largest difference {worst:.1%}: the paper prints two or three digits\n")


def report_runs(runs: Sequence[Run], constants: Mapping[str, dict[str, float]]) -> None:
    """Each run's step beside the prediction, then medians of the error."""
    print("Training runs: seconds of a step (fit: seen by the fit, held: not)")
    print(f"{'row':<10}{'model':<16}{'device':<8}{'n':>5}{'tokens':>8} {'layout':<34}{'published':>10}{'predicted':>10}"
          f"{'error':>8}")  # fmt: skip
    errors: dict[tuple[str, str], list[float]] = {}
    for run in runs:
        device, predicted = run.device, run.predicted(constants.get(run.device))
        error = predicted / run.seconds - 1
        split = "held" if run.held_out else "fit"
        source = run.row["source"][:48]
        for group in ("all", device, source):
            errors.setdefault((group, split), []).append(abs(error))
        at = run.layout
        layout = f"{at.sharding} tp{at.tensor} pp{at.pipeline} {at.microbatches}x{at.rows} {at.recompute} {split}"
        name, ranks, tokens = run.row["model"][:15], run.row["n_gpus"], run.sequence
        print(f"{run.row['row_id']:<10}{name:<16}{device:<8}{ranks:>5}{tokens:>8} {layout:<34}"
              f"{run.seconds:>10.3f}{predicted:>10.3f}{error:>8.1%}")  # fmt: skip
    print(f"\n{'median |error|':<50}{'fit':>16}{'held out':>16}")
    for group in dict.fromkeys(group for group, _ in errors):
        cells = [errors.get((group, split), []) for split in ("fit", "held")]
        shown = [f"{statistics.median(cell):.1%} of {len(cell)}" if cell else "none" for cell in cells]
        print(f"{group:<50}{shown[0]:>16}{shown[1]:>16}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, default=DATA / "training_runs.csv")
    parser.add_argument("--fit", action="store_true", help="fit the constants again and report with those")
    options = parser.parse_args()
    report_memory()
    runs, left_out = read(options.rows)
    constants = {}
    for device in sorted({run.device for run in runs}) if options.fit else ():
        constants[device] = fit([run for run in runs if run.device == device and not run.held_out])
    report_runs(runs, constants)
    print(f"\n{len(runs)} rows; {sum(left_out.values())} left out:")
    for reason, count in left_out.most_common():
        print(f"  {count:>4}  {reason}")
    for device, parts in constants.items():
        fitted = ", ".join(f"{kind}: {part:.3f}" for kind, part in parts.items())
        print(f"{device}: sustained {{{fitted}}}")


if __name__ == "__main__":
    main()
