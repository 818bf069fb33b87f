"""The optimizer's update as an operation of backward graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Updates = Callable[[Sequence[str], list[torch.Tensor]], None]
"""Steps an optimizer on parameters, by name, of which it is given the gradients."""


def update(updater: Updates, names: Sequence[str], gradients: list[torch.Tensor]) -> None:
    """Hand over the gradients of parameters that nothing in the graph reads afterwards, nor the gradients."""
    updater(names, gradients)
