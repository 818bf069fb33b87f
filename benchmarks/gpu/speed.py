"""A Llama of a thousand million parameters, trained in bfloat16 by this project, eager PyTorch and FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import shardgraph
from benchmarks.gpu import models
from benchmarks.gpu.cases import Cases, Machine
from benchmarks.gpu.training import Stepper

Built = tuple[nn.Module, Callable[..., Any]]
"""A model, and what is called in its place."""


def speed(cases: Cases, machine: Machine) -> None:
    """Steps of all contenders, one of each in turn; each one's peak is what its own step adds to its own states."""
    make = models.llama(2, 64, 2, 16, 128) if machine.tiny else models.llama(16, 2048, 2, 2048)
    steppers: dict[str, Stepper] = {}
    add(cases, machine, steppers, make, "eager, autocast", eager)
    add(cases, machine, steppers, make, "shardgraph single", lambda model, machine: compiled(model, machine, "single"))
    with machine.process_group(machine.backend):
        add(cases, machine, steppers, make, "shardgraph fsdp", lambda model, machine: compiled(model, machine, "fsdp"))
        add(cases, machine, steppers, make, "fully_shard", fsdp2)
        interleaved(cases, machine, steppers, "without torch.compile")
        fused = {"backend": "inductor"}
        add(cases, machine, steppers, make, "shardgraph inductor", lambda *given: compiled(*given, "single", **fused))
        add(cases, machine, steppers, make, "torch.compile, autocast", inductor)  # last, because it may take too long
        interleaved(cases, machine, steppers, "all")


def add(
    cases: Cases,
    machine: Machine,
    steppers: dict[str, Stepper],
    make: models.Make,
    name: str,
    build: Callable[[nn.Module, Machine], Built],
) -> None:
    """One more contender, warmed up, with its losses and its peak."""
    with cases.case(name) as figures:
        model, call = models.seeded(make, machine.device)
        figures["parameters"] = sum(p.numel() for p in model.parameters())
        model, run = build(model, machine)
        stepper = Stepper(machine, run, model, call)
        figures["losses"] = [stepper.step().item() for _ in range(3)]
        figures |= own_peak(machine, stepper, model)
        steppers[name] = stepper
        losses = ", ".join(f"{loss:.4f}" for loss in figures["losses"])
        cases.say(f"{name:<26}peak {figures['bytes'] / 2**20:>9,.0f} MiB; losses {losses}")


def interleaved(cases: Cases, machine: Machine, steppers: dict[str, Stepper], what: str) -> None:
    """Steps of all contenders, one of each in turn."""
    with cases.case(f"interleaved, {what}") as figures:
        for stepper in steppers.values():
            stepper.times.clear()
        for _ in range(3 if machine.tiny else 12):
            for stepper in steppers.values():
                stepper.timed()
        first = next(iter(steppers.values())).median()
        for name, stepper in steppers.items():
            figures[name] = {"seconds": stepper.median(), "times": stepper.times[:]}
            cases.say(
                f"{name:<26}{1e3 * stepper.median():>9.2f} ms, {stepper.median() / first:.2f} of the first, "
                f"{1e3 * min(stepper.times):.2f} to {1e3 * max(stepper.times):.2f}"
            )


def eager(model: nn.Module, machine: Machine) -> Built:
    return model, autocast(model, machine)


def inductor(model: nn.Module, machine: Machine) -> Built:
    return model, autocast(model if machine.tiny else torch.compile(model), machine)


def autocast(run: Callable[..., Any], machine: Machine) -> Callable[..., Any]:
    def call(**kwargs: Any) -> Any:
        with torch.autocast(machine.kind, dtype=torch.bfloat16):
            return run(**kwargs)

    return call


def compiled(model: nn.Module, machine: Machine, plan: str, **options: Any) -> Built:
    sharded = shardgraph.compile(model, plan=plan, precision="bf16", **options)
    return sharded, sharded


def fsdp2(model: nn.Module, machine: Machine) -> Built:
    mesh = init_device_mesh(machine.kind, (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model, model


def own_peak(machine: Machine, stepper: Stepper, model: nn.Module) -> dict[str, int]:
    """The peak of a step less what others have on the device."""
    states = [value for state in stepper.optimizer.state.values() for value in state.values()]
    own = sum(local_bytes(tensor) for tensor in [*model.parameters(), *model.buffers(), *states])
    machine.settle()
    others = machine.allocated() - own
    machine.reset_peak()
    stepper.step()
    machine.settle()
    return {"bytes": machine.peak() - others, "state_bytes": own}


def local_bytes(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return 0 if local.device.type == "cpu" else local.numel() * local.element_size()
