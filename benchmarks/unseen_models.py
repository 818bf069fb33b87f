"""Models that no test of this project uses, and one call of each: convolutions, dropout, large vocabularies.

Configurations are those of the libraries, made small; where the library's default has dropout, it stays.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn

Call = tuple[nn.Module, dict[str, Any]]

_LAYERS = {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
_WIDE = _LAYERS | {"intermediate_size": 256}
_GROUPED = _WIDE | {"num_key_value_heads": 2, "use_cache": False}
_BART = {
    **{
        f"{half}_{name}": value
        for half in ("encoder", "decoder")
        for name, value in {"layers": 2, "attention_heads": 4, "ffn_dim": 256}.items()
    },
    "d_model": 96,
    "use_cache": False,
}


def _text(vocabulary: int, batch: int = 4, length: int = 32) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, vocabulary, (batch, length))
    return {"input_ids": ids, "labels": ids}


def _images(size: int, batch: int = 4, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(batch, 3, size, size), **more}


def _labels(batch: int = 4) -> dict[str, torch.Tensor]:
    return {"labels": torch.zeros(batch, dtype=torch.long)}


class Transformer(nn.Module):
    """torch's encoder and decoder, with dropout."""

    def __init__(self, vocabulary: int = 5000, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.transformer = nn.Transformer(width, 4, 2, 2, 256, dropout=0.1, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, source: torch.Tensor, target_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.transformer(self.embedding(source), self.embedding(target_ids))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), target_ids.flatten())


class Recurrent(nn.Module):
    """A language model of an LSTM."""

    def __init__(self, vocabulary: int = 2000, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, 2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.lstm(self.embedding(ids))[0]).flatten(0, 1), ids.flatten())


class UNet(nn.Module):
    """Of double convolutions with batch norm, as O. Ronneberger et al., arXiv:1505.04597."""

    def __init__(self, widths: tuple[int, ...] = (16, 32, 64)) -> None:
        super().__init__()
        pairs = list(itertools.pairwise(widths))
        self.enter = self._double(3, widths[0])
        self.down = nn.ModuleList(self._double(a, b) for a, b in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in reversed(pairs))
        self.join = nn.ModuleList(self._double(2 * a, a) for a, _ in reversed(pairs))
        self.leave = nn.Conv2d(widths[0], 2, 1)

    @staticmethod
    def _double(a: int, b: int) -> nn.Module:
        convolutions = ((nn.Conv2d(i, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(inplace=True)) for i in (a, b))
        return nn.Sequential(*(layer for layers in convolutions for layer in layers), nn.Dropout2d(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, skips = self.enter(x), []
        for down in self.down:
            skips.append(x)
            x = down(F.max_pool2d(x, 2))
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([up(x), skips.pop()], 1))
        return self.leave(x)


class Volume(nn.Module):
    """Three-dimensional convolutions, strided, dilated and grouped."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv3d(1, 8, 3, padding=1),
            nn.BatchNorm3d(8),
            nn.GELU(),
            nn.Conv3d(8, 16, 3, stride=2, padding=1),
            nn.GELU(),
            nn.Conv3d(16, 16, 3, padding=2, dilation=2, groups=4),
            nn.GELU(),
            nn.AdaptiveAvgPool3d(1),
            nn.Flatten(),
            nn.Linear(16, 5),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Sequence(nn.Module):
    """One-dimensional convolutions over time with growing dilation, as WaveNet's, and weight norm."""

    def __init__(self, width: int = 32, layers: int = 4) -> None:
        super().__init__()
        self.enter = nn.Conv1d(1, width, 1)
        self.layers = nn.ModuleList(
            nn.utils.parametrizations.weight_norm(nn.Conv1d(width, 2 * width, 2, padding=2**i, dilation=2**i))
            for i in range(layers)
        )
        self.leave = nn.Conv1d(width, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = x + F.dropout(F.glu(layer(x)[..., : x.shape[-1]], 1), 0.1, self.training)
        return self.leave(x)


class Detector(nn.Module):
    """Depthwise separable convolutions, a pyramid of features, upsampling, group norm."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, width, 7, 2, 3)
        self.levels = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 5, 2, 2, groups=width),
                nn.Conv2d(width, width, 1),
                nn.GroupNorm(4, width),
                nn.SiLU(),
            )
            for _ in range(3)
        )
        self.heads = nn.ModuleList(nn.Conv2d(width, 6, 3, padding=1) for _ in range(3))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        x, maps = self.enter(x), []
        for level in self.levels:
            x = level(x)
            maps.append(x)
        total, found = torch.zeros_like(maps[-1]), []
        for each, head in zip(reversed(maps), self.heads, strict=True):
            total = each + F.interpolate(total, size=each.shape[-2:], mode="nearest")
            found.append(head(total))
        return found


def _whisper() -> Call:
    config = hf.WhisperConfig(
        **_BART,
        vocab_size=500,
        num_mel_bins=16,
        max_source_positions=64,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    labels = torch.randint(3, 500, (4, 16))
    return hf.WhisperForConditionalGeneration(config), {"input_features": torch.randn(4, 16, 128), "labels": labels}


def _wav2vec2() -> Call:
    config = hf.Wav2Vec2Config(
        **_WIDE,
        conv_dim=(32, 32, 32),
        conv_stride=(5, 2, 2),
        conv_kernel=(10, 3, 3),
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        mask_time_prob=0.0,
        layerdrop=0.0,
        vocab_size=32,
    )
    return hf.Wav2Vec2Model(config), {"input_values": torch.randn(4, 1600)}


def _causal(kind: str, vocabulary: int = 1000, **config: Any) -> Callable[[], Call]:
    def make() -> Call:
        made = getattr(hf, f"{kind}Config")(vocab_size=vocabulary, **config)
        return getattr(hf, f"{kind}ForCausalLM")(made), _text(vocabulary)

    return make


def _masked(kind: str, vocabulary: int = 1000, **config: Any) -> Callable[[], Call]:
    def make() -> Call:
        made = getattr(hf, f"{kind}Config")(vocab_size=vocabulary, **config)
        return getattr(hf, f"{kind}ForMaskedLM")(made), _text(vocabulary)

    return make


def _vision(kind: str, size: int, **config: Any) -> Callable[[], Call]:
    def make() -> Call:
        return getattr(hf, f"{kind}ForImageClassification")(getattr(hf, f"{kind}Config")(**config)), _images(
            size, **_labels()
        )

    return make


MODELS: dict[str, Callable[[], Call]] = {
    "bart": lambda: (
        hf.BartForConditionalGeneration(hf.BartConfig(**_BART, vocab_size=3000, max_position_embeddings=64)),
        _text(3000),
    ),
    "mistral": _causal("Mistral", **_GROUPED),
    "qwen2, vocabulary of 30000": _causal("Qwen2", 30000, **_GROUPED),
    "gemma": _causal("Gemma", 8000, **_GROUPED, head_dim=24),
    "opt": _causal("OPT", 1000, **_LAYERS, ffn_dim=256, word_embed_proj_dim=96, max_position_embeddings=64),
    "bloom": _causal("Bloom", 1000, hidden_size=96, n_layer=2, n_head=4, hidden_dropout=0.1, use_cache=False),
    "gpt-neox": _causal("GPTNeoX", **_WIDE, hidden_dropout=0.1, attention_dropout=0.1, use_cache=False),
    "phi": _causal("Phi", **_WIDE, resid_pdrop=0.1, use_cache=False),
    "falcon": _causal("Falcon", **_LAYERS, hidden_dropout=0.1, use_cache=False),
    "gpt-j": _causal("GPTJ", n_embd=96, n_layer=2, n_head=4, rotary_dim=16, n_positions=64, use_cache=False),
    "distilbert": _masked("DistilBert", dim=96, n_layers=2, n_heads=4, hidden_dim=256),
    "roberta": _masked("Roberta", **_WIDE, max_position_embeddings=64),
    "deberta": _masked("DebertaV2", **_WIDE, max_position_embeddings=64, relative_attention=True),
    "albert": _masked("Albert", **_WIDE, embedding_size=32, hidden_dropout_prob=0.1),
    "electra, vocabulary of 30522": _masked("Electra", 30522, **_WIDE, embedding_size=64),
    "convbert": _masked("ConvBert", **_WIDE, embedding_size=96, max_position_embeddings=64),
    "mobilebert": _masked("MobileBert", **_LAYERS, embedding_size=64, intra_bottleneck_size=64),
    "fnet": _masked("FNet", **{k: v for k, v in _WIDE.items() if k != "num_attention_heads"}),
    "convnext": _vision("ConvNext", 64, hidden_sizes=[24, 48, 96], depths=[1, 1, 2], num_stages=3),
    "regnet": _vision("RegNet", 64, embedding_size=16, hidden_sizes=[32, 64], depths=[1, 2], groups_width=16),
    "mobilenet v2": _vision("MobileNetV2", 64, depth_multiplier=0.5),
    "efficientnet": _vision(
        "EfficientNet", 64, width_coefficient=0.5, depth_coefficient=0.3, hidden_dim=640, image_size=64
    ),
    "swin": _vision(
        "Swin", 64, image_size=64, patch_size=4, embed_dim=24, depths=[1, 2], num_heads=[2, 4], window_size=4
    ),
    "segformer": lambda: (
        hf.SegformerForSemanticSegmentation(
            hf.SegformerConfig(
                num_encoder_blocks=3,
                depths=[1, 1, 1],
                sr_ratios=[4, 2, 1],
                hidden_sizes=[16, 32, 64],
                patch_sizes=[7, 3, 3],
                strides=[4, 2, 2],
                num_attention_heads=[1, 2, 4],
                mlp_ratios=[2, 2, 2],
                decoder_hidden_size=64,
                num_labels=5,
            )
        ),
        _images(64, labels=torch.randint(5, (4, 64, 64))),
    ),
    "dinov2": _vision("Dinov2", 56, **_LAYERS, image_size=56, patch_size=14),
    "beit": _vision("Beit", 64, **_WIDE, image_size=64, patch_size=16),
    "poolformer": _vision("PoolFormer", 64, hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 1, 1]),
    "clip vision": lambda: (
        hf.CLIPVisionModel(hf.CLIPVisionConfig(**_WIDE, image_size=64, patch_size=16)),
        _images(64),
    ),
    "wav2vec2": _wav2vec2,
    "whisper": _whisper,
    "torch transformer": lambda: (
        Transformer(),
        {"source": torch.randint(5000, (4, 24)), "target_ids": torch.randint(5000, (4, 16))},
    ),
    "lstm": lambda: (Recurrent(), {"ids": torch.randint(2000, (4, 24))}),
    "u-net with batch norm": lambda: (UNet(), {"x": torch.randn(4, 3, 32, 32)}),
    "convolutions in 3 dimensions": lambda: (Volume(), {"x": torch.randn(4, 1, 16, 16, 16)}),
    "dilated convolutions in 1 dimension": lambda: (Sequence(), {"x": torch.randn(4, 1, 512)}),
    "depthwise pyramid": lambda: (Detector(), {"x": torch.randn(4, 3, 96, 96)}),
}


def make(name: str, seed: int = 0) -> Call:
    """A model in training mode and the arguments of one call by name, the same for the same seed."""
    torch.manual_seed(seed)
    model, call = MODELS[name]()
    return model.train(), call
