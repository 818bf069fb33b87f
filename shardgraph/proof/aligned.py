"""Operands of one operation, with the coordinates of ranks where all of them have these."""

from __future__ import annotations

from collections.abc import Sequence

from shardgraph.proof.held import Held, patterns
from shardgraph.proof.terms import seams


def aligned(tensors: Sequence[Held]) -> list[Held]:
    """The same local elements, each axis at one dimension of all operands, if they are divided alike there.

    A rank has one coordinate along an axis, which takes no room. So a local tensor [4, 1] is as well the rank's half of
    [8, 1] as that of [4, 2], whichever the other operands are.
    """
    result = list(tensors)
    for axis in sorted({axis for each in tensors for axis in each.marks}):
        places = sorted({place for each in result if (place := _place(each, axis)) is not None})
        if len(places) > 1 or not all(_alike(result, place) for place in places):
            places += [
                k for k in range(len(result[0].dims)) if k not in places and all(t.shape[k] == 1 for t in result)
            ]
            moved = [[placed(each, axis, place) for each in result] for place in places]
            alike = [each for each in moved if all(_alike(each, dim) for dim in places)]
            result = min(alike, key=_seams, default=result)
    return result


def _seams(tensors: Sequence[Held]) -> int:
    """How often whole dimensions consist of digits of different ones; where terms are as they were made, never."""
    return sum(seams(each.view.dims) for each in tensors)


def _place(held: Held, axis: str) -> int | None:
    return next((k for k, dim in enumerate(held.dims) if any(atom.axis == axis for atom in dim)), None)


def placed(held: Held, axis: str, place: int) -> Held:
    """The same local elements, with the coordinate along an axis at another dimension."""
    before = _place(held, axis)
    if before in (None, place):
        return held
    dims = [tuple(atom for atom in dim if atom.axis != axis) for dim in held.dims]
    dims[place] = (held.marks[axis], *dims[place])
    return held.with_dims(dims)


def _alike(tensors: Sequence[Held], dim: int) -> bool:
    """Whether all operands that do not repeat along a dimension are divided there in one way."""
    return len({patterns(each.dims[dim]) for each in tensors if any(a.source is not None for a in each.dims[dim])}) < 2
