"""What ranks do in test_disk.py."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardgraph
from shardgraph import Offload
from shardgraph.runtime.host import is_in_file
from shardgraph.torch_api import local_tensor


def training(folder: Path) -> list[tuple[bool, bool, bool]]:
    """For an optimizer of shards and for one of whole tensors: whether weights and consolidated state are those of the
    same training with state in memory, and whether each tensor of the state is in a file."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 33), nn.Tanh(), nn.Linear(33, 4))
    found = []
    for make in (torch.optim.AdamW, lambda p: shardgraph.ShardedOptimizer(p, torch.optim.AdamW)):
        kept: list[tuple[nn.Module, Any, Any]] = []
        for given in (Offload(parameters=True, disk=str(folder), optimizer_state=True), Offload(parameters=True)):
            sharded = shardgraph.compile(copy.deepcopy(model), "fsdp", offload=given)
            optimizer = make(sharded.parameters())
            for _ in range(3):
                optimizer.zero_grad()
                sharded(torch.ones(2, 16)).square().mean().backward()
                optimizer.step()
            kept.append((sharded, optimizer, sharded.full_state_dict()))
        (_, optimizer, ours), (_, other, theirs) = kept
        inner, plain = (getattr(each, "optim", each).state.values() for each in (optimizer, other))
        tensors = [local_tensor(value) for state in inner for value in state.values() if value.numel() > 1]
        pairs = [(a["exp_avg_sq"], b["exp_avg_sq"]) for a, b in zip(inner, plain, strict=True)]
        found.append(
            (
                ours.keys() == theirs.keys() and all(torch.equal(ours[fqn], theirs[fqn]) for fqn in ours),
                all(torch.equal(local_tensor(a), local_tensor(b)) for a, b in pairs),
                bool(tensors) and all(map(is_in_file, tensors)),
            )
        )
    return found
