"""What runs on each rank of the tests of averaged weights."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import shardgraph
from shardgraph import AveragedWeights, Pipeline
from tests.ranks import whole


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def step(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    batch = torch.linspace(-1, 1, 20, dtype=torch.float64).reshape(4, 5)
    module(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def trained(plan: str, mesh: dict[str, int], **options: Any) -> tuple[Any, AveragedWeights, nn.Module]:
    """``(sharded, its average, torch's average of the unsharded model)`` after five steps."""
    original = model()
    theirs = AveragedModel(original, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    theirs.update_parameters(original)  # takes the values as they are
    batch = torch.zeros(4, 5, dtype=torch.float64)
    pipeline = Pipeline(2, stages=("2",)) if plan == "pp" else None
    sharded = shardgraph.compile(copy.deepcopy(original), plan, mesh=mesh, pipeline=pipeline, example_inputs=(batch,))
    average = AveragedWeights(sharded, 0.8, **options)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.05) for each in (sharded, original)]
    for _ in range(5):
        step(sharded, optimizers[0])
        step(original, optimizers[1])
        average.update()
        theirs.update_parameters(original)
    return sharded, average, theirs.module


def error(sharded: Any, expected: nn.Module) -> float:
    theirs = dict(expected.named_parameters())
    return max((whole(p.detach()) - theirs[fqn]).abs().max().item() for fqn, p in sharded.named_parameters())


def against_torch(plan: str, mesh: dict[str, int]) -> tuple[float, bool]:
    """How far averages are from torch's, and whether the weights are as before after they were applied."""
    sharded, average, expected = trained(plan, mesh)
    before = [whole(parameter.detach()).clone() for parameter in sharded.parameters()]
    with average.applied():
        difference = error(sharded, expected)
    after = [whole(parameter.detach()) for parameter in sharded.parameters()]
    return difference, all(map(torch.equal, before, after))


def loaded_under_another_plan() -> tuple[float, int]:
    """How far averages are from torch's once a module of another plan has loaded them, and their updates."""
    _, average, expected = trained("fsdp", {"dp": 2})
    other = shardgraph.compile(model(), "ddp", mesh={"dp": 2})
    again = AveragedWeights(other)
    state = average.state_dict()
    averages = {fqn: each.full_tensor() for fqn, each in state["averages"].items()}
    again.load_state_dict({**state, "averages": averages})
    with again.applied():
        return error(other, expected), again.updates
