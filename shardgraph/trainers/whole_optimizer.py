"""An optimizer of shards as trainers save and load it: by a state of whole tensors."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from shardgraph.module.optimizer_state import sharded_state, whole_state
from shardgraph.optim.sharded import ShardedOptimizer


class WholeOptimizer:
    """The state of ``optimizer`` in the format of the unsharded model's; all ranks must call each method.

    Args:
        optimizer: of the parameters of a compiled module, element by element, or a :class:`ShardedOptimizer`.
        everywhere: every rank receives the state; otherwise the first one, and others have no values in it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, everywhere: bool = False) -> None:
        self._optimizer = optimizer
        self._keep = everywhere or not dist.is_initialized() or dist.get_rank() == 0
        self._recipient = -1 if everywhere else 0

    def state_dict(self) -> dict[str, Any]:
        """The whole state, in CPU memory."""
        if not isinstance(self._optimizer, ShardedOptimizer):
            return whole_state(self._optimizer, self._keep)
        self._optimizer.consolidate_state_dict(self._recipient)
        return self._optimizer.state_dict() if self._keep else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a whole state: each rank keeps what is of its shards."""
        if not isinstance(self._optimizer, ShardedOptimizer):
            state = sharded_state(self._optimizer, state)
        self._optimizer.load_state_dict(state)
