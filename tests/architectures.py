"""Networks as people write them for images, noise and graphs: small, in plain torch, with a loss."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

Call = dict[str, torch.Tensor]


class SqueezeExcite(nn.Module):
    """Scales channels by what all of an image says of them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(channels, 4, 1), nn.Conv2d(4, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(self.up(F.silu(self.down(F.adaptive_avg_pool2d(x, 1)))))


class Inverted(nn.Module):
    """Wide inside, where each channel has its own convolution; whole branches are dropped in training."""

    def __init__(self, channels: int, stride: int = 1) -> None:
        super().__init__()
        wide = 2 * channels
        self.layers = nn.Sequential(
            nn.Conv2d(channels, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6(inplace=True),
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.Hardswish(),
            SqueezeExcite(wide), nn.Conv2d(wide, channels, 1, bias=False), nn.BatchNorm2d(channels),
        )  # fmt: skip
        self.residual, self.drop = stride == 1, 0.2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        branch = self.layers(x)
        if not self.residual:
            return branch
        if self.training:
            kept = torch.empty(len(x), 1, 1, 1, dtype=x.dtype).bernoulli_(1 - self.drop)
            branch = branch * kept / (1 - self.drop)
        return x + branch


class Residual(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, into: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(into, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.norm2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.shortcut = nn.Sequential(nn.Conv2d(into, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = F.relu(self.norm1(self.conv1(x)), inplace=True)
        return F.relu(self.norm2(self.conv2(out)) + self.shortcut(x), inplace=True)


class Classifier(nn.Module):
    """A stem, blocks of one kind and a head with dropout."""

    def __init__(self, *blocks: nn.Module, width: int = 8, dropout: float = 0.2) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout), nn.Linear(width, 6))

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": F.cross_entropy(self.head(self.blocks(self.stem(images))), labels)}


class Timed(nn.Module):
    """A residual block that is told the time of the noise."""

    def __init__(self, into: int, out: int, width: int = 16) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, into), nn.Conv2d(into, out, 3, padding=1)
        self.time = nn.Linear(width, 2 * out)
        self.norm2, self.conv2 = nn.GroupNorm(4, out), nn.Conv2d(out, out, 3, padding=1)
        self.shortcut = nn.Conv2d(into, out, 1) if into != out else nn.Identity()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        out = self.conv1(F.silu(self.norm1(x)))
        scale, shift = self.time(F.silu(time))[:, :, None, None].chunk(2, dim=1)
        return self.conv2(F.silu(self.norm2(out) * (1 + scale) + shift)) + self.shortcut(x)


class Attention(nn.Module):
    """Over all pixels."""

    def __init__(self, channels: int, heads: int = 2) -> None:
        super().__init__()
        self.norm, self.heads = nn.GroupNorm(4, channels), heads
        self.qkv, self.out = nn.Conv2d(channels, 3 * channels, 1), nn.Conv2d(channels, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, channels, height, width = x.shape
        split = self.qkv(self.norm(x)).reshape(batch, 3, self.heads, channels // self.heads, height * width)
        query, key, value = split.transpose(-1, -2).unbind(1)
        seen = F.scaled_dot_product_attention(query, key, value)
        return x + self.out(seen.transpose(-1, -2).reshape(batch, channels, height, width))


class Diffusion(nn.Module):
    """Predicts the noise that was added to images, from what it computes at two sizes."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.into, self.first = nn.Conv2d(3, 8, 3, padding=1), Timed(8, 8)
        self.down, self.second = nn.Conv2d(8, 16, 3, stride=2, padding=1), Timed(16, 16)
        self.attention, self.up = Attention(16), nn.Conv2d(16, 8, 3, padding=1)
        self.third, self.norm, self.out = Timed(16, 8), nn.GroupNorm(4, 8), nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, images: torch.Tensor, noise: torch.Tensor, times: torch.Tensor) -> dict[str, torch.Tensor]:
        frequencies = torch.exp(-math.log(1e4) * torch.arange(8, dtype=images.dtype) / 8)
        angles = times[:, None].to(images.dtype) * frequencies
        time = self.time(torch.cat([angles.sin(), angles.cos()], dim=-1))
        level = (times.to(images.dtype) / 100)[:, None, None, None]
        first = self.first(self.into((1 - level).sqrt() * images + level.sqrt() * noise), time)
        inner = self.attention(self.second(self.down(first), time))
        outer = self.up(F.interpolate(inner, scale_factor=2, mode="nearest"))
        outer = self.third(torch.cat([outer, first], dim=1), time)
        return {"loss": F.mse_loss(self.out(F.silu(self.norm(outer))), noise)}


class Message(nn.Module):
    """Sends along edges, sums where they arrive, and weighs by a softmax over each node's edges."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.message, self.score = nn.Linear(2 * width, width), nn.Linear(2 * width, 1)
        self.update = nn.Linear(2 * width, width)

    def forward(self, nodes: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        pairs = torch.cat([nodes[source], nodes[target]], dim=-1)
        weights = F.softplus(self.score(pairs)).exp()
        total = torch.zeros_like(nodes[:, :1]).index_add_(0, target, weights)
        sent = F.leaky_relu(self.message(pairs)) * weights / total[target]
        arrived = torch.zeros_like(nodes).scatter_add(0, target[:, None].expand(-1, nodes.shape[1]), sent)
        return F.hardtanh(self.update(torch.cat([nodes, arrived], dim=-1)), -2, 2)


class GraphNetwork(nn.Module):
    """Graphs of one batch are one graph without edges between them, as in libraries for these."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed, self.layers = nn.Linear(5, width), nn.ModuleList(Message(width) for _ in range(2))
        self.head = nn.Linear(width, 1)

    def forward(self, features: torch.Tensor, edges: torch.Tensor, goals: torch.Tensor) -> dict[str, torch.Tensor]:
        graphs, count = features.shape[:2]
        offsets = count * torch.arange(graphs)[:, None]
        source, target = ((edges[:, i] + offsets).flatten() for i in (0, 1))
        nodes = self.embed(features).flatten(0, 1)
        for layer in self.layers:
            nodes = layer(nodes, source, target)
        pooled = torch.zeros(graphs, nodes.shape[1], dtype=nodes.dtype)
        pooled = pooled.index_add(0, torch.arange(graphs).repeat_interleave(count), nodes) / count
        return {"loss": F.logsigmoid(self.head(pooled)[:, 0] * goals).neg().mean()}


def _images(batch: int) -> Call:
    return {"images": torch.randn(batch, 3, 16, 16), "labels": torch.arange(batch) % 6}


def _noise(batch: int) -> Call:
    images, noise = torch.randn(batch, 3, 8, 8), torch.randn(batch, 3, 8, 8)
    return {"images": images, "noise": noise, "times": torch.arange(batch) * 7 % 100}


def _graphs(batch: int) -> Call:
    goals = torch.where(torch.arange(batch) % 2 == 0, 1.0, -1.0)
    return {"features": torch.randn(batch, 6, 5), "edges": torch.randint(6, (batch, 2, 10)), "goals": goals}


ARCHITECTURES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Call]]] = {
    "residual": (lambda: Classifier(Residual(8, 8), Residual(8, 16, 2), width=16), _images),
    "inverted": (lambda: Classifier(Inverted(8), Inverted(8, 2)), _images),
    "diffusion": (Diffusion, _noise),
    "graph": (GraphNetwork, _graphs),
}


def make(name: str, batch: int) -> tuple[nn.Module, Call]:
    """A network in training mode, and a call of it."""
    torch.manual_seed(0)
    build, call = ARCHITECTURES[name]
    return build().train(), call(batch)
