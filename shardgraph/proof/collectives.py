"""Collectives, and what depends on the rank: they change which digits are ranks' coordinates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from shardgraph import ir
from shardgraph.mesh import axes_of
from shardgraph.proof.arranged import arranged, is_arranged
from shardgraph.proof.held import Held, UntypedError, tidy
from shardgraph.proof.shards import arranged_part, chunk, padded
from shardgraph.proof.terms import Atom, Terms, regrouped, repeated

Ranks = Callable[[str], int]
Exchange = Callable[..., Any]
EXCHANGES: dict[Any, Exchange] = {}
"""By operation: the result for the terms, the sizes of axes, the operand and the other arguments."""


def exchange(target: Any) -> Callable[[Exchange], Exchange]:
    """Register a function for an operation."""

    def register(function: Exchange) -> Exchange:
        EXCHANGES[target] = function
        return function

    return register


@exchange(ir.ALL_REDUCE)
def all_reduce(terms: Terms, ranks: Ranks, held: Held, operation: str, group: str) -> Held:
    """Combined over the ranks of one axis or several."""
    for axis in axes_of(group):
        held = _reduced(held, operation, axis, ranks(axis))
    return held


@exchange(ir.REDUCE_SCATTER)
def reduce_scatter(terms: Terms, ranks: Ranks, held: Held, operation: str, size: int, axis: str) -> Held:
    """This rank's rows of what is combined."""
    if not _summands(held, axis):
        raise UntypedError(f"ranks along {axis!r} sum parts of values that are not summands")
    return arranged_part(terms, _reduced(held, operation, axis, ranks(axis)), 0, 1, axis, ranks(axis))


@exchange(ir.ALL_GATHER)
def all_gather(terms: Terms, ranks: Ranks, held: Held, size: int, axis: str) -> Held:
    """All ranks' rows."""
    held = _even(held, axis)
    return held.with_dims(_with_first(*_taken(held, axis, ranks(axis))))


@exchange(ir.ALL_TO_ALL)
def all_to_all(terms: Terms, ranks: Ranks, held: Held, received: Sequence[int], sent: Sequence[int], axis: str) -> Held:
    """Row ``r`` to rank ``r``."""
    size = ranks(axis)
    if list(received) != list(sent) or len(set(sent)) > 1 or held.shape[0] % size:
        raise UntypedError("an all-to-all of unequal parts")
    if size == 1:
        return held
    held = _even(held, axis)
    dims, mine = _taken(held, axis, size)
    local = [atom for atom in dims[0] if atom.axis is None]
    pieces = regrouped(local, [size, held.shape[0] // size])
    if pieces is None or len(pieces[0]) != 1:
        if is_arranged(held):
            raise UntypedError("an all-to-all of rows that are not one digit")
        return all_to_all(terms, ranks, arranged(terms, held), received, sent, axis)
    (away,) = pieces[0]
    if isinstance(away.source, str):
        if away.source != axis:
            raise UntypedError(f"an all-to-all along {axis!r} of batches along {away.source!r}")
        gone: tuple[Atom, ...] = ()  # each rank has its own batch again
    else:
        gone = (away._replace(axis=axis),)
    rest = [*(atom for atom in dims[0] if atom.axis is not None), *gone, *pieces[1]]
    return held.with_dims(tidy(_with_first([rest, *dims[1:]], mine)))


@exchange(ir.first_only)
def first_only(terms: Terms, ranks: Ranks, held: Held, axis: str) -> Held:
    """Zeros on all ranks but one."""
    if held.on(axis):
        raise UntypedError(f"ranks along {axis!r} do not all have what the first alone keeps")
    return replace(held, partial=held.partial | {(axis, "sum")})


@exchange(ir.pad_shard)
def pad_shard(terms: Terms, ranks: Ranks, held: Held, rows: int) -> Held:
    """Rows of zeros."""
    return padded(terms, held, rows)


@exchange(ir.trim_shard)
def trim_shard(terms: Terms, ranks: Ranks, held: Held, rows: int, axis: str) -> Held:
    """Without the rows that a rank has for padding alone."""
    mark = held.marks.get(axis)
    if held.term.operation != "padded rows" or held.term.operands[1] != rows or mark is None or mark.source != 0:
        raise UntypedError("rows are trimmed that were not padded")
    return replace(held, uneven=axis)


@exchange(ir.local_chunk)
def local_chunk(terms: Terms, ranks: Ranks, held: Held, rows: int, axis: str) -> Held:
    """This rank's rows."""
    if held.shape[0] != rows:
        raise UntypedError(f"{rows} rows are cut of {held.shape[0]}")
    return chunk(terms, held, axis, ranks(axis))


def _summands(held: Held, axis: str) -> bool:
    return axis in held.batches or (axis, "sum") in held.partial or not held.factor


def _reduced(held: Held, operation: str, axis: str, size: int) -> Held:
    if (axis, operation) in held.partial:
        return replace(held, partial=held.partial - {(axis, operation)})
    if operation == "sum" and axis in held.batches:
        return replace(held, summed=held.summed | {axis})
    if held.on(axis):
        raise UntypedError(f"a {operation} over {axis!r}, along which the ranks do not have summands of it")
    return held.scaled(size) if operation == "sum" else held


def _even(held: Held, axis: str) -> Held:
    if held.uneven == axis:
        raise UntypedError("unequal numbers of rows are exchanged")
    if any(each == axis for each, _ in held.partial):
        raise UntypedError(f"summands along {axis!r} are exchanged as if they were parts")
    return held


def _taken(held: Held, axis: str, size: int) -> tuple[list[Sequence[Atom]], tuple[Atom, ...]]:
    """Dimensions without what ranks along an axis have of their own, and that as a digit."""
    if axis in held.marks:
        dims = [[atom for atom in dim if atom.axis != axis] for dim in held.dims]
        return list(dims), (held.marks[axis]._replace(axis=None),)
    return list(held.dims), (Atom(axis, 1, size),) if axis in held.batches else repeated(size)


def _with_first(dims: Sequence[Sequence[Atom]], first: tuple[Atom, ...]) -> list[tuple[Atom, ...]]:
    """The digits as the most significant ones of the first dimension's local ones."""
    return list(tidy([(*first, *dims[0]), *dims[1:]]))
