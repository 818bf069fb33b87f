"""Measured steps of torch's pipeline schedules beside the simulated ones, on real processes whose stages only sleep.

Run ``python benchmarks/schedules.py`` (a minute): 4 ranks, 8 microbatches; F, I and W take 30 ms each. Sleep needs no
core, so that any machine can run it; what a step takes beyond the simulated one is torch's and gloo's own time.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

import shardgraph
from shardgraph.cost_models.schedules import StageCost, simulate_schedule
from shardgraph.pipeline.orders import SCHEDULES, pipeline_order, rank_of_stage

RANKS, MICROBATCHES, SECONDS, STEPS = 4, 8, 0.03, 4


class Sleep(torch.autograd.Function):
    """An identity that takes its time, in forward if asked and in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: bool) -> torch.Tensor:
        time.sleep(SECONDS * forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(SECONDS)
        return gradient.clone(), None


class Stage(nn.Module):
    """Sleeps in forward, for the gradient of its input and for that of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Sleep.apply(x, True) @ Sleep.apply(self.weight, False)


def measure(name: str) -> float:
    """The shortest of a few steps, the first left out."""
    stages = RANKS * SCHEDULES[name].least
    place = rank_of_stage(name, RANKS, stages)
    own = [i for i in range(stages) if place[i] == dist.get_rank()]
    mine = [PipelineStage(Stage(), i, stages, torch.device("cpu")) for i in own]
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
    for name, schedule in SCHEDULES.items():
        measured = measure(name)
        if dist.get_rank() == 0:
            stages = RANKS * schedule.least
            order = pipeline_order(name, RANKS, stages, MICROBATCHES)
            cost = StageCost(forward=SECONDS, backward=2 * SECONDS)
            simulated = simulate_schedule(order, [cost] * stages, prefetch=schedule.prefetch).seconds
            print(f"| `{name}` | {simulated:.2f} s | {measured:.2f} s | {measured / simulated - 1:+.1%} |", flush=True)


if __name__ == "__main__":
    shardgraph.launch(main, nproc=RANKS)
