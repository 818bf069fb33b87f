"""A decoder as published runs train it, in plain PyTorch: what the analysis captures for a row of a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

Mlp = Literal["gelu", "relu2", "swiglu"]


@dataclass(frozen=True)
class Shape:
    """``layers`` of ``width`` with ``heads`` query heads, ``kv_heads`` of keys, and an MLP of ``hidden``.

    ``classic`` models have layer norms and biases, others RMS norms and rotary positions. ``flash``: attention is one
    kernel that does not write its scores. ``float8``: matrices of layers are multiplied in 8 bits.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int
    mlp: Mlp = "gelu"
    classic: bool = True
    flash: bool = True
    float8: bool = False

    @property
    def parameters(self) -> int:
        """Elements of all matrices, including one of the vocabulary."""
        keys = self.width * self.kv_heads // self.heads
        layer = self.width * (2 * self.width + 2 * keys + (3 if self.mlp == "swiglu" else 2) * self.hidden)
        return self.layers * layer + self.vocabulary * self.width


class Decoder(nn.Module):
    """``tokens (B, S) -> loss``, the mean cross-entropy in float32 of the next token."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = _norm(shape)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), labels.flatten())


class Layer(nn.Module):
    """Attention and MLP, each after a norm and beside a residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, bias = shape, shape.classic
        head = shape.width // shape.heads
        linear = Float8Linear if shape.float8 else nn.Linear
        self.attention_norm, self.mlp_norm = _norm(shape), _norm(shape)
        self.query = linear(shape.width, shape.width, bias=bias)
        self.key = linear(shape.width, shape.kv_heads * head, bias=bias)
        self.value = linear(shape.width, shape.kv_heads * head, bias=bias)
        self.out = linear(shape.width, shape.width, bias=bias)
        self.gate = linear(shape.width, shape.hidden, bias=bias) if shape.mlp == "swiglu" else None
        self.up = linear(shape.width, shape.hidden, bias=bias)
        self.down = linear(shape.hidden, shape.width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        normed = self.mlp_norm(x)
        inner = self.up(normed)
        if self.gate is not None:
            inner = F.silu(self.gate(normed)) * inner
        else:
            inner = F.gelu(inner, approximate="tanh") if self.shape.mlp == "gelu" else F.relu(inner).square()
        return x + self.down(inner)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        query, key, value = (
            each(x).view(batch, length, -1, width // self.shape.heads).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        if not self.shape.classic:
            query, key = _rotated(query), _rotated(key)
        if self.shape.flash:
            grouped = self.shape.kv_heads != self.shape.heads
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        else:
            scores = query @ key.transpose(2, 3) * (width // self.shape.heads) ** -0.5
            place = torch.arange(length, device=x.device)
            mixed = scores.masked_fill(place > place.unsqueeze(1), -1e4).softmax(-1) @ value
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Float8Linear(nn.Linear):
    """A linear layer whose three products multiply float8 numbers with one scale for each tensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Float8Product.apply(x.flatten(0, -2), self.weight).view(*x.shape[:-1], -1)  # type: ignore[no-any-return]


class Float8Product(torch.autograd.Function):
    """``x @ weight.T``, in the formats of P. Micikevicius et al., "FP8 formats for deep learning", arXiv:2209.05433."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight.t())

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, weight = ctx.saved_tensors  # type: ignore[attr-defined]
        (gradient,) = gradients
        return _product(gradient, weight), _product(gradient.t(), x)


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    scale = torch.ones((), device=a.device, dtype=torch.float32)
    cast = torch.float8_e4m3fn
    columns = b.t().contiguous().to(cast).t()
    return torch._scaled_mm(a.contiguous().to(cast), columns, scale, scale, out_dtype=a.dtype)


def _norm(shape: Shape) -> nn.Module:
    return nn.LayerNorm(shape.width) if shape.classic else nn.RMSNorm(shape.width)


def _rotated(x: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, -1)
    angle = torch.arange(x.shape[2], device=x.device, dtype=x.dtype).unsqueeze(-1)
    return x * angle.cos() + torch.cat((-right, left), -1) * angle.sin()
