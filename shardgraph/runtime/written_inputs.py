"""Inputs of a call that forward writes in place.

A graph is functional: it computes from the inputs as they were, and what was written is copied back after it. So what
is written must be in no other input's memory, which the original's forward would see change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardgraph.errors import ShardGraphError
from shardgraph.ir import Input, Mutation, Role


def written_inputs(results: Sequence[Role | None]) -> list[int]:
    """The positions, among a call's flattened inputs, of those that a graph with these results writes."""
    return [role.of.index for role in results if isinstance(role, Mutation) and isinstance(role.of, Input)]


def check_apart(leaves: Sequence[Any], written: Sequence[int]) -> None:
    """Raise ShardGraphError if an input that is ``written`` shares memory with another one."""
    for position in written:
        for other, leaf in enumerate(leaves):
            if other != position and isinstance(leaf, torch.Tensor) and _overlap(leaves[position], leaf):
                raise ShardGraphError(
                    f"forward writes to input {position} of the call, which shares memory with input {other}: the "
                    "model itself would see the other one change as well, and its program does not. Give it a copy "
                    "(tensor.clone()) of one of them"
                )


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors may have a byte in common."""
    if one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
        return False
    (start, end), (first, last) = _extent(one), _extent(other)
    return start < last and first < end


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The first byte of a tensor in its memory, and the first behind it."""
    if not tensor.numel():
        return 0, 0
    start = tensor.storage_offset()
    last = start + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(start) * tensor.itemsize, int(last + 1) * tensor.itemsize
