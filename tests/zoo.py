"""The models that parity is shown on: small, awkward where it matters, and half of them not written here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from shardgraph.nn import MoE

Call = tuple[tuple[Any, ...], dict[str, Any]]


class OddMLP(nn.Module):
    """Sizes that nothing divides, a scalar, an unused, a frozen, a transposed and an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 7)
        self.norm = nn.LayerNorm(7)
        self.down = nn.Linear(7, 3, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.full((3,), 0.5), requires_grad=False)
        self.transposed = nn.Parameter(torch.randn(3, 2).t())
        self.empty = nn.Parameter(torch.empty(0, 4))

    def forward(self, x: torch.Tensor, *, shift: torch.Tensor | None = None) -> dict[str, Any]:
        hidden = F.gelu(self.norm(self.up(x)))
        out = self.down(hidden) * self.scale + self.frozen
        if shift is not None:
            out = out + shift
        return {"out": out @ self.transposed.t(), "hidden": (hidden, 3), "flat": out.view(-1)}


class ConvNet(nn.Module):
    """Convolutions with batch norm, whose running statistics forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.conv2 = nn.Conv2d(6, 5, 3, stride=2)
        self.norm2 = nn.BatchNorm2d(5)
        self.head = nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.conv(x)))
        x = F.relu(self.norm2(self.conv2(x)))
        return self.head(x.mean((2, 3)))


class UNet(nn.Module):
    """Skip connections from the way down to the way up, past all that is between."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList([nn.Conv2d(width * 2**i, width * 2 ** (i + 1), 3, 2, 1) for i in range(2)])
        self.middle = nn.Conv2d(width * 4, width * 4, 3, padding=1)
        self.up = nn.ModuleList([nn.ConvTranspose2d(width * 2 ** (i + 1), width * 2**i, 2, 2) for i in (1, 0)])
        self.join = nn.ModuleList([nn.Conv2d(width * 2 ** (i + 1), width * 2**i, 3, padding=1) for i in (1, 0)])
        self.leave = nn.Conv2d(width, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.enter(x))
        skips = []
        for down in self.down:
            skips.append(x)
            x = F.gelu(down(x))
        x = F.gelu(self.middle(x))
        for up, join in zip(self.up, self.join, strict=True):
            x = F.gelu(join(torch.cat([up(x), skips.pop()], 1)))
        return self.leave(x)


class TiedTransformer(nn.Module):
    """A transformer with dropout whose output layer is its embedding."""

    def __init__(self, vocabulary: int = 37, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, 2, 24, dropout=0.1, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.head(self.blocks(self.embedding(ids), mask=mask, is_causal=True))


class Deep(nn.Module):
    """Equal layers whose activations are most of the memory; gives its loss."""

    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


class Loss(nn.Module):
    """A language model that gives its loss alone: no rank needs all logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **call: torch.Tensor) -> torch.Tensor:
        return self.model(**call).loss


def _mlp(batch: int) -> tuple[nn.Module, Call]:
    return OddMLP(), ((torch.randn(batch, 5),), {"shift": torch.randn(batch, 3)})


def _conv(batch: int) -> tuple[nn.Module, Call]:
    return ConvNet(), ((torch.randn(batch, 3, 8, 8),), {})


def _tied(batch: int) -> tuple[nn.Module, Call]:
    return TiedTransformer(), ((torch.randint(0, 37, (batch, 6)),), {})


def _text(batch: int, vocabulary: int = 61, length: int = 9) -> Call:
    ids = torch.randint(0, vocabulary, (batch, length))
    return (), {"input_ids": ids, "labels": ids}


class Mixture(nn.Module):
    """A language model whose second and third layer have experts, beside one that all tokens share."""

    def __init__(self, vocabulary: int = 61, width: int = 16, experts: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.dense = nn.TransformerEncoderLayer(width, 2, 24, dropout=0.1, batch_first=True, norm_first=True)
        self.moe = nn.ModuleList(
            [
                MoE(width, 24, experts, k=2, activation="swiglu"),
                MoE(width, 20, experts, k=1, capacity_factor=None, bias=True),
            ]
        )
        self.shared = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        x = self.dense(self.embedding(input_ids))
        aux = x.new_zeros(())
        for moe in self.moe:
            out, balance = moe(self.norm(x))
            x, aux = x + out + self.shared(x), aux + balance
        logits = F.linear(x, self.embedding.weight)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + 0.01 * aux}


def _mixture(batch: int) -> tuple[nn.Module, Call]:
    return Mixture(), _text(batch)


_SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 44}


def _llama(batch: int) -> tuple[nn.Module, Call]:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_SMALL, num_key_value_heads=2, vocab_size=61)), _text(batch)


def mixtral(batch: int, implementation: str = "batched_mm") -> tuple[nn.Module, Call]:
    from transformers import MixtralConfig, MixtralForCausalLM

    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": implementation}
    config = MixtralConfig(**_SMALL, **experts, num_key_value_heads=2, vocab_size=61, use_cache=False)
    return MixtralForCausalLM(config), _text(batch)


def _gpt2(batch: int) -> tuple[nn.Module, Call]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=61, n_positions=16, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config), _text(batch)


def _bert(batch: int) -> tuple[nn.Module, Call]:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(**_SMALL, vocab_size=61, max_position_embeddings=16)
    args, kwargs = _text(batch)
    return BertForMaskedLM(config), (args, kwargs | {"attention_mask": torch.ones_like(kwargs["input_ids"])})


def _vit(batch: int) -> tuple[nn.Module, Call]:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(**_SMALL, image_size=16, patch_size=8)
    inputs = {"pixel_values": torch.randn(batch, 3, 16, 16), "labels": torch.randint(0, 2, (batch,))}
    return ViTForImageClassification(config), ((), inputs)


def _t5(batch: int) -> tuple[nn.Module, Call]:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=61, d_model=32, d_kv=8, d_ff=44, num_layers=2, num_heads=4, decoder_start_token_id=0, use_cache=False
    )
    return T5ForConditionalGeneration(config), _text(batch)


def _unet(batch: int) -> tuple[nn.Module, Call]:
    return UNet(), ((torch.randn(batch, 3, 8, 8),), {})


ZOO: dict[str, Callable[[int], tuple[nn.Module, Call]]] = {
    "odd-mlp": _mlp,
    "conv-batch-norm": _conv,
    "tied-transformer": _tied,
    "unet": _unet,
    "mixture": _mixture,
    "llama": _llama,
    "mixtral": mixtral,
    "gpt2": _gpt2,
    "bert": _bert,
    "vit": _vit,
    "t5": _t5,
}


def make(name: str, batch: int, seed: int = 0) -> tuple[nn.Module, Call]:
    """A model of the zoo in training mode and one call of it, the same for the same seed."""
    torch.manual_seed(seed)
    model, call = ZOO[name](batch)
    return model.train(), call


def shorter(call: Call, length: int) -> Call:
    """The call with the first ``length`` positions of its sequences."""
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor[:, :length].contiguous(), call)


def scalar(output: Any) -> torch.Tensor:
    """A loss of any output: its own where it has one, else a sum over its floating tensors."""
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if loss is not None:
        return loss
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    return sum((leaf.square().mean() for leaf in leaves if leaf.is_floating_point()), torch.zeros(()))
