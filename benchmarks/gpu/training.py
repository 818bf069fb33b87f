"""Steps of training, as a user writes them, and how two trainings differ."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from benchmarks.gpu.cases import Machine


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW for comparisons: its epsilon is above the rounding of gradients, which it else makes updates of."""
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-5)


def train(model: nn.Module, call: dict[str, Any], steps: int) -> list[torch.Tensor]:
    """The losses of ``steps`` steps, on the device."""
    optimizer, losses = adamw(model.parameters()), []
    for _ in range(steps):
        loss = model(**call).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """All weights, whole, on the CPU; of several ranks all must call it."""
    found = {}
    for name, parameter in model.named_parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        found[name] = whole.detach().float().cpu()
    return found


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference, relative to the largest magnitude; infinite for what is no number."""
    error = ((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-12)).item()
    return error if error == error else float("inf")


def differences(
    losses: list[torch.Tensor], model: dict[str, torch.Tensor], ours: list[torch.Tensor], mine: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """How the second training differs from the first: in its losses, and in the weight that differs most."""
    assert model.keys() == mine.keys()
    errors = {name: difference(mine[name], model[name]) for name in model}
    worst = max(errors, key=lambda name: errors[name])
    pair = torch.stack([loss.cpu().float() for loss in ours]), torch.stack([loss.cpu().float() for loss in losses])
    return {"loss_error": difference(*pair), "weight_error": errors[worst], "worst_weight": worst}


class Stepper:
    """A model with AdamW, its steps timed: by events of the device, or by the clock where it is the CPU."""

    def __init__(self, machine: Machine, run: Callable[..., Any], model: nn.Module, call: dict[str, Any]) -> None:
        self.machine, self.run, self.call = machine, run, call
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.times: list[float] = []

    def backward(self) -> torch.Tensor:
        """Forward and backward."""
        loss = self.run(**self.call).loss
        loss.backward()
        return loss.detach()

    def step(self) -> torch.Tensor:
        """A whole step."""
        loss = self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def timed(self) -> float:
        """Seconds of a step, also kept in ``times``."""
        if self.machine.kind == "cuda":
            began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            began.record()
            self.step()
            ended.record()
            torch.cuda.synchronize()
            self.times.append(began.elapsed_time(ended) / 1e3)
        else:
            started = time.perf_counter()
            self.step()
            self.times.append(time.perf_counter() - started)
        return self.times[-1]

    def median(self) -> float:
        return statistics.median(self.times)
