"""Models of transformers by their type or config, with random weights, and inputs that are made up for them."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardgraph.errors import ShardGraphError, nearest

_USUAL = 1024  # tokens of a sequence, where a model can have as many

_OWN = "name a function that returns the module and its inputs instead, as package.module:function"


@dataclass(frozen=True)
class Sizes:
    """The number of samples of a call, and of tokens of each; None: as many as usual."""

    batch: int
    sequence: int | None


def build(name: str, settings: Mapping[str, Any]) -> nn.Module:
    """The model of a type, or of a config in JSON, with these fields changed.

    Weights are float32, whatever the config says of a checkpoint's: computation in half precision is a plan's.

    Raises:
        ShardGraphError: there is no such type, file or field; it is of a kind for which inputs cannot be made up; or
            transformers is not installed.
    """
    config = _config(name, settings)
    if hasattr(config, "use_cache"):
        config.use_cache = False  # training has no use for it
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0  # as their checkpoints have it
    made_for = _class_of(config)
    try:
        return made_for(config)
    except Exception as error:  # each model has checks of its own
        changed = f" with {', '.join(f'{key}={value}' for key, value in settings.items())}" if settings else ""
        why = f"{type(error).__name__}: {error}"
        raise ShardGraphError(f"{name}{changed} is not a model that transformers can build: {why}") from error


def is_one(module: nn.Module) -> bool:
    """Whether inputs can be made up for a module."""
    library = sys.modules.get("transformers")  # of a model that there is, it has been imported
    return library is not None and isinstance(module, library.PreTrainedModel)


def inputs(module: Any, sizes: Sizes) -> dict[str, Any]:
    """Keyword inputs of a training call of a model of transformers, its loss included.

    Raises:
        ShardGraphError: its sequences are shorter, or it takes what cannot be made up.
    """
    config, rows = module.config, sizes.batch
    if module.main_input_name == "pixel_values" and isinstance(getattr(config, "image_size", None), int):
        if sizes.sequence is not None:
            raise ShardGraphError(f"--sequence is for texts, and {type(module).__name__} takes images: leave it out")
        side = config.image_size
        pixels = torch.randn(rows, getattr(config, "num_channels", 3), side, side)
        return {"pixel_values": pixels, "labels": torch.randint(0, config.num_labels, (rows,))}
    text = config.get_text_config()
    if module.main_input_name != "input_ids" or not getattr(text, "vocab_size", None):
        raise ShardGraphError(
            f"inputs cannot be made up for {type(module).__name__}, which takes {module.main_input_name}: {_OWN}"
        )
    most = getattr(text, "max_position_embeddings", None)
    length = sizes.sequence or min(_USUAL, most or _USUAL)
    if most is not None and length > most:
        raise ShardGraphError(
            f"--sequence {length} is longer than {type(module).__name__} has positions, {most}: change its config too, "
            f"with --set max_position_embeddings={length}"
        )
    ids = torch.randint(0, text.vocab_size, (rows, length))
    return {"input_ids": ids, "labels": ids}


def _config(name: str, settings: Mapping[str, Any]) -> Any:
    try:
        from transformers import CONFIG_MAPPING
    except ImportError as error:
        raise ShardGraphError(f"the model {name!r} is of transformers: pip install transformers, or {_OWN}") from error
    fields = {"model_type": name} if name in CONFIG_MAPPING else _fields(name)
    kind = fields.pop("model_type", None)
    if not isinstance(kind, str):
        raise ShardGraphError(f"{name!r} says no model_type, which is to be the name of one of transformers: {_OWN}")
    if kind not in CONFIG_MAPPING:
        raise ShardGraphError(
            f"there is no model type {kind!r} in transformers: {_OWN}{nearest(kind, CONFIG_MAPPING.keys())}"
        )
    default = _made(CONFIG_MAPPING[kind], fields, f"the config of {name} cannot be")
    for field in settings:
        if not hasattr(default, field):
            raise ShardGraphError(f"the config of {name} has no field {field!r}{nearest(field, vars(default))}")
    return _made(CONFIG_MAPPING[kind], fields | dict(settings), f"the config of {name} cannot be with {dict(settings)}")


def _fields(name: str) -> dict[str, Any]:
    """What the config of a file says, or of a folder that has one, as a checkpoint's; else that this is its type."""
    path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    if path.suffix.lower() != ".json":
        return {"model_type": name}
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ShardGraphError(f"the config {str(path)!r} cannot be read: {error}") from error
    return fields if isinstance(fields, dict) else {}


def _made(config_of: Any, fields: Mapping[str, Any], cannot: str) -> Any:
    try:
        return config_of(**fields)
    except Exception as error:  # each config has checks of its own
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise ShardGraphError(f"{cannot}: {why}") from error


def _class_of(config: Any) -> Any:
    """The class that its checkpoint says, or one with a loss."""
    import transformers

    named = config.architectures or ()
    for name in [named] if isinstance(named, str) else named:
        found = getattr(transformers, name, None)
        if not isinstance(found, type) or not issubclass(found, transformers.PreTrainedModel):
            raise ShardGraphError(
                f"the config is of the architecture {name!r}, which transformers {transformers.__version__} does not "
                f"have: --set architectures=null for the one of its model type, or {_OWN}"
            )
        return found
    kinds = [
        transformers.MODEL_FOR_MASKED_LM_MAPPING,  # before the next, where what is pretrained so is also made a decoder
        transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
        transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    ]
    if config.is_encoder_decoder:
        kinds.insert(0, transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING)
    for mapping in kinds:
        if type(config) in mapping:
            found = mapping[type(config)]
            return found[0] if isinstance(found, tuple) else found
    raise ShardGraphError(f"inputs cannot be made up for models of type {config.model_type!r}: {_OWN}")
