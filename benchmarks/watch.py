"""What the watch of ranks over each other and the flight record take of a step of the network of small parameters.

    python benchmarks/watch.py --name watch

Two ranks train two copies of the model, one with and one without: the one without has graphs that note nothing, and
while it trains the watching thread and process stand still. The two take turns, for a second each; medians of their
steps are compared, and the median of the ratio within each turn, with its 95% bootstrap interval. On a machine that
does other work besides, that is rough; so the parts are also timed by themselves, in processor time, and added up.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))

import shardgraph
from benchmarks.ratios import ratio
from benchmarks.training_jobs import JOBS
from shardgraph.runtime import watch
from shardgraph.runtime.watch import flight, watcher

STEPS = 5  # without a look at the clock


@contextlib.contextmanager
def without() -> Any:
    """Nothing is noted and nobody watches."""
    with mock.patch.object(watch, "begin_graph", lambda: None), mock.patch.object(watcher, "_LOOK", 0.05):
        watching: Any = watch._watcher
        with mock.patch.object(watching, "_look", lambda: None), mock.patch.object(watcher, "_LOOK", 3600.0):
            os.kill(watching._sentinel.pid, signal.SIGSTOP)
            try:
                yield
            finally:
                os.kill(watching._sentinel.pid, signal.SIGCONT)


def trainer(plan: str) -> Callable[[], None]:
    """A step of a model of its own."""
    torch.manual_seed(0)
    sharded = shardgraph.compile(JOBS["small"].model().train(), plan, loss_fn=F.cross_entropy)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-3)
    x, target = torch.randn(8, 32), torch.arange(8) % 10

    def step() -> None:
        F.cross_entropy(sharded(x), target).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(10):
        step()
    return step


def turn(step: Callable[[], None], steps: int) -> tuple[float, float]:
    """Seconds of wall and of processor time of a step, as the medians of groups of a few."""
    dist.barrier()
    walls, processor = [], []
    for _ in range(steps // STEPS):
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(STEPS):
            step()
        walls.append((time.perf_counter() - wall) / STEPS)
        processor.append((time.process_time() - cpu) / STEPS)
    return statistics.mean(walls), statistics.mean(processor)


def added_up(step: Callable[[], None], taken: float) -> dict[str, float]:
    """The processor time of the parts: of a step, which takes ``taken`` seconds, and of each second."""
    flight._ring.clear()
    step()
    notes, graphs = len(flight._ring), sum(number < 0 for number, _ in flight._ring)
    note = _seconds(lambda: flight.mark(2), 20000)
    begin = _seconds(watch.begin_graph, 20000) - note
    look = _seconds(watch._watcher._look if watch._watcher is not None else lambda: None, 200)
    outside = _sentinel_seconds()
    in_step = notes * note + graphs * begin
    return {
        "notes": notes,
        "note_s": note,
        "look_s": look,
        "sentinel_s_a_second": outside,
        "share": in_step / taken + look + outside,
    }


def _seconds(run: Callable[[], object], times: int) -> float:
    started = time.process_time()
    for _ in range(times):
        run()
    return (time.process_time() - started) / times


def _sentinel_seconds() -> float:
    """The processor time that the watching process takes in a second."""
    watching: Any = watch._watcher
    file = Path(f"/proc/{watching._sentinel.pid}/stat")

    def taken() -> int:
        return sum(map(int, file.read_text().rpartition(")")[2].split()[11:13]))

    before, started = taken(), time.monotonic()
    time.sleep(20)
    return (taken() - before) / os.sysconf("SC_CLK_TCK") / (time.monotonic() - started)


def measure(plan: str, rounds: int) -> dict[str, Any]:
    """What each rank does; the figures by kind."""
    torch.set_num_threads(1)
    watched = trainer(plan)
    with mock.patch.object(flight, "recorded", lambda gm: gm):
        plain = trainer(plan)
    started = time.perf_counter()
    for _ in range(20):
        watched()
    sent: list[Any] = [max(STEPS, int(1.0 / ((time.perf_counter() - started) / 20)) // STEPS * STEPS)]
    dist.broadcast_object_list(sent)
    times: dict[str, list[tuple[float, float]]] = {"watched": [], "plain": []}
    for number in range(rounds):
        order = ("watched", "plain") if number % 2 else ("plain", "watched")
        for name in order:
            with contextlib.nullcontext() if name == "watched" else without():
                times[name].append(turn(watched if name == "watched" else plain, sent[0]))
    figures: dict[str, Any] = {"steps_a_turn": sent[0]}
    for place, kind in enumerate(("wall", "processor")):
        with_it, without_it = ([each[place] for each in times[name]] for name in ("watched", "plain"))
        middle, *interval = ratio(with_it, without_it)
        figures[kind] = {
            "watched_s": statistics.median(with_it),
            "plain_s": statistics.median(without_it),
            "ratio": middle,
            "interval": interval,
        }
    figures["added_up"] = added_up(watched, figures["processor"]["plain_s"])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="latest", help="results/NAME.json is written")
    parser.add_argument("--plan", default="fsdp")
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    figures = shardgraph.launch(measure, 2, args=(options.plan, options.rounds), timeout=1800)[0]
    text = json.dumps({"plan": options.plan, "rounds": options.rounds, **figures}, indent=1)
    (Path(__file__).parent / "results" / f"{options.name}.json").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
