"""Values whose strides are others than a fake tensor says."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardgraph


class Strided(nn.Module):
    """Elementwise results of operands that are laid out differently, which are viewed in backward or forward."""

    def __init__(self, body) -> None:
        super().__init__()
        self.layer, self.scale, self.body = nn.Linear(6, 6), nn.Parameter(torch.ones(6, 4)), body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.layer(x), self.scale)  # [2, 4, 6] and [6, 4]


BODIES = {
    "softplus": lambda h, s: (F.softplus(h).transpose(1, 2) * s).square().sum(),
    "hardswish": lambda h, s: (F.hardswish(h).transpose(1, 2) * s).square().sum(),
    "elu": lambda h, s: (F.elu(h).transpose(1, 2) * s).square().sum(),
    "a loss": lambda h, s: F.mse_loss(h.transpose(1, 2).sigmoid(), (h.detach() * 2).contiguous().mT.contiguous() * s),
}


@pytest.mark.quick("softplus", "a loss")
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_view_of_a_result_that_is_laid_out_otherwise_is_of_the_same_elements(body):
    torch.manual_seed(0)
    model = Strided(body)
    sharded, x = shardgraph.compile(copy.deepcopy(model), "single", progress=False), torch.randn(2, 4, 6)
    for module in (sharded, model):
        module(x).backward()
    torch.testing.assert_close(sharded(x), model(x))
    for mine, theirs in zip(sharded.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    report = shardgraph.verify(model, (x,), "fsdp", mesh={"dp": 2}, loss_fn=lambda loss: loss)
    assert report.ok, str(report)


def test_a_view_by_strides_that_depend_on_the_device_is_refused_with_its_line():
    model = Strided(lambda h, s: torch.copysign(h, (h.mT * 2).contiguous().mT).as_strided((2, 24), (24, 1)).cumsum(1))
    with pytest.raises(shardgraph.CaptureError, match=r"as_strided at .*test_layouts\.py:\d+ .*contiguous\(\)"):
        shardgraph.compile(model, "single", example_inputs=(torch.randn(2, 4, 6),), progress=False)


def test_a_view_by_strides_of_a_contiguous_value_reads_its_elements():
    model = Strided(lambda h, s: torch.copysign(h, (h.mT * 2).mT).contiguous().as_strided((2, 24), (24, 1)).cumsum(1))
    sharded, x = shardgraph.compile(copy.deepcopy(model), "single", progress=False), torch.randn(2, 4, 6)
    torch.testing.assert_close(sharded(x), model(x))


class Residual(nn.Module):
    """A sum of positions last and first, as in the attention blocks of diffusion models, which is then normalised."""

    def __init__(self, group_norm) -> None:
        super().__init__()
        self.group_norm, self.scale = group_norm, nn.Parameter(torch.rand(8))
        self.project, self.conv = nn.Linear(8, 8), nn.Conv2d(8, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attended = self.project(x.flatten(2).mT).mT.view(x.shape)
        return self.group_norm(attended + self.conv(x), 2, self.scale).square().mean()


@pytest.mark.parametrize("group_norm", [F.group_norm, torch.group_norm])
@pytest.mark.parametrize("samples", [1, 2])  # for each rank
def test_group_norm_takes_sums_of_any_strides_also_of_one_sample(samples, group_norm):
    report = shardgraph.verify(Residual(group_norm), (torch.randn(2 * samples, 8, 4, 4),), "fsdp", mesh={"dp": 2})
    assert report.ok, str(report)
