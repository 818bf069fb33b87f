"""What runs on each rank of the tests of optimizers whose ranks own parameters whole."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardgraph
from shardgraph.fairscale import OSS, AdaScale, ShardedDataParallel
from shardgraph.runtime.measure import PeakMemory
from tests.ranks import difference, part

RATE = 1e-2
Optim = Callable[..., torch.optim.Optimizer]


class Branches(nn.Module):
    """Two layers, and one that is used only if it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 10), nn.Linear(10, 6)
        self.late = nn.Linear(6, 6, bias=False)

    def forward(self, x: torch.Tensor, late: bool = False) -> torch.Tensor:
        y = self.last(torch.tanh(self.first(x)))
        return y + self.late(x) if late else y


def made() -> Branches:
    torch.manual_seed(0)
    return Branches().double()


def batch() -> torch.Tensor:
    return torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """The weights, and at a rate of their own the rest."""
    weights = [p for p in model.parameters() if p.dim() == 2]
    return [{"params": weights, "weight_decay": 0.1}, {"params": [p for p in model.parameters() if p.dim() != 2]}]


class Beside:
    """A sharded model with its optimizer, and the unsharded model with the plain one, that train side by side."""

    def __init__(self, optim: Optim = torch.optim.AdamW, groups: Any = groups_of, **options: Any) -> None:
        model = made()
        self.original = copy.deepcopy(model)
        self.optimizer = OSS(groups(model), optim, lr=RATE, **options)
        self.plain = optim(groups(self.original), lr=RATE, **options)
        self.sharded = ShardedDataParallel(model, self.optimizer)

    def losses(self, late: bool = False) -> None:
        """Forward and backward of both."""
        self.sharded(part(batch()), late).square().mean().backward()
        self.original(batch(), late).square().mean().backward()

    def step(self, late: bool = False) -> None:
        for optimizer in (self.optimizer, self.plain):
            optimizer.zero_grad()
        self.losses(late)
        for optimizer in (self.optimizer, self.plain):
            optimizer.step()

    @property
    def difference(self) -> float:
        return difference(self.sharded.module, self.original, gradients=False)


def whole_tensors(names: list[str]) -> dict[str, float]:
    """The difference that each optimizer makes in weights after four steps, with two groups and a scheduler."""
    found = {}
    for name in names:
        groups = (lambda model: [p for p in model.parameters() if p.dim() == 2]) if name == "Muon" else groups_of
        beside = Beside(getattr(torch.optim, name), groups)
        schedules = [
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
            for optimizer in (beside.optimizer, beside.plain)
        ]
        for _ in range(4):
            beside.step(late=True)
            for schedule in schedules:
                schedule.step()
        found[name] = beside.difference
    return found


def in_rows(plan: str, mesh: dict[str, int] | None) -> tuple[float, float]:
    """With parameters stored in shards, what is left after three clipped steps between weights, and between states."""
    model = nn.Sequential(nn.Linear(6, 3, bias=False), nn.Tanh(), nn.Linear(3, 5, bias=False)).double()
    original = copy.deepcopy(model)
    sharded = shardgraph.compile(model, plan, mesh=mesh)
    optimizer = shardgraph.ShardedOptimizer(sharded.parameters(), torch.optim.Muon, lr=RATE)
    plain = torch.optim.Muon(original.parameters(), lr=RATE)
    for _ in range(3):
        optimizer.zero_grad()
        plain.zero_grad()
        sharded(part(batch())).square().mean().backward()
        original(batch()).square().mean().backward()
        optimizer.clip_grad_norm(0.1)
        nn.utils.clip_grad_norm_(original.parameters(), 0.1)
        optimizer.step()
        plain.step()
    states = zip(optimizer.state_dict(all_ranks=True)["state"].values(), plain.state.values(), strict=True)
    left = max((a["momentum_buffer"] - b["momentum_buffer"]).abs().max().item() for a, b in states)
    return difference(sharded, original, gradients=False), left


def under_torchs_ddp() -> float:
    """As a plain tensor: parameters that no one has compiled."""
    model = made()
    original = copy.deepcopy(model)
    replica = nn.parallel.DistributedDataParallel(model)
    optimizer = shardgraph.ShardedOptimizer(replica.parameters(), torch.optim.AdamW, lr=RATE)
    plain = torch.optim.AdamW(original.parameters(), lr=RATE)
    for _ in range(3):
        replica(part(batch()), True).square().mean().backward()
        original(batch(), True).square().mean().backward()
        for each in (optimizer, plain):
            each.step()
            each.zero_grad()
    return difference(model, original, gradients=False)


def changes() -> dict[str, float]:
    """What is left between weights after changes in mid-training, one after the other."""
    beside = Beside(groups=lambda model: [*model.first.parameters(), *model.last.parameters()])
    models, optimizers = (beside.sharded, beside.original), (beside.optimizer, beside.plain)
    found = {}
    beside.step()
    for model in models:
        model.first.weight.requires_grad_(False)
    beside.step()
    beside.step()
    found["frozen"] = beside.difference
    for model in models:
        model.first.weight.requires_grad_(True)
    beside.step()
    found["trained again"] = beside.difference
    for model, optimizer in zip(models, optimizers, strict=True):
        optimizer.add_param_group({"params": [model.late.weight], "lr": RATE / 3})
    for _ in range(2):
        beside.step(late=True)
    found["with another group"] = beside.difference
    for model in models:
        model.zero_grad()
    calls = []

    def closure(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        loss = model(x, True).square().mean()
        loss.backward()
        return loss.detach()

    mean = beside.optimizer.step(lambda: closure(beside.sharded, part(batch())))
    dist.all_reduce(mean)
    found["loss of a closure"] = abs(mean / 2 - beside.plain.step(lambda: closure(beside.original, batch()))).item()
    assert len(calls) == 2
    found["closures"] = beside.difference
    return found


def several() -> float:
    """Two optimizers of one module, one of which steps half as often."""
    model = made()
    original = copy.deepcopy(model)
    kinds: list[tuple[Optim, str]] = [(torch.optim.SGD, "first"), (torch.optim.AdamW, "last")]
    sharded_ones = [OSS(model.get_submodule(name).parameters(), kind, lr=RATE) for kind, name in kinds]
    plain_ones = [kind(original.get_submodule(name).parameters(), lr=RATE) for kind, name in kinds]
    sharded = ShardedDataParallel(model, sharded_ones)
    for step in range(4):
        sharded(part(batch())).square().mean().backward()
        original(batch()).square().mean().backward()
        for optimizers in (sharded_ones, plain_ones):
            optimizers[0].step()
            if step % 2:
                optimizers[1].step()
        for each in (sharded, original):
            each.zero_grad()
    return difference(sharded.module, original, gradients=False)


def late_norm() -> tuple[float, float, float]:
    """The norm of the gradients of two weights, 5 and then 50 of the one whose first gradient comes in the second
    backward; the weights after clipping by it, against the unsharded ones."""

    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.early, self.late = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)

        def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
            return self.early(x) + self.late(10 * x) if both else self.early(x)

    optimizer = OSS(list((model := Late()).parameters()), torch.optim.SGD, lr=RATE)
    sharded = ShardedDataParallel(model, optimizer)
    norms = []
    for both in (False, True):
        optimizer.zero_grad()
        sharded(torch.full((1, 1), 5.0), both).sum().backward()
        norms.append(optimizer.clip_grad_norm(1.0).item())
        optimizer.step()
    return norms[0], norms[1], optimizer.clip_grad_norm(1.0).item()


def accumulated() -> tuple[bool, float]:
    """Whether gradients under ``no_sync`` wait, and what is left between weights after a step with them."""
    beside = Beside()
    with beside.sharded.no_sync():
        beside.sharded(part(batch()), True).square().mean().backward()
    waits = all(p.grad is None for p in beside.sharded.parameters())
    beside.sharded.zero_grad()  # so that only what follows counts
    with beside.sharded.no_sync():
        beside.sharded(part(batch()), True).square().mean().backward()
    beside.original(batch(), True).square().mean().backward()
    beside.losses(late=True)
    beside.optimizer.step()
    beside.plain.step()
    return waits, beside.difference


def states(folder: str) -> dict[str, Any]:
    """What ranks say of the state after three steps, and after rank 1 has received it; it is saved to ``folder``."""
    beside = Beside()
    for _ in range(3):
        beside.step(late=True)
    said = {"own": sorted(beside.optimizer.local_state_dict()["state"]), "before": _refusal(beside.optimizer)}
    beside.optimizer.consolidate_state_dict(recipient_rank=1)
    if dist.get_rank() == 1:
        torch.save(beside.optimizer.state_dict(), f"{folder}/sharded.pt")
        torch.save(beside.plain.state_dict(), f"{folder}/plain.pt")
        torch.save({name: p.detach() for name, p in beside.original.state_dict().items()}, f"{folder}/model.pt")
    else:
        said["other"] = _refusal(beside.optimizer)
    beside.step(late=True)
    said["after a step"] = _refusal(beside.optimizer)
    if dist.get_rank() == 1:
        torch.save({name: p.detach() for name, p in beside.original.state_dict().items()}, f"{folder}/later.pt")
    return said


def _refusal(optimizer: OSS) -> str:
    try:
        optimizer.state_dict()
    except shardgraph.CheckpointError as error:
        return str(error)
    return ""


def continued(folder: str) -> float:
    """What is left between weights and those of the run that saved, after loading and one more step."""
    beside = Beside()
    beside.sharded.load_state_dict(torch.load(f"{folder}/model.pt"))
    beside.original.load_state_dict(torch.load(f"{folder}/later.pt"))
    beside.optimizer.load_state_dict(torch.load(f"{folder}/plain.pt"))
    beside.sharded(part(batch()), True).square().mean().backward()
    beside.optimizer.step()
    return beside.difference


def consolidation_memory() -> tuple[int, int, int]:
    """The peak bytes of a consolidation on this rank; those of the whole state, and of the largest tensor in it."""
    parameters = [nn.Parameter(torch.ones(size)) for size in (40_000, 30_000, 20_000, 10_000)]
    optimizer = shardgraph.ShardedOptimizer(parameters, torch.optim.Adam)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with PeakMemory() as memory:
        optimizer.consolidate_state_dict(0)
    return memory.peak_bytes, 2 * 4 * 100_000, 4 * 40_000


def rounded() -> tuple[float, bool]:
    """The difference between the weights that rank 0 has and these, and whether they are those of float16."""
    model = made().float()
    optimizer = OSS(model.parameters(), torch.optim.SGD, lr=RATE, broadcast_fp16=True)
    sharded = ShardedDataParallel(model, optimizer)
    sharded(part(batch()).float(), True).square().mean().backward()
    optimizer.step()
    weights = torch.cat([p.flatten() for name, p in sorted(sharded.state_dict().items())])
    first = weights.clone()
    dist.broadcast(first, src=0)
    return (weights - first).abs().max().item(), torch.equal(weights, weights.half().float())


def scaled() -> tuple[float, bool]:
    """What is left between weights after steps with a scaled loss, and whether an overflow on one rank leaves all
    weights as they are."""
    beside = Beside()
    scaler = shardgraph.GradScaler("cpu", init_scale=2.0**8)
    for _ in range(2):
        beside.optimizer.zero_grad()
        beside.plain.zero_grad()
        scaler.scale(beside.sharded(part(batch()), True).square().mean()).backward()
        beside.original(batch(), True).square().mean().backward()
        scaler.step(beside.optimizer)
        scaler.update()
        beside.plain.step()
    left = beside.difference
    beside.optimizer.zero_grad()
    factor = float("inf") if dist.get_rank() == 1 else 1.0
    scaler.scale(factor * beside.sharded(part(batch()), True).square().mean()).backward()
    scaler.step(beside.optimizer)
    scaler.update()
    return left, beside.difference == left and scaler.get_scale() == 2.0**7


def plain_states() -> tuple[bool, float]:
    """Whether the state of the module is of plain tensors under FairScale's names, and what it changes when loaded."""
    beside = Beside()
    state = beside.sharded.state_dict()
    named = list(state) == [f"module.{name}" for name in beside.original.state_dict()]
    beside.original.load_state_dict({name.removeprefix("module."): 2 * value for name, value in state.items()})
    beside.sharded.load_state_dict({name: 2 * value for name, value in state.items()})
    return named and all(type(value) is torch.Tensor for value in state.values()), beside.difference


def with_adascale() -> list[tuple[float, float]]:
    """The gains of three accumulated steps and the weights after them: with a sharded optimizer, and with SGD."""
    found = []
    for sharded in (True, False):
        model, options = made(), {"smoothing": 0.5, "num_gradients_to_accumulate": 2}
        if sharded:
            inner: Any = OSS(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
            compiled: Any = ShardedDataParallel(model, inner)
            optimizer: Any = AdaScale(inner, **options)
        else:
            compiled = shardgraph.compile(model, "ddp", gradient_statistics=True)
            inner = torch.optim.SGD(compiled.parameters(), lr=0.1, momentum=0.9)
            optimizer = shardgraph.AdaScale(inner, compiled, **options)
        values = []
        for step in range(3):
            optimizer.zero_grad()
            rows = part(batch() + step)
            with compiled.no_sync():
                (compiled(rows[:2], True).square().mean() / 2).backward()
            (compiled(rows[2:], True).square().mean() / 2).backward()
            values.append(optimizer.gain())
            optimizer.step()
        weights = sum(p.to_local().square().sum().item() for p in compiled.parameters())
        found.append((*values, weights))
    return list(zip(*found, strict=True))


def refused() -> dict[str, str]:
    """What is said of what cannot be."""
    model = shardgraph.compile(made(), "tp", example_inputs=(batch(), True))
    loose = [nn.Parameter(torch.ones(2))]
    few = OSS(loose, torch.optim.SGD, lr=RATE)
    other = torch.optim.SGD([nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))], lr=RATE).state_dict()
    asked = {
        "columns": lambda: OSS(model.parameters(), torch.optim.SGD, lr=RATE),
        "loss": lambda: OSS(loose, torch.optim.LBFGS),
        "groups": lambda: few.load_state_dict(other),
        "no OSS": lambda: ShardedDataParallel(made(), torch.optim.SGD(loose, lr=RATE)),
        "not compiled": lambda: AdaScale(torch.optim.SGD(loose, lr=RATE)),
    }
    said = {}
    for name, ask in asked.items():
        try:
            ask()
        except shardgraph.ShardGraphError as error:
            said[name] = str(error)
    return said
