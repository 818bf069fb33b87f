"""Loss scaling for float16 (Micikevicius et al., 2018, https://arxiv.org/abs/1710.03740, section 3.2) on many ranks."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from shardgraph.arguments import BOOL, DEVICE, GROUP, POSITIVE, WHOLE, checked, number
from shardgraph.module.joining import refuse_inside
from shardgraph.runtime.device import accelerator


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` for a sharded model: an inf or NaN in any rank's gradients skips the step on all.

    Used like torch's, on CPU and on CUDA::

        scaler = shardgraph.GradScaler()
        scaler.scale(sharded(ids).loss).backward()
        scaler.step(optimizer)
        scaler.update()

    Ranks have different shards, so an overflow may occur on one rank alone. Torch's own scaler reduces the flag only
    along the mesh axes that shard the first of the gradients.

    Args:
        device: device type of the gradients; default: the accelerator's, where there is one.
        init_scale: initial factor of the loss.
        growth_factor: by which the factor grows after ``growth_interval`` steps without an overflow.
        backoff_factor: by which the factor is multiplied at an overflow.
        growth_interval: see ``growth_factor``.
        enabled: False disables scaling; every method then behaves as without a scaler.
        group: the ranks that step together; default: all.
    """

    @checked(
        device=DEVICE,
        init_scale=POSITIVE,
        growth_factor=number("a number above 1", lambda value: 1 < value < math.inf),
        backoff_factor=number("a number above 0 and below 1", lambda value: 0 < value < 1),
        growth_interval=WHOLE,
        enabled=BOOL,
        group=GROUP,
    )
    def __init__(
        self,
        device: str | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        device = device or (accelerator() or torch.device("cpu")).type
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._group = group

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        refuse_inside("GradScaler")
        flags: dict[torch.device, Any] = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        flags = flags or {found_inf.device: found_inf}  # a rank without gradients takes part in the reduction too
        if dist.is_initialized():
            for flag in flags.values():
                dist.all_reduce(flag, dist.ReduceOp.MAX, self._group)
        return flags
