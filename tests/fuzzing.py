"""Random small models, inputs, plans, and changes of what forward reads: the same for the same seed.

Every block takes and gives activations of ``[rows, positions, width]``, so that blocks nest in any order. Models are in
double precision. ``str(model)`` shows the blocks with their attributes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

# -- operations --------------------------------------------------------------------------------------------


def _assign_slice(x: torch.Tensor) -> torch.Tensor:
    y = x * 1.5
    y[..., :1] = 0
    y[:, -1] = y[:, 0] * 0.5
    return y


def _assign_elements_that_are_large(x: torch.Tensor) -> torch.Tensor:
    y = x * 0.5
    y[y > 0.5] = 0.25
    return y


def _add_to_transposed(x: torch.Tensor) -> torch.Tensor:
    y = x.contiguous() * 0.5
    y.transpose(1, 2).add_(0.1)
    y.view(-1)[::2].mul_(2)
    return y


def _view_before_its_base_changes(x: torch.Tensor) -> torch.Tensor:
    y = x * 0.5
    first = y[:, :1]
    y.add_(1).mul_(0.5)
    return y + first


def _detached_before_its_base_changes(x: torch.Tensor) -> torch.Tensor:
    y = x * 0.5
    detached = y.detach()
    y.mul_(1.5)
    return y + detached


def _write_into_zeros(x: torch.Tensor) -> torch.Tensor:
    y = x.new_zeros(x.shape)
    y[..., 1:] = x[..., 1:]
    y[:, :, 0].copy_(x.sum(-1))
    return y


def _detach_half(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return torch.cat([x[..., :half].detach(), x[..., half:]], -1)


def _without_gradients(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        largest = x.abs().amax(-1, keepdim=True)
    return x / (largest + 1)


def _branch_on_rows(x: torch.Tensor) -> torch.Tensor:
    if x.shape[0] > 2:
        return x * x.shape[0] - x.mean(0, keepdim=True)
    return x.sin() / x.shape[0]


def _causal(x: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    scores = (x @ x.transpose(1, 2)).masked_fill(~mask, float("-inf"))
    return scores.softmax(-1) @ x


def _at_the_largest(x: torch.Tensor) -> torch.Tensor:
    where = x.argmax(-1, keepdim=True)
    return x.scatter(-1, where, 0.5) + x.gather(-1, where)


# Left out, since it fails under "tp": torch.cat with a tensor of no rows.
OPERATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "one hot": lambda x: x + F.one_hot(x.argmax(-1), x.shape[-1]),
    "assign a slice": _assign_slice,
    "assign elements that are large": _assign_elements_that_are_large,
    "add to a transposed view": _add_to_transposed,
    "a view before its base changes": _view_before_its_base_changes,
    "detached before its base changes": _detached_before_its_base_changes,
    "write into zeros": _write_into_zeros,
    "detach half": _detach_half,
    "without gradients": _without_gradients,
    "branch on rows": _branch_on_rows,
    "causal": _causal,
    "at the largest": _at_the_largest,
    "relu_": lambda x: (x + 0.1).relu_(),
    "clamp_": lambda x: (x + 0.1).clamp_(-1, 1),
    "transpose": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "flatten": lambda x: x.reshape(-1, x.shape[-1]).tanh().view(x.shape),
    "flatten all": lambda x: x.flatten().cos().unflatten(0, x.shape),
    "chunk": lambda x: torch.cat(x.chunk(2, -1)[::-1], -1),
    "split positions": lambda x: torch.cat(x.split(2, 1)[::-1], 1),
    "slices": lambda x: torch.cat([x[..., 1:], x[..., :1].exp()], -1),
    "strided slice": lambda x: torch.cat([x[:, ::2], x[:, 1::2]], 1),
    "roll": lambda x: x + x.roll(1, 1),
    "flip": lambda x: x + x.flip(-1),
    "cumulative sum": lambda x: x.cumsum(1) * 0.5,
    "softmax": lambda x: x.softmax(-1) * x.shape[-1],
    "softmax over positions": lambda x: x + x.softmax(1),
    "pad": lambda x: F.pad(x, (1, 0))[..., :-1] + x,
    "expand": lambda x: x + x.mean(1, keepdim=True).expand(-1, x.shape[1], -1),
    "mean of rows": lambda x: x - x.mean(0, keepdim=True),
    "einsum": lambda x: torch.einsum("bsw,btw->bst", x, x.tanh()) @ x * 0.1,
    "where": lambda x: torch.where(x > 0, x, x.expm1()),
    "standard deviation": lambda x: x / (x.std(-1, keepdim=True) + 1),
    "unbind": lambda x: torch.stack(x.unbind(1)[::-1], 1),
    "index": lambda x: x[:, torch.arange(x.shape[1] - 1, -1, -1)],
    "normalize": lambda x: F.normalize(x, dim=-1),
    "logsumexp": lambda x: x - x.logsumexp(-1, keepdim=True),
    "largest": lambda x: x - x.amax((1, 2), keepdim=True),
    "sort": lambda x: x.sort(-1).values,
    "repeat": lambda x: x.repeat(1, 2, 1)[:, : x.shape[1]] * 0.5,
    "softplus": lambda x: F.softplus(x),
    "permute": lambda x: x.permute(2, 0, 1).sigmoid().permute(1, 2, 0),
    "product with the flipped": lambda x: x * x.unsqueeze(0).squeeze(0).flip(1),
    "fourier": lambda x: torch.fft.rfft(x, dim=1).abs().sum(1, keepdim=True) * 0.1 + x,
    "in single precision": lambda x: x + torch.linspace(0, 1, x.shape[-1], dtype=torch.float32),
    "reshape to other rows": lambda x: x.reshape(-1, 2, x.shape[-1] // 2).softmax(1).reshape(x.shape),
    "rows in another order": lambda x: x[torch.arange(x.shape[0]).flip(0)] + x,
    "outer product": lambda x: (x.unsqueeze(-1) * x.unsqueeze(-2)).mean(-1),
    "scatter_add": lambda x: x.scatter_add(1, torch.zeros(x.shape, dtype=torch.long), x),
    "tiled": lambda x: x.expand(2, *x.shape).reshape(-1, *x.shape[1:])[: x.shape[0]] * 0.7,
    "swapped halves of rows": lambda x: torch.cat([x[len(x) // 2 :], x[: len(x) // 2]]) + x,
    "interpolate": lambda x: F.interpolate(F.avg_pool1d(x, 2, 2), size=x.shape[-1]) + x,
    "norm over all": lambda x: x / (x.norm() + 1),
    "layer norm of two dimensions": lambda x: F.layer_norm(x, x.shape[1:]),
    "topk": lambda x: x + x.topk(2, -1).values.sum(-1, keepdim=True),
    "addcmul_": lambda x: (x * 0.5).addcmul_(x, x.tanh(), value=0.3),
    "assign by index": lambda x: (x * 0.5).index_copy_(1, torch.tensor([0]), x[:, -1:]),
}

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,
    "tanh": nn.Tanh,
    "relu in place": lambda: nn.ReLU(inplace=True),
    "silu": nn.SiLU,
}

# -- blocks ------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A part of a random model."""

    def extra_repr(self) -> str:
        own = {key: value for key, value in vars(self).items() if not key.startswith("_") and key != "training"}
        return ", ".join(
            f"{key}={list(value.shape) if isinstance(value, torch.Tensor) else value!r}" for key, value in own.items()
        )


class Operations(Block):
    """Operations without parameters, one after another; ``scale`` and ``flag`` may change between calls."""

    def __init__(self, width: int, random: Random) -> None:
        super().__init__()
        self.names = random.choices(list(OPERATIONS), k=random.randint(1, 3))
        self.scale, self.flag = 1.0, random.random() < 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.names:
            x = OPERATIONS[name](x)
        return x * self.scale + 0.25 if self.flag else x


class FeedForward(Block):
    """Linear layers, of which the second may have the weight of the first, transposed."""

    def __init__(self, width: int, random: Random) -> None:
        super().__init__()
        hidden = random.choice([width, 2 * width, 7, 12])
        self.tied, self.scale = random.random() < 0.3, 1.0
        self.up = nn.Linear(width, hidden, bias=random.random() < 0.7)
        self.activation = ACTIVATIONS[random.choice(list(ACTIVATIONS))]()
        self.dropout = nn.Dropout(0.0)
        if random.random() < 0.3:
            self.dropout = nn.Dropout(0.5).eval()
        self.down = None if self.tied else nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.dropout(self.activation(self.up(x) * self.scale))
        return F.linear(y, self.up.weight.t()) if self.down is None else self.down(y)


class Gated(Block):
    """A linear layer whose result is cut into values and their gates."""

    def __init__(self, width: int, random: Random) -> None:
        super().__init__()
        self.both, self.flag = nn.Linear(width, 2 * width), random.random() < 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value, gate = self.both(x).chunk(2, -1) if self.flag else self.both(x).split(x.shape[-1], -1)
        return value * gate.sigmoid()


class Attention(Block):
    """Attention of the positions of a row to each other, with one projection or three; fused or written out."""

    def __init__(self, width: int, random: Random) -> None:
        super().__init__()
        self.heads = random.choice([heads for heads in (1, 2, 4) if not width % heads])
        self.fused, self.causal = random.random() < 0.6, random.random() < 0.5
        self.together = random.random() < 0.5
        self.qkv = (
            nn.Linear(width, 3 * width) if self.together else nn.ModuleList(nn.Linear(width, width) for _ in "qkv")
        )
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, positions, width = x.shape
        parts = self.qkv(x).chunk(3, -1) if self.together else [project(x) for project in self.qkv]
        q, k, v = (part.view(rows, positions, self.heads, -1).transpose(1, 2) for part in parts)
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        else:
            y = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(rows, positions, width))


class Norm(Block):
    """One of the norms, over the width or, as channels, over groups of it or the batch."""

    def __init__(self, width: int, random: Random) -> None:
        super().__init__()
        self.kind = random.choice(["layer", "rms", "group", "batch"])
        self.norm: nn.Module = {
            "layer": lambda: nn.LayerNorm(width, elementwise_affine=random.random() < 0.8),
            "rms": lambda: nn.RMSNorm(width),
            "group": lambda: nn.GroupNorm(2, width),
            "batch": lambda: nn.BatchNorm1d(width).train(random.random() < 0.6),
        }[self.kind]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind in ("group", "batch"):
            return self.norm(x.transpose(1, 2)).transpose(1, 2)
        return self.norm(x)


class Convolution(Block):
    """A convolution along the positions."""

    def __init__(self, width: int, random: Random) -> None:
        super().__init__()
        groups = random.choice([1, 1, 2])
        self.convolution = nn.Conv1d(width, width, 3, padding=1, groups=groups, bias=random.random() < 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.convolution(x.transpose(1, 2)).relu().transpose(1, 2)


class Direct(Block):
    """Parameters used as they are: trained, frozen or unused; with a tensor, a number and a flag that may change."""

    def __init__(self, width: int, random: Random) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width))
        self.shift = nn.Parameter(torch.randn(width), requires_grad=random.random() < 0.5)
        self.gain = nn.Parameter(torch.tensor(1.2))
        self.unused = nn.Parameter(torch.ones(3))
        self.mask = torch.rand(width, dtype=torch.float64)
        self.scale, self.flag = 1.0, random.random() < 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (x @ self.weight * self.gain * self.scale).tanh() * self.mask
        return y + self.shift if self.flag else y * self.weight[0] + self.weight[:, 1:2].mean()


class Positions(Block):
    """An embedding of positions, frozen or trained, as a table or as a parameter of which a part is used."""

    def __init__(self, width: int, random: Random) -> None:
        super().__init__()
        self.table = random.random() < 0.5
        self.embedding = nn.Embedding(9, width)
        self.embedding.weight.requires_grad_(random.random() < 0.7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = x.shape[1]
        return x + (self.embedding(torch.arange(positions)) if self.table else self.embedding.weight[:positions])


class Counts(Block):
    """Buffers that forward writes in place and reads."""

    def __init__(self, width: int, random: Random) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(width))
        self.read_before = random.random() < 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = x - self.mean
        with torch.no_grad():
            self.calls.add_(1)
            self.mean.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
        return before if self.read_before else x - self.mean


class Remembers(Block):
    """Attributes that forward sets: a count and a tensor that the next call reads, and one that is only set."""

    def __init__(self, width: int, random: Random) -> None:
        super().__init__()
        self.calls, self.flag = 0, random.random() < 0.5
        self.last, self.seen = torch.zeros(width, dtype=torch.float64), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.last * 0.5
        self.calls += 1
        self.last = y.mean((0, 1)).detach()
        self.seen = {"size": y.square().mean()}
        return y * self.calls * 0.5 if self.flag else y + self.seen["size"]


class Lists(Block):
    """Parameters in a list and a dictionary, and plain numbers in a dictionary that may change."""

    def __init__(self, width: int, random: Random) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(width) for _ in range(2))
        self.named = nn.ParameterDict({"a": torch.randn(width, width), "b": torch.randn(1, width)})
        self.options = {"offset": 0.5, "layers": random.randint(1, 2)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in list(self.weights)[: self.options["layers"]]:  # torch 2.12 traces no slice of a ParameterList
            x = x * weight + self.options["offset"]
        return torch.cat([self.named["b"], x.flatten(0, 1)])[1:].view(x.shape) @ self.named["a"].tril()


class Heads(Block):
    """Attention as torch has it, with a mask that is a buffer, or none."""

    def __init__(self, width: int, random: Random) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True, bias=random.random() < 0.5)
        self.weights = random.random() < 0.3
        self.register_buffer("mask", torch.randn(9, 9).tril() if random.random() < 0.5 else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = None if self.mask is None else self.mask[: x.shape[1], : x.shape[1]]
        y, weights = self.attention(x, x, x, attn_mask=mask, need_weights=self.weights)
        return y if weights is None else y + weights.mean((1, 2), keepdim=True)


class Picture(Block):
    """Positions and width as the pixels of a picture."""

    def __init__(self, width: int, random: Random) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv2d(1, 4, 3, padding=1), nn.ConvTranspose2d(4, 1, 3, padding=1)
        self.norm, self.scale = nn.BatchNorm2d(4, affine=random.random() < 0.5), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.max_pool2d(self.norm(self.enter(x.unsqueeze(1))), 3, 1, 1) * self.scale
        return self.leave(y).squeeze(1)


class Parametrized(Block):
    """A linear layer whose weight is computed, from others or from the layer's own in another block."""

    def __init__(self, width: int, random: Random) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(width, width))
        self.frozen = nn.Linear(width, width).requires_grad_(random.random() < 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return y + F.linear(x, self.frozen.weight - self.linear.weight.detach(), self.frozen.bias)


class Residual(Block):
    """A block beside its input."""

    def __init__(self, width: int, random: Random, depth: int) -> None:
        super().__init__()
        self.inside, self.scale = random_block(width, random, depth - 1), 1.0
        self.norm = nn.LayerNorm(width) if random.random() < 0.5 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inside(self.norm(x)) * self.scale


class Repeated(Block):
    """A block that is used twice, and is there under two names."""

    def __init__(self, width: int, random: Random, depth: int) -> None:
        super().__init__()
        self.first = self.second = random_block(width, random, depth - 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh())


class Branch(Block):
    """One of two blocks, by the shape of the input or by ``flag``."""

    def __init__(self, width: int, random: Random, depth: int) -> None:
        super().__init__()
        self.first, self.second = random_block(width, random, depth - 1), random_block(width, random, depth - 1)
        self.flag = random.random() < 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 2 or self.flag:
            return self.first(x)
        return self.second(x) + 0.1


class Recomputed(Block):
    """A block that the model itself computes again in backward."""

    def __init__(self, width: int, random: Random, depth: int) -> None:
        super().__init__()
        self.inside = random.choice(WITHOUT_WRITES)(width, random)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inside, x, use_reentrant=False)


WITHOUT_WRITES = [Operations, FeedForward, Gated, Attention, Convolution, Direct, Positions, Lists, Heads]
LEAVES = [*WITHOUT_WRITES, Operations, Operations, Norm, Counts, Remembers, Picture, Parametrized]
NESTED = [Residual, Residual, Repeated, Branch, Recomputed]


def random_block(width: int, random: Random, depth: int) -> Block:
    if depth and random.random() < 0.5:
        return random.choice(NESTED)(width, random, depth)
    return random.choice(LEAVES)(width, random)


# -- models ------------------------------------------------------------------------------------------------

VOCABULARY = 11
OUTPUTS = ["activations", "with views", "with detached", "logits", "loss"]


class Model(Block):
    """Blocks between an embedding, or an input layer, and a head, which may have the embedding's weight."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        width = random.choice([4, 6, 8])
        self.tokens, self.output = random.random() < 0.5, random.choice(OUTPUTS)
        self.enter = nn.Embedding(VOCABULARY, width) if self.tokens else nn.Linear(5, width)
        self.blocks = nn.ModuleList(random_block(width, random, 2) for _ in range(random.randint(1, 3)))
        self.head = nn.Linear(width, VOCABULARY, bias=random.random() < 0.5)
        if self.tokens and random.random() < 0.5:
            self.head.weight = self.enter.weight

    def forward(self, x: torch.Tensor) -> Any:
        y = self.enter(x)
        for block in self.blocks:
            y = block(y)
        if self.output == "activations":
            return y
        if self.output == "with views":
            return {"all": y, "first": y[:, 0], "flat": [y.reshape(-1), y.transpose(0, 1)]}
        logits = self.head(y)
        if self.output == "with detached":
            return logits, y.detach(), logits.shape[0]
        if self.output == "loss":
            return {"loss": F.cross_entropy(logits.flatten(0, 1), torch.arange(logits[..., 0].numel()) % VOCABULARY)}
        return logits

    def example(self, rows: int, positions: int) -> torch.Tensor:
        if self.tokens:
            return torch.randint(0, VOCABULARY, (rows, positions))
        return torch.randn(rows, positions, 5, dtype=torch.float64)


def random_model(random: Random) -> Model:
    torch.manual_seed(random.randrange(2**31))
    return Model(random).double()


def loss_of(output: Any) -> torch.Tensor:
    """A loss whose gradient is of the size of the output also where a norm fixes the mean square of the output."""
    if isinstance(output, dict) and "loss" in output:
        return output["loss"]
    tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    directions = [torch.arange(tensor.numel(), dtype=tensor.dtype).sin().view(tensor.shape) for tensor in tensors]
    return sum(((t + d).square().mean() for t, d in zip(tensors, directions, strict=True)), torch.zeros(()))


OPTIMIZERS: dict[str, Callable[[list[torch.Tensor]], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9, weight_decay=0.1),
    # With the default eps, the rounding error of a gradient that is zero, as before a batch norm, moves weights by more
    # than the tolerance.
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4),
}

# -- changes -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """An attribute of a module of the model, by its path, and its new value."""

    path: str
    attribute: str
    value: Any

    def apply(self, model: nn.Module) -> None:
        module = model.get_submodule(self.path)
        if self.attribute == "training":
            module.train(self.value)
        elif self.attribute == "requires_grad":
            module.requires_grad_(self.value)
        elif self.attribute == "mask in place":
            module.mask.mul_(self.value)
        elif isinstance(self.value, torch.Tensor):
            setattr(module, self.attribute, self.value.clone())
        else:
            setattr(module, self.attribute, self.value() if callable(self.value) else self.value)


def random_changes(model: nn.Module, random: Random) -> list[Change]:
    """One or two changes of what forward may read."""
    possible = [change for path, module in model.named_modules() for change in _changes_of(path, module, random)]
    return random.sample(possible, min(len(possible), random.randint(1, 2)))


def _changes_of(path: str, module: nn.Module, random: Random) -> list[Change]:
    changes = []
    if hasattr(module, "scale"):
        changes.append(Change(path, "scale", random.choice([0.5, 2.0, 2, -1.0])))
    if hasattr(module, "flag"):
        changes.append(Change(path, "flag", not module.flag))
    if isinstance(module, Operations):
        changes.append(Change(path, "names", random.choices(list(OPERATIONS), k=2)))
    if isinstance(module, Direct):
        changes.append(Change(path, "mask", torch.rand_like(module.mask)))
        changes.append(Change(path, "mask in place", 0.5))
    if isinstance(module, Lists):
        changes.append(Change(path, "options", {"offset": 0.1, "layers": random.randint(0, 2)}))
    if isinstance(module, nn.Linear):
        changes.append(Change(path, "requires_grad", not module.weight.requires_grad))
    if isinstance(module, FeedForward):
        changes.append(Change(path, "activation", random.choice(list(ACTIVATIONS.values()))))
        changes.append(Change(path, "dropout", nn.Identity))
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.BatchNorm1d)):
        changes.append(Change(path, "eps", random.choice([1e-3, 1e-1])))
    if isinstance(module, nn.BatchNorm1d):
        changes.append(Change(path, "training", not module.training))
        changes.append(Change(path, "momentum", 0.3))
    return changes


# -- plans -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sharding:
    """A plan, the mesh that it is for, and what backward recomputes."""

    plan: str
    mesh: dict[str, int]
    recompute: str

    @property
    def data_ranks(self) -> int:
        ranks = 1
        for axis, size in self.mesh.items():
            ranks *= size if axis.startswith("dp") else 1
        return ranks


def random_sharding(random: Random) -> Sharding:
    plan = random.choice(["ddp", "zero1", "zero2", "fsdp", "hsdp", "tp", "fsdp+tp", "tp+sp", "cp"])
    size = random.choice([2, 2, 3, 4])
    mesh = {
        "hsdp": {"dp_replicate": 2, "dp_shard": min(size, 3)},
        "tp": {"tp": size},
        "tp+sp": {"tp": size},
        "cp": {"cp": size},
        "fsdp+tp": {"dp": 2, "tp": min(size, 3)},
    }.get(plan, {"dp": size})
    return Sharding(plan, mesh, random.choice(["none", "full", "selective"]))
