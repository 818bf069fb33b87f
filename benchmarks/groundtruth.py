"""Predictions beside published figures: the ZeRO paper's table of memory, training runs, and NCCL's collectives.

    make groundtruth                               # all rows, and how far off those are that the fit did not see
    python benchmarks/groundtruth.py --fit         # fits the devices' constants again, and reports with those
    python benchmarks/groundtruth.py --rows x.csv  # rows of your own, with the columns of groundtruth/training_runs.csv

Each row is a question to ``shardgraph.analyze``: its model is captured, its layout is a plan, and the graph is priced.
Half of the rows, chosen by a checksum of their names, fit three constants for each type of device (what a training step
sustains of the rates of matmul, of attention and of memory), which ``cost_models/devices.yaml`` holds, and three for
the kernels of NVIDIA's own programs. The other half was never looked at by the fit. Captured work is kept in a folder,
so that a second run takes a minute.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import math
import multiprocessing
import pickle
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))

import shardgraph
from benchmarks.published.fit import CONSTANTS, attaining, fit
from benchmarks.published.ranking import rank, repeatability
from benchmarks.published.runs import Run, read
from benchmarks.published.work import PipelineWork, Work, work_of
from shardgraph.cost_models.cluster import Cluster
from shardgraph.cost_models.collectives import collective_seconds
from shardgraph.cost_models.model_state import model_state

DATA = Path(__file__).parent / "groundtruth"
ENOUGH = 8
"""Rows of a device at least, for a fit of its constants."""

SWEPT = {"A100-SXM-80GB": "A100", "A100-SXM": "A100", "H100-SXM": "H100", "H200-SXM": "H200", "B200-SXM": "B200"}
"""Devices of the table of collectives."""

NVIDIA = "NVIDIA's kernels"
NVIDIAS_KERNELS = {"matmul": 1.144, "attention": 1.026, "memory": 4.0}
"""What NVIDIA's own programs of 2024 and later attain of the rates of PyTorch's kernels, fitted to one half of them:
FlashAttention 3 or cuDNN, gradients of weights added up inside of the product, casts fused with what is before them."""
NVIDIAS_MOST = {"matmul": 1.5, "attention": 4.0, "memory": 4.0}
"""Bounds of that fit: four times the rate of memory is as if three quarters of the bytes were not moved."""

Works = Mapping[str, Work | PipelineWork | str]
"""By the name of a run's row: what is computed for it, or why it cannot be analysed."""


# -- analysis --------------------------------------------------------------------------------------


def analysed(runs: Sequence[Run], kept: Path, processes: int) -> Works:
    """What is computed for every run; once for runs with the same question."""
    kept.mkdir(parents=True, exist_ok=True)
    first = {_file(run, kept): run for run in runs}
    missing = [(run, path) for path, run in first.items() if not path.exists()]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for _ in tqdm(pool.imap_unordered(_analyse, missing), "analysing", len(missing)):
            pass
    return {run.row["row_id"]: pickle.loads(_file(run, kept).read_bytes()) for run in runs}


def _file(run: Run, kept: Path) -> Path:
    return kept / (hashlib.sha256(repr(run.question).encode()).hexdigest()[:24] + ".pickle")


def _analyse(task: tuple[Run, Path]) -> None:
    run, path = task
    try:
        work: Work | PipelineWork | str = work_of(run.analysis())
    except shardgraph.ShardGraphError as error:
        work = f"not analysed: {str(error).splitlines()[0][:90]}"
    path.write_bytes(pickle.dumps(work))


def kernels_of(run: Run) -> str:
    """The name of the constants that a run is priced with: of its device with PyTorch's kernels, or NVIDIA's."""
    return NVIDIA if run.makers_kernels else run.device


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


def report_collectives() -> None:
    """NCCL's all-reduces of 32 KiB and more, by their source: the median error, and that of 64 MiB and more."""
    errors: dict[str, list[tuple[int, float]]] = defaultdict(list)
    with (DATA / "nccl_collectives.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            # Sweeps with NVLS turned on and off, and in part of a node, show what a switch does, not a usual node.
            if row["gpu"] not in SWEPT or not row["time_us"] or "NVLS" in row["source"]:
                continue
            ranks, size = int(row["n_gpus"]), int(row["size_bytes"])
            if row["collective"] == "all_reduce" and size >= 2**15:
                machine = Cluster.of(SWEPT[row["gpu"]], int(row["n_nodes"]))
                group = machine.group_of((("dp", ranks),), "dp")
                priced = collective_seconds("all_reduce", size, size, group, machine.efficiency)
                source = f"{row['source'][:44]}, {ranks} x {SWEPT[row['gpu']]}"
                errors[source].append((size, abs(priced / float(row["time_us"]) * 1e6 - 1)))
    print(f"{'All-reduces of NCCL':<60}{'median |error|':>16}{'of 64 MiB on':>16}")
    for source, sizes in errors.items():
        cells = [[error for size, error in sizes if size >= least] for least in (0, 2**26)]
        print(f"{source:<60}" + "".join(f"{statistics.median(cell):>16.1%}" if cell else f"{'':>16}" for cell in cells))
    print()


def report_runs(predictions: Sequence[tuple[Run, float]]) -> None:
    """Each run's step beside the prediction, then medians of the error."""
    print("Training runs: seconds of a step (fit: seen by the fit, held: not)")
    print(f"{'row':<10}{'model':<16}{'device':<8}{'n':>5}{'tokens':>8} {'layout':<46}{'published':>10}{'predicted':>10}"
          f"{'error':>8}")  # fmt: skip
    errors: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run, predicted in predictions:
        error, split = predicted / run.seconds - 1, "held" if run.held_out else "fit"
        for group in ("all", run.device, run.row["source"][:48], *_groups(run)):
            errors[group][split].append(abs(error))
        mesh = " ".join(f"{name}{size}" for name, size in run.mesh.items())
        layout = f"{run.plan} {mesh} {run.recompute}"
        name, ranks = run.row["model"][:15], run.row["n_gpus"]
        print(f"{run.row['row_id']:<10}{name:<16}{run.device[:7]:<8}{ranks:>5}{run.sequence:>8} {layout[:45]:<46}"
              f"{run.seconds:>10.3f}{predicted:>10.3f}{error:>8.1%}")  # fmt: skip
    print(f"\n{'median |error|':<50}{'fit':>16}{'held out':>16}")
    for group, splits in errors.items():
        shown = [
            f"{statistics.median(splits[s]):.1%} of {len(splits[s])}" if splits[s] else "none" for s in ("fit", "held")
        ]
        print(f"{group:<50}{shown[0]:>16}{shown[1]:>16}")


def _groups(run: Run) -> list[str]:
    """What a run is an example of."""
    kinds = {
        "pipelines": run.pipeline is not None,
        "tensor parallelism": "tp" in run.mesh,
        "context parallelism": "cp" in run.mesh,
        "float8": run.shape.float8,
        "mixtures of experts": run.shape.mixture is not None,
        NVIDIA: run.makers_kernels,
        "PyTorch's kernels": not run.makers_kernels,
        "recomputation": run.recompute != "none",
    }
    return [kind for kind, is_one in kinds.items() if is_one]


def report_ranking(predictions: Sequence[tuple[Run, float]]) -> None:
    """How many pairs of layouts are in the published order."""
    noise = repeatability([run for run, _ in predictions])
    print(f"\nOne configuration published more than once differs by {math.expm1(noise):.1%} (a standard deviation)")
    for name, some in (("all", predictions), ("held out", [pair for pair in predictions if pair[0].held_out])):
        found = rank(some)
        print(
            f"pairs of layouts of one job that differ by 10% or more, {name}: {found.right} of {found.pairs} in the "
            f"published order ({found.right / max(found.pairs, 1):.0%}); measured again, {found.ceiling:.0%} would be"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, default=DATA / "training_runs.csv")
    parser.add_argument("--fit", action="store_true", help="fit the constants again and report with those")
    parser.add_argument("--kept", type=Path, default=Path(".venv/groundtruth"), help="the folder of captured work")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    report_memory()
    report_collectives()
    runs, left_out = read(options.rows)
    works = analysed(runs, options.kept, options.processes)
    priced: list[tuple[Run, Work | PipelineWork]] = []
    for run in runs:
        work = works[run.row["row_id"]]
        if isinstance(work, str):
            left_out[work] += 1
        else:
            priced.append((run, work))
    constants: dict[str, Mapping[str, float]] = {NVIDIA: NVIDIAS_KERNELS}
    for kernels in sorted({kernels_of(run) for run, _ in priced}) if options.fit else ():
        seen = [(run, work) for run, work in priced if kernels_of(run) == kernels and not run.held_out]
        if len(seen) >= ENOUGH:
            most = NVIDIAS_MOST if kernels == NVIDIA else dict.fromkeys(CONSTANTS, 1.0)
            constants[kernels] = fit(seen, constants.get(kernels, seen[0][0].cluster.device.sustained), most)
    predictions = []
    for run, work in priced:
        device, parts = run.cluster.device, constants.get(kernels_of(run))
        predictions.append((run, run.seconds_on(work, device if parts is None else attaining(device, parts))))
    report_runs(predictions)
    report_ranking(predictions)
    print(f"\n{len(predictions)} rows; {sum(left_out.values())} left out:")
    for reason, count in left_out.most_common():
        print(f"  {count:>4}  {reason}")
    for kernels, parts in constants.items():
        print(f"{kernels}: sustained {{" + ", ".join(f"{kind}: {part:.3f}" for kind, part in parts.items()) + "}")


if __name__ == "__main__":
    main()
