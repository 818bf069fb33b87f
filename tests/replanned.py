"""What runs on the ranks for :mod:`tests.test_replanning`: a job that goes on under another plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import shardgraph
from shardgraph import Plan
from shardgraph.plans.batch import Batch
from shardgraph.report.parts import parts_of
from tests.machines import toy_cluster

SAMPLES = 16  # of a step


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 8))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch of a step."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(SAMPLES, 8, generator=generator), torch.randn(SAMPLES, 8, generator=generator)


def trained(
    call: Callable[[torch.Tensor], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    steps: range,
    calls: int = 1,
    data_rank: int = 0,
    data_size: int = 1,
) -> list[float]:
    """The loss of each step, of all samples, trained as a loop over a plan's calls does it."""
    losses = []
    for step in steps:
        inputs, targets = (part.chunk(data_size)[data_rank].chunk(calls) for part in batch(step))
        total = torch.zeros(())
        for each, target in zip(inputs, targets, strict=True):
            loss = nn.functional.mse_loss(call(each), target) / calls
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        if dist.is_initialized() and dist.get_world_size() > 1:  # ranks that share a batch have its loss
            dist.all_reduce(total)
            total /= dist.get_world_size()
        losses.append(total.item())
    return losses


def continued(plan_text: str, folder: str, steps: range, resume: bool) -> list[float]:
    """Losses of ``steps`` under a plan, from the checkpoint in ``folder`` or saved to it afterwards."""
    plan = Plan.from_yaml(plan_text)
    sharded = shardgraph.compile(net(), plan, example_inputs=(torch.zeros(plan.samples_per_call, 8),))
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-2)
    if resume:
        state = dict(zip(("model", "optimizer"), get_state_dict(sharded, optimizer), strict=True))
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(sharded, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    rank = plan.data_rank(dist.get_rank())
    losses = trained(sharded, optimizer, steps, plan.calls, rank, plan.data_size)
    if not resume:
        state = dict(zip(("model", "optimizer"), get_state_dict(sharded, optimizer), strict=True))
        dcp.save(state, checkpoint_id=folder)
    return losses


def peaks_of_calls(name: str, calls: int) -> tuple[int, int]:
    """The measured and the predicted peak of a step of so many calls: the least of several steps, since a thread of
    gloo may still hold what it has sent."""
    x, options = torch.randn(64, 8), {"loss_fn": nn.functional.mse_loss}
    sharded = shardgraph.compile(net(), name, example_inputs=(x,), **options)
    optimizer = torch.optim.AdamW(sharded.parameters())

    def step() -> None:
        for _ in range(calls):
            sharded.train_step(x, target=x)
        optimizer.step()
        optimizer.zero_grad()

    step()
    peaks = []
    for _ in range(6):
        with shardgraph.MemoryTracker(sharded, optimizer) as tracker:
            step()
        peaks.append(tracker.trace.peak.live)
    plan = replace(sharded.plan, batch=Batch(64 * calls * sharded.plan.data_size, calls))
    options |= {"example_kwargs": {"target": x}, "cluster": toy_cluster(1, 4)}
    return min(peaks), parts_of(shardgraph.analyze(net(), (x,), plan, **options)).peak
