"""Gradients accumulated under ``no_sync`` are those of no parameter yet, and are cleared with those that are."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch

from shardgraph.runtime.executor import State

_STATES: weakref.WeakSet[State] = weakref.WeakSet()


def clear_with_optimizers(state: State) -> None:
    """Have ``zero_grad()`` of an optimizer clear the unreduced gradients of its parameters too."""
    _STATES.add(state)
    _watch_optimizers()


def clear_of(optimizer: torch.optim.Optimizer) -> None:
    """Clear what is accumulated of an optimizer's parameters."""
    if not any(gradients for state in _STATES for gradients in state.accumulated):
        return
    cleared = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for state in _STATES:
        for gradients in state.accumulated:
            for fqn in [fqn for fqn in gradients if id(state.layout.parameter(fqn)) in cleared]:
                del gradients[fqn]


@functools.cache
def _watch_optimizers() -> None:
    # Optimizers have hooks for their step, and none for this.
    original = torch.optim.Optimizer.zero_grad

    @functools.wraps(original)
    def zero_grad(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        clear_of(self)

    torch.optim.Optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
