"""What runs on the ranks for :mod:`tests.test_global_batch`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardgraph
from shardgraph import Plan
from tests.machines import toy_cluster
from tests.replanned import net

SAMPLES = 16  # of a step


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch of a step."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(SAMPLES, 32, 8, generator=generator), torch.randn(SAMPLES, 32, 8, generator=generator)


def _optimizer(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-2)


def on_one_device() -> list[float]:
    """The loss of each step, of all samples."""
    model, losses = net(), []
    optimizer = _optimizer(model)
    for step in range(3):
        x, target = batch(step)
        loss = nn.functional.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def divided(mesh: dict[str, int] | None, memory: int, tune: float | None) -> tuple[Plan, list[float]]:
    """The plan that is found for the batch, with example inputs of two samples that differ between ranks; and the
    losses of steps that are divided as it says."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    x = torch.full((2, 32, 8), 1.0 + rank)
    options: Any = {"cluster": toy_cluster(1, 4, memory=memory), "loss_fn": nn.functional.mse_loss, "tune": tune}
    options |= {"example_inputs": (x,), "example_kwargs": {"target": x}, "mesh": mesh}
    sharded = shardgraph.compile(net(), "auto", global_batch=SAMPLES, **options)
    plan, losses = sharded.plan, []
    optimizer = _optimizer(sharded)
    for step in range(3):
        inputs, targets = (part.chunk(plan.data_size)[plan.data_rank(rank)].chunk(plan.calls) for part in batch(step))
        total = torch.zeros(())
        for call, (each, target) in enumerate(zip(inputs, targets, strict=True)):
            assert len(each) == plan.samples_per_call
            sharded.set_requires_gradient_sync(plan.reduces(call))
            total += _loss(sharded, each, target, plan.calls)
        optimizer.step()
        optimizer.zero_grad()
        if ranks > 1:  # ranks that share a batch have its loss
            dist.all_reduce(total)
        losses.append(total.item() / ranks)
    return plan, losses


def _loss(sharded: shardgraph.ShardedModule, x: torch.Tensor, target: torch.Tensor, calls: int) -> torch.Tensor:
    """The part of a step's loss that is of one call, whose gradients are added to those of others."""
    if sharded.plan.pipeline is not None:
        return sharded.train_step(x, target=target).detach()
    loss = nn.functional.mse_loss(sharded(x), target) / calls
    loss.backward()
    return loss.detach()


class _Centred(nn.Module):
    """Subtracts the mean of the batch, which microbatches do not have."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)


def why_no_stages() -> str:
    """Why no plan is found on a mesh of stages for a model that mixes the rows of its batch."""
    x = torch.ones(2, 8)
    call: Any = {"example_inputs": (x,), "example_kwargs": {"target": x}, "loss_fn": nn.functional.mse_loss}
    model = nn.Sequential(nn.Linear(8, 8), _Centred(), nn.Linear(8, 8))
    try:
        shardgraph.compile(model, "auto", global_batch=SAMPLES, mesh={"pp": 2}, cluster=toy_cluster(1, 4), **call)
    except shardgraph.PlanError as error:
        return str(error)
    return ""
