"""A training job that saves every other step, and is killed on the way; what its ranks run."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardgraph

SAMPLES = 11  # no multiple of 2 or 3


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The samples of all ranks in a step."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(SAMPLES, 6, generator=generator), torch.randn(SAMPLES, 3, generator=generator)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 3))


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def train(folder: str, steps: int, faults: dict[int, Any]) -> int:
    """Train to ``steps``; ``faults`` are, by the number of ranks, the step and rank at which one fails, and how."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    sharded = shardgraph.compile(model(), "fsdp", loss_fn=loss_of, loss_weight="tokens", random="samples")
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-2)
    done = shardgraph.load_checkpoint(folder, sharded, optimizer).step if shardgraph.checkpoints(folder) else 0
    for step in range(done + 1, steps + 1):
        at, which, how = faults.get(ranks, (0, 0, ""))
        if (step, rank) == (at, which):
            if how == "raise":
                raise ValueError("a bad sample")
            os.kill(os.getpid(), signal.SIGKILL)
        inputs, targets = batch_of(step)
        mine = sharded.rows_of(SAMPLES)
        loss = sharded.train_step(inputs[mine], target=targets[mine]) * len(targets[mine]) / SAMPLES
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss)
        if rank == 0:
            with (Path(folder).parent / "losses.jsonl").open("a") as file:
                file.write(json.dumps([step, ranks, loss.item()]) + "\n")
        if step % 2 == 0:
            shardgraph.save_checkpoint(folder, step, sharded, optimizer)
    return ranks
