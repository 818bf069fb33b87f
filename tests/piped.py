"""What runs on each rank of the tests of FairScale's Pipe."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn

import shardgraph
from shardgraph.fairscale import Pipe
from tests.ranks import whole


def layers() -> nn.Sequential:
    """Layers of which the first and the last share a weight, in double precision."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6))
    made[5].weight = made[0].weight
    return made.double()


def batch(rows: int = 8) -> torch.Tensor:
    return torch.randn(rows, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(rows))


def training(balance: list[int], rows: int, checkpoint: str) -> tuple[float, float, list[str]]:
    """How far losses and weights of a Pipe are from those of the layers, and the names of this rank's parameters.

    The optimizer is made before the first call; with more ranks than stages, ranks have parts of the batch.
    """
    original = layers()
    pipe = Pipe(copy.deepcopy(original), balance, chunks=4, checkpoint=checkpoint)
    names = [name for name, _ in pipe.module.named_parameters()]
    return *trained_like(pipe, original, batch(rows)), names


def trained_like(pipe: Pipe, original: nn.Module, x: torch.Tensor) -> tuple[float, float]:
    """How far losses and weights of a Pipe are from those of its layers after four steps on ``x``."""
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (pipe, original)]
    copies = dist.get_world_size() // len(pipe.balance)
    own = x.chunk(copies)[dist.get_rank() % copies]
    worst = 0.0
    for _ in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss, expected = pipe(own).square().mean(), original(x).square().mean()
        loss.backward()
        expected.backward()
        dist.all_reduce(mean := loss.detach().clone())
        worst = max(worst, abs(mean.item() / dist.get_world_size() - expected.item()))
        for optimizer in optimizers:
            optimizer.step()
    theirs = dict(original.named_parameters())
    named = pipe.module.named_parameters()
    return worst, max((whole(p.detach()) - theirs[fqn].detach()).abs().max().item() for fqn, p in named)


class Both(nn.Module):
    """A layer of each of two tensors, whose numbers of rows need not be equal."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return self.one(pair[0]).tanh(), self.other(pair[1]).tanh()


def tuples_of_unequal_rows() -> tuple[list[int], float]:
    """The rows of both outputs, of 8 and 2 rows, and how far gradients are from the layers' own."""
    torch.manual_seed(0)
    original = nn.Sequential(Both(), Both()).double()
    pipe = Pipe(copy.deepcopy(original), [1, 1], chunks=4)
    pair = batch(8), batch(2)
    rows = []
    for each in (pipe, original):
        outputs = each(pair)
        sum(output.square().mean() for output in outputs).backward()
        rows.append([len(output) for output in outputs])
    theirs = dict(original.named_parameters())
    assert rows[0] == rows[1]
    named = pipe.module.named_parameters()
    return rows[0], max((p.grad - theirs[fqn].grad).abs().max().item() for fqn, p in named)


def statistics_of_fewer_rows_than_chunks() -> float:
    """How far running statistics are from the layers' own after batches of fewer rows than chunks."""
    original = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 6)).double()
    pipe = Pipe(copy.deepcopy(original), [1, 1], chunks=8, deferred_batch_norm=True)
    for rows in (4, 3):
        pipe(batch(rows)).sum().backward()
        original(batch(rows))
    state = pipe.module.full_state_dict()
    if dist.get_rank():
        return 0.0
    names = "0.running_mean", "0.running_var", "0.num_batches_tracked"
    return max((state[name] - original.state_dict()[name]).abs().max().item() for name in names)


def refused(balance: list[int]) -> str:
    """The error of a balance."""
    try:
        Pipe(layers(), balance)
    except shardgraph.PlanError as error:
        return str(error)
    return ""
