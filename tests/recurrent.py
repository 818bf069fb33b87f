"""Models with recurrent layers of torch, and what runs of them on each rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Tagger(nn.Module):
    """A class for every position, and one for the sequence from the last states; loss included."""

    def __init__(self, kind: type[nn.RNNBase], states: bool = False, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.layers = kind(6, 8, batch_first=True, **options)
        directions = 2 if self.layers.bidirectional else 1
        width = self.layers.proj_size or 8
        self.tag = nn.Linear(directions * width, 5)
        if states:
            first = torch.randn(self.layers.num_layers * directions, 1, 8)
            self.first = nn.Parameter(first)

    def forward(self, ids: torch.Tensor, tags: torch.Tensor) -> dict[str, torch.Tensor]:
        first = None
        if hasattr(self, "first"):
            hidden = self.first.expand(-1, len(ids), -1).contiguous()
            first = (hidden, 2 * hidden) if isinstance(self.layers, nn.LSTM) else hidden
        out, last = self.layers(self.embed(ids), first)
        hidden = last[0] if isinstance(last, tuple) else last
        loss = nn.functional.cross_entropy(self.tag(out).flatten(0, 1), tags.flatten()) + hidden.square().mean()
        return {"loss": loss}


class PositionsFirst(nn.Module):
    """Without batch_first, of a user's own class, and a cell in a loop of its own."""

    class Scaled(nn.GRU):
        """Recurrent layers on inputs that it scales."""

        def forward(self, x: torch.Tensor, first: torch.Tensor | None = None) -> Any:
            self.flatten_parameters()
            return super().forward(3 * x, first)

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.cell = self.Scaled(4, 6, num_layers=2), nn.LSTMCell(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, _ = self.layers(x.transpose(0, 1))
        state = None
        for step in out:
            state = self.cell(step, state)
        return state[0].square().mean()


KINDS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: Tagger(nn.LSTM),
    "lstm in two directions": lambda: Tagger(nn.LSTM, num_layers=2, bidirectional=True),
    "lstm with projections": lambda: Tagger(nn.LSTM, num_layers=2, bidirectional=True, proj_size=3),
    "lstm with given states": lambda: Tagger(nn.LSTM, states=True, num_layers=2, bias=False),
    "gru": lambda: Tagger(nn.GRU, num_layers=2, bidirectional=True),
    "gru with given states": lambda: Tagger(nn.GRU, states=True, bias=False),
    "rnn": lambda: Tagger(nn.RNN, num_layers=2, bidirectional=True),
    "rnn with relu": lambda: Tagger(nn.RNN, states=True, nonlinearity="relu"),
}


def make(name: str, batch: int = 4) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A model of this kind, and a call of it."""
    torch.manual_seed(0)
    if name == "positions first":
        return PositionsFirst(), (torch.randn(batch, 5, 4),)
    return KINDS[name](), (torch.randint(11, (batch, 5)), torch.randint(5, (batch, 5)))
