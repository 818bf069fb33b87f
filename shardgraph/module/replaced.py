"""Parameters that compilation replaced, for optimizers that were made before it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from shardgraph import torch_api
from shardgraph.errors import ShardGraphError

_NEW: Any = WeakIdKeyDictionary()
"""By each replaced parameter, while anyone holds it, the parameter that replaces it."""


def remember(replaced: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Have optimizers train the new parameters of ``replaced`` in place of the old ones, from their next step on."""
    _watch_optimizers()
    _NEW.update(replaced)


def current(parameter: torch.Tensor) -> torch.Tensor:
    """The parameter that is in the place of ``parameter`` now: itself, unless compilation has replaced it."""
    while parameter in _NEW:  # compiled more than once
        parameter = _NEW[parameter]
    return parameter


def adopt(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Put the new parameters of an optimizer in the place of replaced ones, as happens before each of its steps.

    Raises:
        ShardGraphError: the optimizer has stepped before, and its state is of whole parameters.
    """
    for group in optimizer.param_groups:
        parameters = group["params"]  # changed in place, since some optimizers keep the list
        for i, parameter in enumerate(parameters):
            if parameter not in _NEW:
                continue
            if optimizer.state.get(parameter):
                raise ShardGraphError(
                    f"this {type(optimizer).__name__} has stepped before shardgraph.compile replaced its parameters by "
                    "shards, and its state is that of whole parameters: make a new optimizer of sharded.parameters(), "
                    "and give its load_state_dict this one's state_dict()"
                )
            parameters[i] = current(parameter)


@functools.cache
def _watch_optimizers() -> None:
    torch_api.before_every_step(adopt)
