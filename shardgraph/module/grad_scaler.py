"""Loss scaling for float16 (Micikevicius et al., 2018, https://arxiv.org/abs/1710.03740, section 3.2) on many ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from shardgraph.runtime.device import accelerator


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` for a sharded model: an inf or NaN in any rank's gradients skips the step on all.

    Used as torch's, on CPU as on CUDA::

        scaler = shardgraph.GradScaler()
        scaler.scale(sharded(ids).loss).backward()
        scaler.step(optimizer)
        scaler.update()

    Ranks hold different shards, so an overflow may be on one alone. Torch's own asks other ranks only along the mesh
    axes that shard the first of the gradients.

    Args:
        device: of the gradients; default: the accelerator's, where there is one.
        init_scale: the first factor of the loss.
        growth_factor: by which it grows after ``growth_interval`` steps without an overflow.
        backoff_factor: by which it changes at an overflow.
        growth_interval: see above.
        enabled: False makes every method do what there is to do without scaling.
        group: the ranks that step together; default: all.
    """

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
        found: dict[torch.device, Any] = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        found = found or {found_inf.device: found_inf}  # a rank without gradients asks the others all the same
        if dist.is_initialized():
            for each in found.values():
                dist.all_reduce(each, dist.ReduceOp.MAX, self._group)
        return found
