"""What ranks do in test_layerwise_grad_scaler.py."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

import shardgraph
from shardgraph import Pipeline
from shardgraph.torch_api import local_tensor

FACTORS = {"0": 2.0**17, "[24]": 4.0}


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def training(plan: str) -> tuple[float, dict[str, float], float]:
    """The largest difference to plain training after five steps, and what the factors and the loss scale are then."""
    model, x, target = make_model(), torch.ones(4, 4).double(), torch.zeros(4, 2).double()
    reference = copy.deepcopy(model)
    scaler = shardgraph.LayerwiseGradScaler(model, FACTORS, device="cpu", init_scale=16.0, growth_interval=2)
    pipeline: dict[str, Any] = {"pipeline": Pipeline(2)} if plan == "pp" else {}
    sharded = shardgraph.compile(model, plan, loss_fn=mse_loss, example_inputs=(x,), **pipeline)
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.1) for each in (sharded, reference)]
    for _ in range(5):
        sharded.train_step(x, target=target, scaler=scaler)
        scaler.step(optimizers[0])
        scaler.update()
        mse_loss(reference(x), target).backward()
        optimizers[1].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    expected = reference.state_dict()
    state = sharded.full_state_dict()  # on rank 0
    assert dist.get_rank() or state.keys() == expected.keys()
    return (
        max(((value - expected[fqn]).abs().max().item() for fqn, value in state.items()), default=0.0),
        scaler.factors(),
        scaler.get_scale(),
    )


def overflow(layer: int | None) -> tuple[bool, dict[str, float], float]:
    """Whether the step was skipped where one rank's gradient of a layer overflows, with the factors and the scale."""
    model = make_model()
    scaler = shardgraph.LayerwiseGradScaler(model, {"0": 8.0, "2": 8.0}, device="cpu", init_scale=4.0)
    sharded = shardgraph.compile(model, "fsdp")
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    before = [local_tensor(each).clone() for each in sharded.parameters()]
    scaler.scale(sharded(torch.ones(4, 4).double()).sum()).backward()
    if layer is not None and dist.get_rank() == 1:
        local_tensor(sharded.get_parameter(f"{layer}.weight").grad).fill_(torch.inf)
    scaler.step(optimizer)
    scaler.update()
    same = [torch.equal(a, local_tensor(b)) for a, b in zip(before, sharded.parameters(), strict=True)]
    return all(same), scaler.factors(), scaler.get_scale()


def fairscale_steps() -> tuple[float, dict[str, float]]:
    """FairScale's calls around FSDP: the difference to plain training, and the factors after it."""
    from shardgraph.fairscale import FSDP, LayerwiseGradientScaler

    model, x = make_model(), torch.ones(4, 4).double()
    reference = copy.deepcopy(model)
    scaler = LayerwiseGradientScaler(model, {"0": 2.0**10, "4": 0.5}, growth_interval=3)
    wrapped = FSDP(model)
    wrapped(x)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (wrapped, reference)]
    for _ in range(3):
        scaler.scale()
        for each, optimizer in zip((wrapped, reference), optimizers, strict=True):
            optimizer.zero_grad()
            each(x).square().mean().backward()
        scaler.unscale()
        scaler.step(optimizers[0])
        optimizers[1].step()
    state, expected = wrapped.state_dict(), reference.state_dict()
    return max((state[fqn] - value).abs().max().item() for fqn, value in expected.items()), scaler.factors()
