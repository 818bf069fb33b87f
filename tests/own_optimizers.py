"""Optimizers as users write them, for tests of which of them step on many parameters at a time."""

from __future__ import annotations

import ctypes
import logging
import math
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import optim
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ranks import difference, whole
from tests.whole_steps import Original, batch, pair, step_apart, target


class Own(optim.Optimizer):
    """One that steps on each parameter with a gradient by ``update(parameter, state, group)``."""

    def __init__(self, params: Any, lr: float = 0.01, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, self.state[parameter], group)
        return loss

    def update(self, parameter: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise AssertionError


class Signs(Own):
    def update(self, parameter: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        parameter.data.add_(parameter.grad.data.sign(), alpha=-group["lr"])


class AdamByHand(Own):
    """With a number of its state that is one of Python, and a bias correction."""

    def update(self, parameter: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["step"], state["mean"], state["square"] = 0, torch.zeros_like(parameter), torch.zeros_like(parameter)
        state["step"] += 1
        state["mean"].mul_(0.9).add_(parameter.grad, alpha=0.1)
        state["square"].mul_(0.99).addcmul_(parameter.grad, parameter.grad, value=0.01)
        rate = group["lr"] * math.sqrt(1 - 0.99 ** state["step"]) / (1 - 0.9 ** state["step"])
        parameter.addcdiv_(state["mean"], state["square"].sqrt().add_(1e-8), value=-rate)


class BeliefInLists(Own):
    """Of all parameters of a group at once; its state is new tensors at each step, and a tensor that counts."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            parameters = [each for each in group["params"] if each.grad is not None]
            if not parameters:
                continue
            gradients = [each.grad for each in parameters]
            for each in parameters:
                state = self.state[each]
                state["count"] = state.get("count", torch.tensor(0.0)) + 1
                state["mean"] = state.get("mean", torch.zeros_like(each)).lerp(each.grad, 0.1)
            means = [self.state[each]["mean"] for each in parameters]
            updates = torch._foreach_sub(gradients, means)
            torch._foreach_mul_(updates, group["lr"])
            torch._foreach_sub_(parameters, updates)
            for each in parameters:
                each.mul_(1 - 0.01 / (1 + self.state[each]["count"].item()))


class CountsSteps(Own):
    """It counts in its group, and in an attribute."""

    calls = 0

    def step(self, closure: Any = None) -> None:
        self.calls += 1
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
        super().step(closure)

    def update(self, parameter: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        parameter.sub_(parameter.grad, alpha=group["lr"] / (group["step"] + self.calls))


class Subclass(optim.AdamW):
    """One of torch's, a little faster."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step(closure)


BY_ELEMENT: dict[str, Callable[[Any], optim.Optimizer]] = {
    "signs": Signs,
    "Adam by hand": AdamByHand,
    "all in lists": BeliefInLists,
    "counts steps": CountsSteps,
    "subclass of AdamW": lambda p: Subclass(p, lr=0.01),
}


class Normalized(Own):
    def update(self, parameter: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        parameter.sub_(parameter.grad / (parameter.grad.norm() + 1e-6), alpha=group["lr"])


class DecaysMatrices(Own):
    def update(self, parameter: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        if parameter.ndim > 1:
            parameter.mul_(0.9)
        parameter.sub_(parameter.grad, alpha=group["lr"])


class Exponential(Own):
    """An exponential rounds otherwise in the last elements of a tensor."""

    def update(self, parameter: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        parameter.sub_(parameter.grad * torch.exp(-parameter.grad.abs()), alpha=group["lr"])


class FirstIsFaster(Own):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for i, parameter in enumerate(each for each in group["params"] if each.grad is not None):
                parameter.sub_(parameter.grad, alpha=group["lr"] / (1 + i))


class FreezesLater(Own):
    """The first three parameters stay from the third step on."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for i, parameter in enumerate(each for each in group["params"] if each.grad is not None):
                rate = 0 if group["step"] > 2 and i < 3 else group["lr"]
                parameter.sub_(parameter.grad, alpha=rate)


class NormOfLater(Own):
    """It computes with whole tensors from the third step on."""

    def update(self, parameter: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["step"] = state.get("step", 0) + 1
        rate = group["lr"] / (parameter.grad.norm() + 1 if state["step"] > 2 else 1)
        parameter.sub_(parameter.grad * rate)


class Table(Own):
    """It remembers parameters beside its state."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.slow: dict[Any, Any] = {}

    def update(self, parameter: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        slow = self.slow.setdefault(parameter, parameter.detach().clone())
        parameter.sub_(parameter.grad, alpha=group["lr"])
        slow.lerp_(parameter, 0.5)
        parameter.copy_(slow)


class DecaysAll(Own):
    """Parameters without a gradient too."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.9)
        super().step()

    update = Signs.update


class KeepsGradient(Own):
    def update(self, parameter: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        if "last" in state:
            parameter.sub_(state["last"], alpha=group["lr"])
        state["last"] = parameter.grad


class ChangesGradient(Own):
    def update(self, parameter: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        parameter.grad.add_(parameter, alpha=0.1)
        parameter.sub_(parameter.grad, alpha=group["lr"])


class OfAnExtension(Own):
    """It writes as code does that knows nothing of torch's operations."""

    def update(self, parameter: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        with torch._C.DisableTorchFunction():
            address = parameter.data_ptr()
        ctypes.memset(address, 0, 4)


class Noise(Own):
    def update(self, parameter: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        parameter.sub_(parameter.grad + 0 * torch.randn_like(parameter), alpha=group["lr"])


class SkipsAtRandom(Own):
    def update(self, parameter: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        if random.random() < 2:
            parameter.sub_(parameter.grad, alpha=group["lr"])


class Prints(Signs):
    def step(self, closure: Any = None) -> None:
        print("a step")
        super().step(closure)


class Logs(Signs):
    def step(self, closure: Any = None) -> None:
        logging.getLogger("tests").info("a step")
        super().step(closure)


class CountsAbroad(Signs):
    """It counts its steps in a global variable."""

    def step(self, closure: Any = None) -> None:
        global steps
        steps += 1
        super().step(closure)


steps = 0


class Columns(Own):
    """It has a number for each column of parameters with three."""

    def update(self, parameter: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        parameter.sub_(parameter.grad * torch.tensor([1.0, 2.0, 3.0]), alpha=group["lr"])


class ClippedByValue(Own):
    """It goes by values of elements."""

    def update(self, parameter: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not torch.isfinite(parameter.grad).all():
            return
        parameter.sub_(parameter.grad, alpha=group["lr"])


NOT_BY_ELEMENT: dict[str, tuple[Callable[[Any], optim.Optimizer], str]] = {
    "norm": (Normalized, "linalg_vector_norm"),
    "number of dimensions": (DecaysMatrices, "'ndim'"),
    "exponential": (Exponential, "aten::exp"),
    "place in the list": (FirstIsFaster, "how many parameters there are"),
    "place in the list from the third step on": (FreezesLater, "how many parameters there are"),
    "norm from the third step on": (NormOfLater, "linalg_vector_norm"),
    "table of parameters": (Table, "beside"),
    "parameters without a gradient": (DecaysAll, "without gradient"),
    "gradient as state": (KeepsGradient, "shares memory"),
    "gradient changed": (ChangesGradient, "changes gradients"),
    "extension": (OfAnExtension, "by other means"),
    "random numbers": (Noise, "randn_like"),
    "random numbers of Python": (SkipsAtRandom, "draws random numbers"),
    "a line printed": (Prints, "calls print"),
    "a message logged": (Logs, "calls logging"),
    "a global variable": (CountsAbroad, "sets a global variable"),
    "columns": (Columns, "another operand than elements"),
    "values": (ClippedByValue, "aten::all"),
}


class ByNumbers(Own):
    """It reads norms as numbers, and branches on them."""

    def update(self, parameter: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        weight, gradient = parameter.norm().item(), float(parameter.grad.norm())
        rate = weight / gradient if gradient > 1e-9 else 1.0
        parameter.sub_(parameter.grad, alpha=group["lr"] * rate)
        parameter.sub_(parameter.grad, alpha=group["lr"] * int(parameter.sum() > 0))


class NormalizedSGD(optim.SGD):
    """One of torch's, after all gradients were divided by a number."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        size = math.sqrt(sum(p.grad.square().sum().item() for p in parameters))
        for parameter in parameters:
            parameter.grad.div_(size)
        super().step(closure)


def of_numbers(plan: str) -> float:
    """The largest difference of a weight after steps by optimizers that read numbers of parameters, some of whose
    shards are empty."""
    return max(_difference(plan, make) for make in (ByNumbers, lambda p: NormalizedSGD(p, lr=0.1, momentum=0.9)))


def differences(plan: str) -> dict[str, float]:
    """The largest difference of a weight from that of the same optimizer on plain torch, after four steps under a
    schedule: whole ones, and the optimizer's own."""
    others = ("table of parameters", "parameters without a gradient", "place in the list from the third step on")
    makers = {**BY_ELEMENT, **{name: NOT_BY_ELEMENT[name][0] for name in others}}
    return {name: _difference(plan, make) for name, make in makers.items()}


def _difference(plan: str, make: Callable[[Any], optim.Optimizer]) -> float:
    sharded, original = pair(plan, dtype=torch.float64)
    mine, reference = make(sharded.parameters()), Original(original, make(original.parameters()))
    schedules = [optim.lr_scheduler.ExponentialLR(each, 0.8) for each in (mine, reference.optimizer)]
    for number in range(4):
        if number % 2:
            step_apart(sharded, mine, number)
        else:
            sharded.step(batch(number), target=target(number), optimizer=mine)
        reference.step(number)
        for schedule in schedules:
            schedule.step()
    return difference(sharded, original, gradients=False)


def after_loading() -> dict[str, float]:
    """The difference of weights where state is loaded in the middle, and of the state in the end."""
    found = {}
    for name, make in BY_ELEMENT.items():
        sharded, original = pair()
        mine, reference = make(sharded.parameters()), Original(original, make(original.parameters()))
        for number in range(4):
            if number == 2:
                kept, mine = mine.state_dict(), make(sharded.parameters())
                mine.load_state_dict(kept)
                kept, reference.optimizer = reference.optimizer.state_dict(), make(original.parameters())
                reference.optimizer.load_state_dict(kept)
            sharded.step(batch(number), target=target(number), optimizer=mine)
            reference.step(number)
        states = [filter(None, each.state_dict()["state"].values()) for each in (mine, reference.optimizer)]
        pairs = [(a[key], b[key]) for a, b in zip(*states, strict=True) for key in b]
        wrong = [(whole(a) - b).abs().max().item() if torch.is_tensor(b) else abs(a - b) for a, b in pairs]
        found[name] = max([difference(sharded, original, gradients=False), *wrong])
    return found


class _Counting(TorchDispatchMode):
    """How many operations there are, and whether one is on DTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.operations, self.distributed = 0, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += func is torch.ops.aten.sign.default
        self.distributed |= any(issubclass(each, DTensor) for each in types)
        return func(*args, **(kwargs or {}))


def counted() -> dict[str, Any]:
    """What a step of an optimizer computes: kernels, by signs of gradients, and whether on DTensors."""
    sharded, _ = pair("ddp")
    optimizer = Signs(sharded.parameters())
    sharded.train_step(batch(0), target=target(0))
    trained = [parameter for parameter in sharded.parameters() if parameter.grad is not None]
    with _Counting() as counting:
        optimizer.step()
    stand_ins = 1 + len(trained)  # the first step is watched twice
    return {"kernels": counting.operations - stand_ins, "DTensors": counting.distributed}
