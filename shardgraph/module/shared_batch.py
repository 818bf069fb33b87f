"""Ranks along an axis of operators compute one batch together, so they must be called with the same inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import DeviceMesh

from shardgraph.errors import RankMismatchError
from shardgraph.plans.plan import Plan

_PERIOD = 8191  # of the weights of a checksum, with which another order of the rows is another sum


def check_shared(plan: Plan, mesh: DeviceMesh | None, leaves: Sequence[Any]) -> None:
    """Compare the inputs of a call, ``leaves``, along the axes whose ranks share a batch.

    Raises:
        RankMismatchError: on all ranks of the axis: they have different inputs. A loop that gives each rank a batch of
            its own, as data parallelism has it, would train on mixtures of them.
    """
    sizes = dict(plan.mesh)
    axes = [axis for axis, _ in plan.operators if sizes[axis] > 1]
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if not axes or not tensors or mesh is None:
        return
    sums = torch.stack([_checksum(tensor.detach()) for tensor in tensors])
    for axis in axes:
        most = torch.cat([sums, -sums])
        dist.all_reduce(most, dist.ReduceOp.MAX, group=mesh.get_group(axis))
        highest, lowest = most[: len(sums)], -most[len(sums) :]
        if not torch.equal(highest, lowest):
            number = int((highest != lowest).nonzero()[0])
            shape = list(tensors[number].shape)
            raise RankMismatchError(
                f"the {sizes[axis]} ranks along {axis!r} share a batch under plan {plan.name!r}, and they were called "
                f"with different values in input {number} of shape {shape}: give rank r the batch "
                f"plan.data_rank(r) of plan.data_size ({plan.data_size} here), as "
                "DistributedSampler(data, num_replicas=plan.data_size, rank=plan.data_rank(r)) does"
            )


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    """A sum of the elements that depends on their order, in float64; what is not finite counts as a number."""
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = torch.nan_to_num(values.reshape(-1).double(), nan=0.5, posinf=1.5, neginf=2.5)
    weights = torch.arange(flat.numel(), device=flat.device) % _PERIOD + 1
    return (flat * weights).sum()
