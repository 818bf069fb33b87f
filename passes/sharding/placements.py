"""Placement arithmetic along one mesh axis.

The types are DTensor's: ``Replicate()``, ``Partial()`` (the sum over ranks), ``Shard(dim)``, and ``_StridedShard(dim,
split_factor=k)``, here :func:`blocks`: a dimension of ``k`` equal blocks, each of which is sharded over the ranks. A
sharded dimension ends up in blocks when a view merges it with dimensions to its left, and a fused query-key-value
projection must be sharded in blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

REPLICATE = Replicate()
PARTIAL = Partial()
_CUTS = frozenset({Shard, _StridedShard})  # a search asks a million times, and isinstance() runs Python for them


@dataclass(frozen=True)
class Exchanged(Placement):
    """On an axis whose ranks have different batches: each rank has its shard of ``experts``, for all ranks' tokens.

    Relative to the tensor that a rank computes on its own batch, dim ``experts`` is sharded, and the ranks' tensors are
    concatenated along dim ``tokens``. All-to-all converts one into the other (Lepikhin et al., 2020,
    https://arxiv.org/abs/2006.16668).
    """

    experts: int
    tokens: int

    def __post_init__(self) -> None:
        Placement.__init__(self)  # torch 2.11 rejects an object of its own type that was not initialized


@dataclass(frozen=True)
class Summed(Placement):
    """On an axis whose ranks have different batches: the sum over ranks, sharded along ``dim``."""

    dim: int

    def __post_init__(self) -> None:
        Placement.__init__(self)


def blocks(dim: int, count: int) -> Placement:
    """Each of ``count`` equal blocks of ``dim`` is sharded over the ranks."""
    return Shard(dim) if count == 1 else _StridedShard(dim, split_factor=count)


def is_cut(placement: Placement | None) -> bool:
    """Whether the placement is sharded."""
    return type(placement) in _CUTS


def cut_of(placement: Placement) -> tuple[int, int]:
    """The sharded dimension, and the number of blocks."""
    if type(placement) is Shard:
        return placement.dim, 1
    if type(placement) is _StridedShard:
        return placement.dim, int(placement.split_factor)
    assert isinstance(placement, Summed), placement
    return placement.dim, 1


def divides(placement: Placement, shape: Sequence[int], parts: int) -> bool:
    """Whether a tensor of ``shape`` is split into equal, non-empty shards."""
    if not is_cut(placement):
        if isinstance(placement, Exchanged):
            inside = 0 <= placement.tokens < len(shape) and placement.tokens != placement.experts
            return inside and divides(Shard(placement.experts), shape, parts)
        if not isinstance(placement, Summed):
            return True
    dim, count = cut_of(placement)
    return dim < len(shape) and shape[dim] > 0 and shape[dim] % (count * parts) == 0


def local_shape(placement: Placement, shape: Sequence[int], parts: int) -> tuple[int, ...]:
    """The shape of one rank's local tensor."""
    if isinstance(placement, Exchanged):
        local = list(shape)
        local[placement.experts] //= parts
        local[placement.tokens] *= parts
        return tuple(local)
    if not is_cut(placement) and not isinstance(placement, Summed):
        return tuple(shape)
    dim, _ = cut_of(placement)
    return (*shape[:dim], shape[dim] // parts, *shape[dim + 1 :])


def through_view(placement: Placement, before: Sequence[int], after: Sequence[int], parts: int) -> Placement | None:
    """The placement after a view of shape ``before`` as ``after``; None if it cannot be expressed.

    In element order a sharding is periodic: of every ``period`` elements each rank has an equal run. The same period is
    a sharding of a dimension of the new shape if the runs are whole rows of it.
    """
    if not is_cut(placement):
        return placement
    if 0 in before:  # no run of elements tells where it is
        return None
    dim, count = cut_of(placement)
    period = before[dim] // count * math.prod(before[dim + 1 :])
    below = 1
    for at in reversed(range(len(after))):
        whole = after[at] * below
        if after[at] > 1 and period % (parts * below) == 0 and whole % period == 0:
            return blocks(at, whole // period)
        below = whole
    return None


def written(placement: Placement | None) -> str:
    """``replicate``, ``partial``, ``shard(1)``, ``shard(1, blocks=3)`` or ``exchanged(0, 1)``."""
    if placement is None:
        return "-"
    if isinstance(placement, Exchanged):
        return f"exchanged({placement.experts}, {placement.tokens})"
    if isinstance(placement, Summed):
        return f"summed({placement.dim})"
    if not is_cut(placement):
        return "partial" if isinstance(placement, Partial) else "replicate"
    dim, count = cut_of(placement)
    return f"shard({dim})" if count == 1 else f"shard({dim}, blocks={count})"
