"""What runs on each rank of the tests of replicas that train by themselves."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardgraph
from shardgraph import LocalSGD, SlowMo, StochasticGradientPush
from shardgraph.fairscale import SlowMoDistributedDataParallel
from tests.ranks import whole

STEPS, FREQUENCY, REPLICAS = 6, 3, 2
NESTEROV = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
Weights = list[torch.Tensor]


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()  # 35 weights do not divide by two


def rows(step: int, replica: int) -> torch.Tensor:
    return torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + replica))


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return (output - 1).square().mean()


def rate_at(step: int) -> float:
    return 0.1 * 0.8**step


class Papers:
    """The papers' algorithms as they are written, over whole replicas in one process."""

    def __init__(self, outer: str, momentum: float = 0.0, lr: float = 1.0, average: int = STEPS + 1) -> None:
        self.outer, self.momentum, self.lr, self.average = outer, momentum, lr, average
        self.replicas = [made() for _ in range(REPLICAS)]
        self.inner = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in self.replicas]

    @torch.no_grad()
    def run(self) -> Weights:
        """The weights after all steps, of which one round follows the other."""
        start, momentum = self._weights(0), [torch.zeros_like(each) for each in self._weights(0)]
        for step in range(STEPS):
            for replica, (model, optimizer) in enumerate(zip(self.replicas, self.inner, strict=True)):
                optimizer.param_groups[0]["lr"] = rate_at(step)
                with torch.enable_grad():
                    optimizer.zero_grad()
                    loss_of(model(rows(step, replica))).backward()
                optimizer.step()
            mean = [sum(each) / REPLICAS for each in zip(*map(self._weights, range(REPLICAS)), strict=True)]
            if (step + 1) % FREQUENCY == 0:
                start = self._outer_step(start, mean, momentum, rate_at(step))
                self._set(start)
            elif (step + 1) % self.average == 0:
                self._set(mean)
        return start

    def _outer_step(self, start: Weights, mean: Weights, momentum: Weights, rate: float) -> Weights:
        if self.outer == "mean":
            return mean
        moved = [a - b for a, b in zip(start, mean, strict=True)]
        if self.outer == "slowmo":
            for u, delta in zip(momentum, moved, strict=True):
                u.mul_(self.momentum).add_(delta / rate)
            return [x - self.lr * rate * u for x, u in zip(start, momentum, strict=True)]
        for u, delta in zip(momentum, moved, strict=True):  # DiLoCo's Nesterov momentum
            u.mul_(NESTEROV["momentum"]).add_(delta)
        steps = [delta + NESTEROV["momentum"] * u for delta, u in zip(moved, momentum, strict=True)]
        return [x - NESTEROV["lr"] * step for x, step in zip(start, steps, strict=True)]

    def _weights(self, replica: int) -> Weights:
        return [parameter.detach().clone() for parameter in self.replicas[replica].parameters()]

    def _set(self, weights: Weights) -> None:
        for model in self.replicas:
            for parameter, value in zip(model.parameters(), weights, strict=True):
                parameter.copy_(value)


SLOW = {"momentum": 0.6, "lr": 0.9}
KINDS: dict[str, tuple[Callable[[], Papers], Callable[..., LocalSGD]]] = {
    "mean": (partial(Papers, "mean"), LocalSGD),
    "slowmo": (partial(Papers, "slowmo", **SLOW), partial(SlowMo, **SLOW)),
    "slowmo over averages": (
        partial(Papers, "slowmo", **SLOW, average=2),
        partial(SlowMo, **SLOW, average_frequency=2),
    ),
    "diloco": (partial(Papers, "diloco"), partial(LocalSGD, outer=partial(torch.optim.SGD, **NESTEROV))),
}


def against_the_papers(plan: str, mesh: dict[str, int] | None, kinds: list[str]) -> dict[str, float]:
    """The largest difference of a weight after two rounds, for each kind of outer step."""
    found = {}
    for kind in kinds:
        paper, wrap = KINDS[kind]
        sharded = shardgraph.compile(made(), plan, mesh=mesh)
        optimizer = wrap(torch.optim.SGD(sharded.parameters(), lr=0.1, momentum=0.9), sharded, frequency=FREQUENCY)
        _train(sharded, optimizer, optimizer.param_groups, range(STEPS))
        found[kind] = _difference(sharded, paper().run())
    return found


def _train(sharded: nn.Module, optimizer: Any, groups: list[dict[str, Any]], steps: range) -> None:
    per_replica = dist.get_world_size() // REPLICAS
    replica, place = divmod(dist.get_rank(), per_replica)
    for step in steps:
        groups[0]["lr"] = rate_at(step)
        optimizer.zero_grad()
        loss_of(sharded(rows(step, replica).chunk(per_replica)[place])).backward()
        optimizer.step()


def _difference(sharded: nn.Module, weights: Weights) -> float:
    pairs = zip(sharded.parameters(), weights, strict=True)
    return max((whole(parameter.detach()) - value).abs().max().item() for parameter, value in pairs)


def continued(pushes: bool) -> float:
    """The largest difference of a weight of a run that was saved in the middle of a round and loaded."""
    made_optimizers = []
    for _ in range(2):
        sharded = shardgraph.compile(made(), "local-sgd")
        inner = torch.optim.SGD(sharded.parameters(), lr=0.1, momentum=0.9)
        base: Any = StochasticGradientPush(inner, sharded, staleness=1) if pushes else inner
        made_optimizers.append((sharded, SlowMo(base, sharded, frequency=FREQUENCY, momentum=0.6)))
    (first, saved), (second, loaded) = made_optimizers
    _train(first, saved, saved.param_groups, range(4))
    loaded.load_state_dict(copy.deepcopy(saved.state_dict()))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for sharded, optimizer in made_optimizers:
        _train(sharded, optimizer, optimizer.param_groups, range(4, STEPS))
    return _difference(second, [parameter.detach() for parameter in first.parameters()])


class Noisy(nn.Module):
    """Dropout, and statistics of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(5), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(torch.ones_like(x)) + 0 * self.norm(x)


def alone_and_together() -> dict[str, Any]:
    """What replicas draw and hold during a round and after it, and what they hold of the outer state."""
    sharded = shardgraph.compile(Noisy(), "local-sgd")
    optimizer = SlowMo(torch.optim.SGD(sharded.parameters(), lr=0.1), sharded, frequency=2)
    said: dict[str, Any] = {}
    for step in range(2):
        optimizer.zero_grad()
        drawn = sharded(torch.full((4, 5), float(dist.get_rank())) + rows(step, 0).float())
        drawn.sum().backward()
        optimizer.step()
        said["drawn"] = drawn.detach()
        said["means" if step else "own means"] = sharded.norm.running_mean.clone()
    state = optimizer.outer.state.values()
    said["state"] = sum(value.numel() for each in state for value in each.values())
    said["communication"] = sharded.program.communication
    return said


def fairscales(momentum: float, average: int, base: str) -> float:
    """The largest difference of a weight with FairScale's wrapper in a loop that steps the optimizer by itself."""
    model = made()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    wrapped = SlowMoDistributedDataParallel(
        model,
        1,
        slowmo_base_algorithm=base,
        slowmo_momentum=momentum,
        slowmo_frequency=FREQUENCY,
        localsgd_frequency=average,
    )
    for step in range(STEPS):
        inner.param_groups[0]["lr"] = rate_at(step)
        inner.zero_grad()
        loss_of(wrapped(rows(step, dist.get_rank()))).backward()
        inner.step()
        wrapped.perform_slowmo(inner)
    return _difference(wrapped.module, Papers("slowmo", momentum, 1.0, average).run())


def pushed(staleness: int, frequency: int | None) -> tuple[float, float]:
    """The largest difference of a weight of this rank's replica after all steps of stochastic gradient push, within
    rounds of slow momentum if they have a ``frequency``, and the weight of its sum."""
    sharded = shardgraph.compile(made(), "local-sgd")
    inner = torch.optim.SGD(sharded.parameters(), lr=0.1, momentum=0.9)
    push = StochasticGradientPush(inner, sharded, staleness=staleness)
    optimizer = push if frequency is None else SlowMo(push, sharded, frequency=frequency, **SLOW)
    for step in range(STEPS):
        inner.param_groups[0]["lr"] = rate_at(step)
        optimizer.zero_grad()
        loss_of(sharded(rows(step, dist.get_rank()))).backward()
        optimizer.step()
    expected = pushed_in_one_process(dist.get_world_size(), staleness, frequency)
    found = _difference(sharded, expected[dist.get_rank()]), push.weight
    push.drain()  # so that no message is left
    return found


def grown() -> float:
    """The largest change of a weight, at a rate of 0, when a group is added while messages are on their way."""
    sharded = shardgraph.compile(made(), "local-sgd")
    first, last = sharded.get_submodule("0"), sharded.get_submodule("2")
    push = StochasticGradientPush(torch.optim.SGD(first.parameters(), lr=0.0), sharded, staleness=2)
    optimizer = SlowMo(push, sharded, frequency=5)
    for step in range(STEPS):
        if step == 3:
            optimizer.add_param_group({"params": list(last.parameters())})
        optimizer.zero_grad()
        loss_of(sharded(rows(step, dist.get_rank()))).backward()
        optimizer.step()
    push.drain()
    return _difference(sharded, [parameter.detach() for parameter in made().parameters()])


def pushed_in_one_process(ranks: int, staleness: int, frequency: int | None) -> list[Weights]:
    """The paper's algorithm as it is written, over whole replicas, with a queue of messages."""
    models = [made() for _ in range(ranks)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    x = [[p.detach().clone() for p in model.parameters()] for model in models]
    w, queue, hops = [1.0] * ranks, [], [hop for hop in (1, 2, 4) if hop < ranks]
    start, momentum = x[0], [torch.zeros_like(each) for each in x[0]]

    def receive() -> None:
        for receiver, values, weight in queue.pop(0):
            x[receiver] = [a + b for a, b in zip(x[receiver], values, strict=True)]
            w[receiver] += weight

    for step in range(STEPS):
        messages = []
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            z = [value / w[rank] for value in x[rank]]
            with torch.no_grad():
                for parameter, value in zip(model.parameters(), z, strict=True):
                    parameter.copy_(value)
            optimizer.param_groups[0]["lr"] = rate_at(step)
            optimizer.zero_grad()
            loss_of(model(rows(step, rank))).backward()
            optimizer.step()
            moved = [p.detach() - value for p, value in zip(model.parameters(), z, strict=True)]
            x[rank], w[rank] = [(a + b) / 2 for a, b in zip(x[rank], moved, strict=True)], w[rank] / 2
            messages.append(((rank + hops[step % len(hops)]) % ranks, x[rank], w[rank]))
        queue.append(messages)
        if len(queue) > staleness:
            receive()
        if frequency is not None and (step + 1) % frequency == 0:
            while queue:
                receive()
            moved = [a - sum(each) / ranks for a, *each in zip(start, *x, strict=True)]
            momentum = [SLOW["momentum"] * u + delta / rate_at(step) for u, delta in zip(momentum, moved, strict=True)]
            start = [a - SLOW["lr"] * rate_at(step) * u for a, u in zip(start, momentum, strict=True)]
            x, w = [start] * ranks, [1.0] * ranks
    return [[value / w[rank] for value in x[rank]] for rank in range(ranks)]


def refused() -> dict[str, str]:
    """What is said of what cannot be."""
    reduced = shardgraph.compile(made(), "ddp")
    sgd = torch.optim.SGD(reduced.parameters(), lr=0.1)
    asked = {
        "reduced": lambda: LocalSGD(sgd, reduced, frequency=2),
        "base": lambda: SlowMoDistributedDataParallel(made(), 1, slowmo_base_algorithm="gossip"),
        "no inner axis": lambda: shardgraph.compile(made(), "local-sgd+fsdp"),
    }
    said = {}
    for name, ask in asked.items():
        try:
            ask()
        except shardgraph.ShardGraphError as error:
            said[name] = str(error)
    return said
