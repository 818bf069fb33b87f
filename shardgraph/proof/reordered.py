"""Elements in another order than their term has them, such as rows as they were gathered from ranks.

What an operation treats element by element, or sums over, it treats alike in any order. So digits that belong together
but stand apart along such labels are put side by side in its operands, and the result's are put back: rows of
``[2 ranks, 4 sequences, 8 positions]`` make the term that rows of ``[4 sequences, 16 positions]`` make.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from shardgraph.proof.terms import Atom, Dims, View, joined, regrouped

Labels = Sequence[Any]


@dataclass(frozen=True)
class Reordering:
    """An order of the elements along some ``labels`` together.

    ``sizes`` are those of the digits as they are, from the most significant one; ``order`` has their numbers in the
    order of the term.
    """

    labels: tuple[str, ...]
    sizes: tuple[int, ...]
    order: tuple[int, ...]

    def of(self, dims: Dims, labels: Labels) -> Dims:
        """Dimensions of an operand in the order of the term."""
        found = self.fitting(dims, labels)
        assert found is not None
        return found

    def fitting(self, dims: Dims, labels: Labels) -> Dims | None:
        """As :meth:`of`; None if the operand has no such digits."""
        return self._put(dims, labels, self.sizes, self.order)

    def back(self, dims: Dims, labels: Labels) -> Dims:
        """Dimensions of a result, which are in the order of the term, in the order that the operands had."""
        sizes = [self.sizes[number] for number in self.order]
        places = [self.order.index(number) for number in range(len(sizes))]
        found = self._put(dims, labels, sizes, places)
        assert found is not None  # they were made of these digits
        return found

    def _put(self, dims: Dims, labels: Labels, sizes: Sequence[int], order: Sequence[int]) -> Dims | None:
        if self.labels[0] not in labels:
            return dims
        first = list(labels).index(self.labels[0])
        own = dims[first : first + len(self.labels)]
        if not any(own):  # one element, which there is for all others
            return dims
        digits = regrouped(_atoms(own), sizes)
        if digits is None:
            return None
        moved = joined(_atoms(digits[number] for number in order))
        made = regrouped(moved, [math.prod(atom.size for atom in dim) for dim in own])
        return None if made is None else (*dims[:first], *made, *dims[first + len(own) :])


def reorderings(operands: Sequence[View], of_operands: Sequence[Labels], of_results: Sequence[Labels]) -> list[Reordering]:
    """The orders in which an operation's operands have fewer digits than as they are.

    ``of_operands`` and ``of_results`` have a label for each dimension; None where elements must stay where they are.
    """
    found: list[Reordering] = []
    for run in _runs(of_operands, of_results):
        for view, labels in zip(operands, of_operands, strict=True):
            if run[0] in labels and (better := _better(run, view.dims, labels)):
                if all(better.fitting(each.dims, own) for each, own in zip(operands, of_operands, strict=True)):
                    found.append(better)
                break
    return found


def _better(run: tuple[str, ...], dims: Dims, labels: Labels) -> Reordering | None:
    """The order of the digits of one operand as its term has them, if they are fewer then."""
    first = list(labels).index(run[0])
    atoms = _atoms(dims[first : first + len(run)])
    if any(atom.source is None for atom in atoms):
        return None
    order = sorted(range(len(atoms)), key=lambda number: (atoms[number].source, -atoms[number].stride))
    made = Reordering(run, tuple(atom.size for atom in atoms), tuple(order))
    found = made.fitting(dims, labels)
    return made if found is not None and _seams(found) < _seams(dims) else None


def _runs(of_operands: Sequence[Labels], of_results: Sequence[Labels]) -> Iterator[tuple[str, ...]]:
    """Labels that are always side by side, in one order."""
    every = [*map(list, of_operands), *map(list, of_results)]
    where = {label: [label in own for own in every] for own in every for label in own if label is not None}
    seen: set[str] = set()
    for own in every:
        for _, several in groupby(own, where.get):
            run = tuple(several)
            if run[0] in where and seen.isdisjoint(run) and all(_side_by_side(run, other) for other in every):
                yield run
            seen.update(run)


def _side_by_side(run: Sequence[str], labels: Labels) -> bool:
    first = labels.index(run[0]) if run[0] in labels else len(labels)
    return list(labels[first : first + len(run)]) in ([], list(run))


def _atoms(dims: Iterable[Iterable[Atom]]) -> list[Atom]:
    return [atom for dim in dims for atom in dim]


def _seams(dims: Dims) -> int:
    """How often a dimension consists of digits that are not one."""
    return sum(max(len(dim) - 1, 0) for dim in dims)
