"""The list of its parameters that a recurrent layer of torch keeps beside their names."""

from __future__ import annotations

from typing import Any

from torch import nn


def list_weights(module: nn.Module) -> None:
    """After a parameter of ``module`` was replaced, have its list those that it has now, if it is such a layer."""
    if isinstance(module, nn.RNNBase):
        module._init_flat_weights()


def read_weights(module: nn.Module) -> None:
    """Have ``module`` read its parameters by name instead, whatever is in their place, if it is such a layer."""
    if isinstance(module, nn.RNNBase):
        module.__class__ = type(type(module).__name__, (_ByName, type(module)), {})
        del vars(module)["_flat_weights"]


class _ByName:
    @property
    def _flat_weights(self) -> list[Any]:
        named: Any = self
        return [getattr(self, name) for name in named._flat_weights_names]
