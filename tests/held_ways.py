"""Ways in which the ranks of a small mesh may hold the operands of an operation."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from shardgraph.proof.held import Held
from shardgraph.proof.terms import Atom, Terms
from tests.held_values import Values
from tests.rule_cases import Operand

aten = torch.ops.aten
MESH = {"dp": 2, "tp": 2}


@dataclass(frozen=True)
class Way:
    """How ranks hold one operand: ``cuts`` are a size, an axis and a number of blocks each."""

    cuts: tuple[tuple[int, str, int], ...] = ()
    batch: str = ""  # "own": each data rank's, "all": all of them in the first dimension
    partial: tuple[str, str] | None = None
    again: int | None = None  # the dimension along which elements repeat
    factor: float = 1.0


def ways(operands: Sequence[Operand], count: int) -> Iterator[list[Way]]:
    """Ways of holding operands together: each division alone, each operand as summands alone, and random others."""
    sizes = sorted({size for each in operands for size in each.shape if size > 1})
    cuts = [(size, axis, blocks) for size in sizes for axis, blocks in (("tp", 1), ("tp", 2), ("dp", 1))]
    alone = [Way(cuts=(cut,)) for cut in cuts] + [Way(batch="own"), Way(batch="all")]
    alone += [Way(partial=("tp", "sum")), Way(partial=("dp", "sum")), Way(partial=("tp", "max"))]
    alone += [Way(partial=("tp", "sum"), factor=0.0)]
    for way in alone:
        yield [way for _ in operands]
        for k in range(len(operands) if len(operands) > 1 else 0):
            yield [way if j == k else Way() for j in range(len(operands))]
    draw = random.Random(0)
    for _ in range(count):
        together = tuple(draw.sample(cuts, draw.choice([0, 1, 1, 2]))) if len(cuts) > 1 else ()
        batches = draw.choice([["", "own"], ["", "own", "all"], [""], [""]])
        yield [
            Way(
                tuple(cut for cut in together if draw.random() < 0.8),
                draw.choice(batches),
                draw.choice([None] * 6 + [("tp", "sum"), ("tp", "max"), ("dp", "sum")]),
                draw.randrange(len(each.shape)) if each.shape and draw.random() < 0.15 else None,
                draw.choice([1.0, 1.0, -2.0, 0.5, 0.0]),
            )
            for each in operands
        ]


def held(terms: Terms, values: Values, operand: Operand, number: int, way: Way) -> tuple[Held, Held] | None:
    """What ranks have of an operand, and the whole of it on each; None where the way says two things of an axis."""
    if operand.kind != "real" and (way.partial or way.factor != 1):
        way = replace(way, partial=None, factor=1.0)
    shape = [1 if k == way.again else size for k, size in enumerate(operand.shape)]
    used, local, whole, left = [], [], [], list(way.cuts)
    for k, size in enumerate(operand.shape):
        cut = next((each for each in left if each[0] == size), None)
        whole.append(_atoms(k, size, None, k == way.again))
        local.append(_atoms(k, size, cut, k == way.again))
        if cut:
            left.remove(cut)
            used += [cut[1]] if k != way.again else []
    used += [way.partial[0]] if way.partial else []
    used += ["dp"] if way.batch else []
    impossible = None in local or len(set(used)) < len(used) or (way.batch == "all" and not shape)
    if impossible or (way.partial and way.partial[1] == "max" and way.factor <= 0):
        return None
    if way.batch == "all":
        local[0] = (Atom("dp", 1, MESH["dp"]), *local[0])
    if operand.kind == "count":
        term = terms.make((aten.arange.default, 0), [[operand.shape[0]]], shape)
    else:
        term = terms.make("input", [number, operand, bool(way.batch)], shape, ["dp"] if way.batch else [])
    if values.of(term) is None:
        apart = [rank["dp"] if way.batch else 0 for rank in values.ranks]
        values.give(term, [operand.value(100 * number + at, shape) for at in apart])
    partial = frozenset({way.partial} if way.partial else ())
    return Held(term, way.factor, tuple(local), partial), Held(term, way.factor, tuple(whole))


def _atoms(dim: int, size: int, cut: tuple[int, str, int] | None, again: bool) -> tuple[Atom, ...] | None:
    """The digits of a dimension of which ranks have their part of every block; None if it does not divide."""
    _, axis, blocks = cut or (size, None, 1)
    parts = MESH[axis] if axis else 1
    if size % (blocks * parts):
        return None
    rest = size // (blocks * parts)
    if again:
        return (Atom(None, 1, blocks * rest),) if blocks * rest > 1 else ()
    atoms = (Atom(dim, parts * rest, blocks), Atom(dim, rest, parts, axis), Atom(dim, 1, rest))
    return tuple(atom for atom in atoms if atom.size > 1)
