"""What ranks do in tests of backends: the same steps with one backend and the other."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

import shardgraph
from shardgraph import ShardedModule
from tests.ranks import difference


class Net(nn.Module):
    """Linear layers whose rows do not divide by two, normalisations, and dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 7), nn.Linear(7, 3)
        self.norm, self.batch_norm, self.dropout = nn.LayerNorm(7), nn.BatchNorm1d(7), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.dropout(nn.functional.gelu(self.norm(self.first(x))))
        result: torch.Tensor = self.second(self.batch_norm(hidden))
        return result


def trained(backend: str, plan: Any, dropout: float = 0.0, **options: Any) -> tuple[ShardedModule, list[float]]:
    """A module after three steps of AdamW, and their losses."""
    torch.manual_seed(0)
    model = shardgraph.compile(Net(dropout).double(), plan, backend=backend, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x = torch.randn(3, 8, 6).double()
    torch.manual_seed(1)
    losses = []
    for batch in x:
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


def error(plan: str, dropout: float = 0.0, options: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """The largest difference of a loss, and of a weight, between the backends, and inductor's warnings."""
    eager, expected = trained("eager", plan, dropout, **options)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        compiled, found = trained("inductor", plan, dropout, **options)
    return {
        "losses": max(abs(ours - theirs) for ours, theirs in zip(found, expected, strict=True)),
        "weights": difference(compiled, _whole(eager), gradients=False),
        "warnings": [str(each.message) for each in seen if "backend=" in str(each.message)],
    }


def _whole(module: ShardedModule) -> nn.Module:
    """An unsharded copy of a module, on each rank."""
    whole = Net().double()
    state = {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in module.state_dict().items()
    }
    whole.load_state_dict(state)
    return whole
