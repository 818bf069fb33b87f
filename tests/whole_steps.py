"""What ranks do in tests of whole training steps."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, optim

import shardgraph
from shardgraph import preset
from shardgraph.plans.annotations.kinds import offload
from shardgraph.report.step import program_memory
from shardgraph.runtime.host import is_on_host
from shardgraph.torch_api import local_tensor
from tests import ranks
from tests.local_steps import OPTIMIZERS
from tests.ranks import difference


def model() -> nn.Module:
    """Of parameters that do not all divide by two, one of which is never used."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 8), nn.Tanh(), nn.Linear(8, 1))
    layers.register_parameter("unused", nn.Parameter(torch.ones(3)))
    return layers.double()


def pair(
    plan: str = "fsdp", bucket: int = 1 << 20, dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[Any, nn.Module]:
    """A sharded module, and the original."""
    original = model().to(dtype)
    size = dist.get_world_size()
    mesh = {"hsdp": {"replica": 2, "shard": 2}}.get(plan, {"tp": size} if plan == "tp" else {"dp": size})
    if plan == "fsdp+tp":
        mesh = {"dp": 2, "tp": 2}
    example = {"example_inputs": (batch(0),), "example_kwargs": {"target": target(0)}} if "tp" in plan else {}
    chosen = replace(preset(plan, mesh), bucket=bucket)
    return shardgraph.compile(copy.deepcopy(original), chosen, loss_fn=F.mse_loss, **example, **options), original


def batch(step: int) -> torch.Tensor:
    """The same on all ranks."""
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(step)).double()


def target(step: int) -> torch.Tensor:
    """Of a batch."""
    return torch.randn(4, 1, generator=torch.Generator().manual_seed(100 + step)).double()


class Original:
    """The unsharded step."""

    def __init__(self, module: nn.Module, optimizer: optim.Optimizer, max_norm: float | None = None) -> None:
        self.module, self.optimizer, self.max_norm = module, optimizer, max_norm
        self.norm: torch.Tensor | None = None

    def step(self, number: int) -> torch.Tensor:
        loss = F.mse_loss(self.module(batch(number)), target(number))
        loss.backward()
        if self.max_norm is not None:
            self.norm = nn.utils.clip_grad_norm_(self.module.parameters(), self.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def step_apart(sharded: Any, optimizer: optim.Optimizer, number: int) -> None:
    """Backward, and the optimizer's own step."""
    sharded.train_step(batch(number), target=target(number))
    optimizer.step()
    optimizer.zero_grad()


def no_gradients(module: nn.Module) -> bool:
    """Whether no parameter has one."""
    return all(parameter.grad is None for parameter in module.parameters())


def errors_by_optimizer(plan: str, bucket: int = 1 << 20) -> dict[str, float]:
    """The largest difference of a weight after five steps, clipped, under a schedule."""
    return {name: _error(plan, make, bucket) for name, make in OPTIMIZERS.items()}


def _error(plan: str, make: Any, bucket: int) -> float:
    sharded, original = pair(plan, bucket)
    mine, reference = make(sharded.parameters()), Original(original, make(original.parameters()), 0.5)
    schedules = [optim.lr_scheduler.ExponentialLR(each, 0.8) for each in (mine, reference.optimizer)]
    worst = 0.0
    for number in range(5):
        loss = sharded.step(batch(number), target=target(number), optimizer=mine, max_norm=0.5)
        theirs = reference.step(number)
        worst = max(worst, abs(loss.item() - theirs.item()), abs(sharded.gradient_norm.item() - reference.norm.item()))
        for schedule in schedules:
            schedule.step()
        assert no_gradients(sharded)
    return max(worst, difference(sharded, original, gradients=False))


def error_of_plan(plan: str) -> float:
    """As :func:`errors_by_optimizer`, of one optimizer."""
    return _error(plan, OPTIMIZERS["AdamW"], 1 << 20)


def mixed() -> dict[str, float]:
    """Errors after whole steps and an optimizer's own in turns, and after the state was saved and loaded."""
    sharded, original = pair()
    mine, reference = (
        optim.AdamW(sharded.parameters(), lr=0.01),
        Original(original, optim.AdamW(original.parameters(), lr=0.01)),
    )
    errors = {}
    for number in range(8):
        if number == 6:
            kept = mine.state_dict()
            mine = optim.AdamW(sharded.parameters(), lr=0.5)
            mine.load_state_dict(kept)
        if number in (1, 4, 6):
            step_apart(sharded, mine, number)
        else:
            sharded.step(batch(number), target=target(number), optimizer=mine)
        reference.step(number)
        errors[f"step {number}"] = difference(sharded, original, gradients=False)
    states = [
        {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in state.items()}
        for state in mine.state_dict()["state"].values()
    ]
    theirs = reference.optimizer.state_dict()["state"].values()
    errors["state"] = max(
        (a[name] - b[name]).abs().max().item() for a, b in zip(states, theirs, strict=True) for name in b
    )
    return errors


def some_only() -> float:
    """The error where groups alternate, one parameter is frozen in between, and one is trained later."""
    sharded, original = pair()

    def groups(module: nn.Module) -> list[dict[str, Any]]:
        weights = [p for name, p in module.named_parameters() if name.endswith("weight") and not name.startswith("5")]
        biases = [p for name, p in module.named_parameters() if name.endswith("bias")]
        return [{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 0.02, "weight_decay": 0.0}]

    modules = (sharded, original)
    optimizers = [optim.AdamW(groups(module), lr=0.01) for module in modules]
    reference = Original(original, optimizers[1])
    for number in range(8):
        if number == 3:
            for module, optimizer in zip(modules, optimizers, strict=True):
                module.get_parameter("0.bias").requires_grad_(False)
                optimizer.add_param_group({"params": [module.get_parameter("5.weight")], "lr": 0.03})
        if number == 6:
            for module in modules:
                module.get_parameter("0.bias").requires_grad_(True)
        for module in modules:
            module.zero_grad()
        sharded.step(batch(number), target=target(number), optimizer=optimizers[0])
        reference.step(number)
    return difference(sharded, original, gradients=False)


def accumulated() -> dict[str, float]:
    """Errors of steps that end an accumulation, with and without communication before."""
    errors = {}
    for quiet in (False, True):
        sharded, original = pair()
        mine, reference = optim.SGD(sharded.parameters(), lr=0.1), optim.SGD(original.parameters(), lr=0.1)
        for number in range(4):
            if quiet:
                with sharded.no_sync():
                    sharded.train_step(batch(number), target=target(number))
            else:
                sharded.train_step(batch(number), target=target(number))
            sharded.step(batch(number + 10), target=target(number + 10), optimizer=mine)
            for each in (number, number + 10):
                F.mse_loss(original(batch(each)), target(each)).backward()
            reference.step()
            reference.zero_grad()
        errors["no_sync" if quiet else "in grad"] = difference(sharded, original, gradients=False)
    return errors


def scaled() -> dict[str, Any]:
    """What a scaler does with steps, one of which overflows on one rank alone."""
    sharded, original = pair()
    mine, reference = (
        optim.AdamW(sharded.parameters(), lr=0.01),
        Original(original, optim.AdamW(original.parameters(), lr=0.01), 0.5),
    )
    scaler = shardgraph.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    scales = []
    for number in range(4):
        x = batch(number)
        if number == 2 and dist.get_rank() == 1:
            x = x * float("inf")
        sharded.step(x, target=target(number), optimizer=mine, scaler=scaler, max_norm=0.5)
        scales.append(scaler.get_scale())
        if number != 2:
            reference.step(number)
    return {"scales": scales, "error": difference(sharded, original, gradients=False)}


def bits(plan: str) -> dict[str, bool]:
    """Whether whole steps give the bits of steps taken apart, in double and in single precision."""
    same = {}
    for name, make in OPTIMIZERS.items():
        for dtype in (torch.float64, torch.float32):
            modules = [pair(plan, dtype=dtype)[0] for _ in range(2)]
            optimizers = [make(module.parameters()) for module in modules]
            for number in range(5):
                x, y = batch(number).to(dtype), target(number).to(dtype)
                modules[0].step(x, target=y, optimizer=optimizers[0])
                modules[1].train_step(x, target=y)
                optimizers[1].step()
                optimizers[1].zero_grad()
            pairs = zip(*(module.parameters() for module in modules), strict=True)
            same[f"{name}, {dtype}"] = all(torch.equal(local(a), local(b)) for a, b in pairs)
    return same


def local(tensor: Any) -> torch.Tensor:
    """This rank's shard."""
    return shardgraph.torch_api.local_tensor(tensor)


def kernels_of_groups() -> int:
    """Operations that take an update where parameters of two groups alternate."""
    sharded = shardgraph.compile(
        nn.Sequential(*(nn.Linear(8, 8) for _ in range(6))),
        replace(preset("fsdp", {"dp": 2}), bucket=1 << 20),
        loss_fn=F.mse_loss,
    )
    named = list(sharded.named_parameters())
    groups = [{"params": [p for name, p in named if name.endswith(end)], "lr": 0.1} for end in ("weight", "bias")]
    optimizer, x = optim.AdamW(groups), torch.randn(4, 8)
    sharded.step(x, target=x, optimizer=optimizer)
    with torch.profiler.profile() as profiler:
        sharded.step(x, target=x, optimizer=optimizer)
    return sum(event.count for event in profiler.key_averages() if event.key == "aten::addcdiv_")


def kernels() -> dict[str, Any]:
    """Operations that take an update of a model of so many blocks."""
    counts = {}
    for blocks in (2, 6):
        layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(blocks)))
        plan = replace(preset("fsdp", {"dp": 2}), bucket=1 << 20)
        sharded = shardgraph.compile(layers, plan, loss_fn=F.mse_loss)
        optimizer = optim.AdamW(sharded.parameters())
        x = torch.randn(4, 8)
        for _ in range(2):
            sharded.step(x, target=x, optimizer=optimizer)
        with torch.profiler.profile() as profiler:
            sharded.step(x, target=x, optimizer=optimizer)
        counts[blocks] = sum(event.count for event in profiler.key_averages() if event.key == "aten::addcdiv_")
    return {"addcdiv_": counts, "gradients": no_gradients(sharded)}


def refused() -> list[str]:
    """Errors of calls that make no sense."""
    sharded, _ = pair()
    mine = optim.SGD(sharded.parameters(), lr=0.1)
    messages = []

    def caught(**options: Any) -> None:
        try:
            sharded.step(batch(0), target=target(0), **options)
        except shardgraph.ShardGraphError as error:
            messages.append(str(error))

    with sharded.no_sync():
        caught(optimizer=mine)
    caught(optimizer=optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))
    out = sharded(batch(0))
    sharded.step(batch(0), target=target(0), optimizer=mine)
    try:
        out.sum().backward()
    except shardgraph.ShardGraphError as error:
        messages.append(str(error))
    return messages


def others(kind: str) -> float:
    """The error of steps that are taken apart: of other optimizers, and of a pipeline."""
    if kind == "pipeline":
        original = model()
        pipeline = shardgraph.Pipeline(2, "1f1b")
        plan = preset("pp", {"pp": 2}, pipeline)
        call = {"example_inputs": (batch(0),), "example_kwargs": {"target": target(0)}}
        sharded = shardgraph.compile(copy.deepcopy(original), plan, loss_fn=F.mse_loss, **call)
        make: Any = OPTIMIZERS["AdamW"]
    else:
        sharded, original = pair("ddp")
        make = {"Adafactor": lambda p: optim.Adafactor(p, lr=0.01), "hooks": OPTIMIZERS["AdamW"]}[kind]
    mine, reference = make(sharded.parameters()), Original(original, make(original.parameters()))
    if kind == "hooks":
        next(iter(sharded.parameters())).register_post_accumulate_grad_hook(lambda parameter: None)
    for number in range(4):
        sharded.step(batch(number), target=target(number), optimizer=mine)
        reference.step(number)
    if kind == "pipeline":
        theirs = original.state_dict()
        return max((value.cpu() - theirs[name]).abs().max().item() for name, value in sharded.state_dict().items())
    return difference(sharded, original, gradients=False)


def peaks(plan: str) -> dict[str, tuple[int, int]]:
    """The predicted peak of a step, and those measured of one taken apart and of a whole one."""
    torch.manual_seed(0)
    small = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)))
    layers = nn.Sequential(small, nn.Linear(64, 1024), nn.Tanh(), nn.Linear(1024, 64))
    chosen = replace(preset(plan, {"dp": 2}), bucket=1 << 20)
    sharded = shardgraph.compile(layers, chosen, loss_fn=F.mse_loss)
    optimizer, x = optim.AdamW(sharded.parameters()), torch.randn(4, 64)

    def whole() -> None:
        sharded.step(x, target=x, optimizer=optimizer)

    def taken_apart() -> None:
        sharded.train_step(x, target=x)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        whole()
    found = {}
    for name, step in (("apart", taken_apart), ("whole", whole)):
        states = [value for state in optimizer.state.values() for value in state.values()]
        held = [*sharded.parameters(), *states, x]
        found[name] = min(ranks._measured(step, held) for _ in range(3))
    predicted = program_memory(sharded.program, "adamw", dist.get_rank()).peak_bytes
    return {name: (predicted, measured) for name, measured in found.items()}


def statistics_left() -> int:
    """Of how many parameters statistics are left after a step that clears gradients."""
    sharded, _ = pair(gradient_statistics=True)
    optimizer = optim.AdamW(sharded.parameters())
    sharded.train_step(batch(0), target=target(0))
    assert sharded.gradient_statistics.measured
    optimizer.zero_grad()
    sharded.step(batch(0), target=target(0), optimizer=optimizer)
    return len(sharded.gradient_statistics.measured)


def with_a_parameter_in_host_memory() -> tuple[float, bool]:
    """How far weights are from the unsharded model's after whole steps and an optimizer's own, and whether the
    parameter is in host memory still."""
    original = model()
    mine = copy.deepcopy(original)
    shardgraph.annotate(mine, {"3.weight": offload()})
    sharded = shardgraph.compile(mine, "fsdp", loss_fn=F.mse_loss, progress=False)
    optimizer = optim.AdamW(sharded.parameters(), lr=0.01)
    reference = Original(original, optim.AdamW(original.parameters(), lr=0.01))
    for number in range(4):
        if number % 2:
            sharded.step(batch(number), target=target(number), optimizer=optimizer)
        else:
            step_apart(sharded, optimizer, number)
        reference.step(number)
    parameter = dict(sharded.named_parameters())["3.weight"]
    return difference(sharded, original, gradients=False), is_on_host(local_tensor(parameter))
