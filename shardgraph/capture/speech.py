"""Models of sound of ``transformers``: what they do that torch's tracer refuses.

Encoders set ``requires_grad`` of their input while they train. They do so for gradient checkpointing by hooks, and
neither the results nor the gradients of parameters depend on it. And what SpecAugment masks is drawn by NumPy, which is
left to the function that does so, whenever the program runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from shardgraph.ir import DRAWN_MASK


def _convolved(self: Any, input_values: Tensor) -> Tensor:
    hidden = input_values[:, None]
    for layer in self.conv_layers:
        hidden = layer(hidden)
    return hidden


_FAMILIES = {
    "data2vec.modeling_data2vec_audio": "Data2VecAudio",
    "hubert.modeling_hubert": "Hubert",
    "sew.modeling_sew": "SEW",
    "sew_d.modeling_sew_d": "SEWD",
    "unispeech.modeling_unispeech": "UniSpeech",
    "unispeech_sat.modeling_unispeech_sat": "UniSpeechSat",
    "wav2vec2.modeling_wav2vec2": "Wav2Vec2",
    "wav2vec2_conformer.modeling_wav2vec2_conformer": "Wav2Vec2Conformer",
    "wavlm.modeling_wavlm": "WavLM",
}
SOUND_ENCODERS: dict[str, Callable[..., Any]] = {
    f"transformers.models.{module}.{family}FeatureEncoder": _convolved for module, family in _FAMILIES.items()
}
"""Forwards by the name of the class."""


def _drawn_mask(function: Callable[..., Any]) -> Callable[..., Tensor]:
    name = f"{function.__module__}:{function.__name__}"

    @functools.wraps(function)
    def drawn(
        shape: tuple[int, int],
        mask_prob: float,
        mask_length: int,
        attention_mask: Tensor | None = None,
        min_masks: int = 0,
    ) -> Tensor:
        mask: Tensor = DRAWN_MASK(name, shape, mask_prob, mask_length, attention_mask, min_masks)
        return mask

    return drawn


MASKS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {"*._compute_mask_indices": _drawn_mask}
"""What makes the functions that are called instead, by the name in a module of ``transformers.models``."""
