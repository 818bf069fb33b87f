"""What ranks tell those that have run out of data: see :mod:`shardgraph.module.joining`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardgraph.runtime.executor import State
from shardgraph.torch_api import local_tensor


def announce(state: State, event: Callable[[], tuple[Any, ...]]) -> bool:
    """Tell ranks without data what all ranks do next, if inside of ``join()``; returns whether there are any."""
    return state.joining is not None and bool(state.joining.announce(event))


def has_gradients(state: State) -> bool:
    """Whether gradients are added to those that parameters have already."""
    present = (local_tensor(each.grad) for each in state.layout.parameters if each.grad is not None)
    return any(bool(gradient.any()) for gradient in present)
