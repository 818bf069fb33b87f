"""FairScale's OffloadModel: trained like the model, with parameters in host memory."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from shardgraph import ShardGraphError
from shardgraph.fairscale import OffloadModel


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 3)]


@pytest.mark.parametrize(
    "options",
    [{}, {"num_slices": 2}, {"checkpoint_activation": True}, {"checkpoint_activation": True, "num_microbatches": 2}],
    ids=str,
)
def test_it_trains_like_the_model(options):
    original = nn.Sequential(*layers()).double()
    model = OffloadModel(copy.deepcopy(original), "cpu", **options)
    optimizers = [torch.optim.Adam(each.parameters(), lr=1e-2) for each in (model, original)]
    for step in range(3):
        batch = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        losses = [each(batch).square().mean() for each in (model, original)]
        torch.testing.assert_close(*losses)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    expected = dict(original.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name].detach())
    assert model.plan.offload.parameters and model.plan.offload.activations == ("checkpoint_activation" in options)


def test_it_takes_a_list_of_parts():
    assert OffloadModel(layers(), "cpu")(torch.ones(2, 6)).shape == (2, 3)


def test_what_cannot_be_is_refused_in_words():
    with pytest.raises(ShardGraphError, match="num_microbatches=2 saves no memory"):
        OffloadModel(layers(), "cpu", num_microbatches=2)
    with pytest.raises(ShardGraphError, match="offload_device is cuda"):
        OffloadModel(layers(), "cpu", "cuda")
    with pytest.raises(ShardGraphError, match="device is cuda:7, and this run computes on cpu"):
        OffloadModel(layers(), "cuda:7")
    model = OffloadModel(layers(), "cpu", checkpoint_activation=True, num_microbatches=4)
    with pytest.raises(ShardGraphError, match="cannot be cut into 4 microbatches: one has 2 parts"):
        model(torch.ones(2, 6))
