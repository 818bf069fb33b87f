"""Inputs of a call that are one tensor, or share memory: forward may ask, and may write to them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import shardgraph
from tests import ranks
from tests.standing import on_ranks

X, Y = torch.randn(4, 4), torch.randn(4, 4)


class Asks(nn.Module):
    """As attention does that has one product where queries and keys are the same."""

    def __init__(self) -> None:
        super().__init__()
        self.alone, self.both = nn.Linear(4, 4), nn.Bilinear(4, 4, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if y is not x:
            return self.both(x, y)
        return self.alone(x)


class Writes(nn.Linear):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return super().forward(y)


def alike(sharded: nn.Module, model: nn.Module, *inputs: torch.Tensor) -> None:
    torch.testing.assert_close(sharded(*inputs), model(*inputs))


@pytest.mark.parametrize("first", [(X, Y), (X, X)], ids=["others first", "the same first"])
def test_each_call_goes_the_way_that_the_original_goes(first):
    model = Asks()
    sharded = shardgraph.compile(copy.deepcopy(model), "single", example_inputs=first)
    for inputs in [(X, Y), (X, X), (Y, X), (Y, Y), (X, X.clone()), (X, X.view(4, 4))]:
        alike(sharded, model, *inputs)


@pytest.mark.parametrize("inputs", [(X, Y), (X, X)], ids=["others", "the same"])
def test_a_plan_is_verified_for_inputs_that_are_the_same(inputs):
    report = shardgraph.verify(Asks(), inputs, "fsdp", mesh={"dp": 2})
    assert report.ok, str(report)
    reached = {"both": inputs[0] is not inputs[1], "alone": inputs[0] is inputs[1]}
    unreached = {name.partition(".")[0] for name in report.coverage.unreached}
    assert unreached == {name for name, is_reached in reached.items() if not is_reached}


def test_attention_of_torch_trains_with_one_tensor_and_with_three():
    model = nn.MultiheadAttention(4, 2, batch_first=True)
    sharded = shardgraph.compile(copy.deepcopy(model), "single")
    for inputs in [(X[None], X[None], X[None]), 3 * (X[None],), (Y[None], *2 * (X[None],))]:
        mine, theirs = (each(*inputs)[0] for each in (sharded, model))
        torch.testing.assert_close(mine, theirs)
        for output in (mine, theirs):
            output.square().sum().backward()
    for parameter, original in zip(sharded.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ranks.whole(parameter.grad), original.grad)


def test_microbatches_of_one_tensor_are_one_tensor():
    for took in on_ranks(ranks.microbatches_of_the_same, 2):
        assert took == ["alone", "both", "alone"]


@pytest.mark.parametrize("kind", ["the same", "a view", "rows of one tensor"])
def test_an_input_that_is_written_may_not_be_in_the_memory_of_another(kind):
    base = torch.randn(6, 4)
    inputs = {"the same": (base, base), "a view": (base, base.view(6, 4)), "rows of one tensor": (base[:4], base[2:])}
    sharded = shardgraph.compile(Writes(4, 4), "single")
    with pytest.raises(shardgraph.ShardGraphError, match=r"writes to input 0 .* shares memory with input 1"):
        sharded(*inputs[kind])


def test_an_input_that_is_written_may_be_beside_another_in_memory():
    base = torch.randn(8, 4)
    mine, theirs = base.clone(), base.clone()
    model = Writes(4, 4)
    sharded = shardgraph.compile(copy.deepcopy(model), "single")
    torch.testing.assert_close(sharded(mine[:4], mine[4:]), model(theirs[:4], theirs[4:]))
    torch.testing.assert_close(mine, theirs)


def test_no_stage_of_a_pipeline_may_write_an_input():
    class Empties(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(2 * x)
            x.zero_()
            return y

    model = Empties(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    with pytest.raises(shardgraph.PlanError, match="writes to input 0 of the call in place, in stage"):
        shardgraph.analyze(model, (X,), "pp", mesh={"pp": 2}, loss_fn=torch.mean)
