"""Operations that depend on the rank: symbolic until :mod:`shardgraph.runtime.bind` replaces them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from shardgraph.ir.fake_values import fake


def pad_shard(shard: torch.Tensor, rows: int) -> torch.Tensor:
    """Zero-pad dim 0 of a rank's shard to ``rows``, so that shards have equal length on all ranks."""
    missing = rows - shard.shape[0]
    return torch.cat([shard, shard.new_zeros(missing, *shard.shape[1:])]) if missing else shard


def trim_shard(padded: torch.Tensor, rows: int, axis: str) -> torch.Tensor:
    """The part of a padded shard of a ``rows``-long tensor that this rank of mesh ``axis`` owns.

    Symbolic: :mod:`shardgraph.runtime.bind` replaces it by a slice of known length.
    """
    raise RuntimeError(f"trim_shard({rows}, {axis!r}) has no meaning before the graph is bound to a rank")


def local_chunk(full: torch.Tensor, rows: int, axis: str) -> torch.Tensor:
    """This rank's rows of a tensor of ``rows`` rows, by DTensor's chunking. Symbolic, as above."""
    raise RuntimeError(f"local_chunk({rows}, {axis!r}) has no meaning before the graph is bound to a rank")


def local_part(full: torch.Tensor, dim: int, blocks: int, axis: str, back: int = 0) -> torch.Tensor:
    """This rank's part of a tensor that every rank of mesh ``axis`` has; see :func:`take_part`. Symbolic, as above.

    With ``back``, the part of the rank that many places before this one on the ring.
    """
    raise RuntimeError(f"local_part({dim}, {blocks}, {axis!r}) has no meaning before the graph is bound to a rank")


def take_part(full: torch.Tensor, dim: int, blocks: int, parts: int, index: int) -> torch.Tensor:
    """A copy of part ``index`` of ``parts`` of every one of ``blocks`` equal blocks of ``dim``.

    Not a view, which would keep all of ``full`` alive; and some kernels need contiguous operands.
    """
    size = full.shape[dim] // (blocks * parts)
    apart = full.unflatten(dim, (blocks, parts, size)).select(dim + 1, index)
    return apart.clone(memory_format=torch.contiguous_format).flatten(dim, dim + 1)


def first_only(full: torch.Tensor, axis: str) -> torch.Tensor:
    """``full`` on the first rank of mesh ``axis``, zeros on the others: a partial placement of ``full``. Symbolic."""
    raise RuntimeError(f"first_only({axis!r}) has no meaning before the graph is bound to a rank")


def first_row(rows: int, axis: str) -> int:
    """The index of this rank's first row if every rank of mesh ``axis`` has ``rows``. Symbolic, as above."""
    raise RuntimeError(f"first_row({rows}, {axis!r}) has no meaning before the graph is bound to a rank")


def from_later(steps: int, axis: str) -> int:
    """1 if a tensor that reaches this rank after ``steps`` sends on the ring of ``axis`` is a later rank's, else 0.

    Symbolic, as above.
    """
    raise RuntimeError(f"from_later({steps}, {axis!r}) has no meaning before the graph is bound to a rank")


def chunk_bounds(rows: int, parts: int, index: int) -> tuple[int, int]:
    """First and past-last row of chunk ``index`` when ``rows`` are cut in ``parts`` as DTensor does.

    Every chunk has ``ceil(rows / parts)`` rows, but for the last non-empty one and empty ones after it.
    """
    size = -(-rows // parts)
    start = min(index * size, rows)
    return start, min(start + size, rows)


# -- values, as rank 0 has them ----------------------------------------------------------------------


@fake(trim_shard)
def _(ranks: Callable[[str], int], padded: torch.Tensor, rows: int, axis: str) -> torch.Tensor:
    return padded[: chunk_bounds(rows, ranks(axis), 0)[1]]


@fake(local_chunk)
def _(ranks: Callable[[str], int], full: torch.Tensor, rows: int, axis: str) -> torch.Tensor:
    return full[: chunk_bounds(rows, ranks(axis), 0)[1]]


@fake(local_part)
def _(ranks: Callable[[str], int], full: torch.Tensor, dim: int, blocks: int, axis: str, back: int = 0) -> torch.Tensor:
    return take_part(full, dim, blocks, ranks(axis), 0)


@fake(first_only)
def _(ranks: Callable[[str], int], full: torch.Tensor, axis: str) -> torch.Tensor:
    return full.clone()


@fake(first_row)
def _(ranks: Callable[[str], int], rows: int, axis: str) -> int:
    return 0


@fake(from_later)
def _(ranks: Callable[[str], int], steps: int, axis: str) -> int:
    return 0
