"""The figures that the README compares systems by are those of the files that benchmarks wrote."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BASE = "FSDP2"


def measured(name: str) -> dict:
    """What each contender took: of a run on this machine alone, or over the network of 1 Gbit/s."""
    result = json.loads((RESULTS / f"{name}.json").read_text())
    return result["figures"] if "figures" in result else result["settings"]["bandwidth"]["figures"]


def ratio(name: str, contender: str) -> float:
    return measured(name)[contender]["of_base"][0]


def is_rounded(written: str, value: float) -> bool:
    decimals = len(written.partition(".")[2])
    return abs(float(written) - value) <= 0.5 * 10**-decimals * (1 + 1e-6)


COMPARED = {
    "Llama, 12 M parameters": [
        min(ratio(run, "shardgraph fsdp of 8") for run in ("step-llama", "deepspeed", "autoparallel")),
        max(ratio(run, "shardgraph fsdp of 8") for run in ("step-llama", "deepspeed", "autoparallel")),
        ratio("step-llama", "shardgraph ddp of 8"),
        ratio("step-llama", BASE),
        ratio("step-llama", "DDP"),
        ratio("deepspeed", "DeepSpeed ZeRO-3"),
        ratio("deepspeed", "DeepSpeed ZeRO-2"),
        ratio("autoparallel", "autoparallel"),
    ],
    "GPT-2, 11.5 M": [
        ratio("step-gpt2", name) for name in ("shardgraph fsdp of 8", "shardgraph ddp of 8", BASE, "DDP")
    ],
    "convolutions with batch norm": [
        ratio("step-convolutions", name) for name in ("shardgraph fsdp of 8", "shardgraph ddp of 8", BASE, "DDP")
    ],
    "146 small parameters": [
        *(ratio("step-small", name) for name in ("shardgraph fsdp of 8", "shardgraph ddp of 8", BASE, "DDP")),
        *(ratio("deepspeed-small", name) for name in ("DeepSpeed ZeRO-3", "DeepSpeed ZeRO-2")),
    ],
    "Llama on 4 ranks over 1 Gbit/s": [
        ratio("limited-network", name) for name in ("shardgraph fsdp", "shardgraph zero2", BASE, "DDP")
    ],
}


@pytest.mark.parametrize("row", COMPARED)
def test_a_row_of_the_readme_has_the_measured_step_times(row: str) -> None:
    (cells,) = re.findall(rf"^\| {re.escape(row)} \|(.*)\|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    written = re.findall(r"\d+\.\d\d", cells)
    assert len(written) == len(COMPARED[row])
    assert [text for text, value in zip(written, COMPARED[row], strict=True) if not is_rounded(text, value)] == []


def test_the_errors_of_predicted_memory_in_the_readme_are_the_measured_ones() -> None:
    said = r"within ([\d.]+)% of measured for the tests' models, ([\d.]+)% for (\d+) others"
    ((of_tests, of_others, models),) = re.findall(said, (ROOT / "README.md").read_text())
    tests = [
        predicted / measured - 1
        for rank in json.loads((RESULTS / "memory-2-ranks.json").read_text())["ranks"]
        for plan in rank.values()
        for predicted, measured in plan.values()
    ]
    unseen = {
        name: [figure["predicted"] / figure["events"] - 1 for figure in figures]
        for name, figures in measured("memory-unseen-2-ranks").items()
        if isinstance(figures[0], dict)  # the others were not captured at that time
    }
    others = [error for errors in unseen.values() for error in errors]
    assert is_rounded(of_tests, 100 * max(map(abs, tests)))
    assert is_rounded(of_others, 100 * max(map(abs, others)))
    assert int(models) == len({name.rpartition(", ")[0] for name in unseen})


def rows_of_steps() -> list[tuple[str, str, list[str]]]:
    """Result file, contender and its three figures, of each table of steps below a link to the file that has them.

    A table has the figures of one file or, side by side, of two; without text of its own it has those of the next
    file that the text above linked.
    """
    text = (ROOT / "benchmarks" / "README.md").read_text()
    found, files, end = [], [], 0
    for table in re.finditer(r"(?:^\|.*\n)+", text, re.MULTILINE):
        said, end = text[end : table.start()], table.end()
        files = re.findall(r"\(results/([\w-]+)\.json\)", said.rpartition("\n## ")[2]) if said.strip() else files[1:]
        head, _, *rows = table[0].splitlines()
        columns = [head[: of.start()].count("|") for of in re.finditer(r" ms \| of FSDP2 \|", head)]
        for file, column in zip(files, columns, strict=False):
            cells = [[cell.strip() for cell in row.split("|")] for row in rows]
            found += [(file, row[1], row[column : column + 3]) for row in cells]
    return found


@pytest.mark.parametrize("file", sorted({file for file, _, _ in rows_of_steps()}))
def test_a_table_of_steps_has_the_figures_of_the_file_beside_it(file: str) -> None:
    contenders = measured(file)
    rows = [(name, figures) for of, name, figures in rows_of_steps() if of == file]
    assert {name for name, _ in rows} == set(contenders)
    for name, (milliseconds, of_base, interval) in rows:
        took = contenders[name]
        assert is_rounded(milliseconds, 1e3 * took["median_s"]), name
        ratios = [of_base, *(interval.split(" to ") if interval else [])]
        assert all(map(is_rounded, ratios, took["of_base"])), name
