"""Balances of a Sequential by measured time and by size."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from shardgraph import ShardGraphError
from shardgraph.fairscale import balance_by_size, balance_by_time
from shardgraph.fairscale.balance import _balance


class Slow(nn.Module):
    """Takes as many hundredths of a second as it is given."""

    def __init__(self, hundredths: int) -> None:
        super().__init__()
        self.hundredths = hundredths

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.hundredths / 100)
        return x * 1


def test_stages_take_equal_time():
    layers = nn.Sequential(*(Slow(hundredths) for hundredths in (1, 1, 1, 1, 4)))
    assert balance_by_time(2, layers, torch.ones(2), timeout=0.1, device="cpu") == [4, 1]


def test_stages_have_parameters_of_equal_size():
    layers = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 512))
    assert balance_by_size(2, layers, torch.ones(1, 8), device="cpu") == [3, 1]


def test_activations_of_a_large_batch_count_and_those_of_a_microbatch_less():
    layers = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid(), nn.Sigmoid(), nn.Sigmoid(), nn.Linear(8, 64))
    batch = torch.ones(256, 8)
    assert balance_by_size(2, layers, batch, device="cpu") == [3, 2]
    assert balance_by_size(2, layers, batch, chunks=256, device="cpu") == [4, 1]


def test_the_module_stays_as_it_is():
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    balance_by_size(2, layers, torch.ones(2, 4), device="cpu")
    assert all(parameter.grad is None for parameter in layers.parameters())


@pytest.mark.parametrize(
    ("costs", "partitions", "expected"),
    [([1, 2, 3, 4, 5, 6], 2, [4, 2]), ([1, 2, 3, 4, 5, 6], 3, [3, 2, 1]), ([5, 1, 1, 1, 1], 2, [1, 4]), ([2], 1, [1])],
)
def test_the_most_expensive_stage_costs_least(costs, partitions, expected):
    assert _balance(costs, partitions) == expected


def test_more_stages_than_layers_are_refused():
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(ShardGraphError, match="a balance of 3 stages was asked for of 2 children"):
        balance_by_size(3, layers, torch.ones(2, 4))
