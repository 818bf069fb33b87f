"""What runs on each rank of the tests of measured memory; at module level, so that a rank finds it."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn

import shardgraph
from shardgraph.report.analysis import analyze_program
from shardgraph.report.step import program_memory


class Block(nn.Module):
    """A residual block, whose hidden layer is what most is saved of."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """A chain of blocks of unequal size, and the loss."""

    def __init__(self, hidden: tuple[int, ...] = (64, 32, 128, 32)) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.layers = nn.ModuleList(Block(16, each) for each in hidden)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


class Logits(Net):
    """The same without the loss."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def batch() -> torch.Tensor:
    return torch.randn(32, 16, generator=torch.Generator().manual_seed(0))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    model(x).backward()
    optimizer.step()
    optimizer.zero_grad()


def traced(model: nn.Module) -> shardgraph.MemoryTrace:
    """The memory of the second step."""
    optimizer, x = torch.optim.AdamW(model.parameters()), batch()
    step(model, optimizer, x)
    with shardgraph.MemoryTracker(model, optimizer) as tracker:
        step(model, optimizer, x)
    return tracker.trace


def of_a_compiled_part() -> dict[str, dict[str, int]]:
    """What the modules held of a model of which one block is compiled."""
    model = Net()
    model.layers[2] = shardgraph.compile(model.layers[2], "single")
    return {module: dict(own) for module, own in traced(model).modules.items()}


def of_stages() -> tuple[list[str], int]:
    """The modules of which this rank has parameters, and the halves of the step that ran on it."""
    example = {"example_inputs": (batch(),), "example_kwargs": {"target": torch.zeros(32, 4)}}
    sharded = shardgraph.compile(Logits(), "pp", loss_fn=nn.functional.mse_loss, **example)
    optimizer = torch.optim.AdamW(sharded.parameters())
    for _ in range(2):
        with shardgraph.MemoryTracker(sharded, optimizer) as tracker:
            sharded.train_step(batch(), target=torch.zeros(32, 4))
            optimizer.step()
        optimizer.zero_grad()
    halves = {moment.half for moment in tracker.trace.moments}
    return [module for module, own in tracker.trace.modules.items() if own.get("parameters")], len(halves)


def of_shards(plan: str) -> tuple[int, int, dict[str, dict[str, int]]]:
    """The predicted and the measured peak of this rank, and what its modules held."""
    sharded = shardgraph.compile(Net(), plan)
    # The least of several: gloo's thread may let go of a buffer late.
    trace = min((traced(sharded) for _ in range(3)), key=lambda each: each.peak.live)
    predicted = program_memory(sharded.program, "adamw", dist.get_rank()).peak_bytes
    return predicted, trace.peak.live, {module: dict(own) for module, own in trace.modules.items()}


def of_waits(plan: str) -> tuple[list[str], list[tuple[str, float]], str, bool]:
    """The program's waits, those measured with their seconds, their table, and whether a measured step is the same."""
    models = [shardgraph.compile(Net(), plan), shardgraph.compile(Net(), plan)]
    tracker = shardgraph.WaitTracker(models[1])
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step(model, optimizer, batch())
        with tracker if model is models[1] else nullcontext():
            for _ in range(2):
                step(model, optimizer, batch())
    ours, measured = ([p.to_local() for p in model.parameters()] for model in models)
    analysis = analyze_program(models[1].program, shardgraph.Cluster.detect())
    table = analysis.transfer_table(tracker.times)
    waits = [f"{each.half} {each.wait}" for each in analysis.transfers]
    times = [(f"{half} {wait}", seconds) for (half, wait), seconds in tracker.times.items()]
    return waits, times, table, all(map(torch.equal, ours, measured))
