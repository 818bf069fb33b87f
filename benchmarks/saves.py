"""What a checkpoint every 10 steps costs: a Llama of 50 million parameters with AdamW, on 2 gloo ranks.

    python benchmarks/saves.py --rounds 8 --path /data/checkpoints

Blocks of steps with a checkpoint in the background at the start of each, in the foreground, and without one take turns,
so that a machine whose speed drifts is fair to all; a block ends when its checkpoint is whole, or its steps are done.
Medians are reported, of blocks and of the ratios of a round, of time and of processor seconds of rank 0: on a machine
that is busy with other things the latter say more. The last checkpoint is verified, and loaded.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

import shardgraph
from benchmarks.training_jobs import JOBS

WAYS = ("background", "foreground")


class Training:
    """A job that takes steps, on this rank."""

    def __init__(self, job: str) -> None:
        torch.manual_seed(0)
        self.job, self.number = JOBS[job], 0
        self.model = shardgraph.compile(self.job.model().train(), "fsdp", loss_fn=self.job.loss_fn)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.number += 1
            generator = torch.Generator().manual_seed(self.number)
            ids = self.job.batch(generator, dist.get_world_size())[dist.get_rank()]
            self.model.step(**self.job.whole(ids), optimizer=self.optimizer)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """What each rank does; rank 0's figures are reported."""
    torch.set_num_threads(options.threads)
    training = Training(options.job)
    training.steps(3)
    ways = ("without", *options.ways)
    blocks: dict[str, list[float]] = {way: [] for way in ways}
    calls: dict[str, list[float]] = {way: [] for way in ways}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(options.rounds + 1):  # the first is not counted
        for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
            dist.barrier()
            start, busy = time.perf_counter(), time.process_time()
            if way != "without":
                shardgraph.save_checkpoint(
                    options.path, training.number, training.model, training.optimizer, background=way == "background"
                )
            called = time.perf_counter() - start
            training.steps(options.every)
            shardgraph.wait_for_saves()
            dist.barrier()
            if number:
                blocks[way].append(time.perf_counter() - start)
                calls[way].append(called)
                seconds[way].append(time.process_time() - busy)
    size = sum(file.stat().st_size for file in shardgraph.checkpoints(options.path)[-1][1].iterdir())
    start = time.perf_counter()
    shardgraph.load_checkpoint(options.path, training.model, training.optimizer)

    def more(of: dict[str, list[float]]) -> dict[str, float]:
        pairs = {way: zip(of[way], of["without"], strict=True) for way in ways[1:]}
        return {way: statistics.median(a / b - 1 for a, b in each) for way, each in pairs.items()}

    return {
        "parameters": sum(each.numel() for each in training.model.parameters()),
        "checkpoint_bytes": size,
        "step_s": statistics.median(blocks["without"]) / options.every,
        "call_s": {way: statistics.median(calls[way]) for way in ways[1:]},
        "time": more(blocks),
        "processor_time": more(seconds),
        "load_s": time.perf_counter() - start,
        "blocks_s": blocks,
        "processor_s": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", default="llama-50m", choices=JOBS)
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--path", default="", help="where checkpoints are written [default: a temporary folder]")
    parser.add_argument("--name", default="", help="write figures to benchmarks/results/NAME.json too")
    options = parser.parse_args()
    made = "" if options.path else tempfile.mkdtemp(prefix="saves-")
    options.path = options.path or made
    try:
        found = shardgraph.launch(measure, 2, args=(options,), timeout=7200)[0]
    finally:
        shutil.rmtree(made, ignore_errors=True)
    found["cores"], found["load"] = os.cpu_count(), os.getloadavg()
    print(f"{found['parameters'] / 1e6:.1f} M parameters, a step of {found['step_s']:.3f} s without checkpoints")
    print(f"a checkpoint has {found['checkpoint_bytes'] / 1e6:.0f} MB; loading it takes {found['load_s']:.2f} s")
    for way, cost in found["time"].items():
        busy = 100 * found["processor_time"][way]
        called = f"the call takes {found['call_s'][way]:.3f} s"
        print(f"{way}: {called}, {options.every} steps {100 * cost:+.1f}% of time, {busy:+.1f}% of processor time")
    if options.name:
        Path(__file__).with_name("results").joinpath(f"{options.name}.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
