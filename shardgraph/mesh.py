"""Arithmetic of device meshes as data: ranks are numbered row by row, the last axis fastest, as a DeviceMesh does."""

from __future__ import annotations

import math

Mesh = tuple[tuple[str, int], ...]
"""``(axis name, size)`` pairs, outermost first; empty for one process without a group."""


def coordinates(mesh: Mesh, rank: int) -> tuple[int, ...]:
    """Where ``rank`` stands along each axis."""
    found = []
    for _, size in reversed(mesh):
        rank, here = divmod(rank, size)
        found.append(here)
    return tuple(reversed(found))


def position_of(mesh: Mesh, axis: str) -> int:
    """Which axis, counted from the outermost, has this name."""
    return [name for name, _ in mesh].index(axis)


def group_along(mesh: Mesh, axis: str, rank: int) -> tuple[int, ...]:
    """The ranks, ascending, whose coordinates differ from those of ``rank`` along ``axis`` only."""
    position = position_of(mesh, axis)
    stride = math.prod(size for _, size in mesh[position + 1 :])
    first = rank - coordinates(mesh, rank)[position] * stride
    return tuple(range(first, first + mesh[position][1] * stride, stride))
