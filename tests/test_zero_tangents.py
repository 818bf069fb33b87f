"""Backward of losses that do not depend on all outputs: what is zero is left out, or stands in as a constant."""

import copy

import pytest
import torch
from torch import nn

import shardgraph
from tests.ranks import whole

X = torch.randn(3, 4, 8)


class TwoOutputs(nn.Module):
    """Returns what the loss is of, and another result of the same hidden states."""

    def __init__(self, other) -> None:
        super().__init__()
        self.first, self.last, self.other = nn.Linear(8, 8), nn.Linear(8, 2), other

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.first(x)
        return self.last(hidden), self.other(hidden)


OTHERS = {
    "a mean": lambda hidden: hidden.mean(1),
    "a sum of running sums": lambda hidden: hidden.cumsum(-1).sum(1),
    "a sum over the first dimension": lambda hidden: hidden.cumsum(-1).sum(0),
    "a transposed sum": lambda hidden: hidden.transpose(1, 2).cumsum(-1).sum(1),
    "running sums": lambda hidden: hidden.cumsum(1),
    "a part": lambda hidden: hidden[:, 1:3].cumsum(-1),
    "a multiple": lambda hidden: 2 * hidden,
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_gradients_are_those_of_the_outputs_that_the_loss_is_of(other):
    model = TwoOutputs(other)
    sharded = shardgraph.compile(copy.deepcopy(model), "single")
    for each in (sharded, model):
        each(X)[0].square().sum().backward()
    for mine, theirs in zip(sharded.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(whole(mine.grad), theirs.grad)
