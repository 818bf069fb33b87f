"""Libraries that note something in their first call are as usual inside of a model, also if that call is compiled."""

from __future__ import annotations

import einops
import pytest
import torch
from einops.layers.torch import Rearrange
from torch import nn

import shardgraph


class Heads(nn.Module):
    """Rearranges activations, repeats a parameter, and has a layer of einops."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Sequential(nn.Linear(8, 8), Rearrange("b (h d) -> b h d", h=2))
        self.token = nn.Parameter(torch.randn(1, 1, 4))
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        token = einops.repeat(self.token, "1 1 d -> b 1 d", b=x.shape[0])
        heads = einops.pack([token, self.project(x)], "b * d")[0]
        weights = einops.einsum(heads, heads, "b h d, b k d -> b h k").softmax(-1)
        return einops.reduce(self.head(weights @ heads), "b h d -> b d", "mean").logsumexp(-1).mean()


@pytest.fixture
def nothing_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("einops._backends._type2backend", {})


@pytest.mark.usefixtures("nothing_noted")
@pytest.mark.parametrize("plan", ["fsdp", "tp"])
def test_a_model_that_calls_einops_is_that_of_plain_torch(plan: str) -> None:
    report = shardgraph.verify(Heads(), (torch.randn(4, 8),), plan, world_size=2, steps=2)
    assert report.ok, report
