"""A small denoiser: residual blocks with group norm, attention over positions, and a skip connection."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Residual(nn.Module):
    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.norm_1, self.conv_1 = nn.GroupNorm(4, channels), nn.Conv2d(channels, out, 3, padding=1)
        self.norm_2, self.conv_2 = nn.GroupNorm(4, out), nn.Conv2d(out, out, 3, padding=1)
        self.shortcut = nn.Conv2d(channels, out, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.conv_1(F.silu(self.norm_1(x)))
        return self.shortcut(x) + self.conv_2(F.silu(self.norm_2(hidden)))


class Attention(nn.Module):
    def __init__(self, channels: int, heads: int = 4) -> None:
        super().__init__()
        self.norm, self.heads = nn.GroupNorm(4, channels), heads
        self.query, self.key, self.value = (nn.Linear(channels, channels) for _ in range(3))
        self.out = nn.Linear(channels, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.norm(x).flatten(2).mT
        parts = (each(rows).unflatten(-1, (self.heads, -1)) for each in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in parts))
        return x + self.out(mixed.transpose(1, 2).flatten(2)).mT.reshape(x.shape)


class Denoiser(nn.Module):
    """Gives its loss."""

    def __init__(self, channels: int = 32) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv2d(3, channels, 3, padding=1), nn.Conv2d(channels, 3, 3, padding=1)
        self.down = nn.Sequential(Residual(channels, channels), Attention(channels))
        self.middle = Residual(channels, channels)
        self.up = nn.Sequential(Residual(2 * channels, channels), Attention(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        down = self.down(self.enter(x))
        up = self.up(torch.cat([self.middle(down), down], 1))
        return F.mse_loss(self.leave(up), x.tanh())
