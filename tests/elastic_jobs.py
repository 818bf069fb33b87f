"""A training job that saves every other step, and is killed on the way; what its ranks run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardgraph

SAMPLES = 11  # no multiple of 2 or 3
SAVED = int(os.environ.get("STEPS_BETWEEN_SAVES", "2"))


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The samples of all ranks in a step."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(SAMPLES, 6, generator=generator), torch.randn(SAMPLES, 3, generator=generator)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 3))


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def train(
    folder: str, steps: int, faults: dict[int, Any], plans: dict[int, str] | None = None, memory: str | None = None
) -> int:
    """Train to ``steps``; ``faults`` are, by the number of ranks, the step and rank at which one fails, and how.

    ``plans`` are those of so many ranks; with ``memory`` every step is saved there, too. If it has ``{machine}``, each
    rank is a machine with a folder of its own, which is lost when the rank is killed.
    """
    ranks, rank = dist.get_world_size(), dist.get_rank()
    plan, mesh = (plans or {}).get(ranks, "fsdp"), None
    if plan == "hsdp":
        mesh = {"dp_replicate": 2, "dp_shard": ranks // 2}
    sharded = shardgraph.compile(model(), plan, mesh=mesh, loss_fn=loss_of, loss_weight="tokens", random="samples")
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-2)
    own = None if memory is None else memory.format(machine=os.environ.get("MACHINE", rank))
    folders = [folder] if own is None else [folder, own]
    done = shardgraph.load_checkpoint(folders, sharded, optimizer, required=False).step
    for step in range(done + 1, steps + 1):
        time.sleep(float(os.environ.get("SECONDS_OF_A_STEP", "0")))
        at, which, how = faults.get(ranks, (0, 0, ""))
        if (step, rank) == (at, which):
            if how == "raise":
                raise ValueError("a bad sample")
            if own != memory:
                shutil.rmtree(own)
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
        if own is not None:
            shardgraph.save_checkpoint(own, step, sharded, optimizer, keep=1, copies=2)
        if step % SAVED == 0:
            shardgraph.save_checkpoint(folder, step, sharded, optimizer)
    return ranks


if __name__ == "__main__":  # under torchrun
    shardgraph.elastic(train, args=(sys.argv[1], int(sys.argv[2]), {}, None, *sys.argv[3:]))
