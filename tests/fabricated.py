"""What each rank does in the tests of Fabric: one loop, under Fabric's own strategy or ours."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from shardgraph import ShardGraphError
from shardgraph.trainers.fabric import ShardGraphFabricStrategy
from tests.standing import environment


def fabric(plan: str, precision: str = "64-true") -> Fabric:
    strategy = "ddp" if plan == "theirs" else ShardGraphFabricStrategy(plan)
    made = Fabric(strategy=strategy, accelerator="cpu", devices=2, precision=precision)
    made.launch()
    return made


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(2 * step + int(os.environ["RANK"]))
    return torch.randn(4, 3, dtype=torch.float64, generator=generator)


def steps(made: Fabric, net: Any, optimizer: Any, numbers: range) -> list[float]:
    """Losses, each of which is averaged over ranks; gradients are added up over two batches, and clipped."""
    losses = []
    for step in numbers:
        with made.no_backward_sync(net, enabled=step % 2 == 0):
            loss = net(batch(step)).square().mean()
            made.backward(loss)
        if step % 2:
            made.clip_gradients(net, optimizer, max_norm=0.1)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(made.all_reduce(loss.detach(), reduce_op="mean")))
    return losses


def trained(plan: str) -> list[float]:
    """The losses of eight batches; every rank begins with weights of its own."""
    with environment():
        made = fabric(plan)
        net = model(seed=int(os.environ["RANK"]))
        net, optimizer = made.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
        return steps(made, net, optimizer, range(8))


def resumed(first: str, second: str, folder: str) -> tuple[list[float], int]:
    """The losses after a run under one plan is saved, and goes on under another; and a number that was saved."""
    with environment():
        file = Path(folder) / "state.ckpt"
        for plan, numbers in ((first, range(4)), (second, range(4, 8))):
            made = fabric(plan)
            net = model(seed=numbers[0])
            net, optimizer = made.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
            state = {"model": net, "optimizer": optimizer, "step": numbers[-1]}
            if numbers[0]:
                state["step"] = 0
                made.load(file, state)
            losses = steps(made, net, optimizer, numbers)
            if not numbers[0]:
                made.save(file, state)
        return losses, state["step"]


def refused(case: str) -> str:
    """The words with which something is refused."""
    with environment():
        try:
            made = fabric("tp" if case == "tp" else "fsdp", "bf16-true" if case == "precision" else "64-true")
            made.setup(model())
        except ShardGraphError as error:
            return str(error)
        return "nothing was refused"
