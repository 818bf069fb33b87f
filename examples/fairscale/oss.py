"""FairScale's example of OSS with ShardedDDP: each rank keeps the optimizer's state of some parameters, and updates
them for all.

    python examples/fairscale/oss.py

Against the script for FairScale, the imports name shardgraph.fairscale and the device is the CPU, with gloo for nccl.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from shardgraph.fairscale import OSS
from shardgraph.fairscale import ShardedDataParallel as ShardedDDP

WORLD_SIZE, EPOCHS, ROWS = 2, 5, 16
BASE_OPTIMIZER, ARGUMENTS = torch.optim.Adam, {"lr": 3e-2}
LOSS = nn.MSELoss()


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
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    model = make_model()
    optimizer = OSS(params=model.parameters(), optim=BASE_OPTIMIZER, **ARGUMENTS)
    model = ShardedDDP(model, optimizer)

    model.train()
    for epoch in range(epochs):
        for whole_data, whole_target in batches():
            data, target = whole_data.chunk(world_size)[rank], whole_target.chunk(world_size)[rank]
            model.zero_grad()
            loss = LOSS(model(data), target)
            loss.backward()
            optimizer.step()
            show(epoch, loss)
    held = sum(value.numel() for state in optimizer.state.values() for value in state.values())
    dist.all_reduce(total := torch.tensor(held))
    if rank == 0:
        print(f"rank 0 holds {held} of {total} numbers of optimizer state", flush=True)
    dist.destroy_process_group()


def show(epoch: int, loss: torch.Tensor) -> None:
    """Print the mean of the ranks' losses."""
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    if dist.get_rank() == 0:
        print(f"epoch {epoch} loss {mean.item() / dist.get_world_size():.6f}", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29517")
    mp.spawn(train, args=(WORLD_SIZE, EPOCHS), nprocs=WORLD_SIZE, join=True)
