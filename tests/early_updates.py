"""What ranks do in tests of updates within backward."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, optim

import shardgraph
from shardgraph import ir, preset
from shardgraph.module import pipelined, state_on_disk, update_in_backward
from shardgraph.report.step import program_halves, program_memory
from shardgraph.torch_api import local_tensor
from tests import ranks
from tests.local_steps import OPTIMIZERS
from tests.whole_steps import Original, batch, pair, target


class Reused(nn.Module):
    """A stack whose first weight is read again at the end, in another way, and whose last is a sum of two."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 7)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(7, 7), nn.Tanh()) for _ in range(3))
        self.head, self.added = nn.Linear(5, 1), nn.Parameter(torch.randn(1, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        for layer in self.layers:
            h = layer(h)
        h = h @ self.first.weight
        return F.linear(h, self.head.weight + self.added / 2, self.head.bias)


def errors(plan: str, recompute: str, bucket: int, backend: str = "eager") -> dict[str, float]:
    """The largest difference of a weight from the unsharded model's after steps without clipping."""
    found = {}
    for name in ("SGD with momentum", "AdamW"):
        original, make = Reused().double(), OPTIMIZERS[name]
        size = dist.get_world_size()
        chosen = replace(preset(plan, {"dp": size}), bucket=bucket)
        options: dict[str, Any] = {"recompute": recompute, "backend": backend}
        sharded = shardgraph.compile(copy.deepcopy(original), chosen, loss_fn=F.mse_loss, **options)
        mine, reference = make(sharded.parameters()), Original(original, make(original.parameters()))
        for number in range(4):
            sharded.step(batch(number), target=target(number), optimizer=mine)
            reference.step(number)
        found[name] = ranks.difference(sharded, original, gradients=False)
        found[f"{name}, not handed over"] = float(_left(sharded) != set())
    return found


def _left(sharded: Any) -> set[str]:
    """The parameters whose gradients the graph of the update returns at the end."""
    return {role.of.fqn for role, _ in ir.outputs(sharded.program.graph("update")) if isinstance(role, ir.Gradient)}


def deep(plan: str, layers: int = 12) -> tuple[Any, torch.Tensor]:
    """A module most of whose memory is parameters, and a batch."""
    torch.manual_seed(0)
    stack = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512, bias=False), nn.Tanh()) for _ in range(layers)))
    chosen = replace(preset(plan, {"dp": dist.get_world_size()}), bucket=1 << 20)
    return shardgraph.compile(stack, chosen, loss_fn=F.mse_loss), torch.randn(4, 512)


def peaks(plan: str) -> dict[str, tuple[int, int]]:
    """Predicted and measured peaks of steps: whole, clipped and taken apart; and the bytes of all gradients."""
    sharded, x = deep(plan, layers=32)
    optimizer = optim.AdamW(sharded.parameters())

    def apart() -> None:
        sharded.train_step(x, target=x)
        optimizer.step()
        optimizer.zero_grad()

    steps: dict[str, Any] = {
        "whole": lambda: sharded.step(x, target=x, optimizer=optimizer),
        "clipped": lambda: sharded.step(x, target=x, optimizer=optimizer, max_norm=1.0),
        "apart": apart,
    }
    steps["whole"]()
    found = {}
    for name, step in steps.items():
        states = [value for state in optimizer.state.values() for value in state.values()]
        measured = min(ranks._measured(step, [*sharded.parameters(), *states, x]) for _ in range(3))
        halves = program_halves(sharded.program, "update" if name == "whole" else "backward")
        predicted = program_memory(sharded.program, "adamw", dist.get_rank(), halves=halves)
        found[name] = predicted.peak_bytes, measured
    return found


def calls() -> dict[str, Any]:
    """How often backward and the end of a step update, and what a schedule and a replaced step see.

    The process has had pipelines and optimizer state on disk, which watch all optimizers.
    """
    pipelined._watch_optimizers()
    state_on_disk._hook_all_optimizers()
    sharded, x = deep("fsdp")
    optimizer = optim.SGD(sharded.parameters(), lr=0.01)
    schedule = optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    facts: dict[str, Any] = {}

    def counted(**options: Any) -> int:
        with torch.profiler.profile() as profiler:
            sharded.step(x, target=x, optimizer=optimizer, **options)
        return sum(e.count for e in profiler.key_averages() if e.key.startswith("Optimizer.step"))

    facts["without clipping"] = counted()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        schedule.step()
    facts["warnings"] = [str(each.message) for each in caught if "lr_scheduler" in str(each.message)]
    facts["clipped"] = counted(max_norm=1.0)
    original, seen = optimizer.step, []

    def step(*args: Any) -> Any:
        seen.append(sum(len(group["params"]) for group in optimizer.param_groups))
        return original(*args)

    optimizer.step = step
    facts["replaced"] = counted()
    facts["replaced step saw"] = len(seen)
    return facts


def aliased() -> float:
    """The error where the batch is in the memory of a parameter, which the step changes."""
    original = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4, bias=False)).double()
    sharded = shardgraph.compile(copy.deepcopy(original), "ddp", loss_fn=F.mse_loss)
    optimizers = [optim.SGD(module.parameters(), lr=0.1) for module in (sharded, original)]
    for _ in range(3):
        own = local_tensor(sharded.get_parameter("2.weight")).detach()
        sharded.step(own, target=torch.zeros(4, 4).double(), optimizer=optimizers[0])
        F.mse_loss(original(original[2].weight.detach()), torch.zeros(4, 4).double()).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
    return ranks.difference(sharded, original, gradients=False)


def others_gradients() -> dict[str, float]:
    """Errors where two optimizers train the model in turns: each leaves the gradients of the other's parameters."""
    sharded, original = pair()

    def halves(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        named = list(module.named_parameters())
        return [p for name, p in named if name < "3"], [p for name, p in named if name >= "3"]

    mine, theirs = ([optim.AdamW(half, lr=0.01) for half in halves(module)] for module in (sharded, original))
    for number in range(4):
        sharded.step(batch(number), target=target(number), optimizer=mine[0])
        mine[1].step()
        mine[1].zero_grad()
        F.mse_loss(original(batch(number)), target(number)).backward()
        for optimizer in theirs:
            optimizer.step()
            optimizer.zero_grad()
    return {"weights": ranks.difference(sharded, original, gradients=False)}


def failing() -> dict[str, bool]:
    """What an optimizer is after a step that fails between two updates, and whether the next one goes well."""
    sharded, x = deep("ddp", layers=4)
    optimizer = optim.SGD(sharded.parameters(), lr=0.01, momentum=0.9)
    sharded.step(x, target=x, optimizer=optimizer)
    parameters = list(optimizer.param_groups[0]["params"])
    update = update_in_backward.UpdatesInBackward._update
    done: list[Any] = []

    def fails(self: Any, runs: Any) -> None:
        if done:
            raise ValueError("in the middle")
        done.append(runs)
        update(self, runs)

    stale = sharded(x)
    update_in_backward.UpdatesInBackward._update = fails
    try:
        sharded.step(x, target=x, optimizer=optimizer)
        facts = {"raised": False}
    except ValueError:
        facts = {"raised": True}
    finally:
        update_in_backward.UpdatesInBackward._update = update
    try:
        stale.sum().backward()
        facts["noticed"] = False
    except shardgraph.ShardGraphError:
        facts["noticed"] = True
    now = optimizer.param_groups[0]["params"]
    facts["parameters"] = all(a is b for a, b in zip(now, parameters, strict=True))
    facts["state"] = all(isinstance(optimizer.state[p]["momentum_buffer"], torch.Tensor) for p in parameters)
    sharded.step(x, target=x, optimizer=optimizer)
    return facts
