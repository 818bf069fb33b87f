"""What ranks do in tests of optimizers that compute with whole tensors, and of those that users write."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn, optim
from torch.distributed.tensor import DTensor

import shardgraph
from shardgraph.module.whole_tensor_step import step_on_whole
from shardgraph.torch_api import local_tensor
from tests.ranks import difference, whole
from tests.whole_steps import Original, batch, pair, target


class Lion(optim.Optimizer):
    """Chen et al., 2023, https://arxiv.org/abs/2302.06675, as users have it."""

    def __init__(self, params: Any, lr: float = 0.01, betas: Any = (0.9, 0.99), weight_decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            fast, slow = group["betas"]
            for parameter in (each for each in group["params"] if each.grad is not None):
                state = self.state[parameter]
                momentum = state.setdefault("momentum", torch.zeros_like(parameter))
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(momentum.lerp(parameter.grad, 1 - fast).sign_(), alpha=-group["lr"])
                momentum.lerp_(parameter.grad, 1 - slow)


class Counting(optim.Adafactor):
    """Derived of one that computes with whole tensors, with a step of its own, which counts its calls and scales all
    gradients by their norm."""

    calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += 1
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.cat([gradient.reshape(-1) for gradient in gradients]).norm().item()
        for gradient in gradients:
            gradient.div_(self.calls * norm)
        super().step()


class Slower(optim.Muon):
    """Derived without a step of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.005)


class Logging(optim.LBFGS):
    """Derived of one that computes with all parameters, and keeps its losses."""

    @torch.no_grad()
    def step(self, closure: Any) -> Any:
        self.losses = [*getattr(self, "losses", []), super().step(closure)]
        return self.losses[-1]


def matrices(module: nn.Module) -> Iterable[nn.Parameter]:
    """What Muon trains."""
    return (parameter for parameter in module.parameters() if parameter.dim() == 2)


OPTIMIZERS: dict[str, Any] = {
    "Adafactor": lambda m: optim.Adafactor(m.parameters(), lr=0.01, weight_decay=0.1),
    "Adafactor of all at once": lambda m: optim.Adafactor(m.parameters(), lr=0.01, foreach=True),
    "Muon": lambda m: optim.Muon(matrices(m), lr=0.01),
    "Lion": lambda m: Lion(m.parameters()),
    "derived with a step of its own": lambda m: Counting(m.parameters(), lr=0.01),
    "derived without": lambda m: Slower(matrices(m)),
}


def errors(plan: str) -> dict[str, float]:
    """The largest difference of a weight from the unsharded model's, after whole steps and an optimizer's own."""
    return {name: _error(plan, make) for name, make in OPTIMIZERS.items()}


def _error(plan: str, make: Any) -> float:
    sharded, original = pair(plan)
    mine, reference = make(sharded), Original(original, make(original))
    for number in range(4):
        if number % 2:
            sharded.step(batch(number), target=target(number), optimizer=mine)
        else:
            sharded.train_step(batch(number), target=target(number))
            mine.step()
        reference.step(number)
        for module in (sharded, original):
            module.zero_grad()
    return difference(sharded, original, gradients=False)


def with_closures() -> tuple[float, bool, str]:
    """The error of weights after steps of a class derived of LBFGS, whether its losses are the original's, and what is
    said of a closure for one that is derived of Adafactor."""
    sharded, original = pair()
    optimizers = [Logging(module.parameters(), lr=0.1) for module in (sharded, original)]
    for module, optimizer in zip((sharded, original), optimizers, strict=True):

        def closure(module: Any = module, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            with torch.enable_grad():
                loss = nn.functional.mse_loss(module(batch(0)), target(0))
                loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
    losses = [torch.stack(list(map(torch.as_tensor, optimizer.losses))) for optimizer in optimizers]
    try:
        Counting(sharded.parameters(), lr=0.01).step(lambda: None)
        told = "it ran"
    except shardgraph.ShardGraphError as error:
        told = str(error)
    return difference(sharded, original, gradients=False), torch.allclose(*losses), told


def imported_late() -> float:
    """The error of weights after steps of an optimizer whose module is imported after the model was compiled."""
    sharded, original = pair()
    assert "transformers.optimization" not in sys.modules
    from transformers.optimization import Adafactor

    mine, reference = Adafactor(sharded.parameters()), Original(original, Adafactor(original.parameters()))
    for number in range(3):
        sharded.train_step(batch(number), target=target(number))
        mine.step()
        mine.zero_grad()
        reference.step(number)
    return difference(sharded, original, gradients=False)


def state() -> dict[str, Any]:
    """What is in the state of Adafactor, whether it is that of the unsharded one, and whether it is loaded."""
    sharded, original = pair()
    mine, reference = OPTIMIZERS["Adafactor"](sharded), Original(original, OPTIMIZERS["Adafactor"](original))

    def step(number: int) -> None:
        sharded.step(batch(number), target=target(number), optimizer=mine)
        reference.step(number)

    step(0)
    first = sharded.get_parameter("0.weight")
    before = dict(mine.state[first])
    step(1)
    facts: dict[str, Any] = {
        "same objects": all(mine.state[first][name] is value for name, value in before.items()),
        "kinds": {name: type(value).__name__ for name, value in before.items()},
    }
    states = zip(mine.state.values(), reference.optimizer.state.values(), strict=True)
    facts["difference"] = max((whole(a[name]) - b[name]).abs().max().item() for a, b in states for name in b)
    shards = [value for each in mine.state.values() for value in each.values() if isinstance(value, DTensor)]
    facts["whole memory"] = [
        True for each in map(local_tensor, shards) if each.untyped_storage().nbytes() > each.nbytes
    ]
    kept = mine.state_dict()
    mine = optim.Adafactor(sharded.parameters(), lr=0.5)
    mine.load_state_dict(kept)
    step(2)
    facts["after loading"] = difference(sharded, original, gradients=False)
    return facts


def largest_gathered() -> tuple[int, int]:
    """Elements of the largest tensors that a step of Muon gathers at a time, and of the largest parameter."""
    sharded = shardgraph.compile(
        nn.Sequential(*itertools.chain.from_iterable((nn.Linear(1024, 512), nn.Linear(512, 1024)) for _ in range(3))),
        "fsdp",
    )
    optimizer = optim.Muon(matrices(sharded), lr=0.01)
    sharded(torch.randn(4, 1024)).square().mean().backward()
    seen: list[int] = []
    unwrapped = optim.Muon.step.__wrapped__

    def watched(self: Any, closure: Any = None) -> Any:
        seen.append(sum(p.numel() for group in self.param_groups for p in group["params"]))
        return unwrapped(self, closure)

    step_on_whole(optimizer, watched)
    return max(seen), 1024 * 512
