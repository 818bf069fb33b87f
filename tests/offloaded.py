"""What ranks do in test_host_update.py."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import shardgraph


def updates() -> tuple[float, list[str]]:
    """How far weights are from those of the same steps on the device, and the fused kernels that made them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 33), nn.Tanh(), nn.Linear(33, 4))
    seen: list[str] = []
    weights = []
    for offload in (None, "parameters"):
        sharded = shardgraph.compile(copy.deepcopy(model), "fsdp", offload=offload)
        optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-2)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            for _ in range(3):
                sharded(torch.ones(2, 16)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        seen = sorted({event.name for event in profiler.events() if event.name.startswith("aten::_fused_adam")})
        weights.append(sharded.full_state_dict())
    one, other = weights
    return max((float((one[name] - other[name]).abs().max()) for name in one), default=0.0), seen
