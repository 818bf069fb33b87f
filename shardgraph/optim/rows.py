"""Tensors that ranks store in shards of rows, whole at the rank that owns them for as long as it needs."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from shardgraph.torch_api import local_tensor

Owned = tuple[torch.Tensor, int]
"""A tensor, and the rank in the group that owns it."""


def in_rows(tensor: torch.Tensor, ranks: int) -> bool:
    """Whether so many ranks store the tensor in shards of rows, in order."""
    return isinstance(tensor, DTensor) and tensor.placements == (Shard(0),) and tensor.device_mesh.size() == ranks


def gather_rows(tensors: Iterable[Owned], group: dist.ProcessGroup) -> list[torch.Tensor | None]:
    """Each tensor, whole, at its owner; None elsewhere. All in flight together; all ranks must call it alike."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    in_flight = []
    for tensor, owner in tensors:
        sent = _padded(local_tensor(tensor).detach(), _most_rows(tensor, ranks))
        pieces = [torch.empty_like(sent) for _ in range(ranks)] if rank == owner else None
        work = dist.gather(sent, pieces, group=group, group_dst=owner, async_op=True)
        in_flight.append((work, sent, pieces, tensor.shape[0]))
    whole = []
    for work, _, pieces, rows in in_flight:
        work.wait()
        whole.append(None if pieces is None else torch.cat(pieces)[:rows])
    return whole


def scatter_rows(whole: Iterable[torch.Tensor | None], tensors: Iterable[Owned], group: dist.ProcessGroup) -> None:
    """Write each tensor, ``whole`` at its owner, to the shards of all ranks; the reverse of :func:`gather_rows`."""
    ranks, in_flight = dist.get_world_size(group), []
    for value, (tensor, owner) in zip(whole, tensors, strict=True):
        local, rows = local_tensor(tensor).detach(), _most_rows(tensor, ranks)
        pieces = None if value is None else list(_padded(value.detach(), rows * ranks).split(rows))
        received = local.new_empty(rows, *local.shape[1:])
        work = dist.scatter(received, pieces, group=group, group_src=owner, async_op=True)
        in_flight.append((work, received, pieces, local))
    for work, received, _, local in in_flight:
        work.wait()
        local.copy_(received[: local.shape[0]])


def _most_rows(tensor: torch.Tensor, ranks: int) -> int:
    return -(-tensor.shape[0] // ranks)


def _padded(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    missing = rows - tensor.shape[0]
    return nn.functional.pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, missing)) if missing else tensor.contiguous()
