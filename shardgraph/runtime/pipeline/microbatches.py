"""A rank's batch, cut into the microbatches of a pipeline."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from shardgraph.errors import PlanError, ShardGraphError
from shardgraph.ir import Output, Role, outputs
from shardgraph.passes.analysis.loss_reduction import LossReduction
from shardgraph.passes.program import Program
from shardgraph.torch_api import map_tensors, pytree


def batch_size(call: Any) -> int:
    """The length of dimension 0 of a call's first tensor that is not a scalar; 0 if there is none."""
    tensors = (leaf for leaf in pytree.tree_leaves(call) if isinstance(leaf, torch.Tensor))
    return next((tensor.shape[0] for tensor in tensors if tensor.dim()), 0)


def microbatches(call: Any, count: int) -> list[Any]:
    """``call``, with every tensor whose dimension 0 is the batch's cut into ``count`` parts; all else is in each.

    Parts have equal sizes, except that the first may have one row more than the last.

    Raises:
        PlanError: the batch has fewer rows than that.
    """
    rows = batch_size(call)
    if not rows:
        raise PlanError(f"{count} microbatches are cut from a batch, and no input of this call is a tensor with rows")
    if rows < count:
        raise PlanError(f"a batch of {rows} rows cannot be cut into {count} microbatches: give it {count} rows or more")
    ends = list(itertools.accumulate(rows // count + (i < rows % count) for i in range(count)))

    def cut(tensor: torch.Tensor, start: int, end: int) -> torch.Tensor:
        is_batch = tensor.dim() > 0 and tensor.shape[0] == rows
        return tensor[start:end].contiguous() if is_batch else tensor

    parts = itertools.pairwise([0, *ends])
    return [map_tensors(partial(cut, start=start, end=end), call) for start, end in parts]


def loss_counts(
    programs: Sequence[Program], values: Sequence[Callable[[Role], Any]], output: int = 0
) -> tuple[LossReduction, list[int], list[list[float]]]:
    """How a 0-dimensional output, such as the loss, is reduced, and the rows and counts of each microbatch.

    ``values`` are the inputs and buffers of each microbatch by role.

    Raises:
        ShardGraphError: the output of a batch does not follow from those of its microbatches; the message says why.
    """
    rows = [program.joint.rows for program in programs]
    counts = [program.losses[output].counts(value) for program, value in zip(programs, values, strict=True)]
    return programs[0].losses[output], rows, counts


def weighted_sum(values: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """The loss of a batch. A microbatch that counts for nothing may have no mean at all, which is left out."""
    return torch.stack([value * weight for value, weight in zip(values, weights, strict=True) if weight]).sum(0)


def can_merge(programs: Sequence[Program], whole: Sequence[torch.Size | None]) -> bool:
    """Whether outputs of the shapes ``whole`` for the batch follow from those for microbatches; see :func:`merged`."""
    parts = [dict(outputs(program.joint.module)) for program in programs]
    for index, shape in enumerate(whole):
        values = [roles.get(Output(index)) for roles in parts]
        shapes = [value.meta["val"].shape for value in values if isinstance(value, fx.Node)]
        if shape and shapes and shape[0] != sum(part[0] for part in shapes):
            return False
    try:
        return all(program.losses is not None for program in programs)
    except ShardGraphError:
        return False


def merged(made: list[Any], programs: Sequence[Program], values: Sequence[Callable[[Role], Any]]) -> Any:
    """The model's output for the whole batch, from the outputs ``made`` for microbatches.

    Tensors are concatenated; losses are added up as they are reduced. All else is the same for all microbatches.
    """
    if len(made) == 1:
        return made[0]
    leaves, (spec, *_) = zip(*map(pytree.tree_flatten, made), strict=True)

    def merge(index: int, *parts: Any) -> Any:
        if not isinstance(parts[0], torch.Tensor):
            return parts[0]
        if parts[0].dim():
            return torch.cat(parts)
        reduction, rows, counts = loss_counts(programs, values, index)
        return weighted_sum(parts, reduction.weights(rows, counts)).to(parts[0].dtype)

    return pytree.tree_unflatten([merge(i, *parts) for i, parts in enumerate(zip(*leaves, strict=True))], spec)
