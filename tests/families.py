"""Model families of transformers that nobody chose: of all text and image models that the installed version lists, by
name, every fifth, and of those of sound, video and segmentation every third; small, and otherwise with their defaults,
caches included."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoModelForAudioClassification,
    AutoModelForCausalLM,
    AutoModelForCTC,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSemanticSegmentation,
    AutoModelForSeq2SeqLM,
    AutoModelForVideoClassification,
    PreTrainedConfig,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_CTC_MAPPING_NAMES,
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING_NAMES,
)

EVERY = 5
_KINDS: list[tuple[Any, Any]] = [
    (AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    (AutoModelForSeq2SeqLM, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
    (AutoModelForMaskedLM, MODEL_FOR_MASKED_LM_MAPPING_NAMES),
    (AutoModelForImageClassification, MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES),
]
_OTHER_KINDS: list[tuple[Any, Any]] = [
    (AutoModelForAudioClassification, MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES),
    (AutoModelForCTC, MODEL_FOR_CTC_MAPPING_NAMES),
    (AutoModelForSemanticSegmentation, MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES),
    (AutoModelForVideoClassification, MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING_NAMES),
]
_WIDTHS = {32: "hidden_size d_model n_embd dim embedding_size word_embed_proj_dim moe_intermediate_size "
               "shared_expert_intermediate_size image_size",
           64: "intermediate_size encoder_ffn_dim decoder_ffn_dim hidden_dim ffn_dim d_ff dim_feedforward "
               "max_position_embeddings n_positions context_size"}  # fmt: skip
_COUNTS = {
    2: "num_hidden_layers encoder_layers decoder_layers n_layer n_layers num_layers num_decoder_layers "
       "num_key_value_heads num_experts_per_tok",
    4: "num_attention_heads encoder_attention_heads decoder_attention_heads n_head n_heads num_heads num_experts "
       "num_local_experts n_routed_experts mamba_n_heads",
    8: "head_dim d_kv qk_rope_head_dim qk_nope_head_dim v_head_dim patch_size",
    16: "q_lora_rank kv_lora_rank",
    1: "n_group topk_group",
    128: "vocab_size vocab_size_per_layer_input",
}  # fmt: skip
_SIZES = {name: size for sizes in (_WIDTHS, _COUNTS) for size, names in sizes.items() for name in names.split()}
_KEPT = [
    (), ("head_dim",), ("layer_types",), ("head_dim", "layer_types"), ("hidden_dim",),
    ("hidden_dim", "dim", "image_size", "patch_size"), ("d_kv", "num_layers"), ("vocab_size",),
]  # fmt: skip
"""Sizes that stay a family's own, where smaller ones do not fit together: the first that work are taken."""

_ROWS = 8
"""Images of a call, so that each of four microbatches has more than one: batch normalization refuses one number."""

_NEEDED: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},  # of two layers
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},  # it has no default
    "xmod": {"default_language": "en_XX", "languages": ("en_XX", "de_DE", "fr_XX")},  # likewise
}


def listed() -> list[str]:
    """All model types of text and images, by name."""
    return _names(_KINDS)


def _names(kinds: list[tuple[Any, Any]]) -> list[str]:
    return sorted({name for _, names in kinds for name in names})


def build(family: str) -> tuple[nn.Module, dict[str, Any]]:
    """A small model of a family in training mode, and a call of it with its loss.

    Raises:
        Exception: the family's own, if it does not train by itself (another package is missing, say).
    """
    first: Exception | None = None
    for kept in _KEPT:
        try:
            model, call = _made(family, kept)
            model(**call).loss.backward()
        except ImportError:
            raise
        except Exception as error:
            first = first or error
            continue
        model.zero_grad()
        return model, call
    assert first is not None
    raise first


def _made(family: str, kept: tuple[str, ...]) -> tuple[nn.Module, dict[str, Any]]:
    config = _small(CONFIG_MAPPING[family], kept)
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0  # as their checkpoints have it
    kind = next(kind for kind, names in (*_KINDS, *_OTHER_KINDS) if family in names)
    torch.manual_seed(0)
    model = kind.from_config(config).train()
    return model, _INPUTS.get(kind, _texts)(config, model.main_input_name)


def _texts(config: Any, _: str) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, min(getattr(config, "vocab_size", 0) or 128, 100), (4, 16))
    return {"input_ids": ids, "labels": ids}


def _images(config: Any, _: str) -> dict[str, torch.Tensor]:
    side = config.image_size if isinstance(getattr(config, "image_size", None), int) else 32
    pixels = torch.randn(_ROWS, getattr(config, "num_channels", 3), side, side)
    return {"pixel_values": pixels, "labels": torch.arange(_ROWS) % config.num_labels}


def _segmented(config: Any, name: str) -> dict[str, torch.Tensor]:
    pixels = _images(config, name)["pixel_values"]
    return {"pixel_values": pixels, "labels": torch.randint(config.num_labels, (_ROWS, *pixels.shape[2:]))}


def _videos(config: Any, _: str) -> dict[str, torch.Tensor]:
    frames, side = getattr(config, "num_frames", None) or config.frames_per_clip, config.image_size
    return {"pixel_values": torch.randn(4, frames, 3, side, side), "labels": torch.arange(4) % config.num_labels}


def _sounds(config: Any, name: str) -> dict[str, torch.Tensor]:
    if hasattr(config, "max_length"):  # of spectrograms
        sound = torch.randn(4, config.max_length, config.num_mel_bins)
    elif name == "input_features":
        sound = torch.randn(4, 64, config.feature_projection_input_dim)
    else:
        sound = torch.randn(4, 8000)
    return {name: sound, "labels": torch.arange(4) % config.num_labels}


def _spoken(config: Any, name: str) -> dict[str, torch.Tensor]:
    labels = torch.randint(1, config.vocab_size, (4, 2))
    if name == "input_values":
        return {
            name: torch.randn(4, 1, 8000),
            "labels": labels,
            "attention_mask": torch.ones(4, 8000, dtype=torch.long),
        }
    return {name: torch.randn(4, 64, 4 * 80), "labels": labels}  # four frames are one


_INPUTS: dict[Any, Any] = {
    AutoModelForImageClassification: _images,
    AutoModelForSemanticSegmentation: _segmented,
    AutoModelForVideoClassification: _videos,
    AutoModelForAudioClassification: _sounds,
    AutoModelForCTC: _spoken,
}


def _small(kind: Any, kept: tuple[str, ...]) -> Any:
    """A configuration with small sizes, those of its parts too."""
    default = kind()
    sizes: dict[str, Any] = {
        name: size
        for name, size in _SIZES.items()
        if name not in kept and hasattr(default, name) and type(getattr(default, name)) in (int, type(None))
    }
    if hasattr(default, "kv_lora_rank"):  # heads of keys are made from one latent vector, as many as of queries
        sizes["num_key_value_heads"] = sizes.get("num_attention_heads", default.num_attention_heads)
    if isinstance(vars(default).get("layer_types"), list) and "layer_types" not in kept:
        count = sizes.get("num_hidden_layers", len(default.layer_types))
        kinds = [*dict.fromkeys(default.layer_types), *default.layer_types]  # each, if there are layers enough
        sizes["layer_types"] = kinds[:count]
    configs = {name: part for name, part in vars(default).items() if isinstance(part, PreTrainedConfig)}
    parts = {name: _small(type(part), kept) for name, part in configs.items()}
    return kind(**sizes | _NEEDED.get(kind.model_type, {}), **parts)


@cache
def sample() -> tuple[str, ...]:
    """The families that are tried."""
    others = [name for name in _names(_OTHER_KINDS) if name not in set(listed())]
    return (*listed()[::EVERY], *others[:: EVERY - 2])
