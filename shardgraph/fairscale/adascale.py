"""FairScale's AdaScale is :class:`shardgraph.AdaScale`, which knows the module by the optimizer's parameters."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from shardgraph.arguments import OPTIMIZER, WHOLE, checked
from shardgraph.errors import ShardGraphError
from shardgraph.module.sharded import module_of
from shardgraph.optim import adascale


class AdaScale(adascale.AdaScale):
    """``fairscale.optim.AdaScale``: learning rates by the variance of gradients over data-parallel ranks.

    Made of an optimizer of a compiled module's parameters, or of :class:`~shardgraph.fairscale.OSS`, before the first
    backward pass; the module measures its gradients from then on.

    Args:
        optimizer: updates the parameters of a compiled module.
        world_size: the number of data-parallel ranks, which the module knows; another one is refused.
        options: of :class:`shardgraph.AdaScale`, whose names are FairScale's.
    """

    @checked(optimizer=OPTIMIZER, world_size=WHOLE)
    def __init__(self, optimizer: torch.optim.Optimizer, world_size: int | None = None, **options: Any) -> None:
        module = module_of(optimizer.param_groups[0]["params"][0])
        ranks = module.plan.data_size if dist.is_initialized() else 1
        if world_size not in (None, ranks):
            raise ShardGraphError(
                f"world_size is {world_size}, and gradients are the mean over {ranks} data-parallel ranks: leave it out"
            )
        module.measure_gradients()
        super().__init__(optimizer, module, **options)
