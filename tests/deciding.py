"""Models whose forward branches on values, and what ranks do with them."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import shardgraph
from shardgraph import Pipeline


class Dimmed(nn.Module):
    """It branches on a value of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        h = self.layers(x)
        return h if mask.all() else h * mask


class Masked(Dimmed):
    """It branches on several of them, and computes with numbers that it reads of them."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        h = self.layers(x)
        if not mask.all():
            h = h * mask
        elif x.max() > 5:
            h = h.sin()
        counts = torch.zeros(2, dtype=torch.long)
        counts[0] = mask.sum(0).max()
        for i, count in enumerate(counts.tolist()):
            h = h + count * i
        return h / max(int(counts[0]), 1)


class Checking(nn.Module):
    """It checks what it computes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.max() < 50 and x.shape[1] == 4, f"numbers of {x.max()}"
        h = self.first(x - x.roll(1)).tanh()
        if torch.isnan(h).any():
            raise ValueError("not a number", h.shape)
        return self.second(h)


class Routed(nn.Module):
    """Which of two layers it uses follows from a value of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if mask.all():
            return self.first(x)
        return self.second(x)


def ways_of_ranks() -> float:
    """The largest difference of a gradient to the mean of the ranks', which go different ways with the same layers."""
    sharded, original = shardgraph.compile(Masked(), "fsdp"), Masked()
    for rank in range(2):
        (original(*call(rank > 0)).square().mean() / 2).backward()
    sharded(*call(dist.get_rank() > 0)).square().mean().backward()
    pairs = zip(sharded.parameters(), original.parameters(), strict=True)
    return max((mine.grad.full_tensor() - theirs.grad).abs().max().item() for mine, theirs in pairs)


def values_differ() -> str:
    """What a rank is told whose mask leads forward to another layer than the other rank's."""
    sharded = shardgraph.compile(Routed(), "fsdp")
    try:
        sharded(*call(dist.get_rank() > 0))
    except shardgraph.RankMismatchError as error:
        return str(error)
    return "nothing"


def call(masks: bool, rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs of :class:`Masked`; the mask is all true or not."""
    torch.manual_seed(1)
    mask = torch.ones(rows, 4, dtype=torch.bool)
    mask[:, :2] = not masks
    return torch.randn(rows, 4), mask


def through_a_pipeline() -> tuple[float, str]:
    """The error of steps in which each microbatch leads forward the batch's way, and what is told of another."""
    original = Dimmed()
    sharded = shardgraph.compile(
        copy.deepcopy(original),
        "pp",
        mesh={"pp": 2},
        pipeline=Pipeline(2, "1f1b", stages=("layers.2",)),
        loss_fn=F.mse_loss,
        example_inputs=call(True),
        example_kwargs={"target": torch.zeros(4, 4)},
    )
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (sharded, original)]
    for _ in range(2):
        x, mask = call(True)
        sharded.train_step(x, mask, target=torch.zeros(4, 4))
        F.mse_loss(original(x, mask), torch.zeros(4, 4)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    x, mask = call(True)
    mask[:2], mask[2:] = True, False
    try:
        sharded.train_step(x, mask, target=torch.zeros(4, 4))
        told = "nothing"
    except shardgraph.ShardGraphError as error:
        told = str(error)
    differences = [(p - original.get_parameter(name)).abs().max() for name, p in sharded.named_parameters()]
    return float(max(differences)), told


def failing_check(plan: str, mesh: dict[str, int]) -> list[str]:
    """What a call raises on this rank, with good numbers and with bad ones."""
    sharded = shardgraph.compile(Checking(), plan, mesh=mesh, example_inputs=(torch.zeros(4, 4),))
    found = []
    for x in (torch.ones(4, 4), torch.full((4, 4), -torch.inf), torch.full((4, 4), 60.0)):
        with torch.no_grad():
            try:
                sharded(x)
                found.append("")
            except AssertionError as error:
                found.append(str(error))
    return found


def failing_check_of_a_stage() -> None:
    """A call whose second stage computes what is not a number."""
    options = {"mesh": {"pp": 2}, "pipeline": Pipeline(2, "1f1b", stages=("second",)), "timeout": 20}
    sharded = shardgraph.compile(Checking(), "pp", example_inputs=(torch.zeros(4, 4),), **options)
    sharded(torch.full((4, 4), -torch.inf))
