"""Collectives over gloo: what runs in their place, and that the numbers are the same."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardgraph
from shardgraph.ir import collectives
from shardgraph.runtime.backends.gloo import add_parts
from tests.standing import on_ranks

pytestmark = pytest.mark.timeout(120)


def run_and_count(plan: str) -> tuple[dict[str, int], float]:
    """The collectives of a backward that has run, and how far the gradient is from the mean over ranks."""
    torch.manual_seed(0)
    model = nn.Linear(6, 4).double()
    batches = torch.randn(dist.get_world_size(), 3, 6, dtype=torch.float64)
    expected = torch.autograd.grad(model(batches.flatten(0, 1)).square().mean(), model.weight)[0]
    sharded = shardgraph.compile(model, plan, progress=False)
    sharded(batches[dist.get_rank()]).square().mean().backward()
    ran = Counter(node.target.__name__.split(".")[0] for node in collectives(sharded.backward_graph))
    return dict(ran), (sharded.weight.grad.full_tensor() - expected).abs().max().item()


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_reduce_scatter_sends_each_rank_its_part_alone(ranks):
    for ran, error in on_ranks(run_and_count, ranks, args=("zero2",)):
        assert ran == {"all_to_all_single": 1} and error < 1e-12


def test_an_all_reduce_works_in_place():
    for ran, error in on_ranks(run_and_count, 2, args=("ddp",)):
        assert ran == {"all_reduce_": 1} and error < 1e-12


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_parts_are_added_up(ranks):
    received = torch.randn(ranks * 2, 3)
    kept = received.clone()
    assert torch.allclose(add_parts(received, ranks), received.view(ranks, 2, 3).sum(0), atol=1e-6)
    assert torch.equal(received, kept)
