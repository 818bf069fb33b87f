"""Parts of values: along axes of operators, and rows that DTensor cuts where they do not divide."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from shardgraph.plans.parameter_plan import ParameterPlan
from shardgraph.proof.arranged import arranged
from shardgraph.proof.held import Held, UntypedError, divided, patterns, tidy
from shardgraph.proof.terms import Atom, Terms, joined, regrouped


def part(held: Held, dim: int, blocks: int, axis: str, size: int) -> Held:
    """The part of this rank of each of ``blocks`` equal blocks of a dimension.

    Raises:
        UntypedError: ranks along ``axis`` do not all have the value.
    """
    if size == 1:
        return held
    if held.on(axis):
        raise UntypedError(f"ranks along {axis!r} take parts of what they do not all have")
    rows = held.shape[dim]
    if rows % (blocks * size):
        raise UntypedError(f"{rows} elements are not {blocks} blocks of {size} parts")
    local = [atom for atom in held.dims[dim] if atom.axis is None]
    pieces = regrouped(local, [blocks, size, rows // blocks // size])
    if pieces is None or len(pieces[1]) != 1:
        raise UntypedError(f"parts of dimension {dim} are not parts of one of its term")
    marks = [atom for atom in held.dims[dim] if atom.axis is not None]
    mark = pieces[1][0]._replace(axis=axis)
    if mark.source is None:  # of elements that repeat, all ranks' parts are equal
        return held.with_dims([*held.dims[:dim], (*marks, *pieces[0], *pieces[2]), *held.dims[dim + 1 :]])
    if isinstance(mark.source, str):
        raise UntypedError(f"ranks along {axis!r} take other ranks' batches")
    dims = list(held.dims)
    dims[dim] = (*marks, *pieces[0], mark, *pieces[2])
    return held.with_dims(tidy(dims) if marks else dims)


def arranged_part(terms: Terms, held: Held, dim: int, blocks: int, axis: str, size: int) -> Held:
    """As :func:`part`, also where the dimension consists of several ones of the term."""
    try:
        return part(held, dim, blocks, axis, size)
    except UntypedError:
        return part(arranged(terms, held), dim, blocks, axis, size)


def padded(terms: Terms, held: Held, rows: int) -> Held:
    """Rows of zeros after those that a rank has, up to ``rows``."""
    own = held.shape[0]
    if own == rows:
        return replace(held, uneven=None)
    if held.uneven is not None:
        raise UntypedError(f"unequal rows are padded to {rows}")
    front = _marks_in_front(held)
    view = replace(held.view, factor=1.0)
    count = math.prod(atom.size for atom in front)
    term = terms.make("padded rows", [view, own, rows], (count * rows, *view.shape[1:]))
    pattern = [*(("mark", atom.size, atom.axis) for atom in front), ("own", rows, None)]
    dims = [divided(0, pattern), *(divided(k + 1, patterns(dim)) for k, dim in enumerate(held.dims[1:]))]
    return replace(held, term=term, dims=tuple(dims))


def unpadded(held: Held, rows: int) -> Held | None:
    """The value without the rows of zeros after its ``rows``; None if it has none such, or not all of them."""
    if held.term.operation != "padded rows" or not held.dims:
        return None
    view, own, longer = held.term.operands
    if own != rows or held.shape[0] != longer or any(isinstance(atom.source, str) for atom in held.dims[0]):
        return None
    front = _marks_in_front(held)
    pattern = [*(("mark", atom.size, atom.axis) for atom in front), ("own", rows, None)]
    dims = [divided_by(view.dims[0], pattern)]
    dims += [divided_by(whole, patterns(dim)) for whole, dim in zip(view.dims[1:], held.dims[1:], strict=True)]
    return replace(held, term=view.term, dims=tuple(map(joined, dims)))


def undivided(held: Held) -> Held:
    """The whole value whose rows ranks have, padded."""
    if held.term.operation != "padded rows":
        raise UntypedError("rows that were not padded are to be put together")
    view = held.term.operands[0]
    return Held(view.term, held.factor * view.factor, view.dims, held.partial, held.summed)


def chunk(terms: Terms, held: Held, axis: str, size: int) -> Held:
    """This rank's rows by DTensor's chunking, which are fewer on the last ranks if ``size`` does not divide them."""
    rows = held.shape[0]
    longest = -(-rows // size)
    cut = part(padded(terms, held, longest * size), 0, 1, axis, size)
    return cut if longest * size == rows else replace(cut, uneven=axis)


def stored(terms: Terms, held: Held, entry: ParameterPlan, mesh: Sequence[tuple[str, int]]) -> Held:
    """What a rank keeps of a whole parameter, or of its gradient: parts along axes of operators, then rows of these."""
    for position, (dim, blocks) in entry.splits.items():
        axis, size = mesh[position]
        held = part(held, dim, blocks, axis, size)
    if entry.shard_axis is not None:
        held = chunk(terms, held, *mesh[entry.shard_axis])
    return held


def _marks_in_front(held: Held) -> list[Atom]:
    dim = held.dims[0]
    front = [atom for atom in dim if atom.axis is not None]
    if list(dim[: len(front)]) != front:
        raise UntypedError("rows are padded that ranks have in several blocks")
    return front


def divided_by(dim: Sequence[Atom], pattern: Sequence[tuple[str, int, str | None]]) -> tuple[Atom, ...]:
    pieces = regrouped(dim, [size for _, size, _ in pattern])
    if pieces is None:
        raise UntypedError("rows were padded that ranks share unlike the term")
    marked = ((piece, kind, axis) for piece, (kind, _, axis) in zip(pieces, pattern, strict=True))
    return tuple(a._replace(axis=axis) if kind == "mark" else a for piece, kind, axis in marked for a in piece)
