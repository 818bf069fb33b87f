"""Measured steps of torch's pipeline schedules beside the simulated ones, on real processes whose stages only sleep.

Run ``python benchmarks/schedules.py`` (a minute): 4 ranks, 8 microbatches; F, I and W of a microbatch take 60 ms each
on every rank, in one stage or divided between its two, so that steps compare with each other. Sleep needs no core, so
that any machine can run it; what a step takes beyond the simulated one is torch's and gloo's own time.
"""

from __future__ import annotations

import time
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

import shardgraph
from shardgraph.cost_models.schedules import StageCost, simulate_schedule
from shardgraph.plans.orders import SCHEDULES, pipeline_order, rank_of_stage

RANKS, MICROBATCHES, SECONDS, STEPS = 4, 8, 0.06, 4


class Sleep(torch.autograd.Function):
    """An identity that takes its time, in forward if asked and in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
        time.sleep(forward)
        ctx.backward = backward
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep(ctx.backward)
        return gradient.clone(), None, None


class Stage(nn.Module):
    """Sleeps in forward, for the gradient of its input and for that of its weight."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Sleep.apply(x, self.seconds, self.seconds) @ Sleep.apply(self.weight, 0.0, self.seconds)


def measure(name: str) -> float:
    """The shortest of a few steps, the first left out."""
    stages = RANKS * SCHEDULES[name].least
    place = rank_of_stage(name, RANKS, stages)
    own = [i for i in range(stages) if place[i] == dist.get_rank()]
    mine = [PipelineStage(Stage(SECONDS / len(own)), i, stages, torch.device("cpu")) for i in own]
    kind: Any = get_schedule_class(SCHEDULES[name].torch_name)
    single = issubclass(kind, PipelineScheduleSingle)
    schedule = kind(mine[0] if single else mine, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    batch = torch.randn(MICROBATCHES, 4, requires_grad=True)
    times = []
    for _ in range(STEPS):
        dist.barrier()
        began = time.perf_counter()
        target = {"target": torch.zeros(MICROBATCHES, 4)} if stages - 1 in own else {}
        schedule.step(*([batch] if 0 in own else []), **target)
        dist.barrier()
        times.append(time.perf_counter() - began)
    return min(times[1:])


def main() -> None:
    torch.set_num_threads(1)
    steps, busy = [], 3 * SECONDS * MICROBATCHES
    for name, schedule in SCHEDULES.items():
        measured = measure(name)
        stages = RANKS * schedule.least
        order = pipeline_order(name, RANKS, stages, MICROBATCHES)
        cost = StageCost(forward=SECONDS / schedule.least, backward=2 * SECONDS / schedule.least)
        found = simulate_schedule(order, [cost] * stages, prefetch=schedule.prefetch)
        steps.append((round(found.seconds, 6), measured))
        if dist.get_rank() == 0:
            length = f"{found.seconds:.2f} s | {measured:.2f} s | {measured / found.seconds - 1:+.1%}"
            print(f"| `{name}` | {length} | {found.bubble_fraction:.1%} | {1 - busy / measured:.1%} |", flush=True)
    if dist.get_rank() == 0:
        pairs = [(a, b) for a, b in combinations(steps, 2) if a[0] != b[0]]
        alike = sum((a[0] < b[0]) == (a[1] < b[1]) for a, b in pairs)
        print(f"{alike} of {len(pairs)} pairs of simulated steps that differ are in the measured order")


if __name__ == "__main__":
    shardgraph.launch(main, nproc=RANKS)
