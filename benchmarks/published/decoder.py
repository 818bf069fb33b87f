"""A decoder as published runs train it, in plain PyTorch: what the analysis captures for a row of a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardgraph.nn import MoE
from shardgraph.nn.experts import Experts

Mlp = Literal["gelu", "relu2", "swiglu"]


@dataclass(frozen=True)
class Mixture:
    """The layers from ``dense`` on, of each ``every`` the last, have ``experts`` of ``hidden`` in place of the MLP, of
    which a token passes through ``chosen``, and one of ``shared`` that all tokens pass through (0: there is none)."""

    experts: int
    chosen: int
    hidden: int
    shared: int = 0
    dense: int = 0
    every: int = 1

    def has(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return layer >= self.dense and (layer + 1) % self.every == 0


@dataclass(frozen=True)
class Latent:
    """Attention whose queries and keys come from ``query`` and ``key`` numbers of a token: DeepSeek-V2,
    arXiv:2405.04434, section 2.1. A head has ``plain`` and ``rotary`` numbers, its value ``value``."""

    query: int
    key: int
    plain: int
    rotary: int
    value: int


@dataclass(frozen=True)
class Shape:
    """``layers`` of ``width`` with ``heads`` query heads, ``kv_heads`` of keys, and an MLP of ``hidden``.

    ``classic`` models have layer norms and biases, others RMS norms and rotary positions. ``flash``: attention is one
    kernel that does not write its scores. ``float8``: matrices of layers are multiplied in 8 bits. ``head``: the width
    of a head, ``width / heads`` if 0.
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
    head: int = 0
    mixture: Mixture | None = None
    latent: Latent | None = None

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
        self.layers = nn.ModuleList(
            Layer(shape, shape.mixture if shape.mixture and shape.mixture.has(layer) else None)
            for layer in range(shape.layers)
        )
        self.norm = _norm(shape)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), labels.flatten())


class Layer(nn.Module):
    """Attention and MLP or experts, each after a norm and beside a residual."""

    def __init__(self, shape: Shape, mixture: Mixture | None) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = _norm(shape), _norm(shape)
        self.attention = LatentAttention(shape) if shape.latent else Attention(shape)
        self.mlp = MixtureOfExperts(shape, mixture) if mixture else FeedForward(shape, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """The feed-forward network of a layer."""

    def __init__(self, shape: Shape, hidden: int) -> None:
        super().__init__()
        self.kind = shape.mlp
        self.gate = _linear(shape, shape.width, hidden) if shape.mlp == "swiglu" else None
        self.up = _linear(shape, shape.width, hidden)
        self.down = _linear(shape, hidden, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.up(x)
        if self.gate is not None:
            inner = F.silu(self.gate(x)) * inner
        else:
            inner = F.gelu(inner, approximate="tanh") if self.kind == "gelu" else F.relu(inner).square()
        return self.down(inner)  # type: ignore[no-any-return]


class MixtureOfExperts(nn.Module):
    """Experts with room for an equal share of the tokens each: published runs balance them by force."""

    def __init__(self, shape: Shape, mixture: Mixture) -> None:
        super().__init__()
        self.routed = MoE(
            shape.width, mixture.hidden, mixture.experts, mixture.chosen, capacity_factor=1.0, activation="swiglu"
        )
        if shape.float8:
            self.routed.experts = Float8Experts(mixture.experts, shape.width, mixture.hidden, "swiglu")
        self.shared = FeedForward(shape, mixture.shared) if mixture.shared else None

    def forward(self, x: Tensor) -> Tensor:
        mixed, _ = self.routed(x)
        return mixed if self.shared is None else mixed + self.shared(x)  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Causal attention with ``kv_heads`` of keys."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, self.head = shape, shape.head or shape.width // shape.heads
        self.query = _linear(shape, shape.width, shape.heads * self.head)
        self.key = _linear(shape, shape.width, shape.kv_heads * self.head)
        self.value = _linear(shape, shape.width, shape.kv_heads * self.head)
        self.out = _linear(shape, shape.heads * self.head, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query, key, value = (
            each(x).view(batch, length, -1, self.head).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        if not self.shape.classic:
            query, key = _rotated(query), _rotated(key)
        if self.shape.flash:
            grouped = self.shape.kv_heads != self.shape.heads
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        else:
            scores = query @ key.transpose(2, 3) * self.head**-0.5
            place = torch.arange(length, device=x.device)
            mixed = scores.masked_fill(place > place.unsqueeze(1), -1e4).softmax(-1) @ value
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))  # type: ignore[no-any-return]


class LatentAttention(nn.Module):
    """Causal attention of :class:`Latent` keys, with values padded to the width of keys, as kernels of one width do."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        assert shape.latent is not None
        self.heads, self.sizes = shape.heads, shape.latent
        sizes, head = shape.latent, shape.latent.plain + shape.latent.rotary
        self.query_down = _linear(shape, shape.width, sizes.query)
        self.query_norm, self.key_norm = nn.RMSNorm(sizes.query), nn.RMSNorm(sizes.key)
        self.query_up = _linear(shape, sizes.query, shape.heads * head)
        self.key_down = _linear(shape, shape.width, sizes.key + sizes.rotary)
        self.key_up = _linear(shape, sizes.key, shape.heads * (sizes.plain + sizes.value))
        self.out = _linear(shape, shape.heads * sizes.value, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        sizes, (batch, length, _) = self.sizes, x.shape
        query = self.query_up(self.query_norm(self.query_down(x))).view(batch, length, self.heads, -1).transpose(1, 2)
        plain, rotary = query.split((sizes.plain, sizes.rotary), -1)
        latent, shared = self.key_down(x).split((sizes.key, sizes.rotary), -1)
        both = self.key_up(self.key_norm(latent)).view(batch, length, self.heads, -1).transpose(1, 2)
        keys, value = both.split((sizes.plain, sizes.value), -1)
        rotated = _rotated(shared.unsqueeze(1)).expand(-1, self.heads, -1, -1)
        query, key = torch.cat((plain, _rotated(rotary)), -1), torch.cat((keys, rotated), -1)
        value = F.pad(value, (0, key.shape[-1] - sizes.value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)[..., : sizes.value]
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))  # type: ignore[no-any-return]


class Float8Linear(nn.Linear):
    """A linear layer whose three products multiply float8 numbers with one scale for each tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return Float8Product.apply(x.flatten(0, -2), self.weight).view(*x.shape[:-1], -1)  # type: ignore[no-any-return]


class Float8Product(torch.autograd.Function):
    """``x @ weight.T``, in the formats of P. Micikevicius et al., "FP8 formats for deep learning", arXiv:2209.05433."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight.t())

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> tuple[Tensor, ...]:
        x, weight = ctx.saved_tensors  # type: ignore[attr-defined]
        (gradient,) = gradients
        return _product(gradient, weight), _product(gradient.t(), x)


class Float8Experts(Experts):
    """Experts whose products multiply float8 numbers."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.w_gate is not None
        hidden = F.silu(Float8Products.apply(x, self.w_gate)) * Float8Products.apply(x, self.w_in)
        return Float8Products.apply(hidden, self.w_out)  # type: ignore[no-any-return]


class Float8Products(torch.autograd.Function):
    """``x @ weight`` of every expert. For shapes alone: torch has no such kernel of ``bmm``, but its grouped products,
    which have no rule for sharding here, cost as much."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _products(x, weight)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> tuple[Tensor, ...]:
        x, weight = ctx.saved_tensors  # type: ignore[attr-defined]
        (gradient,) = gradients
        return _products(gradient, weight.mT), _products(x.mT, gradient)


def _products(a: Tensor, b: Tensor) -> Tensor:
    cast = torch.float8_e4m3fn
    return torch.bmm(a.to(cast), b.to(cast)).to(a.dtype)


def _linear(shape: Shape, inputs: int, outputs: int) -> nn.Linear:
    return (Float8Linear if shape.float8 else nn.Linear)(inputs, outputs, bias=shape.classic)


def _product(a: Tensor, b: Tensor) -> Tensor:
    scale = torch.ones((), device=a.device, dtype=torch.float32)
    cast = torch.float8_e4m3fn
    columns = b.t().contiguous().to(cast).t()
    return torch._scaled_mm(a.contiguous().to(cast), columns, scale, scale, out_dtype=a.dtype)


def _norm(shape: Shape) -> nn.Module:
    return nn.LayerNorm(shape.width) if shape.classic else nn.RMSNorm(shape.width)


def _rotated(x: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    angle = torch.arange(x.shape[2], device=x.device, dtype=x.dtype).unsqueeze(-1)
    return x * angle.cos() + torch.cat((-right, left), -1) * angle.sin()
