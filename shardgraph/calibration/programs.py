"""Training steps of small models whose operations are timed in place.

An operation costs more in a program than repeated alone: its operands have left the caches, its result is new memory,
and Python runs between it and the next one. So calibration times programs rather than operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import fx, nn

from shardgraph import torch_api
from shardgraph.ir import Buffer, Gradient, Input, Parameter, Role, Tangent, outputs, placeholders
from shardgraph.passes.analysis.costs import node_costs
from shardgraph.passes.analysis.liveness import settle_memory
from shardgraph.passes.lowering import build_program
from shardgraph.plans.presets import preset
from shardgraph.runtime.backends import eager
from shardgraph.runtime.bind import bind

T = TypeVar("T")


class Block(nn.Module):
    """A transformer layer: classic (biases, GELU, dropout), or ``gated`` (SwiGLU, rotary embeddings, causal)."""

    def __init__(self, width: int, gated: bool, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout  # with dropout, attention is two products and a softmax
        self.heads = max(2, width // 32)
        self.attention_norm, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.ModuleList(nn.Linear(width, width, bias=not gated) for _ in range(3))
        self.out = nn.Linear(width, width, bias=not gated)
        inner = width * 8 // 3 if gated else 4 * width
        self.up, self.down = nn.Linear(width, inner, bias=not gated), nn.Linear(inner, width, bias=not gated)
        self.gate = nn.Linear(width, inner, bias=False) if gated else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        normed = self.attention_norm(x)
        query, key, value = (linear(normed).view(batch, length, self.heads, -1).transpose(1, 2) for linear in self.qkv)
        if self.gate is not None:
            query, key = _rotated(query), _rotated(key)
        attended = F.scaled_dot_product_attention(query, key, value, None, self.dropout, self.gate is not None)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        normed = self.norm(x)
        if self.gate is None:
            return x + F.dropout(self.down(F.gelu(self.up(normed))), self.dropout)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


def _rotated(x: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, -1)
    angle = torch.arange(x.shape[2], device=x.device, dtype=x.dtype).unsqueeze(-1)
    return x * angle.cos() + torch.cat((-right, left), -1) * angle.sin()


class Transformer(nn.Module):
    """A language model and its loss."""

    def __init__(self, width: int, layers: int, vocabulary: int, gated: bool, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.Sequential(*(Block(width, gated, dropout) for _ in range(layers)))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.layers(self.embedding(tokens)))
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


class ConvNet(nn.Module):
    """A residual network and its loss: each stage halves the image and doubles the channels."""

    def __init__(self, channels: int, stages: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 7, stride=2, padding=3)
        widths = [channels * 2**i for i in range(stages)]
        self.down = nn.ModuleList(nn.Conv2d(a, b, 1, stride=2) for a, b in pairwise(widths))
        self.convolutions = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1, bias=False) for width in widths)
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for width in widths)
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.stem(images)), 3, stride=2, padding=1)
        for i, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            x = x + F.relu(norm(convolution(x)))
            if i < len(self.down):
                x = self.down[i](x)
        return self.head(x.mean((2, 3))).logsumexp(-1).mean()


class Wide(nn.Module):
    """Layers whose weights are more than what is computed with them, as in a microbatch of a large model."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(*each) for each in pairwise(widths)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def reference_steps(device: torch.device, dtype: torch.dtype, quick: bool = False) -> Iterator[Step]:
    """Training steps from small to large, which together cover the usual operations of models; ``quick``: some of them.

    On a GPU, batches are 8 times as large, because smaller ones do not fill it; but for the last step, which has few
    rows for large matrices.
    """
    scale, every = 1 if device.type == "cpu" else 8, 2 if quick else 1
    transformers = (
        (64, 1, 512, 4, 32, False, 0.1),
        (128, 2, 1024, 4, 64, True, 0.0),
        (256, 1, 2048, 4, 128, False, 0.1),
        (512, 1, 2048, 2, 128, True, 0.0),
        (384, 1, 4096, 1, 512, False, 0.0),
    )
    for width, layers, vocabulary, batch, length, gated, dropout in transformers[-1::-every][::-1]:
        tokens = torch.randint(vocabulary, (batch * scale, length), device=device)
        yield Step(Transformer(width, layers, vocabulary, gated, dropout).to(device, dtype), tokens)
    for channels, stages, batch, size in ((16, 3, 4, 32), (64, 4, 4, 64), (64, 3, 8, 32), (192, 1, 4, 96))[::every]:
        images = torch.randn(batch * scale, 3, size, size, device=device, dtype=dtype)
        yield Step(ConvNet(channels, stages).to(device, dtype), images)
    rows = torch.randn(4, 1024, device=device, dtype=dtype)
    yield Step(Wide(1024, 2048, 2048, 1024).to(device, dtype), rows)


class Step:
    """A training step of one model in one process, which reads a clock after every operation."""

    def __init__(self, model: nn.Module, *args: torch.Tensor) -> None:
        self.model, self.args = model, args
        program = build_program(model, preset("single", ()), args, device=args[0].device)
        assert program.backward is not None
        graphs = [program.forward, program.backward]
        self.costs = [c for gm in graphs for node, c in node_costs(gm).items() if node.op == "call_function"]
        """The work of each operation in execution order."""
        self._clock: Callable[[], Any] = float
        self._readings: list[Any] = []
        self._halves = [self._timed(gm) for gm in graphs]

    def _timed(self, gm: fx.GraphModule) -> tuple[fx.GraphModule, Callable[[list[Any]], Any]]:
        """The graph with a reading of the clock after each operation, and the code of it that the executor runs."""
        bound = bind(gm, None)
        settle_memory(bound)
        eager.overwrite(bound)
        for node in list(bound.graph.nodes):
            if node.op == "call_function":
                with bound.graph.inserting_after(node):
                    bound.graph.call_function(self._read)
        return bound, torch_api.boxed(bound)

    def _read(self) -> None:
        self._readings.append(self._clock())

    def run(self, clock: Callable[[], T]) -> tuple[list[tuple[T, T]], dict[str, torch.Tensor]]:
        """The readings of ``clock`` before and after each operation, and the gradients by parameter name."""
        values: dict[Role | None, Any] = {}

        def value(role: Role, like: torch.Tensor) -> Any:
            if isinstance(role, Tangent):
                return torch.ones(like.shape, dtype=like.dtype, device=self.args[0].device)
            return self.args[role.index] if isinstance(role, Input) else values.pop(role)

        pairs: list[tuple[T, T]] = []
        with torch.no_grad(), torch_api.below_autograd():
            for bound, call in self._halves:
                values |= {Parameter(name): parameter.detach() for name, parameter in self.model.named_parameters()}
                values |= {Buffer(name): buffer for name, buffer in self.model.named_buffers()}
                inputs = [value(role, node.meta["val"]) for role, node in placeholders(bound).items()]
                self._clock, self._readings = clock, [clock()]
                results = call(inputs)
                values = dict(zip((role for role, _ in outputs(bound)), results, strict=True))
                pairs += pairwise(self._readings)
        gradients = {role.of: gradient for role, gradient in values.items() if isinstance(role, Gradient)}
        return pairs, {owner.fqn: each for owner, each in gradients.items() if isinstance(owner, Parameter)}
