"""What ranks do in tests of optimizers that step on shards."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn, optim
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import shardgraph
from tests.ranks import difference

OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda p: optim.SGD(p, lr=0.1, weight_decay=0.01),
    "SGD with momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: optim.Adam(p, lr=0.01),
    "Adam with its greatest": lambda p: optim.Adam(p, lr=0.01, amsgrad=True),
    "AdamW": lambda p: optim.AdamW(p, lr=0.01),
    "AdamW of all at once": lambda p: optim.AdamW(p, lr=0.01, foreach=True),
    "AdamW in one kernel": lambda p: optim.AdamW(p, lr=0.01, fused=True),
    "NAdam": lambda p: optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: optim.RAdam(p, lr=0.01),
    "Adamax": lambda p: optim.Adamax(p, lr=0.01),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.01),
    "Adadelta": lambda p: optim.Adadelta(p, lr=0.1),
    "RMSprop": lambda p: optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "Rprop": lambda p: optim.Rprop(p, lr=0.01),
    "ASGD": lambda p: optim.ASGD(p, lr=0.1),
    "SGD in one kernel": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adagrad in one kernel": lambda p: optim.Adagrad(p, lr=0.01, fused=True),
    "Adam that maximizes": lambda p: optim.Adam(p, lr=0.01, weight_decay=0.1, maximize=True),
    "NAdam with a decay apart": lambda p: optim.NAdam(p, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
    "AdamW with a rate in a tensor": lambda p: optim.AdamW(p, lr=torch.tensor(0.01)),
}


def pair(plan: str = "fsdp") -> tuple[nn.Module, nn.Module, torch.Tensor]:
    """A sharded module, of whose parameters not all divide by two, the original, and a batch that all ranks have."""
    torch.manual_seed(0)
    original = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()
    return shardgraph.compile(copy.deepcopy(original), plan), original, torch.randn(4, 5).double()


def backward(model: nn.Module, x: torch.Tensor) -> None:
    """Gradients of a loss."""
    model(x).square().mean().backward()


def errors_by_optimizer(plan: str) -> dict[str, float]:
    """The largest difference of a weight after seven steps: RAdam computes otherwise from the sixth on."""
    return {name: _error(plan, make) for name, make in OPTIMIZERS.items()}


def _error(plan: str, make: Any) -> float:
    sharded, original, x = pair(plan)
    optimizers = [make(module.parameters()) for module in (sharded, original)]
    for number in range(7):
        for module, optimizer in zip((sharded, original), optimizers, strict=True):
            backward(module, x)
            optimizer.step()
            optimizer.zero_grad(set_to_none=number % 2 == 0)
    return difference(sharded, original, gradients=False)


def state() -> dict[str, Any]:
    """What is in an optimizer's state, and whether it is kept and loaded."""
    sharded, original, x = pair()
    optimizers = [optim.AdamW(module.parameters(), lr=0.01) for module in (sharded, original)]

    def step() -> None:
        for module, optimizer in zip((sharded, original), optimizers, strict=True):
            backward(module, x)
            optimizer.step()
            optimizer.zero_grad()

    step()
    first = next(iter(sharded.parameters()))
    before = dict(optimizers[0].state[first])
    step()
    facts: dict[str, Any] = {
        "kinds": {name: type(value).__name__ for name, value in before.items()},
        "same objects at the next step": all(optimizers[0].state[first][name] is v for name, v in before.items()),
    }
    kept = optimizers[0].state_dict()
    optimizers[0] = optim.AdamW(sharded.parameters(), lr=0.01)
    optimizers[0].load_state_dict(kept)
    step()
    facts["after loading"] = difference(sharded, original, gradients=False)
    return facts


def loaded() -> dict[str, Any]:
    """Errors of training that goes on with a state of whole tensors, with shards of another plan, and by an optimizer
    that was made before compiling; whether state is placed as parameters are; and what is said of shards for whole
    parameters."""
    sharded, original, x = pair()
    first, _, _ = pair("ddp")
    optimizers = [optim.AdamW(module.parameters(), lr=0.01) for module in (first, original)]

    def step(module: nn.Module, optimizer: optim.Optimizer) -> None:
        backward(module, x)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step(first, optimizers[0])
        step(original, optimizers[1])
    facts: dict[str, Any] = {"placed": True}
    weights = {name: value.clone() for name, value in original.state_dict().items()}
    reference = copy.deepcopy((original, optimizers[1]))
    step(*reference)
    model = copy.deepcopy(original)
    before, late = optim.AdamW(model.parameters(), lr=0.5), shardgraph.compile(model, "fsdp")
    for name, module, mine, saved in (
        ("another plan", sharded, optim.AdamW(sharded.parameters(), lr=0.5), optimizers[0]),
        ("whole tensors", sharded, optim.AdamW(sharded.parameters(), lr=0.5), optimizers[1]),
        ("made before", late, before, optimizers[1]),
    ):
        module.load_state_dict(weights)
        mine.load_state_dict(copy.deepcopy(saved.state_dict()))
        for parameter, state in mine.state.items():
            facts["placed"] &= state["exp_avg"].placements == parameter.placements
        step(module, mine)
        facts[name] = difference(module, reference[0], gradients=False)
    try:
        optimizers[1].load_state_dict(mine.state_dict())
    except shardgraph.CheckpointError as error:
        facts["told"] = str(error)
    step(original, optimizers[1])
    facts["after the refusal"] = difference(sharded, original, gradients=False)
    return facts


class Watching(TorchDispatchMode):
    """Whether an operation has a DTensor among its operands."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= any(issubclass(each, DTensor) for each in types)
        return func(*args, **(kwargs or {}))


class Normed(optim.SGD):
    """A subclass that computes with more than elements."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad /= parameter.grad.norm()
        super().step(closure)


def operands() -> dict[str, bool]:
    """Whether steps compute on DTensors."""
    sharded, _, x = pair()
    foreign = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def watched(optimizer: Any, *args: Any) -> bool:
        backward(sharded, x)
        with Watching() as watching:
            optimizer.step(*args)
        return watching.seen

    return {
        "step": watched(optim.SGD(sharded.parameters(), lr=0.1)),
        "subclass": watched(Normed(sharded.parameters(), lr=0.1)),
        "closure": watched(optim.SGD(sharded.parameters(), lr=0.1), lambda: None),
        "foreign parameter": watched(optim.SGD([*sharded.parameters(), foreign], lr=0.1)),
    }


def backward_operands() -> bool:
    """Whether a backward that sets gradients computes on DTensors, of biases as of weights."""
    sharded, _, x = pair("ddp")
    loss = sharded(x).square().mean()
    with Watching() as watching:
        loss.backward()
    return watching.seen


def hooks() -> list[str]:
    """What hooks see: of an optimizer that is older than any sharded module, and of a newer one."""
    optim.SGD([torch.zeros(1)], lr=0.1).step()
    sharded, _, x = pair()
    seen: list[str] = []
    for _ in range(2):
        optimizer = optim.SGD(sharded.parameters(), lr=0.1)

        def has(word: str, optimizer: Any = optimizer) -> None:
            seen.append(f"{word}: {all(isinstance(p, DTensor) for p in optimizer.param_groups[0]['params'])}")

        optimizer.register_step_pre_hook(lambda *_: has("before"))
        optimizer.register_step_post_hook(lambda *_: has("after"))
        backward(sharded, x)
        optimizer.step()
    return seen


def failing() -> dict[str, bool]:
    """What an optimizer has after a step that raises."""
    sharded, _, x = pair()
    optimizer = optim.SGD(sharded.parameters(), lr=0.1)
    backward(sharded, x)
    parameters = list(sharded.parameters())
    gradients = [each.grad for each in parameters]
    optimizer.param_groups[0]["lr"] = "fast"
    try:
        optimizer.step()
        raised = False
    except TypeError:
        raised = True
    now = optimizer.param_groups[0]["params"]
    return {
        "raised": raised,
        "parameters": all(a is b for a, b in zip(now, parameters, strict=True)),
        "gradients": all(p.grad is g for p, g in zip(parameters, gradients, strict=True)),
    }


def step_before_backward() -> str:
    """The error of a step between forward and backward."""
    sharded, _, x = pair("zero2")
    optimizer = optim.SGD(sharded.parameters(), lr=0.1)
    backward(sharded, x)
    loss = sharded(x).square().mean()
    optimizer.step()
    try:
        loss.backward()
    except shardgraph.ShardGraphError as error:
        return str(error)
    return "nothing was raised"
