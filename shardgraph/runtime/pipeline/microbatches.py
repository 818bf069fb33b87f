"""A rank's batch, cut into the microbatches of a pipeline."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from shardgraph.errors import PlanError
from shardgraph.torch_api import pytree


def batch_size(call: Any) -> int:
    """The length of dimension 0 of a call's first tensor that is not a scalar; 0 if there is none."""
    tensors = (leaf for leaf in pytree.tree_leaves(call) if isinstance(leaf, torch.Tensor))
    return next((tensor.shape[0] for tensor in tensors if tensor.dim()), 0)


def microbatches(call: Any, count: int) -> list[Any]:
    """``call``, with every tensor whose dimension 0 is the batch's cut into ``count`` parts; all else is in each.

    Parts have equal sizes, except that the last may be smaller.

    Raises:
        PlanError: the batch cannot be cut so; the message has the numbers that work.
    """
    rows = batch_size(call)
    if not rows:
        raise PlanError(f"{count} microbatches are cut from a batch, and no input of this call is a tensor with rows")
    size = -(-rows // count)
    if -(-rows // size) != count:
        possible = sorted({-(-rows // each) for each in range(1, rows + 1)})
        near = sorted(possible, key=lambda each: abs(each - count))[:4]
        raise PlanError(
            f"a batch of {rows} rows cannot be cut into {count} microbatches of a size, but for a smaller last: "
            f"{', '.join(map(str, sorted(near)))} microbatches work for it, or batches of a multiple of {count} rows"
        )

    def cut(tensor: torch.Tensor, start: int) -> torch.Tensor:
        is_batch = tensor.dim() > 0 and tensor.shape[0] == rows
        return tensor[start : start + size].contiguous() if is_batch else tensor

    return [pytree.tree_map_only(torch.Tensor, partial(cut, start=i * size), call) for i in range(count)]


def shares(calls: list[Any]) -> list[float]:
    """The part of the batch's rows that each microbatch has: what its mean loss counts for in that of the batch."""
    sizes = [batch_size(call) for call in calls]
    return [size / sum(sizes) for size in sizes] if sum(sizes) else [1.0] * len(sizes)


def merged(outputs: list[Any], shares: list[float], rows: list[int]) -> Any:
    """The model's output for the whole batch, from the outputs for microbatches of so many ``rows``.

    Tensors with as many rows as a microbatch, or a multiple of that (tokens in one row), are concatenated; of other
    floating-point tensors, such as a mean loss, it is the mean weighted by shares; of all else the first.
    """
    if len(outputs) == 1:
        return outputs[0]

    def merge(*leaves: Any) -> Any:
        if not isinstance(leaves[0], torch.Tensor):
            return leaves[0]
        if all(leaf.dim() and count and leaf.shape[0] % count == 0 for leaf, count in zip(leaves, rows, strict=True)):
            return torch.cat(leaves)
        if leaves[0].is_floating_point():
            return torch.stack([leaf * share for leaf, share in zip(leaves, shares, strict=True)]).sum(0)
        return leaves[0]

    return pytree.tree_map(merge, *outputs)
