"""What runs on each rank of the tests of AdaScale."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import shardgraph
from shardgraph import preset
from shardgraph.runtime import gradient_statistics
from tests.ranks import difference

RATE, SMOOTHING, CLIP = 0.1, 0.7, 0.05


def made() -> nn.Module:
    """A model with a part that operators replicate, in double precision."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 4)).double()


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return (output - output.new_tensor([1.0, -1.0, 0.5, 0.0])).square().mean()


def groups_of(module: nn.Module) -> list[dict[str, Any]]:
    """The weights, and at a rate of their own the rest."""
    weights = [parameter for parameter in module.parameters() if parameter.dim() == 2]
    rest = [parameter for parameter in module.parameters() if parameter.dim() != 2]
    return [{"params": weights}, {"params": rest, "lr": RATE / 2}]


class Paper:
    """Appendix B.3 of the paper as it is written, on whole gradients: the gain of each group and of all."""

    def __init__(self, smoothing: float, debias: bool) -> None:
        self.smoothing, self.debias = smoothing, debias
        self.steps: list[list[tuple[float, float]]] = []

    def step(self, samples: list[list[torch.Tensor]]) -> list[float]:
        """``samples`` has the gradient of each group for each sample."""
        estimates = []
        for group in zip(*samples, strict=True):
            count, mean = len(group), torch.stack(group).mean(0).square().sum().item()
            each = sum(gradient.square().sum().item() for gradient in group)
            variance = each / (count - 1) - count / (count - 1) * mean
            estimates.append((max(variance, 0.0), max(mean - variance / count, 0.0)))
        self.steps.append(estimates)
        averages = [[self._average([step[g][k] for step in self.steps]) for k in (0, 1)] for g in range(len(estimates))]
        averages.append([sum(each) for each in zip(*averages, strict=True)])
        return [(v + m) / (v / len(samples) + m) for v, m in averages]

    def _average(self, values: list[float]) -> float:
        if self.debias:
            weights = [self.smoothing ** (len(values) - 1 - i) for i in range(len(values))]
            return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
        average = 0.0
        for i, value in enumerate(values):
            rate = max(1 / (i + 1), 1 - self.smoothing)
            average = (1 - rate) * average + rate * value
        return average


def against_the_paper(plan: str, mesh: dict[str, int], accumulated: int = 1, debias: bool = True) -> float:
    """The largest difference of a gain, or of a weight, in four steps of clipped SGD to those by whole gradients."""
    model = made()
    original, chosen = copy.deepcopy(model), preset(plan, mesh)
    batches = torch.randn(4, chosen.data_size, accumulated, 3, 4, dtype=torch.float64)
    mine = batches[:, chosen.data_rank(dist.get_rank())]
    sharded = shardgraph.compile(model, plan, mesh=mesh, example_inputs=(mine[0, 0],), gradient_statistics=True)
    optimizer = shardgraph.AdaScale(
        torch.optim.SGD(groups_of(sharded), lr=RATE),
        sharded,
        smoothing=SMOOTHING,
        num_gradients_to_accumulate=accumulated,
        is_scaled_loss=debias,  # both ways, in the tests of both
        debias_ewma=debias,
    )
    paper, factor, worst = Paper(SMOOTHING, debias), accumulated if debias else 1, 0.0
    for step, batch in enumerate(mine):
        optimizer.zero_grad()
        with sharded.no_sync():
            for x in batch[:-1]:
                (loss_of(sharded(x)) / factor).backward()
        (loss_of(sharded(batch[-1])) / factor).backward()
        sharded.clip_grad_norm_(CLIP)
        gains = [optimizer.gain(0), optimizer.gain(1), optimizer.gain()]
        optimizer.step()

        samples = [_gradients(original, x) for x in batches[step].flatten(0, 1)]
        expected = paper.step([[torch.cat([g.flatten() for g in group]) for group in sample] for sample in samples])
        worst = max(worst, *(abs(a - b) for a, b in zip(gains, expected, strict=True)))
        _step(original, samples, expected, accumulated / factor)
    return max(worst, difference(sharded, original, gradients=False))


def _gradients(model: nn.Module, x: torch.Tensor) -> list[list[torch.Tensor]]:
    groups = [group["params"] for group in groups_of(model)]
    return [list(torch.autograd.grad(loss_of(model(x)), group)) for group in groups]


def _step(model: nn.Module, samples: list[list[list[torch.Tensor]]], gains: list[float], factor: float) -> None:
    """Clipped SGD with ``factor`` times the mean gradient, each group at its gain."""
    groups = groups_of(model)
    for g, group in enumerate(groups):
        for p, parameter in enumerate(group["params"]):
            parameter.grad = factor * torch.stack([sample[g][p] for sample in samples]).mean(0)
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    with torch.no_grad():
        for group, gain in zip(groups, gains, strict=False):
            for parameter in group["params"]:
                parameter -= gain * group.get("lr", RATE) * parameter.grad


def noise_then_signal() -> list[float]:
    """The gains of a step whose gradients are opposite on two ranks, and of one whose gradients are equal."""
    sharded = shardgraph.compile(nn.Linear(2, 1, bias=False), "fsdp", gradient_statistics=True)
    optimizer = shardgraph.AdaScale(torch.optim.SGD(sharded.parameters(), lr=RATE), sharded, smoothing=0.0)
    gains = []
    for gradients in ([[2.0, 0.0], [-2.0, 0.0]], [[1.0, 3.0], [1.0, 3.0]]):
        optimizer.zero_grad()
        sharded(torch.tensor([gradients[dist.get_rank()]])).sum().backward()
        gains.append(optimizer.gain())
        optimizer.step()
    return gains


def gain_of_an_optimizer_from_before() -> float:
    """The first gain of an optimizer made before ``compile``, of gradients that are opposite on two ranks."""
    model = nn.Linear(2, 1, bias=False)
    sgd = torch.optim.SGD(model.parameters(), lr=RATE)
    sharded = shardgraph.compile(model, "fsdp", gradient_statistics=True)
    optimizer = shardgraph.AdaScale(sgd, sharded)
    sharded(torch.tensor([[2.0, 0.0]]) * (1 - 2 * dist.get_rank())).sum().backward()
    return optimizer.gain()


def reductions_of_a_step(plan: str) -> tuple[list[int], bool]:
    """The sizes of reductions beside those of the graphs, and whether those are the same as without measuring."""
    x = torch.ones(3, 4, dtype=torch.float64)
    sharded = shardgraph.compile(made(), plan, example_inputs=(x,), gradient_statistics=True)
    without = shardgraph.compile(made(), plan, example_inputs=(x,))
    optimizer = shardgraph.AdaScale(torch.optim.SGD(sharded.parameters(), lr=RATE), sharded)
    with mock.patch.object(gradient_statistics.dist, "all_reduce", wraps=dist.all_reduce) as reduced:
        loss_of(sharded(x)).backward()
        optimizer.gain()
        optimizer.step()
    sizes = [call.args[0].numel() for call in reduced.call_args_list]
    return sizes, sharded.program.communication == without.program.communication


def continued() -> tuple[list[float], list[float]]:
    """The gain before and after a step, of an optimizer and of one that has loaded its state."""
    sharded = shardgraph.compile(made(), "fsdp", gradient_statistics=True)
    x = torch.randn(3, 4, dtype=torch.float64) + dist.get_rank()

    def optimizer() -> shardgraph.AdaScale:
        return shardgraph.AdaScale(torch.optim.SGD(sharded.parameters(), lr=0.0, momentum=0.9), sharded)

    def step(each: shardgraph.AdaScale, rows: torch.Tensor) -> float:
        each.zero_grad()
        loss_of(sharded(rows)).backward()
        each.step()
        return each.gain()

    first, second = optimizer(), optimizer()
    step(first, x)
    first.zero_grad()
    second.load_state_dict(first.state_dict())
    loaded = first.gain(), second.gain()
    later = step(first, 2 * x), step(second, 2 * x)
    assert len(second.optimizer.state) == len(list(sharded.parameters()))
    return [loaded[0], later[0]], [loaded[1], later[1]]


def refused() -> dict[str, str]:
    """What AdaScale says of what it cannot do."""
    sharded = shardgraph.compile(made(), "fsdp", gradient_statistics=True)
    optimizer = shardgraph.AdaScale(torch.optim.SGD(sharded.parameters(), lr=RATE), sharded)
    x = torch.ones(3, 4, dtype=torch.float64)

    def twice() -> None:
        for _ in range(2):
            loss_of(sharded(x)).backward()
        optimizer.step()

    def accumulated() -> None:
        optimizer.zero_grad()
        with sharded.no_sync():
            loss_of(sharded(x)).backward()
        loss_of(sharded(x)).backward()
        optimizer.step()

    other = shardgraph.compile(made(), "fsdp")
    asked = {"two reductions": twice, "two passes": accumulated}
    asked["not measured"] = lambda: shardgraph.AdaScale(torch.optim.SGD(other.parameters(), lr=RATE), other)
    said = {}
    for name, ask in asked.items():
        try:
            ask()
        except shardgraph.ShardGraphError as error:
            said[name] = str(error)
    return said
