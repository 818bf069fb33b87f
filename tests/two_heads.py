"""Models whose outputs a loss may use or not, and whose forward leaves something behind."""

from __future__ import annotations

from typing import Any

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


class KeepsState(nn.Module):
    """A linear layer whose forward leaves behind a loss, activations, a hidden state, counts and an average."""

    def __init__(self, detach: bool = True) -> None:
        super().__init__()
        self.linear, self.detach = nn.Linear(4, 4), detach
        self.auxiliary: torch.Tensor | int | None = None
        self.hidden: torch.Tensor | None = None
        self.kept: list[Any] | None = None
        self.last: torch.Tensor | None = None
        self.calls, self.factor = 0, 1.0
        self.register_buffer("average", torch.zeros(4))

    def state(self) -> list[Any]:
        """All that forward sets."""
        return [self.auxiliary, self.hidden, self.kept, self.last, self.calls, self.factor, self.average]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.auxiliary = 0
        for power in (2, 3):
            self.auxiliary = self.auxiliary + y.pow(power).mean()
        earlier = self.calls
        self.calls += 1
        self.factor = self.factor * 0.5
        state = y if self.hidden is None else self.hidden * 0.5 + y
        self.hidden = state.detach() if self.detach else state
        self.kept = [y, {"squares": y.square(), "rows": len(x)}]
        self.average = self.average * 0.9 + y.mean(0).detach() * 0.1
        self.last = x
        return state * self.factor + self.average * earlier
