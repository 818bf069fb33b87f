"""Elements in another order than their term has them, such as rows as they were gathered from ranks.

What an operation treats element by element, or sums over, it treats alike in any order. So digits that belong together
but stand apart along such labels are put side by side in its operands, and the result's are put back: rows of
``[2 ranks, 4 sequences, 8 positions]`` make the term that rows of ``[4 sequences, 16 positions]`` make.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from shardgraph.proof.held import Held, UntypedError
from shardgraph.proof.terms import Atom, Dims, joined, regrouped, repeated, repeats, seams

Labels = Sequence[Any]


@dataclass(frozen=True)
class Reordering:
    """An order of the elements along some ``labels`` together.

    ``lengths`` are those of the dimensions, and ``sizes`` those of the digits as they are, from the most significant
    one; ``order`` has their numbers in the order of the term.
    """

    labels: tuple[str, ...]
    lengths: tuple[int, ...]
    sizes: tuple[int, ...]
    order: tuple[int, ...]

    def of(self, held: Held, labels: Labels) -> Held:
        """What ranks hold of an operand in the order of the term."""
        return held.with_dims(self._put(held.dims, labels, self.sizes, self.order))

    def back(self, dims: Dims, labels: Labels) -> Dims:
        """Dimensions of a result, which are in the order of the term, in the order that the operands had."""
        sizes = [self.sizes[number] for number in self.order]
        return self._put(dims, labels, sizes, [self.order.index(number) for number in range(len(sizes))])

    def fits(self, held: Held, labels: Labels) -> bool:
        """Whether an operand has such digits."""
        try:
            self.of(held, labels)
        except UntypedError:
            return False
        return True

    def _put(self, dims: Dims, labels: Labels, sizes: Sequence[int], order: Sequence[int]) -> Dims:
        if self.labels[0] not in labels:
            return dims
        first = list(labels).index(self.labels[0])
        own = dims[first : first + len(self.labels)]
        wide = [repeated(size) if repeats(dim) else dim for dim, size in zip(own, self.lengths, strict=True)]
        digits = regrouped(_atoms(wide), sizes)
        moved = digits and regrouped(joined(_atoms(digits[number] for number in order)), self.lengths)
        if (
            not moved
            or _coordinates(moved) != _coordinates(own)
            or any(repeats(a) != repeats(b) for a, b in zip(moved, own, strict=True))
        ):
            raise UntypedError("elements that ranks share are in another order than those of other operands")
        made = [before if repeats(before) else after for before, after in zip(own, moved, strict=True)]
        return (*dims[:first], *made, *dims[first + len(own) :])


def reorderings(
    tensors: Sequence[Held], of_operands: Sequence[Labels], of_results: Sequence[Labels]
) -> list[Reordering]:
    """The orders in which operands have fewer digits than as they are; the operation needs whole what has no label."""
    found: list[Reordering] = []
    if not any(seams(held.view.dims) for held in tensors):  # as of nearly all operations
        return found
    for run in _runs(tensors, of_operands, of_results):
        for held, labels in zip(tensors, of_operands, strict=True):
            if run[0] in labels and (better := _better(run, held, labels)):
                if all(better.fits(each, own) for each, own in zip(tensors, of_operands, strict=True)):
                    found.append(better)
                break
    return found


def _better(run: tuple[str, ...], held: Held, labels: Labels) -> Reordering | None:
    """The order of the digits of one operand as its term has them, if they are fewer then."""
    first, whole = list(labels).index(run[0]), replace(held, dims=held.view.dims)
    atoms = _atoms(whole.dims[first : first + len(run)])
    if any(atom.source is None for atom in atoms):
        return None
    order = sorted(range(len(atoms)), key=lambda number: (atoms[number].source, -atoms[number].stride))
    lengths = [math.prod(atom.size for atom in dim) for dim in whole.dims[first : first + len(run)]]
    made = Reordering(run, tuple(lengths), tuple(atom.size for atom in atoms), tuple(order))
    fewer = made.fits(whole, labels) and seams(made.of(whole, labels).dims) < seams(whole.dims)
    return made if fewer else None


def _runs(
    tensors: Sequence[Held], of_operands: Sequence[Labels], of_results: Sequence[Labels]
) -> Iterator[tuple[str, ...]]:
    """Labels that are always side by side, in one order, and along which there are no batches."""
    every = [*map(list, of_operands), *map(list, of_results)]
    dims = [
        (label, dim)
        for held, own in zip(tensors, of_operands, strict=True)
        for label, dim in zip(own, held.dims, strict=True)
    ]
    batches = {label for label, dim in dims if any(isinstance(atom.source, str) for atom in dim)}
    free = {label for label, _ in dims if isinstance(label, str)} - batches
    where = {label: [label in own for own in every] for label in free}
    seen: set[str] = set()
    for own in every:
        for _, several in groupby(own, where.get):
            run = tuple(several)
            if run[0] in free and seen.isdisjoint(run) and all(_side_by_side(run, other) for other in every):
                yield run
            seen.update(run)


def _side_by_side(run: Sequence[str], labels: Labels) -> bool:
    first = labels.index(run[0]) if run[0] in labels else len(labels)
    return list(labels[first : first + len(run)]) in ([], list(run))


def _atoms(dims: Iterable[Iterable[Atom]]) -> list[Atom]:
    return [atom for dim in dims for atom in dim]


def _coordinates(dims: Dims) -> list[Atom]:
    """The digits that are ranks' own."""
    return sorted(atom for atom in _atoms(dims) if atom.axis is not None)
