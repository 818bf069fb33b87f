"""What ranks do in tests of the gradients that parameters get: each way to ask for them, of both modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.local_steps import pair

Gradients = list[torch.Tensor | None]


def _loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).square().mean()
    return loss


def _set(model: nn.Module) -> Gradients:
    return [parameter.grad for parameter in model.parameters()]


def returned(model: nn.Module, x: torch.Tensor) -> Gradients:
    """torch.autograd.grad, which sets none."""
    return [*torch.autograd.grad(_loss(model, x), list(model.parameters())), *_set(model)]


def of_some(model: nn.Module, x: torch.Tensor) -> Gradients:
    """Of the first and third parameter alone."""
    parameters = list(model.parameters())
    _loss(model, x).backward(inputs=parameters[::2])
    return _set(model)


def of_two_calls(model: nn.Module, x: torch.Tensor) -> Gradients:
    """Of one loss of two calls."""
    (_loss(model, x) + 2 * _loss(model, x + 1)).backward()
    return _set(model)


def accumulated(model: nn.Module, x: torch.Tensor) -> Gradients:
    """Of two passes."""
    _loss(model, x).backward()
    _loss(model, x + 1).backward()
    return _set(model)


def hooked(model: nn.Module, x: torch.Tensor) -> Gradients:
    """With a hook that doubles one gradient before it is added, and one that reads another after."""
    first, second, *_ = model.parameters()
    seen: Gradients = []
    first.register_hook(lambda gradient: 2 * gradient)
    second.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad))
    _loss(model, x).backward()
    return [*seen, *_set(model)]


def frozen(model: nn.Module, x: torch.Tensor) -> Gradients:
    """Of a parameter that no longer requires one there is none."""
    next(model.parameters()).requires_grad_(False)
    _loss(model, x).backward()
    return _set(model)


WAYS: list[Callable[[nn.Module, torch.Tensor], Gradients]] = [
    returned,
    of_some,
    of_two_calls,
    accumulated,
    hooked,
    frozen,
]


def errors_by_way(plan: str) -> dict[str, Any]:
    """The largest difference of a gradient from the original's; a text where one has it and the other does not."""
    return {way.__name__: _error(way, plan) for way in WAYS}


def _error(way: Callable[[nn.Module, torch.Tensor], Gradients], plan: str) -> float | str:
    sharded, original, x = pair(plan)
    found, expected = way(sharded, x), way(original, x)
    if [each is None for each in found] != [each is None for each in expected]:
        return "other parameters have a gradient"
    whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in found]
    pairs = [(ours, theirs) for ours, theirs in zip(whole, expected, strict=True) if theirs is not None]
    return max((ours - theirs).abs().max().item() for ours, theirs in pairs)
