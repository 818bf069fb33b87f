"""A network of linear layers, and what it is with products of float8 values, written in plain torch."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardgraph
from shardgraph import Precision

SCALED = Precision(products="float8")


class Net(nn.Module):
    """Linear layers that can be scaled, two of one input, around a norm; and a head that is too narrow."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(48, 32)
        self.up, self.gate = nn.Linear(32, 64), nn.Linear(32, 64, bias=False)
        self.norm, self.down = nn.LayerNorm(64), nn.Linear(64, 32, bias=False)
        self.head = nn.Linear(32, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        return self.head(x + self.down(self.norm(torch.relu(self.up(x)) * self.gate(x))))


def rounded(tensor: torch.Tensor, to: torch.dtype) -> torch.Tensor:
    """``tensor`` as numbers of the format ``to`` times the largest magnitude over the largest number of it."""
    unit = tensor.abs().max().clamp(min=1e-12) / torch.finfo(to).max
    return (tensor / unit).to(to).to(tensor.dtype) * unit


class Product(torch.autograd.Function):
    """``x @ weight.t()`` of values in e4m3 and gradients in e5m2."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x, weight = rounded(x, torch.float8_e4m3fn), rounded(weight, torch.float8_e4m3fn)
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        gradient = rounded(gradient, torch.float8_e5m2)
        return gradient @ weight, gradient.flatten(0, -2).t() @ x.flatten(0, -2)


class Linear(nn.Linear):
    """A linear layer of that product."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = Product.apply(x, self.weight)
        return product if self.bias is None else product + self.bias


def emulated(net: Net) -> Net:
    """The network, changed in place, with the layers that can be scaled in plain torch."""
    for layer in (net.up, net.gate, net.down):
        layer.__class__ = Linear
    return net


def batch(step: int, data_rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids and targets of a data-parallel rank."""
    generator = torch.Generator().manual_seed(100 * step + data_rank)
    return torch.randint(48, (4, 8), generator=generator), torch.randn(4, 8, 8, generator=generator)


def against_plain_torch(plan: str, mesh: dict[str, int], steps: int = 3) -> dict[str, float]:
    """The largest differences of a program's training from the emulation's on each data rank's batch in turn: of
    losses, and of gradients and weights relative to the largest."""
    torch.manual_seed(0)
    net = Net()
    original = emulated(Net())
    original.load_state_dict(net.state_dict())
    sharded = shardgraph.compile(net, plan, mesh=mesh, precision=SCALED, example_inputs=batch(0, 0)[:1])
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.3, momentum=0.9) for module in (sharded, original)]
    replicas = mesh.get("dp", 1)
    me = dist.get_rank() // mesh.get("tp", 1)
    worst = {"loss": 0.0, "gradients": 0.0, "weights": 0.0}
    for step in range(steps):
        for data_rank in range(replicas):
            ids, target = batch(step, data_rank)
            loss = (original(ids) - target).square().mean()
            (loss / replicas).backward()
            if data_rank == me:
                mine = (sharded(ids) - target).square().mean()
                mine.backward()
                worst["loss"] = max(worst["loss"], abs(float(mine - loss)))
        for name, parameter in original.named_parameters():
            gradient = sharded.get_parameter(name).grad.full_tensor()
            worst["gradients"] = max(worst["gradients"], _error(gradient, parameter.grad))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for name, parameter in original.named_parameters():
            weight = sharded.get_parameter(name).full_tensor()
            worst["weights"] = max(worst["weights"], _error(weight, parameter))
    return worst


def _error(mine: torch.Tensor, theirs: torch.Tensor | None) -> float:
    assert theirs is not None
    return float((mine - theirs).detach().abs().max() / theirs.detach().abs().max())
