"""FairScale's example of AdaScale: a learning rate for a batch that is as many times larger as there are ranks, and a
schedule that follows the gain.

    python examples/fairscale/adascale.py

Against the script for FairScale, the import names shardgraph.fairscale, ``shardgraph.compile(model, "ddp")`` stands for
``DistributedDataParallel(model)``, and the device is the CPU, with gloo for nccl.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR

import shardgraph
from shardgraph.fairscale import AdaScale

WORLD_SIZE, MAX_EPOCH, BATCHES, ROWS, RATE = 2, 4, 8, 8, 0.05
LOSS = nn.MSELoss()


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


def decay(epoch: int) -> float:
    return 0.7**epoch


def dataset(world_size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The batches of all ranks: noisy sums of inputs."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(BATCHES):
        data = torch.randn(world_size * ROWS, 6, generator=generator)
        noise = torch.randn(world_size * ROWS, 1, generator=generator)
        found.append((data, data.sum(1, keepdim=True) + noise))
    return found


def train(rank: int, world_size: int) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    model = shardgraph.compile(make_model(), "ddp")
    optim = AdaScale(SGD(model.parameters(), lr=RATE))
    scheduler = LambdaLR(optim, lr_lambda=decay)

    last_epoch, step, done = 0, 0.0, False
    while not done:
        for whole_data, whole_target in dataset(world_size):
            data, target = whole_data.chunk(world_size)[rank], whole_target.chunk(world_size)[rank]
            optim.zero_grad()
            loss = LOSS(model(data), target)
            loss.backward()
            gain = optim.gain()
            step += gain  # as many steps of one rank's batch
            optim.step()
            show(loss, gain)
            epoch = int(step // BATCHES)
            if epoch != last_epoch:
                scheduler.step()
                last_epoch = epoch
            done = epoch >= MAX_EPOCH
            if done:
                break
    dist.destroy_process_group()


def show(loss: torch.Tensor, gain: float) -> None:
    """Print the mean of the ranks' losses, and the gain."""
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    if dist.get_rank() == 0:
        print(f"loss {mean.item() / dist.get_world_size():.6f} gain {gain:.6f}", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29518")
    mp.spawn(train, args=(WORLD_SIZE,), nprocs=WORLD_SIZE, join=True)
