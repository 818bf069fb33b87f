"""The list of its parameters that a recurrent layer of torch keeps beside their names."""

from __future__ import annotations

from torch import nn


def list_weights(module: nn.Module) -> None:
    """After a parameter of ``module`` was replaced, have its list those that it has now, if it is such a layer."""
    if isinstance(module, nn.RNNBase):
        module._init_flat_weights()
