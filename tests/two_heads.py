"""A model whose outputs a loss may use or not."""

from __future__ import annotations

import torch
from torch import nn


class TwoHeads(nn.Module):
    """Two heads on what one layer computes; returns all three."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.first, self.second = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.shared(x)
        return {"first": self.first(hidden), "second": self.second(hidden), "hidden": hidden}
