"""FairScale's example of Pipe: the layers of a sequence in stages on two ranks, and a batch in eight microbatches.

    python examples/fairscale/pipe.py

Against the script for FairScale, the import names shardgraph.fairscale, mp.spawn starts a process for each stage, and
the devices are CPUs.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from shardgraph.fairscale import Pipe

STEPS, ROWS = 5, 16


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 10), nn.Linear(10, 5))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(ROWS, 10, generator=generator)
    return data, data.view(ROWS, 5, 2).sum(2)


def train(rank: int, world_size: int) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    model = Pipe(make_model(), balance=[2, 2], devices=["cpu", "cpu"], chunks=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data, target = batch()
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(data), target)
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"loss {loss.item():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29518")
    mp.spawn(train, args=(2,), nprocs=2, join=True)
