"""What fails in FairScale and has no test beside the feature that it belongs to; docs/fairscale.md lists them all."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import shardgraph
from shardgraph import Pipeline


class Doubled(nn.Module):
    """Multiplies between layers by a number, at which ``auto_shard`` raises IndexError."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) * 2.0
        return x


class AroundAll(Doubled):
    """Adds its input to its output, for which ``auto_shard`` makes one shard of three."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


@pytest.mark.parametrize("model", [Doubled, AroundAll])
def test_a_model_of_three_layers_has_three_stages_whatever_stands_around_them(model):
    given = {"plan": "pp", "mesh": {"pp": 3}, "pipeline": Pipeline(4)}
    x = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    report = shardgraph.verify(
        model().double(), (x,), **given, loss_fn=lambda output: output.square().mean(), fp64=True
    )
    assert report.ok and report.proof.ok, str(report)
    assert len(shardgraph.analyze(model(), (x.float(),), cluster="A100", **given).plan.pipeline.stages) == 2
