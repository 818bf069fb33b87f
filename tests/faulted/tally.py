"""Many cases, one after the other, and a table of what was injected where."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.faulted.cases import KINDS, LIMIT, PHASES, draw
from tests.faulted.running import run

_PRELOADED = ["shardgraph.api.compile", "shardgraph.saves.loading", "torch.testing", "tests.faulted"]


def inject(numbers: Iterable[int], file: Path, again: bool = False) -> list[dict[str, Any]]:
    """Run the cases of these numbers that the file does not have, and add them to it; returns those of the file.

    With ``again``, those that had a problem too: the outcome of the last run counts.
    """
    multiprocessing.set_start_method("forkserver", force=True)
    multiprocessing.set_forkserver_preload(_PRELOADED)
    known = {record["case"]["seed"]: record for record in records(file)}
    for seed in numbers:
        if seed in known and not (again and known[seed]["problem"]):
            continue
        outcome = run(draw(seed))
        record = {**asdict(outcome), "problem": outcome.problem, "output": outcome.output[-2000:]}
        with file.open("a") as appended:
            appended.write(json.dumps(record) + "\n")
        told = " ".join(f"{name}={value}" for name, value in asdict(outcome.case).items() if value not in ("", 0.0))
        print(f"{told}: {outcome.took:.1f} s, load {os.getloadavg()[0]:.0f}, {outcome.problem or 'ok'}", flush=True)
    return records(file)


def records(file: Path) -> list[dict[str, Any]]:
    """The outcomes in a file, the last of each number."""
    lines = file.read_text().splitlines() if file.exists() else []
    return list({record["case"]["seed"]: record for record in map(json.loads, lines)}.values())


def table(file: Path) -> str:
    """What was injected where, as a table: the number of faults, and the longest time until all others had ended."""
    found = records(file)
    lines = ["| | " + " | ".join(PHASES) + " |", "|---" * (len(PHASES) + 1) + "|"]
    for kind in KINDS:
        cells = [kind]
        for phase in PHASES:
            here = [each for each in found if each["case"]["kind"] == kind and each["case"]["phase"] == phase]
            longest = max((each["took"] for each in here), default=0.0)
            bad = sum(bool(each["problem"]) for each in here)
            cells.append(f"{len(here)}: {longest:.1f} s" + f", {bad} bad" * bool(bad) if here else "")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *_summary(found)])


def _summary(found: list[dict[str, Any]]) -> list[str]:
    def count(key: str) -> str:
        values = sorted({each["case"][key] for each in found}, key=str)
        return ", ".join(f"{sum(each['case'][key] == value for each in found)} {value}" for value in values)

    ended = sorted(each["took"] for each in found if each["case"]["kind"] not in ("slow", "lock", "delay", "pause"))
    loads = sorted(each["load"] for each in found)
    late = sum(took > LIMIT for took in ended)
    return [
        f"{len(found)} faults; ways: {count('way')}; ranks: {count('ranks')}; plans: {count('plan')}",
        f"seconds of those that are not harmless: median {ended[len(ended) // 2]:.1f}, longest {ended[-1]:.1f}, "
        f"{late} above {LIMIT:g}; problems: {sum(bool(each['problem']) for each in found)}",
        f"load: median {loads[len(loads) // 2]:.0f}, highest {loads[-1]:.0f}",
    ]
