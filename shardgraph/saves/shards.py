"""Shards that were read into host memory, until they take their places."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardgraph.module.checkpoint import one_box_placements, sharded_like
from shardgraph.torch_api import local_tensor, placed, pytree


@dataclass(frozen=True)
class Shard:
    """This rank's part of a tensor of a checkpoint, for the place that ``target`` has.

    ``target`` may be sharded in ways that files do not describe: then the part is a larger one, of ``like``.
    """

    value: torch.Tensor
    like: torch.Tensor
    target: torch.Tensor

    def placed(self) -> torch.Tensor:
        """A tensor of the same placements and device as the target. All ranks must call it, for the same tensors."""
        moved = self.value.to(local_tensor(self.target).device)
        if not isinstance(self.like, DTensor):
            return moved
        whole = placed(moved, self.like.device_mesh, list(self.like.placements), self.like.shape)
        assert isinstance(self.target, DTensor)
        same = list(self.like.placements) == list(self.target.placements)
        return whole if same else sharded_like(whole, self.target).clone()


def all_placed(tree: Any) -> Any:
    """The same with a tensor in the place of each :class:`Shard`. All ranks must call it."""
    return pytree.tree_map_only(Shard, Shard.placed, tree)


def boxed(target: torch.Tensor) -> torch.Tensor:
    """What is read for ``target``: itself, or a DTensor of its values' shape whose shards are boxes."""
    if not isinstance(target, DTensor):
        return target
    return placed(local_tensor(target), target.device_mesh, one_box_placements(target), target.shape)
