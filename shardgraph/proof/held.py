"""How the ranks of a mesh hold the elements of a term."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from shardgraph.proof.terms import Atom, Dims, Term, View, joined, regrouped, repeated, whole


class UntypedError(Exception):
    """A value of which it is not known what it is; the message says why."""


class MixedError(UntypedError):
    """What a rank computes needs elements that other ranks have."""


@dataclass(frozen=True)
class Held:
    """What each rank has of ``factor`` times a term.

    ``dims`` are the dimensions of the local tensor; an atom with an axis is the rank's own coordinate, so that it takes
    no room. Along the axes in ``partial`` the sum, or the maximum, over ranks is meant. ``summed`` are the axes of data
    over whose ranks the term was summed; along others of its axes each rank has that of its own batch. Along ``uneven``
    rows are cut as DTensor cuts what does not divide. Ranks that differ only along other axes have equal tensors,
    summands too.
    """

    term: Term
    factor: float
    dims: Dims
    partial: frozenset[tuple[str, str]] = frozenset()
    summed: frozenset[str] = frozenset()
    uneven: str | None = None

    def __str__(self) -> str:
        said = [f"{self.factor:g} x {self.term} as {list(self.shape)}"]
        said += [f"divided along {axis}" for axis in sorted(self.marks)]
        said += [f"{'summands' if how == 'sum' else how} along {axis}" for axis, how in sorted(self.partial)]
        said += [f"summed over {axis}" for axis in sorted(self.summed)]
        said += [f"of each rank's batch along {axis}" for axis in sorted(self.batches)]
        return ", ".join(said)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the local tensor."""
        return tuple(math.prod(atom.size for atom in dim if atom.axis is None) for dim in self.dims)

    @cached_property
    def marks(self) -> dict[str, Atom]:
        """The digit that is a rank's coordinate, by axis."""
        return {atom.axis: atom for dim in self.dims for atom in dim if atom.axis is not None}

    @cached_property
    def replicated(self) -> bool:
        """Whether each rank has the whole value, of its batch."""
        return not self.partial and self.uneven is None and not any(self._atoms_that_need_care())

    @cached_property
    def view(self) -> View:
        """The value that all ranks of a batch have together."""
        return View(self.term, self.factor, tuple(map(_without_ranks, self.dims)))

    def with_dims(self, dims: Sequence[Sequence[Atom]]) -> Held:
        """The same elements in other dimensions."""
        return Held(self.term, self.factor, tuple(map(joined, dims)), self.partial, self.summed, self.uneven)

    def scaled(self, factor: float) -> Held:
        """A multiple."""
        if factor < 0 and any(how != "sum" for _, how in self.partial):
            raise UntypedError("an extremum over ranks is multiplied by a negative number")
        return Held(self.term, self.factor * factor, self.dims, self.partial, self.summed, self.uneven)

    def on(self, axis: str) -> bool:
        """Whether ranks along ``axis`` have different things."""
        return (
            axis in self.marks or axis in self.batches or axis == self.uneven or any(a == axis for a, _ in self.partial)
        )

    @cached_property
    def batches(self) -> frozenset[str]:
        """The axes of data along which each rank has that of its own batch alone."""
        here = {atom.source for dim in self.dims for atom in dim if isinstance(atom.source, str)}
        return self.term.varies - self.summed - here

    def _atoms_that_need_care(self) -> Iterator[Atom]:
        return (atom for dim in self.dims for atom in dim if atom.axis is not None or isinstance(atom.source, str))


def of_term(term: Term, factor: float = 1.0) -> Held:
    """A term as it is, whole on each rank."""
    return Held(term, factor, whole(term.shape))


def _without_ranks(dim: Sequence[Atom]) -> tuple[Atom, ...]:
    return joined(atom._replace(axis=None) for atom in dim if not isinstance(atom.source, str))


def tidy(dims: Sequence[Sequence[Atom]]) -> Dims:
    """Each rank's coordinate beside the digits that it belongs to; where it stands moves no element."""
    places = [[atom for atom in dim if atom.axis is None] for dim in dims]
    free = [(atom, k, _locals_before(dim, atom)) for k, dim in enumerate(dims) for atom in dim if atom.axis is not None]
    for atom, k, before in sorted(free, key=lambda each: each[0].stride):  # the least significant first
        leads = before < sum(other.axis is None for other in places[k])
        at, position = _beside(atom, places, k if leads else None) or (k, _after_locals(places[k], before))
        places[at].insert(position, atom)
    return tuple(map(joined, places))


def _locals_before(dim: Sequence[Atom], mark: Atom) -> int:
    return sum(atom.axis is None for atom in dim[: dim.index(mark)])


def _after_locals(dim: Sequence[Atom], count: int) -> int:
    """The position after ``count`` local digits."""
    seen = 0
    for position, atom in enumerate(dim):
        if seen == count:
            return position
        seen += atom.axis is None
    return len(dim)


def _beside(atom: Atom, places: Sequence[Sequence[Atom]], leads: int | None) -> tuple[int, int] | None:
    """The place before the next less significant digit, or else after the next more significant one; a digit that
    ``leads`` others in a dimension, as a head does its channels, does not leave it for the latter."""
    after = None
    for k, dim in enumerate(places):
        for position, other in enumerate(dim):
            if other.source == atom.source and atom.source is not None:
                if atom.stride == other.stride * other.size:
                    return k, position
                if other.stride == atom.stride * atom.size:
                    after = k, position + 1
    return after if leads is None or (after is not None and after[0] == leads) else None


def sized(dims: Dims, shape: Sequence[int]) -> Dims | None:
    """The same local elements, with the rank's coordinates where whole dimensions have the sizes of ``shape``.

    A coordinate that does not belong where it stands goes to the nearest dimension that lacks its size. ``shape`` is
    that of one batch.
    """
    places = [list(dim) for dim in dims]
    whole = [math.prod(atom.size for atom in dim if not isinstance(atom.source, str)) for dim in places]
    for k, dim in enumerate(dims):
        for mark in [atom for atom in dim if atom.axis is not None]:
            if shape[k] % whole[k] == 0:
                break
            lacking = [j for j, size in enumerate(shape) if j != k and size % (whole[j] * mark.size) == 0]
            if not lacking:
                return None
            j = min(lacking, key=lambda other, own=k: abs(other - own))
            places[k].remove(mark)
            places[j].insert(0 if j > k else len(places[j]), mark)
            whole[k], whole[j] = whole[k] // mark.size, whole[j] * mark.size
    return tuple(map(joined, places)) if whole == list(shape) else None


def viewed(held: Held, shape: Sequence[int]) -> Held:
    """The value in other local sizes, in the order of its elements."""
    atoms = [atom for dim in held.dims for atom in dim if atom.axis is None]
    dims = regrouped(atoms, shape)
    if dims is None:
        raise UntypedError(f"a view of {list(held.shape)} as {list(shape)} cuts through a dimension that ranks share")
    places, before = [list(dim) for dim in dims], 1
    for dim in held.dims:
        behind = False  # a local digit of its own dimension
        for atom in dim:
            if atom.axis is None:
                before, behind = before * atom.size, True
            else:
                _insert(places, atom, before, behind)
    return held.with_dims(places)


def _insert(places: list[list[Atom]], mark: Atom, before: int, behind: bool) -> None:
    """Put a rank's coordinate after local digits of ``before`` elements, in the dimension that ends or starts there."""
    seen = 1
    for dim in places:
        if seen == before and not behind and _has_locals(dim):
            dim.insert(_after_locals(dim, 0), mark)
            return
        for position, atom in enumerate(dim):
            seen *= atom.size if atom.axis is None else 1
            if seen == before and atom.axis is None and (behind or _has_locals(dim[position + 1 :])):
                dim.insert(_after_marks(dim, position + 1), mark)
                return
            if seen > before:  # inside a digit that repeats, or that the view has merged
                low = seen // before
                dim[position : position + 1] = [_high(atom, low), mark, _low(atom, low)]
                return
    places[-1].append(mark)


def _has_locals(atoms: Sequence[Atom]) -> bool:
    return any(atom.axis is None for atom in atoms)


def _after_marks(dim: Sequence[Atom], position: int) -> int:
    while position < len(dim) and dim[position].axis is not None:
        position += 1
    return position


def _high(atom: Atom, low: int) -> Atom:
    return atom._replace(size=atom.size // low, stride=1 if atom.source is None else atom.stride * low)


def _low(atom: Atom, low: int) -> Atom:
    return atom._replace(size=low)


def through(dims: Sequence[Sequence[Atom]], inner: Dims) -> Dims:
    """Dimensions over a value that is itself a view with dimensions ``inner``, over the term of that view."""
    return tuple(joined(each for atom in dim for each in _seen(atom, inner)) for dim in dims)


def _seen(atom: Atom, inner: Dims) -> tuple[Atom, ...]:
    if not isinstance(atom.source, int):
        return (atom,)
    dim = inner[atom.source]
    if all(each.source is None for each in dim):
        return repeated(atom.size) if atom.axis is None else ()
    total = math.prod(each.size for each in dim)
    pieces = regrouped(dim, [total // (atom.stride * atom.size), atom.size, atom.stride])
    if pieces is None or (atom.axis is not None and (len(pieces[1]) != 1 or pieces[1][0].source is None)):
        raise UntypedError("ranks share a dimension that is not one of the value it is computed from")
    return pieces[1] if atom.axis is None else (pieces[1][0]._replace(axis=atom.axis),)


def patterns(dim: Sequence[Atom]) -> tuple[tuple[str, int, str | None], ...]:
    """How a whole dimension is divided: runs of local elements, ranks' coordinates, and batches, by size."""
    result: list[tuple[str, int, str | None]] = []
    for atom in dim:
        if atom.axis is not None:
            result.append(("mark", atom.size, atom.axis))
        elif isinstance(atom.source, str):
            result.append(("batch", atom.size, atom.source))
        elif result and result[-1][0] == "own":
            result[-1] = ("own", result[-1][1] * atom.size, None)
        else:
            result.append(("own", atom.size, None))
    return tuple(result)


def divided(dim: int, pattern: Sequence[tuple[str, int, str | None]]) -> tuple[Atom, ...]:
    """The atoms of dimension ``dim`` of a term that is divided by ``pattern``."""
    atoms, stride = [], 1
    for kind, size, axis in reversed(pattern):
        if kind == "batch":
            atoms.append(Atom(axis, 1, size))
            continue
        atoms.append(Atom(dim, stride, size, axis if kind == "mark" else None))
        stride *= size
    return joined(reversed(atoms))


def whole_size(pattern: Sequence[tuple[str, int, str | None]]) -> int:
    """The size of the whole dimension, of one batch."""
    return math.prod(size for kind, size, _ in pattern if kind != "batch")
