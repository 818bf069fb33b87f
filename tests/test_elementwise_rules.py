"""Activations, joined and parted tensors and random numbers between two divided layers: each rank computes its part,
which is that of the whole model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardgraph
from shardgraph.passes.lowering import build_program
from shardgraph.plans.resolve import resolve_plan

Functions = dict[str, Callable[[Tensor], Tensor]]

ACTIVATIONS: Functions = {
    "hardtanh": F.hardtanh,
    "relu6": F.relu6,
    "softplus": F.softplus,
    "log_sigmoid": F.logsigmoid,
    "elu": F.elu,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "mish": F.mish,
    "leaky_relu": F.leaky_relu,
    "prelu": lambda x: F.prelu(x, torch.full((1,), 0.1)),
    "glu": lambda x: F.glu(torch.cat([x, 2 * x], 0), 0),
}
JOINED: Functions = {
    "stack": lambda x: torch.stack([x, 2 * x], 1).sum(1),
    "unbind": lambda x: torch.stack([part.tanh() for part in x.unbind(0)]),
    "index_add": lambda x: x.new_zeros(4, x.shape[1]).index_add(0, torch.arange(len(x)) % 4, x)[torch.arange(16) % 4],
    "gather": lambda x: x.gather(0, _rows(x)),
    "scatter": lambda x: x.scatter(0, _rows(x), x.tanh()),
    "scatter_add": lambda x: x.scatter_add(0, _rows(x) % 5, x.tanh()),
    "interpolate": lambda x: F.interpolate(x.t()[None, :, None, :], scale_factor=2)[0, :, 0, ::2].t(),
    "eye": lambda x: torch.eye(16) @ x,
    "copy": lambda x: x.new_zeros(2, *x.shape).copy_(x).sum(0),
    "copy of a column": lambda x: x + torch.zeros_like(x).copy_(torch.ones(len(x), 1)),
}


def _rows(x: Tensor) -> Tensor:
    """The rows in another order, for each column."""
    return torch.arange(len(x)).flip(0).unsqueeze(1).expand(-1, x.shape[1])


DRAWN: Functions = {
    "rand_like": lambda x: x * torch.rand_like(x),
    "randn_like": lambda x: x + torch.randn_like(x.t()).t(),
    "rand": lambda x: x * torch.rand(x.shape),
    "bernoulli": lambda x: x * torch.empty_like(x).bernoulli_(0.5),
    "bernoulli of numbers": lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.1, training=True),
}


class Between(nn.Module):
    """A wide hidden layer, and functions of it one after the other."""

    def __init__(self, functions: Functions) -> None:
        super().__init__()
        self.up, self.down, self.functions = nn.Linear(256, 2048, False), nn.Linear(2048, 256, False), functions

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        for function in self.functions.values():
            hidden = function(hidden)
        return self.down(hidden).square().mean()


@pytest.mark.quick("drawn")
@pytest.mark.parametrize("functions", [ACTIVATIONS, JOINED, DRAWN], ids=["activations", "joined", "drawn"])
def test_what_is_between_two_divided_layers_is_that_of_the_whole_model(functions):
    report = shardgraph.verify(Between(functions), (torch.randn(16, 256),), "tp")
    assert report.ok, str(report)


@pytest.mark.parametrize("name", [*ACTIVATIONS, *JOINED, "rand_like", "bernoulli"])
def test_a_function_leaves_the_layers_around_it_divided(name):
    functions = {name: {**ACTIVATIONS, **JOINED, **DRAWN}[name]}
    program = build_program(Between(functions), resolve_plan("tp", (("tp", 2),)), (torch.randn(16, 256),))
    assert program.notes == []
    placed = {name: entry.placements[0] for name, entry in program.parameters.items()}
    assert placed == {"up.weight": "split(0)", "down.weight": "split(1)"}
