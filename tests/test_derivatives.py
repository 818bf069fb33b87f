"""Derivatives that forward computes are part of the program, which is differentiated through them."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import nn

import shardgraph
from shardgraph.errors import CaptureError

MESHES = {"fsdp": {"dp": 2}, "tp": {"tp": 2}, "fsdp+tp": {"dp": 2, "tp": 2}, "pp": {"pp": 2}}
X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
Y = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


class Of(nn.Module):
    """A network, of which forward takes derivatives."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


class Penalty(Of):
    """A critic whose slope between real and made rows is to be 1, as of a Wasserstein GAN."""

    def forward(self, real: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        between = (0.3 * real + 0.7 * made).requires_grad_(True)
        found = self.net(between)
        (slope,) = torch.autograd.grad(found, between, torch.ones_like(found), create_graph=True)
        return (self.net(made) - self.net(real) + 10 * (slope.norm(2, dim=1, keepdim=True) - 1).square()).mean()


class Forces(Of):
    """Energies and their slopes by positions, an input that forward has require gradients."""

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        positions.requires_grad_()
        energy = self.net(positions)
        (slope,) = torch.autograd.grad(energy.sum(), positions, create_graph=self.training)
        return (energy + slope.square().sum(1, keepdim=True)).mean()


class Equation(Of):
    """A differential equation of second order, as a network that is informed by physics has it."""

    def forward(self, at: torch.Tensor) -> torch.Tensor:
        at = at.detach().clone().requires_grad_()
        found = self.net(at)
        (first,) = torch.autograd.grad(found.sum(), at, create_graph=True)
        (second,) = torch.autograd.grad(first[:, 0].sum(), at, create_graph=True)
        return (second[:, :1] + found).square().mean()


class Saliency(Of):
    """A slope that is not differentiated itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        at = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.net(at).sum(), at)
        return (self.net(x) * slope.abs()).mean()


class Functional(Of):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        slope = torch.func.grad(lambda at: self.net(at).sum())(x)
        return (self.net(x) + slope.square().sum(1, keepdim=True)).mean()


class OfParameters(Of):
    """A step of the parameters inside of forward, and the loss after it."""

    def slopes(self, values: dict[str, torch.Tensor], x: torch.Tensor) -> Iterable[torch.Tensor]:
        return torch.autograd.grad(self.net(x).square().mean(), list(values.values()), create_graph=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = dict(self.net.named_parameters())
        slopes = self.slopes(values, x)
        stepped = {name: value - 0.1 * slope for (name, value), slope in zip(values.items(), slopes, strict=True)}
        return torch.func.functional_call(self.net, stepped, (x,)).square().mean()


class FunctionalOfParameters(OfParameters):
    """The same by :mod:`torch.func`, so that the model's modules are called with other values twice."""

    def slopes(self, values: dict[str, torch.Tensor], x: torch.Tensor) -> Iterable[torch.Tensor]:
        def loss(values: dict[str, torch.Tensor]) -> torch.Tensor:
            return torch.func.functional_call(self.net, values, (x,)).square().mean()

        return torch.func.grad(loss)(values).values()


KINDS = {Penalty: (X, Y), Forces: (X,), Equation: (X,), Saliency: (X,), Functional: (X,)}


@pytest.mark.quick("Penalty-fsdp")
@pytest.mark.parametrize("plan", MESHES)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_program_with_derivatives_in_forward_trains_as_the_original(kind, plan):
    torch.manual_seed(0)
    inputs = tuple(each.clone() for each in KINDS[kind])
    report = shardgraph.verify(kind(), inputs, plan, mesh=MESHES[plan], steps=2, fp64=True)
    assert report.ok, str(report)


STEPS = [OfParameters, FunctionalOfParameters]


@pytest.mark.quick("FunctionalOfParameters-tp")
@pytest.mark.parametrize("plan", ["fsdp", "tp", "fsdp+tp"])
@pytest.mark.parametrize("kind", STEPS)
def test_a_step_inside_of_forward_is_differentiated(kind, plan):
    torch.manual_seed(0)
    report = shardgraph.verify(kind(), (X,), plan, mesh=MESHES[plan], steps=2, fp64=True)
    assert report.ok, str(report)


class SlopeOfMean(Of):
    """A slope for each row, of a mean over rows: it is smaller in a larger batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        at = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.net(at).mean(), at, create_graph=True)
        return (self.net(x) + slope).square().mean()


@pytest.mark.parametrize("kind", [*STEPS, SlopeOfMean])
def test_a_mean_over_the_batch_inside_of_a_derivative_is_refused_in_a_pipeline_by_its_line(kind):
    refused = r"(rows of a batch are not computed apart|does not follow from those of its microbatches)"
    with pytest.raises(shardgraph.ShardGraphError, match=rf"{refused}: at .*test_derivatives\.py:\d+ "):
        shardgraph.verify(kind(), (X,), "pp", mesh=MESHES["pp"])


def test_backward_in_forward_is_refused_with_what_works():
    class Calls(Of):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.net(x).sum().backward()
            return self.net(x)

    with pytest.raises(CaptureError, match=r"forward calls backward\(\)(?s:.*)torch\.autograd\.grad"):
        shardgraph.compile(Calls(), "single", example_inputs=(X,), progress=False)
