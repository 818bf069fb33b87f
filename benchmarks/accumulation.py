"""Steps of several calls, whose gradients are reduced in each call or once in the last, beside FSDP2 and DDP.

    python benchmarks/accumulation.py --job llama --calls 4

Every contender makes as many calls in a step as ``--calls`` says, with the models, batches and optimizer of
``train_step.py``. "once": calls before the last are under ``no_sync()``, of FSDP2 without
``set_requires_gradient_sync``; "each": every call reduces. Time and memory are measured as there.

With ``--network`` the ranks are in two "nodes" of this machine, joined by a limited link as in ``limited_network.py``,
which says what that needs, and time alone is measured.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.limited_network import SETTINGS, on_two_nodes
from benchmarks.train_step import Contender, measure, report, table
from benchmarks.training_jobs import JOBS

CONTENDERS = [
    f"{name} {reduced}"
    for name in ("FSDP2", "DDP", "shardgraph fsdp of 8", "shardgraph zero2 of 8", "shardgraph ddp of 8")
    for reduced in ("each", "once")
]


class Accumulating(Contender):
    """A contender whose step has several calls."""

    def __init__(self, name: str, options: argparse.Namespace, device: torch.device) -> None:
        base, _, self.reduced = name.rpartition(" ")
        super().__init__(base, options, device)
        self.name = name

    def step(self, number: int) -> None:
        started = time.perf_counter()
        for call in range(self.options.calls):
            reduces = self.reduced == "each" or call == self.options.calls - 1
            with self._reducing(reduces):
                loss = self.loss(number)
                (loss / self.options.calls).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.times.append(time.perf_counter() - started)
        self.losses.append(loss.item())

    def _reducing(self, reduces: bool) -> nullcontext:
        if hasattr(self.model, "set_requires_gradient_sync"):
            self.model.set_requires_gradient_sync(reduces)
            return nullcontext()
        return nullcontext() if reduces else self.model.no_sync()


def work(options: argparse.Namespace) -> None:
    """What each of the ranks in two nodes does."""
    dist.init_process_group("gloo")
    figures = measure(options, Accumulating)
    if dist.get_rank() == 0:
        table(figures)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="accumulation", help="results/NAME.json is written")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each rank")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=4)
    parser.add_argument("--job", default="llama", choices=JOBS)
    parser.add_argument("--contenders", nargs="+", default=CONTENDERS)
    parser.add_argument("--network", choices=[setting.name for setting in SETTINGS], help="between two nodes")
    options = parser.parse_args()
    options.optimizer = "adamw"
    if options.network and "RANK" in os.environ:
        return work(options)
    if options.network:
        setting = next(setting for setting in SETTINGS if setting.name == options.network)
        on_two_nodes(setting, sys.argv, options.nproc, timeout=3600.0)
        return
    report(options, Accumulating, options.contenders, {})


if __name__ == "__main__":
    main()
