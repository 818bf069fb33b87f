"""Small models of three kinds under every preset, to be emitted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import shardgraph
from shardgraph import Plan
from shardgraph.nn import MoE
from tests.diffusion import Denoiser
from tests.emitted import Case

Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


class Block(nn.Module):
    """Attention and a feed-forward layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.drop = nn.Dropout(0.1)
        self.ln_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.heads = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.ln_1(x)).view(batch, length, 3, self.heads, width // self.heads)
        mixed = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4), is_causal=True)
        x = x + self.drop(self.proj(mixed.transpose(1, 2).reshape(batch, length, width)))
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


class GPT(nn.Module):
    """A small GPT that gives its loss: tied embedding, a vocabulary that nothing divides, dropout."""

    def __init__(self, layers: int = 4, width: int = 16, vocabulary: int = 37, length: int = 8) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, 2) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.ln_f(x)).flatten(0, 1), labels.flatten())


class ConvNet(nn.Module):
    """Convolutions with batch norm, whose running statistics forward writes, and a frozen layer."""

    def __init__(self, batch_norm: bool = True) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6) if batch_norm else nn.GroupNorm(2, 6)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.ReLU()) for _ in range(3)))
        self.frozen = nn.Conv2d(6, 5, 3, stride=2).requires_grad_(False)
        self.norm_2 = nn.BatchNorm2d(5) if batch_norm else nn.GroupNorm(5, 5)
        self.head = nn.Linear(5, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.enter(x)))
        for layer in self.layers:
            x = x + layer(x)
        x = F.relu(self.norm_2(self.frozen(x)))
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


class Mixture(nn.Module):
    """A language model whose layers have experts."""

    def __init__(self, vocabulary: int = 32, width: int = 16, experts: int = 4, **options: Any) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.experts = nn.ModuleList(MoE(width, 24, experts, **options) for _ in range(2))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x, extra = self.tokens(ids), 0.0
        for norm, experts in zip(self.norms, self.experts, strict=True):
            mixed = experts(norm(x))
            mixed, auxiliary = mixed if isinstance(mixed, tuple) else (mixed, 0.0)
            x, extra = x + mixed, extra + auxiliary
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()) + 0.01 * extra


def gpt() -> Made:
    ids = torch.randint(0, 37, (4, 8))
    return GPT(), (ids, ids), {}


def llama() -> Made:
    from transformers import LlamaConfig, LlamaForCausalLM

    return _of_transformers(LlamaForCausalLM, LlamaConfig(**{**_SMALL, "num_hidden_layers": 3}))


def conv() -> Made:
    return ConvNet(), (torch.randn(4, 3, 8, 8), torch.randint(0, 4, (4,))), {}


def grouped() -> Made:
    return ConvNet(batch_norm=False), (torch.randn(4, 3, 8, 8), torch.randint(0, 4, (4,))), {}


def mixture() -> Made:
    ids = torch.randint(0, 32, (4, 8))
    return Mixture(), (ids, ids), {}


def switch() -> Made:
    """One expert for a token, of which each takes no more than its capacity."""
    ids = torch.randint(0, 32, (4, 8))
    return Mixture(k=1, capacity_factor=1.0, activation="relu"), (ids, ids), {}


def gated() -> Made:
    """Three of six gated experts for a token, without biases, and nothing dropped."""
    ids = torch.randint(0, 32, (4, 8))
    return Mixture(experts=6, k=3, capacity_factor=None, activation="swiglu", bias=False), (ids, ids), {}


_SMALL = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "use_cache": False,
}


def _of_transformers(kind: Any, config: Any) -> Made:
    ids = torch.randint(0, 40, (4, 8))
    return kind(config), (), {"input_ids": ids, "labels": ids}


_MODELS = {
    "gpt": gpt,
    "llama": llama,
    "conv": conv,
    "grouped": grouped,
    "mixture": mixture,
    "switch": switch,
    "gated": gated,
}
_PLANS: dict[str, dict[str, int]] = {
    "single": {},
    "ddp": {"dp": 2},
    "zero1": {"dp": 2},
    "zero2": {"dp": 2},
    "fsdp": {"dp": 2},
    "hsdp": {"dp_replicate": 2, "dp_shard": 2},
    "tp": {"tp": 2},
    "tp+sp": {"tp": 2},
    "cp": {"cp": 2},
    "ep": {"ep": 2},
    "fsdp+tp": {"dp": 2, "tp": 2},
    "pp": {"pp": 2},
    "pp+fsdp": {"pp": 2, "dp": 2},
}
_OF = {  # the third model of each plan
    **dict.fromkeys(("single", "ddp", "zero1", "zero2", "fsdp", "hsdp"), "conv"),
    **dict.fromkeys(("pp", "pp+fsdp"), "grouped"),
    **dict.fromkeys(("tp", "tp+sp", "cp", "ep", "fsdp+tp"), "mixture"),
}
CASES = [
    Case(f"{name}:{plan}", _MODELS[name], plan, mesh)
    for plan, mesh in _PLANS.items()
    for name in (("gpt", "llama", _OF[plan]) if plan != "ep" else ("mixture", "switch", "gated"))
]


class Deep(nn.Module):
    """Layers that keep more for backward than the last of them does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


class Dropping(nn.Module):
    """Layers that are dropped at random, in which much else is random, and which write buffers."""

    def __init__(self) -> None:
        super().__init__()
        layer = lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3), nn.BatchNorm1d(4))  # noqa: E731
        self.layers = nn.ModuleList(layer() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if torch.rand([]) >= 0.5:
                x = x + layer(x)
        return x.square().mean()


class Augmented(nn.Module):
    """A model of sound whose spectrograms are masked at random, by NumPy."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import Wav2Vec2Config, Wav2Vec2Model

        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
        sound = {"conv_dim": (8, 8), "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_feat_extract_layers": 2}
        positions = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
        masks = {"mask_time_prob": 0.3, "mask_time_length": 2, "layerdrop": 0.0}
        self.encoder = Wav2Vec2Model(Wav2Vec2Config(**sizes, **sound, **positions, **masks))

    def forward(self, sound: torch.Tensor) -> torch.Tensor:
        return self.encoder(sound).last_hidden_state.square().mean()


class Network(nn.Sequential):
    """Linear layers, which give no loss."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 3))


class TwoOutputs(Network):
    """Outputs of which one is a view of the other, and a number of no gradient."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        out = super().forward(x)
        return {"rows": out, "line": out.view(-1), "count": torch.ones(3).sum().long()}


def denoiser() -> Made:
    return Denoiser(), (torch.randn(2, 3, 8, 8),), {}


def deep() -> Made:
    return Deep(), (torch.randn(256, 32),), {}


def dropping() -> Made:
    return Dropping().train(), (torch.randn(8, 4),), {}


def augmented() -> Made:
    return Augmented().train(), (torch.randn(2, 400),), {}


def network() -> Made:
    return Network(), (torch.randn(6, 5),), {}


def network_and_target() -> Made:
    return Network(), (torch.randn(6, 5),), {"target": torch.randn(6, 3)}


def two_outputs() -> Made:
    return TwoOutputs(), (torch.randn(6, 5),), {}


def absolute(output: torch.Tensor) -> torch.Tensor:
    return (output - 1).abs().mean()


def of_both(output: dict[str, torch.Tensor]) -> torch.Tensor:
    return output["rows"].square().mean() + output["line"].abs().sum() * output["count"]


TWO = {"dp": 2}
REPLICAS = {"replicas": 2, "dp": 2}


def apart(plan: str, mesh: dict[str, int]) -> Plan:
    """A plan whose collectives are not merged, as those of an emitted program are not."""
    return replace(shardgraph.preset(plan, mesh), bucket=0)


MEAN_SQUARE = {"loss_fn": F.mse_loss}
OFTEN = {"FREQUENCY = 4": "FREQUENCY = 2"}
FURTHER = [
    Case("parameters-on-host", gpt, "fsdp", TWO, {"offload": "parameters"}),
    Case("activations-on-host", deep, "fsdp", TWO, {"offload": "activations"}),
    Case("layers-dropped-at-random", dropping, "fsdp", TWO),
    Case("drawn-by-numpy", augmented, "zero1", TWO),
    Case("group-norm-of-what-is-divided", denoiser, "tp", {"tp": 2}),
    # Where gloo adds up what four ranks have, the order is that of a tensor's place in its bucket.
    Case("operators-beside-sequences", gpt, apart("cp+tp+sp", {"cp": 2, "tp": 2}), {"cp": 2, "tp": 2}),
    Case("products-of-float8", gpt, "fsdp", TWO, {"precision": "fp8"}),
    Case("loss-function", network_and_target, "fsdp", TWO, MEAN_SQUARE),
    Case(
        "loss-in-the-loop",
        network,
        "fsdp",
        TWO,
        edits={"return output.float().square().mean()": "return (output - 1).abs().mean()"},
        loss=absolute,
    ),
    Case(
        "loss-of-several-outputs",
        two_outputs,
        "zero2",
        TWO,
        edits={"return rows.float().square().mean()": "return rows.square().mean() + line.abs().sum() * count"},
        loss=of_both,
    ),
    Case("replicas", network_and_target, "local-sgd", TWO, MEAN_SQUARE, OFTEN, frequency=2),
    Case("sharded-replicas", network_and_target, "local-sgd+fsdp", REPLICAS, MEAN_SQUARE, OFTEN, frequency=2),
]
"""What emitted files have beside a program whose tensors stay on the device and whose loss is the model's own."""
