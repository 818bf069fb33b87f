"""Small models of transformers of texts with images or sound, each with a call of four samples and its loss."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn

import shardgraph

IMAGE = 100
"""The token in whose place what is seen or heard goes."""

TEXT: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip
SMALL_PATCHES = VISION | {"patch_size": 4}
TURNED = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
TOKENS = {"image_token_id": IMAGE, "video_token_id": 101}
GRIDS = {"depth": 2, "hidden_size": 32, "num_heads": 4, "patch_size": 8, "spatial_merge_size": 2}
LIKE_QWEN = TOKENS | {"vision_start_token_id": 102, "vision_end_token_id": 103}

MODELS: dict[str, tuple[str, dict[str, Any], Callable[[], dict[str, Any]]]] = {
    "llava": (
        "Llava",
        {"vision_config": VISION | {"model_type": "clip_vision_model"}, "text_config": TEXT | {"model_type": "llama"}},
        lambda: call(16, 4, torch.randn(4, 3, 16, 16)),
    ),
    "llava_next": (
        "LlavaNext",
        {
            "vision_config": VISION | {"model_type": "clip_vision_model"},
            "text_config": TEXT | {"model_type": "llama"},
            "image_grid_pinpoints": [[16, 32], [32, 16]],
        },
        lambda: call(40, 14, torch.randn(4, 3, 3, 16, 16), image_sizes=torch.tensor([[16, 32]] * 4)),
    ),
    "qwen2_vl": (
        "Qwen2VL",
        {"text_config": TEXT | TURNED, "vision_config": GRIDS | {"embed_dim": 32, "mlp_ratio": 2}, **LIKE_QWEN},
        lambda: on_grids(),
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        {
            "text_config": TEXT | TURNED,
            "vision_config": GRIDS
            | {"out_hidden_size": 32, "intermediate_size": 64, "window_size": 32, "fullatt_block_indexes": [1]},
            **LIKE_QWEN,
        },
        lambda: on_grids(),
    ),
    "qwen3_vl": (
        "Qwen3VL",
        {
            "text_config": TEXT | TURNED,
            "vision_config": GRIDS
            | {"out_hidden_size": 32, "intermediate_size": 64, "num_position_embeddings": 16}
            | {"deepstack_visual_indexes": [0, 1]},
            **LIKE_QWEN,
        },
        lambda: on_grids(),
    ),
    "glm4v": (
        "Glm4v",
        {
            "text_config": TEXT | {"rope_parameters": TURNED["rope_parameters"] | {"partial_rotary_factor": 1.0}},
            "vision_config": GRIDS | {"out_hidden_size": 32, "intermediate_size": 64, "image_size": 32},
            **TOKENS,
            **{"image_start_token_id": 102, "image_end_token_id": 103},
            **{"video_start_token_id": 106, "video_end_token_id": 107},
        },
        lambda: on_grids(),
    ),
    "gemma3": (
        "Gemma3",
        {
            "text_config": TEXT | {"sliding_window": 8},
            "vision_config": VISION | {"model_type": "siglip_vision_model"},
            **{"mm_tokens_per_image": 4, "boi_token_index": 104, "eoi_token_index": 105},
        },
        lambda: (
            (given := call(16, 4, torch.randn(4, 3, 16, 16))) | {"token_type_ids": (given["input_ids"] == IMAGE).long()}
        ),
    ),
    "idefics3": (
        "Idefics3",
        {"text_config": TEXT | {"model_type": "llama"}, "vision_config": SMALL_PATCHES, "scale_factor": 2, **TOKENS},
        lambda: call(16, 4, torch.randn(4, 1, 3, 16, 16)),
    ),
    "mistral3": (
        "Mistral3",
        {
            "text_config": TEXT | {"model_type": "mistral"},
            "vision_config": SMALL_PATCHES | {"model_type": "pixtral", "head_dim": 8},
            "spatial_merge_size": 2,
        },
        lambda: call(16, 4, torch.randn(4, 3, 16, 16), image_sizes=torch.tensor([[16, 16]] * 4)),
    ),
    "internvl": (
        "InternVL",
        {
            "text_config": TEXT | {"model_type": "qwen2"},
            "vision_config": VISION | {"image_size": [16, 16], "patch_size": [4, 4]},
            **TOKENS,
        },
        lambda: call(16, 4, torch.randn(4, 3, 16, 16)),
    ),
    "qwen2_audio": (
        "Qwen2Audio",
        {
            "audio_config": {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 64}
            | {"num_mel_bins": 16, "max_source_positions": 30},
            "text_config": TEXT | {"model_type": "qwen2"},
            "audio_token_index": IMAGE,
        },
        lambda: (
            call(40, 15)
            | {"input_features": torch.randn(4, 16, 60), "feature_attention_mask": torch.ones(4, 60, dtype=torch.long)}
        ),
    ),
    "voxtral": (
        "Voxtral",
        {
            "audio_config": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
            | {"intermediate_size": 128, "num_mel_bins": 16, "max_source_positions": 32},
            "text_config": TEXT | {"model_type": "llama"},
            "audio_token_id": IMAGE,
        },
        lambda: call(40, 8) | {"input_features": torch.randn(4, 16, 64)},
    ),
}
"""The class, its configuration and a call, by the type of the model."""


def call(length: int, seen: int, pixels: torch.Tensor | None = None, **more: Any) -> dict[str, Any]:
    """Texts with so many places for what is seen, and their labels."""
    ids = torch.randint(3, 90, (4, length))
    ids[:, 2 : 2 + seen] = IMAGE
    images = {} if pixels is None else {"pixel_values": pixels}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids, **images, **more}


def on_grids() -> dict[str, Any]:
    """Texts with images that are given as the patches of all, and the numbers of their rows and columns."""
    given = call(16, 4, torch.randn(4 * 16, 3 * 2 * 8 * 8), image_grid_thw=torch.tensor([[1, 4, 4]] * 4))
    return given | {"mm_token_type_ids": (given["input_ids"] == IMAGE).long()}


def build(kind: str) -> tuple[nn.Module, dict[str, Any]]:
    """A small model of this type in training mode, and a call of it."""
    name, sizes, inputs = MODELS[kind]
    torch.manual_seed(0)
    token = {} if {"image_token_id", "audio_token_id", "audio_token_index"} & {*sizes} else {"image_token_index": IMAGE}
    model = getattr(transformers, f"{name}ForConditionalGeneration")(
        getattr(transformers, f"{name}Config")(**sizes, **token)
    )
    return model.train(), inputs()


def trained_on_other_images(plan: str) -> list[float]:
    """How far each loss is from the unsharded model's, in steps in which ranks have images of other sizes."""
    model, given = build("qwen2_vl")
    original, rank, errors = copy.deepcopy(model), dist.get_rank(), list[float]()
    sharded = shardgraph.compile(model, plan, progress=False)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (sharded, original)]
    for step in range(3):
        grids = [[[1, 4, 4]] * 4, [[1, 2, 8], [1, 8, 2], [1, 4, 4], [1, 2, 8]]]
        calls = [given | {"image_grid_thw": torch.tensor(grids[(step + each) % 2])} for each in range(2)]
        expected = [original(**each).loss for each in calls]
        (sum(expected) / 2).backward()
        loss = sharded(**calls[rank]).loss
        loss.backward()
        errors.append(abs(loss.item() - expected[rank].item()))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return errors
