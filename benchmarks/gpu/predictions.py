"""Predicted and measured peak memory and step time, of models of several kinds in bfloat16."""

from __future__ import annotations

import statistics
from contextlib import nullcontext
from typing import Any

import torch

import shardgraph
from benchmarks.gpu import models
from benchmarks.gpu.cases import Cases, Machine
from benchmarks.gpu.training import Stepper

Configurations = dict[str, tuple[models.Make, str | None]]
"""By name a model and its plan; None: ``"single"`` without a process group."""


def configurations(tiny: bool) -> Configurations:
    if tiny:
        return {
            "llama": (models.llama(2, 64, 2, 16, 128), None),
            "resnet, fsdp": (models.resnet(2, 32, (1, 1), "basic"), "fsdp"),
        }
    small, large = (12, 768), (16, 2048)  # 125 million parameters and 1 thousand million
    return {
        "llama 12x768, 8x1024": (models.llama(*small, 8, 1024), None),
        "llama 12x768, 8x1024, ddp": (models.llama(*small, 8, 1024), "ddp"),
        "llama 12x768, 8x1024, fsdp": (models.llama(*small, 8, 1024), "fsdp"),
        "llama 12x768, 4x4096": (models.llama(*small, 4, 4096), None),
        "llama 16x2048, 2x2048": (models.llama(*large, 2, 2048), None),
        "llama 16x2048, 4x2048, fsdp": (models.llama(*large, 4, 2048), "fsdp"),
        "gpt2 12x768, 8x1024": (models.gpt2(12, 768, 8, 1024), None),
        "gpt2 12x768, 8x1024, fsdp": (models.gpt2(12, 768, 8, 1024), "fsdp"),
        "bert 12x768, 32x512": (models.bert(12, 768, 32, 512), None),
        "vit 12x768, 64x224x224": (models.vit(12, 768, 64), None),
        "resnet 50, 64x224x224": (models.resnet(64), None),
        "resnet 50, 64x224x224, ddp": (models.resnet(64), "ddp"),
    }


def memory_and_time(cases: Cases, machine: Machine) -> None:
    """Every configuration: the prediction for this GPU, then steps."""
    cluster = cluster_name(machine)
    base = workspaces(machine)
    cases.figures["library workspaces"] = {"bytes": base, "cluster": str(cluster)}
    cases.say(f"cluster {cluster or 'this machine'}; workspaces of libraries {base / 2**20:.0f} MiB, not in the table")
    cases.say(
        f"{'':<30}{'predicted':>10}{'measured':>10} MiB{'ratio':>7}{'predicted':>11}{'measured':>10} ms{'ratio':>7}"
    )
    for name, (make, plan) in configurations(machine.tiny).items():
        with cases.case(name) as figures:
            figures |= measured_and_predicted(machine, make, plan, cluster, base)
            cases.say(row(name, figures))
        machine.free()
    found = [each for each in cases.figures.values() if "memory_ratio" in each]
    for what in ("memory_ratio", "time_ratio"):
        errors = [abs(each[what] - 1) for each in found if each[what]]
        if errors:
            cases.say(
                f"{what}: median error {statistics.median(errors):.1%}, largest {max(errors):.1%}, of {len(errors)}"
            )


def cluster_name(machine: Machine) -> str | None:
    """The described device that this is; None: the machine as it is detected."""
    if machine.kind != "cuda":
        return None
    name = torch.cuda.get_device_name()
    return next((known for known in ("H100", "H200", "B200", "A100", "V100", "MI300X") if known in name), None)


def workspaces(machine: Machine) -> int:
    """Bytes that libraries keep on the device once they have been used; nothing predicts them."""
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.randn(512, 512, device=machine.device, dtype=dtype, requires_grad=True)
        (a @ a).sum().backward()
    del a
    machine.settle()
    machine.free()
    return machine.allocated()


def measured_and_predicted(
    machine: Machine, make: models.Make, plan: str | None, cluster: str | None, workspaces: int
) -> dict[str, Any]:
    """Bytes, but for those of ``workspaces``, and seconds of a step, predicted and measured."""
    model, call = models.seeded(make, machine.device)
    told = shardgraph.analyze(
        model, plan=plan or "single", mesh={"dp": 1}, example_kwargs=call, cluster=cluster, precision="bf16"
    )
    figures: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters())}
    figures |= {"predicted_bytes": told.peak_memory, "predicted_seconds": told.time.total}
    with nullcontext() if plan is None else machine.process_group(machine.backend):
        sharded = shardgraph.compile(model, plan=plan or "single", precision="bf16")
        stepper = Stepper(machine, sharded, sharded, models.on(call, machine.device))
        for _ in range(3):
            stepper.step()
        figures |= peaks(machine, stepper)
        figures["bytes"] = max(0, figures["bytes"] - workspaces)
        for _ in range(3 if machine.tiny else 12):
            stepper.timed()
    figures |= {"seconds": stepper.median(), "times": stepper.times}
    figures["time_ratio"] = figures["predicted_seconds"] / figures["seconds"]
    figures["predicted_at_peak"] = {"half": told.peak.half, **told.peak.memory}
    figures["memory_ratio"] = figures["predicted_bytes"] / figures["bytes"] if figures["bytes"] else None
    return figures


def peaks(machine: Machine, stepper: Stepper) -> dict[str, int]:
    """The highest bytes of a step, and of its halves; and what lies between steps."""
    machine.settle()
    found = {"between_steps": machine.allocated()}
    machine.reset_peak()
    stepper.backward()
    machine.settle()
    found |= {"backward_peak": machine.peak(), "with_gradients": machine.allocated()}
    machine.reset_peak()
    stepper.optimizer.step()
    machine.settle()
    found["optimizer_peak"] = machine.peak()
    stepper.optimizer.zero_grad()
    return found | {"bytes": max(found["backward_peak"], found["optimizer_peak"])}


def row(name: str, figures: dict[str, Any]) -> str:
    memory = f"{figures['predicted_bytes'] / 2**20:>10.0f}{figures['bytes'] / 2**20:>10.0f}    "
    memory += f"{figures['memory_ratio']:>7.3f}" if figures["memory_ratio"] else f"{'':>7}"
    seconds = (
        f"{1e3 * figures['predicted_seconds']:>11.1f}{1e3 * figures['seconds']:>10.1f}   {figures['time_ratio']:>7.2f}"
    )
    return f"{name:<30}{memory}{seconds}"
