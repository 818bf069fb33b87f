"""The jobs that ``train_step.py`` times: models from ``transformers`` and torch, each with its data and its loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM


@dataclass(frozen=True)
class Job:
    """A model, the blocks that FSDP2 shards by themselves, and the loss of a batch, drawn from a generator."""

    model: Callable[[], nn.Module]
    blocks: Callable[[nn.Module], Sequence[nn.Module]]
    batch: Callable[[torch.Generator, int], torch.Tensor]
    loss: Callable[[nn.Module, torch.Tensor], torch.Tensor]
    whole: Callable[[torch.Tensor], dict[str, torch.Tensor]]
    """The arguments of a whole step, of a batch."""
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    """The loss of the output and the target, where the model returns none."""


def _tokens(vocabulary: int, rows: int, length: int) -> Callable[[torch.Generator, int], torch.Tensor]:
    return lambda generator, world: torch.randint(vocabulary, (world, rows, length), generator=generator)


def _language_loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def _language(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": ids, "labels": ids}


def _classes(x: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input": x, "target": torch.arange(len(x), device=x.device) % 10}


def _llama(width: int, layers: int, vocabulary: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=vocabulary,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def _gpt2() -> GPT2LMHeadModel:
    config = GPT2Config(
        n_embd=384, n_layer=6, n_head=6, n_positions=128, vocab_size=2048,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


class Residual(nn.Module):
    """``x + f(x)``, and a ReLU after it if asked for."""

    def __init__(self, *layers: nn.Module, after: nn.Module | None = None) -> None:
        super().__init__()
        self.layers, self.after = nn.Sequential(*layers), after or nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.after(x + self.layers(x))
        return result


def _small() -> nn.Module:
    """24 residual blocks of width 32 and a head: 146 parameters, 52,554 elements."""
    blocks = (Residual(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32, bias=True)) for _ in range(24))
    return nn.Sequential(*blocks, nn.Linear(32, 10))


def _convolutions() -> nn.Module:
    """8 residual blocks of two convolutions of 64 channels with batch norms, as in a ResNet's first stage."""
    blocks = (
        Residual(
            nn.Conv2d(64, 64, 3, padding=1, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, padding=1, bias=False),
            nn.BatchNorm2d(64),
            after=nn.ReLU(),
        )
        for _ in range(8)
    )
    stem = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU())
    return nn.Sequential(stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def _classified(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    output = model(x)
    return F.cross_entropy(output, torch.arange(len(output), device=x.device) % 10)


JOBS = {
    "llama": Job(
        lambda: _llama(384, 6, 2048), lambda model: model.model.layers, _tokens(2048, 4, 128), _language_loss, _language
    ),
    "llama-50m": Job(
        lambda: _llama(640, 9, 4096), lambda model: model.model.layers, _tokens(4096, 2, 128), _language_loss, _language
    ),
    "gpt2": Job(_gpt2, lambda model: model.transformer.h, _tokens(2048, 4, 128), _language_loss, _language),
    "convolutions": Job(
        _convolutions,
        lambda model: [block for block in model if isinstance(block, Residual)],
        lambda generator, world: torch.randn(world, 8, 3, 16, 16, generator=generator),
        _classified,
        _classes,
        F.cross_entropy,
    ),
    "small": Job(
        _small,
        lambda model: [block for block in model if isinstance(block, Residual)],
        lambda generator, world: torch.randn(world, 8, 32, generator=generator),
        _classified,
        _classes,
        F.cross_entropy,
    ),
}
"""By name. Llama of 12.2 M and of 49.5 M parameters, GPT-2 of 11.5 M, convolutions, and one of small parameters."""
