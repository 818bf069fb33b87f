"""FairScale's ShardedGradScaler is :class:`shardgraph.GradScaler`."""

from __future__ import annotations

import torch.distributed as dist

from shardgraph.arguments import GROUP, checked
from shardgraph.module.grad_scaler import GradScaler


class ShardedGradScaler(GradScaler):
    """``fairscale.optim.grad_scaler.ShardedGradScaler``: an overflow on one rank skips the step on all of them.

    Arguments are those of :class:`shardgraph.GradScaler`, in FairScale's order.
    """

    @checked(process_group=GROUP)
    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(None, init_scale, growth_factor, backoff_factor, growth_interval, enabled, process_group)
