"""Models of ``transformers`` with random weights, each with a batch, as the sections train them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

Call = dict[str, torch.Tensor]
Make = Callable[[], tuple[nn.Module, Call]]
"""Gives a model and the keyword arguments of its call, which return an output with a loss, on the default device."""


def llama(layers: int, width: int, batch: int, length: int, vocabulary: int = 32000, heads: int = 0) -> Make:
    """A decoder; ``heads`` of 64 by default, a quarter of them of keys where that divides."""

    def make() -> tuple[nn.Module, Call]:
        count = heads or max(4, width // 64)
        config = LlamaConfig(
            hidden_size=width,
            intermediate_size=width * 11 // 4,
            num_hidden_layers=layers,
            num_attention_heads=count,
            num_key_value_heads=count // 4 if count % 4 == 0 else count,
            vocab_size=vocabulary,
            max_position_embeddings=max(length, 256),
            use_cache=False,
        )
        return LlamaForCausalLM(config).train(), text(batch, length, vocabulary)

    return make


def gpt2(layers: int, width: int, batch: int, length: int, vocabulary: int = 50257) -> Make:
    """GPT-2 without dropout."""

    def make() -> tuple[nn.Module, Call]:
        config = GPT2Config(
            n_embd=width, n_layer=layers, n_head=max(2, width // 64), vocab_size=vocabulary, n_positions=length,
            use_cache=False, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0,
        )  # fmt: skip
        return GPT2LMHeadModel(config).train(), text(batch, length, vocabulary)

    return make


def bert(layers: int, width: int, batch: int, length: int, vocabulary: int = 30522) -> Make:
    """BERT as a masked language model, without dropout."""

    def make() -> tuple[nn.Module, Call]:
        config = BertConfig(
            hidden_size=width, num_hidden_layers=layers, num_attention_heads=max(2, width // 64),
            intermediate_size=4 * width, vocab_size=vocabulary, max_position_embeddings=max(length, 128),
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        return BertForMaskedLM(config).train(), text(batch, length, vocabulary)

    return make


def vit(layers: int, width: int, batch: int, size: int = 224, patch: int = 16) -> Make:
    """A vision transformer."""

    def make() -> tuple[nn.Module, Call]:
        config = ViTConfig(
            hidden_size=width, num_hidden_layers=layers, num_attention_heads=max(2, width // 64),
            intermediate_size=4 * width, image_size=size, patch_size=patch,
        )  # fmt: skip
        return ViTForImageClassification(config).train(), images(batch, size)

    return make


def resnet(batch: int, size: int = 224, depths: tuple[int, ...] = (3, 4, 6, 3), kind: str = "bottleneck") -> Make:
    """A residual network, by default with the shapes of ResNet-50."""

    def make() -> tuple[nn.Module, Call]:
        widths = [64 * 2**i * (4 if kind == "bottleneck" else 1) for i in range(len(depths))]
        config = ResNetConfig(hidden_sizes=widths, depths=list(depths), layer_type=kind, embedding_size=64)
        return ResNetForImageClassification(config).train(), images(batch, size)

    return make


def loss_alone(make: Make) -> Make:
    """The same, whose output has no scores, so that a plan need not keep them."""

    class Alone(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, **call: torch.Tensor) -> Any:
            output = self.model(**call)
            return type(output)(loss=output.loss)

    def made() -> tuple[nn.Module, Call]:
        model, call = make()
        return Alone(model), call

    return made


def text(batch: int, length: int, vocabulary: int) -> Call:
    ids = torch.randint(vocabulary, (batch, length))
    return {"input_ids": ids, "labels": ids}


def images(batch: int, size: int) -> Call:
    return {"pixel_values": torch.randn(batch, 3, size, size), "labels": torch.zeros(batch, dtype=torch.long)}


def seeded(make: Make, device: torch.device | str = "cpu") -> tuple[nn.Module, Call]:
    """The same model and batch at every call; made where they are to be, which is fast for large ones on a GPU."""
    torch.manual_seed(0)
    with torch.device(device):
        return make()


def small_llama(tiny: bool, batch: int = 4, length: int = 64) -> Make:
    """Four layers in float32 that train in no time, for comparisons."""
    return llama(2, 64, batch, 16, 128) if tiny else llama(4, 256, batch, length, 1024)


def on(call: Call, device: torch.device) -> dict[str, Any]:
    return {name: value.to(device) for name, value in call.items()}
