"""What an optimizer of torch does around a step."""

from __future__ import annotations

import torch
from torch.optim import optimizer as _optimizer


def has_step_hooks(optimizer: torch.optim.Optimizer, besides: int) -> bool:
    """Whether hooks run before or after a step of an optimizer, besides so many of all optimizers."""
    own = len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)
    everywhere = len(_optimizer._global_optimizer_pre_hooks) + len(_optimizer._global_optimizer_post_hooks)
    return own + everywhere > besides


def has_own_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the ``step`` of an optimizer has been replaced, other than by a schedule, which counts its calls."""
    step = vars(optimizer).get("step")
    return step is not None and getattr(step, "__wrapped__", step) is not type(optimizer).step
