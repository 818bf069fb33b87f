"""One process: the device that a bare process group leads to, and training that must equal the eager model's."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn

import shardgraph
from benchmarks.gpu import models
from benchmarks.gpu.cases import Cases, Machine, check
from benchmarks.gpu.training import differences, train, weights

TOLERANCE = 1e-4


def default_device(cases: Cases, machine: Machine) -> None:
    """Where ``compile`` computes under process groups that are made in the usual ways."""
    for backend in (None, "cpu:gloo,cuda:nccl" if machine.kind == "cuda" else "gloo"):
        name = "init_process_group()" if backend is None else f"init_process_group({backend!r})"
        with cases.case(name) as figures, machine.process_group(backend):
            figures["get_backend"] = str(dist.get_backend())
            sharded = shardgraph.compile(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)), plan="fsdp")
            figures["device"] = next(sharded.parameters()).device.type
            cases.say(f"{name}: get_backend() is {figures['get_backend']!r}, compiled for {figures['device']}")
            sharded(torch.randn(4, 8)).square().mean().backward()
            check(figures["device"] == machine.kind, f"compiled for {figures['device']}, not for {machine.kind}")
    with cases.case("without a process group") as figures:
        sharded = shardgraph.compile(nn.Linear(8, 8).to(machine.device), plan="single")
        figures["device"] = sharded(torch.randn(4, 8, device=machine.device)).device.type
        check(figures["device"] == machine.kind, f"computed on {figures['device']}, not on {machine.kind}")


def one_rank(cases: Cases, machine: Machine) -> None:
    """Three steps of AdamW under plans of one rank, beside the eager model."""
    original, cpu_call = models.seeded(models.small_llama(machine.tiny))
    call = models.on(cpu_call, machine.device)
    eager = copy.deepcopy(original).to(machine.device)
    losses = train(eager, call, 3)
    theirs = weights(eager)
    with machine.process_group(machine.backend):
        for plan in ("ddp", "zero2", "fsdp", "single"):
            with cases.case(plan) as figures:
                sharded = shardgraph.compile(copy.deepcopy(original), plan=plan)
                ours = train(sharded, call, 3)
                figures |= differences(losses, theirs, ours, weights(sharded))
                figures["device"] = ours[0].device.type
                cases.say(
                    f"{plan:<8} on {figures['device']}: losses within {figures['loss_error']:.1e}, weights within "
                    f"{figures['weight_error']:.1e} ({figures['worst_weight']})"
                )
                check(figures["device"] == machine.kind, f"computed on {figures['device']}")
                worst = max(figures["loss_error"], figures["weight_error"])
                check(worst <= TOLERANCE, f"differs from eager training by {worst:.1e}")
