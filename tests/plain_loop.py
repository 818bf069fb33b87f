"""Training on one device, as anybody writes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch


def losses_of(
    optimizer: torch.optim.Optimizer, loss_of: Callable[[int], torch.Tensor], steps: Iterable[int]
) -> dict[int, float]:
    """The loss of each step."""
    losses = {}
    for step in steps:
        loss = loss_of(step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[step] = loss.item()
    return losses
