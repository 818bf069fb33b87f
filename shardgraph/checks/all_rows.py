"""The original of a model with a SyncBatchNorm: called with all data-parallel ranks' rows, seen by one of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardgraph.torch_api import pytree


def joined(parts: Sequence[Any]) -> Any:
    """One call with the rows of the calls of all ranks, one after the other."""
    leaves, spec = zip(*map(pytree.tree_flatten, parts), strict=True)
    whole = [torch.cat(each) if _has_rows(each[0]) else each[0] for each in zip(*leaves, strict=True)]
    return pytree.tree_unflatten(whole, spec[0])


def rows_of_rank(output: Any, rank: int, ranks: int, call: Any) -> Any:
    """What ``rank`` has of an output of the ``call`` with all rows: its own; what has no rows is every rank's."""
    rows = next((leaf.shape[0] for leaf in pytree.tree_leaves(call) if _has_rows(leaf)), 0)

    def own(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.chunk(ranks)[rank] if _has_rows(tensor) and tensor.shape[0] == rows else tensor

    return pytree.tree_map_only(torch.Tensor, own, output)


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0
