"""The model's own checks, whose conditions are results of a graph."""

from __future__ import annotations

import torch

from shardgraph import ir
from shardgraph.errors import ModelCheckError


def check(role: ir.Checked, value: torch.Tensor) -> None:
    """Raise ModelCheckError if a condition does not hold; waits for the device."""
    if not value:
        raise ModelCheckError(f"the model's own check fails in this call:\n  {role.line}")
