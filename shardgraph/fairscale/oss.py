"""FairScale's OSS is :class:`shardgraph.ShardedOptimizer`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from shardgraph.arguments import BOOL, GROUP, MAKES_OPTIMIZER, PARAMETERS, checked, whole
from shardgraph.optim.sharded import ShardedOptimizer


class OSS(ShardedOptimizer):
    """``fairscale.optim.OSS``: ``optim`` with its state spread over ranks by whole parameters.

    Args:
        params: parameters or parameter groups.
        optim: the class of the optimizer.
        group: the ranks that share the work; default: all.
        broadcast_buffer_size: has no effect: small parameters are sent together.
        broadcast_fp16: send updated parameters in float16, to which every rank rounds them.
        force_broadcast_object: consolidate state in pickled form.
        default: options of ``optim``.
    """

    @checked(
        params=PARAMETERS,
        optim=MAKES_OPTIMIZER,
        group=GROUP,
        broadcast_buffer_size=whole(-1),
        broadcast_fp16=BOOL,
        force_broadcast_object=BOOL,
    )
    def __init__(
        self,
        params: Any,
        optim: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
        group: dist.ProcessGroup | None = None,
        broadcast_buffer_size: int = -1,
        broadcast_fp16: bool = False,
        force_broadcast_object: bool = False,
        **default: Any,
    ) -> None:
        dtype = torch.float16 if broadcast_fp16 else None
        super().__init__(
            params, optim, group=group, broadcast_dtype=dtype, state_as_objects=force_broadcast_object, **default
        )

    refresh_trainable = ShardedOptimizer.refresh

    def partition_parameters(self) -> list[list[dict[str, Any]]]:
        """The parameter groups of each rank, with the parameters that it owns."""
        return [
            [
                {**group, "params": [p for p, owner in zip(group["params"], owners, strict=True) if owner == rank]}
                for group, owners in zip(self.param_groups, self.owners, strict=True)
            ]
            for rank in range(self.world_size)
        ]
