"""What the loss of each data-parallel rank counts for in that of all."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from shardgraph import torch_api
from shardgraph.errors import ShardGraphError
from shardgraph.plans.plan import Plan
from shardgraph.runtime.executor import State

LOSS_WEIGHTS = ("ranks", "tokens")


def check_loss_weight(loss_weight: str) -> None:
    """Raise ShardGraphError unless it is one of LOSS_WEIGHTS."""
    if loss_weight not in LOSS_WEIGHTS:
        raise ShardGraphError(f"loss_weight is {loss_weight!r}; it may be {' or '.join(map(repr, LOSS_WEIGHTS))}")


def weight_by_elements(elements: float, plan: Plan, state: State) -> float:
    """The weight of this rank's loss, a mean of so many ``elements``, in the mean of all ranks' losses that makes it
    the mean over the elements of all. All ranks must call it."""
    if state.mesh is None or plan.data_size == 1:
        return 1.0
    total = torch.tensor(elements, dtype=torch.float32, device=state.device)
    dist.all_reduce(total, group=torch_api.group_along(state.mesh, tuple(axis for axis, _ in plan.data_mesh)))
    return elements * plan.data_size / total.item() if total else math.nan
