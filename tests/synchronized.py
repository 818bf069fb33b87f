"""What ranks do in test_synchronized_batch_norm.py."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardgraph
from shardgraph.plans.presets import preset

Shape = tuple[int, ...]


def make_model(shape: Shape, kind: str = "affine") -> nn.Module:
    """Layers with two batch norms and no bias before them, for inputs of a ``shape`` without rows."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"affine": kind != "bare", "track_running_stats": kind != "bare"}
    if len(shape) == 1:
        layers = [nn.Linear(shape[0], 6, bias=False), nn.BatchNorm1d(6, **options), nn.Tanh()]
        layers += [nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6)]
    else:
        layers = [nn.Conv2d(shape[0], 6, 3, bias=False), nn.BatchNorm2d(6, **options), nn.ReLU()]
        layers += [nn.Conv2d(6, 4, 1, bias=False), nn.BatchNorm2d(4, momentum=0.3)]
    return nn.Sequential(*layers).double()


def loss(output: torch.Tensor) -> torch.Tensor:
    return (output * torch.linspace(-1, 2, output[0].numel()).view(output[0].shape).to(output.dtype)).sin().mean()


def training(plan: str, mesh: dict[str, int], shape: Shape, options: dict[str, Any], kind: str) -> dict[str, float]:
    """How far three steps are from those of the model with all rows on one rank: losses, inputs' gradients, state."""
    original = make_model(shape, kind)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(original))
    given = preset(plan, mesh)
    example = (torch.zeros(4, *shape).double().requires_grad_(),)
    sharded = shardgraph.compile(model, plan, mesh=mesh, example_inputs=example, **options)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (sharded, original)]
    parts, number = given.data_size, given.data_rank(dist.get_rank())
    worst = {"loss": 0.0, "input": 0.0}
    for step in range(3):
        torch.manual_seed(step)
        x = torch.randn(4 * parts, *shape).double() * torch.arange(1.0, 4 * parts + 1).view(-1, *[1] * len(shape))
        whole, part = x.requires_grad_(), x.detach().chunk(parts)[number].clone().requires_grad_()
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected, found = loss(original(whole)), loss(sharded(part))
        expected.backward()
        found.backward()
        total = found.detach().clone()
        dist.all_reduce(total)
        worst["loss"] = max(worst["loss"], abs(total.item() / dist.get_world_size() - expected.item()))
        due = whole.grad.chunk(parts)[number] * parts
        worst["input"] = max(worst["input"], (part.grad - due).abs().max().item())
        for optimizer in optimizers:
            optimizer.step()
    state, due_state = sharded.full_state_dict(), original.state_dict()
    assert dist.get_rank() or state.keys() == due_state.keys()
    worst["state"] = max([(value - due_state[fqn]).abs().max().item() for fqn, value in state.items()], default=0.0)
    return worst
