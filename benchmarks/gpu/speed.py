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
    contenders: dict[str, Callable[[nn.Module, Machine], Built]] = {
        "eager, autocast": eager,
        "shardgraph single": lambda model, machine: compiled(model, machine, "single"),
        "shardgraph fsdp": lambda model, machine: compiled(model, machine, "fsdp"),
        "fully_shard": fsdp2,
        "torch.compile, autocast": inductor,
    }
    with machine.process_group():
        steppers: dict[str, Stepper] = {}
        for name, build in contenders.items():
            with cases.case(name) as figures:
                model, call = models.seeded(make)
                figures["parameters"] = sum(p.numel() for p in model.parameters())
                model, run = build(model, machine)
                stepper = Stepper(machine, run, model, models.on(call, machine.device))
                figures["losses"] = [stepper.step().item() for _ in range(3)]
                figures |= own_peak(machine, stepper, model)
                steppers[name] = stepper
        for _ in range(3 if machine.tiny else 15):
            for name in list(steppers):
                try:
                    steppers[name].timed()
                except torch.OutOfMemoryError:
                    with cases.case(f"{name}, beside the others"):
                        raise
        first = next(iter(steppers.values()), None)
        for name, stepper in steppers.items():
            figures = cases.figures[name]
            figures |= {"seconds": stepper.median(), "times": stepper.times}
            assert first is not None
            cases.say(
                f"{name:<26}{1e3 * stepper.median():>9.2f} ms, {stepper.median() / first.median():.2f} of the first, "
                f"{1e3 * min(stepper.times):.2f} to {1e3 * max(stepper.times):.2f}; peak "
                f"{figures['bytes'] / 2**20:,.0f} MiB; losses {', '.join(f'{loss:.4f}' for loss in figures['losses'])}"
            )


def eager(model: nn.Module, machine: Machine) -> Built:
    model.to(machine.device)
    return model, autocast(model, machine)


def inductor(model: nn.Module, machine: Machine) -> Built:
    model.to(machine.device)
    return model, autocast(model if machine.tiny else torch.compile(model), machine)


def autocast(run: Callable[..., Any], machine: Machine) -> Callable[..., Any]:
    def call(**kwargs: Any) -> Any:
        with torch.autocast(machine.kind, dtype=torch.bfloat16):
            return run(**kwargs)

    return call


def compiled(model: nn.Module, machine: Machine, plan: str) -> Built:
    sharded = shardgraph.compile(model, plan=plan, precision="bf16")
    return sharded, sharded


def fsdp2(model: nn.Module, machine: Machine) -> Built:
    model.to(machine.device)
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
