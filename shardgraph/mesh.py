"""Arithmetic of device meshes as data: ranks are numbered row-major, the last axis fastest, as in a DeviceMesh."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable

Mesh = tuple[tuple[str, int], ...]
"""``(axis name, size)`` pairs, outermost first; empty for one process without a group."""


def coordinates(mesh: Mesh, rank: int) -> tuple[int, ...]:
    """The coordinates of ``rank`` along each axis."""
    inner_first = []
    for _, size in reversed(mesh):
        rank, coordinate = divmod(rank, size)
        inner_first.append(coordinate)
    return tuple(reversed(inner_first))


def position_of(mesh: Mesh, axis: str) -> int:
    """The index of the axis of that name, counted from the outermost."""
    return [name for name, _ in mesh].index(axis)


def together(axes: Iterable[str]) -> str:
    """The name of the group that spans these axes, as ``"dp+ep"``; for one axis its own name."""
    return "+".join(axes)


def axes_of(group: str) -> tuple[str, ...]:
    """The axes that a group spans."""
    return tuple(group.split("+"))


def size_along(mesh: Mesh, group: str) -> int:
    """The number of ranks in a group along one axis or several."""
    sizes = dict(mesh)
    return math.prod(sizes[axis] for axis in axes_of(group))


def group_along(mesh: Mesh, group: str, rank: int) -> tuple[int, ...]:
    """The ranks, ascending, whose coordinates differ from those of ``rank`` only along the axes of ``group``."""
    here = coordinates(mesh, rank)
    spanned = axes_of(group)
    choices = [range(size) if axis in spanned else (at,) for (axis, size), at in zip(mesh, here, strict=True)]
    strides = [math.prod(size for _, size in mesh[position + 1 :]) for position in range(len(mesh))]
    return tuple(sum(map(operator.mul, place, strides)) for place in itertools.product(*choices))
