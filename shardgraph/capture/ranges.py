"""Models of ``transformers`` that keep ranges of their activations, in which Python asks whether there are any yet."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_NONE_YET = 1.1e-5
"""Ranges within this of zero are those that a layer of I-BERT begins with."""


def _ibert_activation(
    self: Any,
    x: Tensor,
    pre_act_scaling_factor: Tensor | None = None,
    identity: Tensor | None = None,
    identity_scaling_factor: Tensor | None = None,
    specified_min: Tensor | None = None,
    specified_max: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The first range is that of the first batch; later ones move towards those of their batches."""
    quant_modules = sys.modules[type(self).__module__]
    sum_of_both = x if identity is None else identity + x
    if self.training:
        low, high = sum_of_both.detach().aminmax()
        assert not (low.isnan() | high.isnan()), "NaN detected when computing min/max of the activation"
        first = (self.x_min.min() > -_NONE_YET) & (self.x_max.max() < _NONE_YET)
        if self.act_range_momentum == -1:
            lowest, highest = torch.minimum(self.x_min, low), torch.maximum(self.x_max, high)
        else:
            kept = self.act_range_momentum
            lowest, highest = self.x_min * kept + low * (1 - kept), self.x_max * kept + high * (1 - kept)
        self.x_min = torch.where(first, self.x_min + low, lowest)
        self.x_max = torch.where(first, self.x_max + high, highest)
    if not self.quant_mode:
        return sum_of_both, None
    lowest = self.x_min if specified_min is None else specified_min
    highest = self.x_max if specified_max is None else specified_max
    bits = self.activation_bit
    scale = quant_modules.symmetric_linear_quantization_params(bits, lowest, highest, per_channel=self.per_channel)
    self.act_scaling_factor = scale
    if pre_act_scaling_factor is None:
        integers = self.act_function(x, bits, self.percentile, scale)
    else:
        of_both = x, pre_act_scaling_factor, bits, scale, identity, identity_scaling_factor
        integers = quant_modules.FixedPointMul.apply(*of_both)
    return integers * scale.view(-1), scale


RANGES: dict[str, Callable[..., Any]] = {"transformers.models.ibert.quant_modules.QuantAct": _ibert_activation}
"""Forwards by the name of the class."""
