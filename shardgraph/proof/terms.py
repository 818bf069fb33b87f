"""Terms: what the values of a captured graph are, independent of how a rank holds them.

A term is an operation on other terms. Equal terms are one object (value numbering), so two graphs compute the same
where their results have the same term. What only moves elements, or scales them by a number, is no term: it is in how
a :class:`View` shows one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class Atom(NamedTuple):
    """One digit of an index: the number ``(index of dimension source // stride) % size`` of a term.

    A ``source`` of None is a dimension along which elements repeat; of a name, the rank along an axis of data. The
    digit is an index of the local tensor, or, with an ``axis``, this rank's coordinate along that mesh axis.
    """

    source: int | str | None
    stride: int
    size: int
    axis: str | None = None


_CUT = "cut"

Dims = tuple[tuple[Atom, ...], ...]
"""For each dimension of a tensor the digits that its index consists of, from the most significant one."""


@dataclass(frozen=True, eq=False)
class Term:
    """An operation on terms; ``shape`` is that of its result, ``varies`` are the axes of data along which it differs.

    ``number`` orders terms by when they were made.
    """

    number: int
    operation: Any
    operands: tuple[Any, ...]
    shape: tuple[int, ...]
    varies: frozenset[str]

    @property
    def is_leaf(self) -> bool:
        """Whether it is not known what it consists of: any value may stand for it."""
        return self.operation in ("input", _CUT)

    def __repr__(self) -> str:
        operation = self.operation[0] if isinstance(self.operation, tuple) else self.operation
        inputs = self.operands if self.operation == "input" else ()
        return f"{operation}{''.join(map(str, inputs))}#{self.number}"


@dataclass(frozen=True)
class View:
    """``factor`` times the elements of ``term``, arranged as ``dims`` say; whole, on no rank in particular."""

    term: Term
    factor: float
    dims: Dims

    @property
    def order(self) -> tuple[int, str]:
        """Sorts operands of which the order does not matter."""
        return self.term.number, str(self.dims)

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the dimensions."""
        return tuple(math.prod(atom.size for atom in dim) for dim in self.dims)


class Terms:
    """All terms made so far."""

    def __init__(self) -> None:
        self._known: dict[Any, Term] = {}
        self._cuts: dict[Term, Term] = {}
        self._whole: dict[Term, Term] = {}

    def make(
        self,
        operation: Any,
        operands: Sequence[Any],
        shape: Sequence[int],
        varies: Iterable[str] = (),
        fixed: Iterable[str] = (),
    ) -> Term:
        """The term of an operation; ``operands`` are views and constants, in containers too.

        It varies along the axes of its operands and those that are given, but for ``fixed`` ones.
        """
        key = (operation, key_of(operands), tuple(shape))
        if key not in self._known:
            views = list(views_of(operands))
            varying = frozenset(varies).union(*(view.term.varies for view in views)) - frozenset(fixed)
            self._known[key] = Term(len(self._known), operation, tuple(operands), tuple(shape), varying)
        return self._known[key]

    def like(self, term: Term, operands: Sequence[Any]) -> Term:
        """The operation of ``term`` on other operands, which vary as its own do."""
        key = (term.operation, key_of(operands), term.shape)
        if key not in self._known:
            self._known[key] = Term(len(self._known), term.operation, tuple(operands), term.shape, term.varies)
        return self._known[key]

    def cut(self, term: Term) -> Term:
        """The term that stands for ``term`` from now on and does not say what that is; a leaf stands for itself."""
        if term.is_leaf or term in self._cuts:
            return self.current(term)
        key = (term.operation, key_of(term.operands), term.shape)
        made = Term(len(self._known), _CUT, (term.number,), term.shape, term.varies)
        self._known[_CUT, term.number] = self._known[key] = self._cuts[term] = made
        self._whole[made] = term
        return made

    def current(self, term: Term) -> Term:
        """The term, or what it has been cut to."""
        return self._cuts.get(term, term)

    def before_cut(self, term: Term) -> Term:
        """The term, or what has been cut to it."""
        return self._whole.get(term, term)

    def __len__(self) -> int:
        return len(self._known)


def rounded(factor: float) -> float:
    """A factor as it is compared: products of the same numbers in another order are equal."""
    return float(f"{factor:.11g}") + 0.0


def whole(shape: Sequence[int]) -> Dims:
    """The dimensions of a term as they are."""
    return tuple(() if size == 1 else (Atom(dim, 1, size),) for dim, size in enumerate(shape))


def repeated(size: int) -> tuple[Atom, ...]:
    """A dimension along which elements repeat."""
    return () if size == 1 else (Atom(None, 1, size),)


def repeats(dim: Sequence[Atom]) -> bool:
    """Whether elements repeat along a dimension, or there is one."""
    return all(atom.source is None for atom in dim)


def seams(dims: Dims) -> int:
    """How often a dimension consists of digits that are not one."""
    return sum(max(len(dim) - 1, 0) for dim in dims)


def joined(atoms: Iterable[Atom]) -> tuple[Atom, ...]:
    """The atoms of one dimension, with neighbours that are one digit together as one."""
    result: list[Atom] = []
    for atom in atoms:
        if atom.size == 1:
            continue
        last = result[-1] if result else None
        if last and last.axis is None and atom.axis is None and last.source == atom.source:
            if atom.source is None:
                result[-1] = Atom(None, 1, last.size * atom.size)
                continue
            if last.stride == atom.stride * atom.size:
                result[-1] = Atom(atom.source, atom.stride, last.size * atom.size)
                continue
        result.append(atom)
    return tuple(result)


def regrouped(atoms: Sequence[Atom], sizes: Sequence[int]) -> Dims | None:
    """Dimensions of ``sizes`` from local ``atoms`` in order; None if a size ends inside one, not at a part."""
    pending, dims = [atom for atom in reversed(atoms) if atom.size > 1], []
    for size in sizes:
        dim: list[Atom] = []
        while size > 1:
            if not pending:
                return None
            atom = pending.pop()
            if size % atom.size == 0:
                dim.append(atom)
                size //= atom.size
            elif atom.size % size == 0:
                low = atom.size // size
                dim.append(_part(atom, atom.stride * low, size))
                pending.append(_part(atom, atom.stride, low))
                size = 1
            else:
                return None
        dims.append(joined(dim))
    return None if pending else tuple(dims)


def _part(atom: Atom, stride: int, size: int) -> Atom:
    """A part of a digit."""
    return Atom(atom.source, 1 if atom.source is None else stride, size, atom.axis)


def key_of(value: Any, of_view: Callable[[View], Any] | None = None) -> Any:
    """Operands as what can be compared; views by what ``of_view`` says of them."""
    if isinstance(value, View):
        return (value.term.number, rounded(value.factor), value.dims) if of_view is None else of_view(value)
    if isinstance(value, (list, tuple)):
        return tuple([key_of(each, of_view) for each in value])
    if isinstance(value, dict):
        return tuple((name, key_of(each, of_view)) for name, each in sorted(value.items()))
    if isinstance(value, float):
        return rounded(value) if math.isfinite(value) else repr(value)
    return type(value).__name__, str(value)


def views_of(value: Any) -> Iterable[View]:
    """The views among operands, in order."""
    if isinstance(value, View):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from views_of(each)
    elif isinstance(value, dict):
        yield from views_of([each for _, each in sorted(value.items())])
