"""Hooks and ``retain_grad()`` on outputs that other outputs are computed from."""

import copy

import pytest
import torch
from torch import nn

import shardgraph
from tests.ranks import whole
from tests.zoo import make

X = torch.randn(2, 4)


class Returns(nn.Module):
    def __init__(self, returned) -> None:
        super().__init__()
        self.first, self.last, self.returned = nn.Linear(4, 4), nn.Linear(4, 4), returned

    def forward(self, x: torch.Tensor):
        hidden = self.first(x)
        return self.returned(hidden, self.last(torch.tanh(hidden)))


INNER = {
    "hidden states": lambda hidden, last: (hidden, last),
    "scores beside a loss": lambda hidden, last: (last, last.square().mean()),
}
OUTER = {
    "nothing else has a gradient": lambda hidden, last: (hidden, last.argmax(-1), last.detach()),
    "nothing is computed from it": lambda hidden, last: (last, hidden),
    "what it is a view of is": lambda hidden, last: (hidden.view(-1), last),
    "views alone are": lambda hidden, last: (last, last[1:], last.t()),
}


def hooked(tensor: torch.Tensor, how: str) -> None:
    tensor.retain_grad() if how == "retain_grad" else tensor.register_hook(lambda gradient: 2 * gradient)


@pytest.mark.parametrize("how", ["retain_grad", "hook"])
@pytest.mark.parametrize("returned", INNER.values(), ids=INNER)
def test_they_are_refused_since_they_would_miss_gradients(returned, how):
    sharded = shardgraph.compile(Returns(returned), "single")
    outputs = sharded(X)
    hooked(outputs[0], how)
    with pytest.raises(shardgraph.BackwardError, match=r"output 0 of the model has a hook or retain_grad\(\)"):
        sum(output.sum() for output in outputs).backward()


@pytest.mark.parametrize("how", ["retain_grad", "hook"])
@pytest.mark.parametrize("returned", OUTER.values(), ids=OUTER)
def test_they_work_where_no_other_gradient_goes_through(returned, how):
    model = Returns(returned)
    sharded = shardgraph.compile(copy.deepcopy(model), "single")
    for each in (sharded, model):
        outputs = each(X)
        hooked(outputs[0], how)
        sum(output.square().sum() for output in outputs if output.requires_grad).backward()
    for mine, theirs in zip(sharded.parameters(), model.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        if mine.grad is not None:
            torch.testing.assert_close(whole(mine.grad), theirs.grad)


def test_what_runs_as_written_retains_the_gradient_of_scores():
    model, (args, kwargs) = make("llama", 2)
    sharded = shardgraph.compile(copy.deepcopy(model), "single", example_inputs=args, example_kwargs=kwargs)
    gradients = []
    for each in (sharded.original, model):
        output = each(*args, **kwargs)
        output.logits.retain_grad()
        output.loss.backward()
        gradients.append(output.logits.grad)
    torch.testing.assert_close(*gradients)
