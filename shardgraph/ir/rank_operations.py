"""Operations that depend on the rank: symbolic until :mod:`shardgraph.runtime.bind` replaces them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

import torch

from shardgraph.ir.fake_values import fake

Ranks = Callable[[str], int]
"""The number of ranks along a mesh axis."""

P = ParamSpec("P")
R = TypeVar("R")


def symbolic(value: Callable[Concatenate[Ranks, P], R]) -> Callable[P, R]:
    """An operation that only a graph can have; ``value``, on fake tensors, is its result on rank 0."""

    @functools.wraps(value)
    def operation(*args: P.args, **kwargs: P.kwargs) -> R:
        raise RuntimeError(f"{value.__name__} has no meaning before the graph is bound to a rank")

    fake(operation)(value)
    return operation


def pad_shard(shard: torch.Tensor, rows: int) -> torch.Tensor:
    """Zero-pad dim 0 of a rank's shard to ``rows``, so that shards have equal length on all ranks."""
    missing = rows - shard.shape[0]
    return torch.cat([shard, shard.new_zeros(missing, *shard.shape[1:])]) if missing else shard


@symbolic
def trim_shard(ranks: Ranks, padded: torch.Tensor, rows: int, axis: str) -> torch.Tensor:
    """The part of a padded shard of a ``rows``-long tensor that this rank of mesh ``axis`` owns."""
    return padded[: chunk_bounds(rows, ranks(axis), 0)[1]]


@symbolic
def local_chunk(ranks: Ranks, full: torch.Tensor, rows: int, axis: str) -> torch.Tensor:
    """This rank's rows of a tensor of ``rows`` rows, by DTensor's chunking."""
    return full[: chunk_bounds(rows, ranks(axis), 0)[1]]


@symbolic
def local_part(ranks: Ranks, full: torch.Tensor, dim: int, blocks: int, axis: str, back: int = 0) -> torch.Tensor:
    """This rank's part of a tensor that every rank of mesh ``axis`` has; see :func:`take_part`.

    With ``back``, the part of the rank that many places before this one on the ring.
    """
    return take_part(full, dim, blocks, ranks(axis), 0)


def take_part(full: torch.Tensor, dim: int, blocks: int, parts: int, index: int) -> torch.Tensor:
    """A copy of part ``index`` of ``parts`` of every one of ``blocks`` equal blocks of ``dim``.

    Not a view, which would keep all of ``full`` alive; and some kernels need contiguous operands.
    """
    size = full.shape[dim] // (blocks * parts)
    apart = full.unflatten(dim, (blocks, parts, size)).select(dim + 1, index)
    return apart.clone(memory_format=torch.contiguous_format).flatten(dim, dim + 1)


@symbolic
def first_only(ranks: Ranks, full: torch.Tensor, axis: str) -> torch.Tensor:
    """``full`` on the first rank of mesh ``axis``, zeros on the others: a partial placement of ``full``."""
    return full.clone()


@symbolic
def first_row(ranks: Ranks, rows: int, axis: str) -> int:
    """The index of this rank's first row if every rank of mesh ``axis`` has ``rows``."""
    return 0


@symbolic
def from_later(ranks: Ranks, steps: int, axis: str) -> int:
    """1 if a tensor that reaches this rank after ``steps`` sends on the ring of ``axis`` is a later rank's, else 0."""
    return 0


def chunk_bounds(rows: int, parts: int, index: int) -> tuple[int, int]:
    """First and past-last row of chunk ``index`` when ``rows`` are cut in ``parts`` as DTensor does.

    Every chunk has ``ceil(rows / parts)`` rows, but for the last non-empty one and empty ones after it.
    """
    size = -(-rows // parts)
    start = min(index * size, rows)
    return start, min(start + size, rows)
