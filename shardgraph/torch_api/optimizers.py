"""What an optimizer of torch does around a step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch.optim import optimizer as _optimizer

_OWN: set[int] = set()
"""The handles of hooks of all optimizers that leave alone what they have nothing to do with."""


def before_every_step(hook: Callable[..., None]) -> None:
    """Have ``hook`` called before each step of every optimizer, without being a hook to :func:`has_step_hooks`."""
    _OWN.add(_optimizer.register_optimizer_step_pre_hook(hook).id)


def after_every_step(hook: Callable[..., None]) -> None:
    """As :func:`before_every_step`, after each step."""
    _OWN.add(_optimizer.register_optimizer_step_post_hook(hook).id)


def in_every_load(load: Callable[[torch.optim.Optimizer, Any, Callable[..., None]], None]) -> None:
    """Have ``load`` called with every optimizer that loads a state, with that, and with torch's way to load it."""
    original = torch.optim.Optimizer.load_state_dict

    @functools.wraps(original)
    def loading(self: torch.optim.Optimizer, state_dict: Any) -> None:
        load(self, state_dict, original)

    torch.optim.Optimizer.load_state_dict = loading  # type: ignore[method-assign]


def when_made(hook: Callable[[torch.optim.Optimizer], None]) -> None:
    """Have ``hook`` called with every optimizer as it is made, or copied, once its class calls hooks."""
    original = torch.optim.Optimizer._patch_step_function

    @functools.wraps(original)
    def patched(self: torch.optim.Optimizer) -> None:
        original(self)
        hook(self)

    torch.optim.Optimizer._patch_step_function = patched  # type: ignore[method-assign]


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether hooks of anyone else run before or after a step of an optimizer."""
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return True
    return not _OWN.issuperset(chain(_optimizer._global_optimizer_pre_hooks, _optimizer._global_optimizer_post_hooks))


def has_own_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the ``step`` of an optimizer has been replaced, other than by a schedule, which counts its calls."""
    step = vars(optimizer).get("step")
    return step is not None and getattr(step, "__wrapped__", step) is not type(optimizer).step
