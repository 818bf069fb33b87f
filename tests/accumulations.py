"""What runs on the ranks for :mod:`tests.test_accumulation`."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

import shardgraph
from shardgraph import Plan
from shardgraph.plans.batch import Batch
from shardgraph.report.analysis import analyze_program
from tests import ranks
from tests.machines import toy_cluster, toy_device
from tests.replanned import net

CALLS = 4
EACH = 8  # samples of a call


def plan_of(name: str, reduce: str) -> Plan:
    """A plan whose ranks accumulate."""
    size = dist.get_world_size()
    return replace(shardgraph.preset(name, {"dp": size}), batch=Batch(size * CALLS * EACH, CALLS, reduce))


def _accumulate(sharded: shardgraph.ShardedModule, x: torch.Tensor, target: torch.Tensor) -> None:
    """The calls of a step of this rank."""
    parts = zip(x.chunk(CALLS), target.chunk(CALLS), strict=True)
    for call, (inputs, expected) in enumerate(parts):
        sharded.set_requires_gradient_sync(sharded.plan.reduces(call))
        loss = nn.functional.mse_loss(sharded(inputs), expected) / CALLS
        loss.backward()


def losses(name: str, reduce: str) -> tuple[list[float], list[float]]:
    """The loss of all samples after each of three steps, and those of one device."""
    rank, size = dist.get_rank(), dist.get_world_size()
    original, sharded = net(), shardgraph.compile(net(), plan_of(name, reduce))
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (original, sharded)]
    found: tuple[list[float], list[float]] = [], []
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x, target = (torch.randn(size * CALLS * EACH, 32, 8, generator=generator) for _ in range(2))
        nn.functional.mse_loss(original(x), target).backward()
        _accumulate(sharded, x.chunk(size)[rank], target.chunk(size)[rank])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for losses, model in zip(found, (sharded, original), strict=True):
                losses.append(nn.functional.mse_loss(model(x), target).item())
    return found


def peaks(name: str, reduce: str) -> tuple[int, int]:
    """``(predicted, measured)`` peak bytes of a step."""
    model = nn.Sequential(*(nn.Linear(96, 96) for _ in range(8)))
    sharded = shardgraph.compile(model, plan_of(name, reduce), loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(sharded.parameters())
    x, target = torch.randn(EACH, 96), torch.randn(EACH, 96)

    def step() -> None:
        for call in range(CALLS):
            sharded.set_requires_gradient_sync(sharded.plan.reduces(call))
            sharded.train_step(x, target=target)
        optimizer.step()
        optimizer.zero_grad()

    step()
    states = [value for state in optimizer.state.values() for value in state.values()]
    measured = min(ranks._measured(step, [*sharded.parameters(), *states, x, target]) for _ in range(3))
    here = replace(toy_cluster(1, dist.get_world_size()), device=replace(toy_device(), name="cpu"))
    return analyze_program(sharded.program, here).peak_memory, measured
