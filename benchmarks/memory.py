"""Predicted and measured peak memory of a training step and of a forward, side by side on every rank.

    python benchmarks/memory.py --name memory-2-ranks

Every model kind of the parity tests under every plan, on real ranks: the highest bytes of live tensors during forward,
backward and AdamW's update, counted operation by operation (``shardgraph.runtime.measure.PeakMemory``), beside what
``shardgraph.passes.analysis.liveness`` says before anything runs. Buffers that gloo and kernels make for themselves are
no tensors of the program: neither figure has them.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import shardgraph
from tests import ranks, zoo

PLANS = ["ddp", "zero1", "zero2", "fsdp", "fsdp kept"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="latest", help="results/NAME.json is written")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4, help="rows of each rank")
    parser.add_argument("--models", nargs="+", default=list(zoo.ZOO), choices=list(zoo.ZOO))
    parser.add_argument("--plans", nargs="+", default=PLANS, choices=PLANS)
    options = parser.parse_args()
    arguments = (options.models, options.plans, options.batch)
    found = shardgraph.launch(ranks.peak_memory, options.nproc, args=arguments, timeout=3000)
    worst = 0.0
    print(f"{'model, plan':<28}{'rank':>5}{'':>9}{'predicted':>12}{'measured':>12}{'error':>8}")
    for case in found[0]:
        for rank, figures in enumerate(found):
            for what, (predicted, measured) in figures[case].items():
                error = predicted / measured - 1
                worst = max(worst, abs(error))
                print(f"{case:<28}{rank:>5}{what:>9}{predicted:>12,}{measured:>12,}{error:>8.2%}")
    print(f"largest error {worst:.2%}")
    path = Path(__file__).parent / "results" / f"{options.name}.json"
    configuration = vars(options) | {"torch": torch.__version__}
    path.write_text(json.dumps({"configuration": configuration, "ranks": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
