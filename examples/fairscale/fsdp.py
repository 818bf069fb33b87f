"""FairScale's example of FSDP: a model whose parameters, gradients and optimizer state are sharded, in a plain loop.

    python examples/fairscale/fsdp.py

Against a script for FairScale, the import names shardgraph.fairscale and the device is the CPU, with gloo for nccl.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from shardgraph.fairscale import FullyShardedDataParallel as FSDP

WORLD_SIZE, EPOCHS, ROWS = 2, 3, 16


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Four batches of all ranks: sums of inputs, to be learnt."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        data = torch.randn(ROWS, 12, generator=generator)
        yield data, data.view(ROWS, 3, 4).sum(2)


def train(rank: int, world_size: int, epochs: int) -> None:
    if world_size > 1:
        dist.init_process_group("gloo", rank=rank, world_size=world_size)
    model = make_model()
    sharded = FSDP(model) if world_size > 1 else model
    optimizer = torch.optim.Adam(sharded.parameters(), lr=1e-2)

    sharded.train()
    for epoch in range(epochs):
        for whole_data, whole_target in batches():
            data, target = whole_data.chunk(world_size)[rank], whole_target.chunk(world_size)[rank]
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(sharded(data), target)
            loss.backward()
            optimizer.step()
            show(epoch, loss, rank, world_size)
    if world_size > 1:
        dist.destroy_process_group()


def show(epoch: int, loss: torch.Tensor, rank: int, world_size: int) -> None:
    """Print the mean of the ranks' losses."""
    mean = loss.detach().clone()
    if world_size > 1:
        dist.all_reduce(mean)
    if rank == 0:
        print(f"epoch {epoch} loss {mean.item() / world_size:.6f}", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29518")
    mp.spawn(train, args=(WORLD_SIZE, EPOCHS), nprocs=WORLD_SIZE, join=True)
