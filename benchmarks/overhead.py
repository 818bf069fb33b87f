"""What a step of the network of small parameters takes beside eager PyTorch on one rank, and where it goes.

    python benchmarks/overhead.py --name overhead-small

``single`` runs the same kernels as the eager model, so the rest of its step is overhead. The two take turns; medians of
processor time are compared, which other work on the machine changes little, and of wall time. A profile counts
function calls per step, and has the functions with the most time of their own.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))

import shardgraph
from benchmarks.training_jobs import JOBS


class Contender:
    """The eager model, or the compiled one, stepped in a plain loop or as a whole step."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        model = JOBS["small"].model().train()
        self.name, self.times, self.walls = name, list[float](), list[float]()
        self.model: Any = model if name == "eager" else shardgraph.compile(model, "single", loss_fn=F.cross_entropy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self, x: torch.Tensor) -> None:
        target = torch.arange(len(x)) % 10
        if self.name == "single by step":
            self.model.step(x, target=target, optimizer=self.optimizer)
            return
        F.cross_entropy(self.model(x), target).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def timed(self, x: torch.Tensor) -> None:
        started, wall = time.process_time(), time.perf_counter()
        self.step(x)
        self.times.append(time.process_time() - started)
        self.walls.append(time.perf_counter() - wall)

    def profile(self, x: torch.Tensor, steps: int = 20) -> tuple[float, list[str]]:
        """Function calls per step, and the functions with the most time of their own."""
        profiler = cProfile.Profile()
        profiler.enable()
        for _ in range(steps):
            self.step(x)
        profiler.disable()
        stats: Any = pstats.Stats(profiler)
        rows = sorted(stats.stats.items(), key=lambda item: -item[1][2])[:12]
        lines = [
            f"{own / steps * 1e6:8.0f} us {calls / steps:7.1f} calls  {Path(file).name}:{line} {name}"
            for (file, line, name), (_, calls, own, _, _) in rows
        ]
        return stats.total_calls / steps, lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="latest", help="results/NAME.json is written")
    parser.add_argument("--rounds", type=int, default=100)
    options = parser.parse_args()
    torch.set_num_threads(1)
    contenders = [Contender(name) for name in ("eager", "single", "single by step")]
    x = torch.randn(8, 32)
    for _ in range(5):
        for contender in contenders:
            contender.step(x)
    for _ in range(options.rounds):
        for contender in contenders:
            contender.timed(x)
    base, figures = contenders[0], {}
    for contender in contenders:
        calls, lines = contender.profile(x)
        figures[contender.name] = {
            "processor_ms": statistics.median(contender.times) * 1e3,
            "wall_ms": statistics.median(contender.walls) * 1e3,
            "of_eager": statistics.median(a / b for a, b in zip(contender.times, base.times, strict=True)),
            "calls": calls,
            "profile": lines,
        }
        f = figures[contender.name]
        print(
            f"{contender.name:<16}{f['processor_ms']:8.2f} ms of processor{f['wall_ms']:8.2f} ms"
            f"{f['of_eager']:8.2f} of eager{calls:8.0f} calls"
        )
        print("\n".join(f"    {line}" for line in lines))
    path = Path(__file__).parent / "results" / f"{options.name}.json"
    configuration = vars(options) | {"torch": torch.__version__, "command": " ".join(["python", *sys.argv])}
    path.write_text(json.dumps({"configuration": configuration, "figures": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
