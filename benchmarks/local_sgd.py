"""Bytes that a rank sends per step, and the loss on text that no rank trains on: gradients averaged at every step, and
replicas that are averaged every 16 steps, as local SGD, SlowMo and DiLoCo; two gloo ranks.

``python benchmarks/local_sgd.py`` trains a small network to predict the next byte of Python's standard library.
"""

from __future__ import annotations

import argparse
import json
import os
import sysconfig
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import shardgraph

RANKS, STEPS, FREQUENCY, SEEDS = 2, 640, 16, 3
CONTEXT, ROWS, RATE = 16, 32, 3e-3
SHOWN = (80, 160, 320, 640)
NESTEROV = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
HOW = {
    "ddp": None,
    "local SGD": shardgraph.LocalSGD,
    "SlowMo": partial(shardgraph.SlowMo, momentum=0.2),
    "DiLoCo": partial(shardgraph.LocalSGD, outer=NESTEROV),
}


class Sent(TorchDispatchMode):
    """Counts the bytes that a rank sends in collectives, by the bandwidth-optimal algorithm of each."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.name():
            tensors = [each for each in tree_leaves(args) if isinstance(each, torch.Tensor)]
            whole = max(each.numel() * each.element_size() for each in tensors)
            rounds = 2 if "reduce" in func.name() and "scatter" not in func.name() else 1
            self.bytes += rounds * whole * (RANKS - 1) / RANKS
        return func(*args, **(kwargs or {}))


def text() -> torch.Tensor:
    """The modules of the standard library, one after the other."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()


def batch(source: torch.Tensor, rows: int, draws: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.randint(len(source) - CONTEXT - 1, (rows, 1), generator=draws)
    window = source[starts + torch.arange(CONTEXT + 1)]
    return window[:, :-1], window[:, -1]


def train(how: str, seed: int) -> tuple[float, list[float]]:
    """The bytes that this rank sends per step, and the losses after the steps of ``SHOWN``."""
    torch.manual_seed(seed)
    layers = nn.Embedding(256, 32), nn.Flatten(), nn.Linear(32 * CONTEXT, 256), nn.GELU(), nn.Linear(256, 256)
    sharded = shardgraph.compile(nn.Sequential(*layers), "ddp" if how == "ddp" else "local-sgd")
    optimizer: Any = torch.optim.AdamW(sharded.parameters(), lr=RATE)
    if (wrap := HOW[how]) is not None:
        optimizer = wrap(optimizer, sharded, frequency=FREQUENCY)
    whole = text()
    source, held_out = whole[: -len(whole) // 10], whole[-len(whole) // 10 :]
    test = batch(held_out, 4096, torch.Generator().manual_seed(0))
    draws, losses = torch.Generator().manual_seed(RANKS * seed + dist.get_rank()), []
    with Sent() as sent:
        for step in range(1, STEPS + 1):
            inputs, targets = batch(source, ROWS, draws)
            optimizer.zero_grad()
            nn.functional.cross_entropy(sharded(inputs), targets).backward()
            optimizer.step()
            if step in SHOWN:  # at the end of a round
                with torch.no_grad():
                    losses.append(nn.functional.cross_entropy(sharded(test[0]), test[1]).item())
    return sent.bytes / STEPS, losses


def all_ways() -> dict[str, list[tuple[float, list[float]]]]:
    torch.set_num_threads(1)
    return {how: [train(how, seed) for seed in range(SEEDS)] for how in HOW}


def main() -> None:
    """Train all, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="a file for the figures, as JSON")
    out = parser.parse_args().out
    figures = shardgraph.launch(all_ways, RANKS)[0]
    print(f"| | KiB per step | {' | '.join(f'step {step}' for step in SHOWN)} |")
    for how, results in figures.items():
        losses = [sum(each) / SEEDS for each in zip(*(losses for _, losses in results), strict=True)]
        print(f"| {how} | {results[0][0] / 1024:,.0f} | {' | '.join(f'{loss:.3f}' for loss in losses)} |")
    if out is not None:
        rows = [{"how": how, "results": results} for how, results in figures.items()]
        out.write_text(json.dumps({"cpus": os.cpu_count(), "torch": torch.__version__, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
