"""FairScale's example of nested FSDP: one layer is wrapped, inside another the large ones are, then the whole model.

    python examples/fairscale/auto_wrap.py

Against a script for FairScale, the import names shardgraph.fairscale and the device is the CPU, with gloo for nccl.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from shardgraph.fairscale import FSDP, auto_wrap, enable_wrap, wrap

WORLD_SIZE, STEPS, ROWS = 2, 6, 8


class Model(nn.Module):
    """Outside of ``enable_wrap``, as in one process, ``wrap`` and ``auto_wrap`` leave the layers as they are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = wrap(nn.Linear(8, 16))
        self.second = auto_wrap(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), min_num_params=500
        )
        self.head = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(x)))


def train(rank: int, world_size: int, steps: int) -> None:
    if world_size > 1:
        dist.init_process_group("gloo", rank=rank, world_size=world_size)
        with enable_wrap(wrapper_cls=FSDP, flatten_parameters=True):
            model = Model()
        assert isinstance(model.first, FSDP)
        model = FSDP(model)
    else:
        model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    generator = torch.Generator().manual_seed(1)
    batch = torch.randn(ROWS, 5, 8, generator=generator)
    for step in range(steps):
        data = batch.chunk(world_size)[rank]
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(data), data)
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        if world_size > 1:
            dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} loss {mean.item() / world_size:.6f}", flush=True)
    if world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29519")
    mp.spawn(train, args=(WORLD_SIZE, STEPS), nprocs=WORLD_SIZE, join=True)
