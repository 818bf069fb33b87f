"""Encoders of sound of ``transformers`` that set ``requires_grad`` of their input while they train.

They do so for gradient checkpointing by hooks, and neither the results nor the gradients of parameters depend on it;
torch's tracer refuses it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


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
