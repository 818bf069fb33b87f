"""Ranges of a dimension: pieces that are computed one at a time are pieces of the whole.

What an operation does element by element along a dimension it does alike to a piece of it, so a piece of operands is
one of the result. A sum over a piece is a part of the sum over all; parts that follow on each other are one part, and
all of them are the sum. Pieces that are joined in order are one piece. A value with zeros around it ("padded") is the
other way about: an operation that is linear in it has zeros there too, and a sum needs no more than what is between.

All of this is about whole values; how ranks have them is not its business.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardgraph.proof.definitions import addends, collected, collecting, sum_of
from shardgraph.proof.held import Held, UntypedError, through
from shardgraph.proof.labels import Label, Whole, lemma, result
from shardgraph.proof.terms import Atom, Dims, Term, Terms, View, joined, regrouped, repeated, whole

aten = torch.ops.aten


@dataclass(frozen=True)
class Range:
    """``length`` elements from ``begin`` on, of ``total``, each ``step``-th.

    They are the middle digit of a dimension, with one of size ``before`` in front of it and one of ``after`` behind it.
    """

    before: int
    begin: int
    length: int
    step: int
    total: int
    after: int

    @property
    def size(self) -> int:
        """The size of the dimension."""
        return self.before * self.length * self.after

    @property
    def whole(self) -> int:
        """The size of the dimension of which it is a range."""
        return self.before * self.total * self.after


# -- pieces and padding as terms -------------------------------------------------------------------------------


def _alone(view: View, dim: int) -> tuple[View, Dims] | None:
    """The term with the digits of one dimension first, and the view's dimensions over it; None if some repeat."""
    cut = view.dims[dim]
    if not cut or any(not isinstance(atom.source, int) for atom in cut):
        return None
    rest = [atom for source in range(len(view.term.shape)) for atom in _others(view.term, source, cut)]
    total = math.prod(atom.size for atom in cut)
    first = (Atom(0, 1, total),)
    dims = [first if k == dim else tuple(_among(atom, rest) for atom in own) for k, own in enumerate(view.dims)]
    return View(view.term, 1.0, (joined(cut), *((atom,) for atom in rest))), tuple(map(joined, dims))


def _others(term: Term, source: int, cut: Sequence[Atom]) -> list[Atom]:
    """The digits of a dimension of a term that ``cut`` leaves."""
    result, at = [], 1
    for atom in sorted((atom for atom in cut if atom.source == source), key=lambda each: each.stride):
        if atom.stride > at:
            result.append(Atom(source, at, atom.stride // at))
        at = atom.stride * atom.size
    if term.shape[source] > at:
        result.append(Atom(source, at, term.shape[source] // at))
    return result[::-1]


def _among(atom: Atom, rest: Sequence[Atom]) -> Atom:
    if not isinstance(atom.source, int):
        return atom
    for position, other in enumerate(rest):
        inside = other.stride <= atom.stride and atom.stride * atom.size <= other.stride * other.size
        if other.source == atom.source and inside:
            return Atom(position + 1, atom.stride // other.stride, atom.size)
    raise UntypedError("a digit of a term is in two dimensions")


def piece(terms: Terms, view: View, dim: int, begin: int, length: int, step: int) -> View | None:
    """Elements of a dimension of a value; None if it is no range of the elements of its term."""
    total = view.shape[dim]
    if (begin, length, step) == (0, total, 1):
        return view
    if length < 1:
        return None
    if all(atom.source is None for atom in view.dims[dim]):
        return replace(view, dims=(*view.dims[:dim], repeated(length), *view.dims[dim + 1 :]))
    inside = _between(view, dim, begin, length, step)
    if inside is not None:
        return inside
    alone = _alone(view, dim)
    if alone is None:
        return None
    base, dims = alone
    term = terms.make("piece", [base, begin, length, step], (length, *base.shape[1:]))
    return View(term, view.factor, _resized(dims, dim, length))


def _between(view: View, dim: int, begin: int, length: int, step: int) -> View | None:
    """What is between the zeros, if that is what is taken."""
    found = _padded(view)
    if found is None or found[0] != dim or step != 1:
        return None
    _, place = found
    if (place.before, place.after, place.begin, place.length) != (1, 1, begin, length):
        return None
    return _inner(view, dim, place)


def padded(terms: Terms, view: View, dim: int, begin: int, total: int) -> View | None:
    """A value with zeros around a dimension; None if that is no range of the elements of its term."""
    if view.shape[dim] == total:
        return view
    alone = _alone(view, dim)
    if alone is None:
        return None
    base, dims = alone
    term = terms.make("padded", [base, begin, total], (total, *base.shape[1:]))
    return View(term, view.factor, _resized(dims, dim, total))


def _resized(dims: Dims, dim: int, size: int) -> Dims:
    return (*dims[:dim], () if size == 1 else (Atom(0, 1, size),), *dims[dim + 1 :])


def _range(view: View, size: int) -> tuple[int, int, int] | None:
    """The dimension that has the first digit of a view's term, whole, and the sizes before and after it."""
    for dim, atoms in enumerate(view.dims):
        for position, atom in enumerate(atoms):
            if atom.source == 0:
                before, after = atoms[:position], atoms[position + 1 :]
                if (atom.stride, atom.size) != (1, size):
                    return None
                return dim, math.prod(a.size for a in before), math.prod(a.size for a in after)
    return None


def _cuts(view: View) -> list[tuple[int, Range]]:
    """Of a piece, its dimension and range: of a piece of one element each dimension of size 1, as it is all of them."""
    if view.term.operation != "piece":
        return []
    base, begin, length, step = view.term.operands
    if length == 1:
        return [(dim, Range(1, begin, 1, step, base.shape[0], 1)) for dim, own in enumerate(view.dims) if not own]
    found = _range(view, length)
    return [(found[0], Range(found[1], begin, length, step, base.shape[0], found[2]))] if found else []


def _padded(view: View) -> tuple[int, Range] | None:
    """Of what has zeros around it, its dimension, and the range that is not zero."""
    if view.term.operation != "padded":
        return None
    base, begin, total = view.term.operands
    found = _range(view, total)
    return found and (found[0], Range(found[1], begin, base.shape[0], 1, total, found[2]))


def _inner(view: View, dim: int, place: Range) -> View:
    """The value of which a view shows a piece, or that it shows with zeros."""
    base: View = view.term.operands[0]
    size = base.shape[0]
    full = () if size == 1 else (Atom(0, 1, size),)
    dims = list(view.dims)
    dims[dim] = tuple(new for atom in dims[dim] for new in (full if atom.source == 0 else (atom,))) or full
    return View(base.term, view.factor * base.factor, through(dims, base.dims))


# -- operations on pieces --------------------------------------------------------------------------------------


@lemma
def a_piece_is_a_term_of_its_elements(terms: Terms, made: Whole) -> View | None:
    """However its dimensions are ordered."""
    if made.operation != "piece":
        return None
    (view,), (dim, begin, length, step) = made.operands, made.constants
    return piece(terms, view, dim, begin, length, step)


@lemma
def a_gradient_of_a_slice_is_padded(terms: Terms, made: Whole) -> View | None:
    """With zeros where the slice was not."""
    if made.operation is not aten.slice_backward.default:
        return None
    (view,), (dim, size, *bounds) = made.operands, made.constants
    place = range(size)[slice(*bounds)]
    return padded(terms, view, dim, place.start, size) if place.step == 1 and len(place) == view.shape[dim] else None


@lemma
def pieces_that_are_joined_in_order_are_one(terms: Terms, made: Whole) -> View | None:
    """Each begins where the one before it ends."""
    if made.operation != "cat":
        return None
    dim = made.constants
    places = [place for view in made.operands for at, place in _cuts(view) if at == dim]
    if len(places) < len(made.operands):
        return None
    first = places[0]
    if any(replace(each, begin=0, length=0) != replace(first, begin=0, length=0) for each in places):
        return None
    if (first.before, first.after, first.step) != (1, 1, 1) or not _follow(places):
        return None
    inner = {_inner(view, dim, each) for view, each in zip(made.operands, places, strict=True)}
    if len(inner) > 1:
        return None
    return piece(terms, inner.pop(), dim, first.begin, sum(each.length for each in places), 1)


def _follow(places: Sequence[Range]) -> bool:
    return all(one.begin + one.length == after.begin for one, after in itertools.pairwise(places))


@lemma
def what_is_computed_of_pieces_is_a_piece(terms: Terms, made: Whole) -> View | None:
    """Of every operand the same piece, along a dimension that runs through the operation or is summed over."""
    cuts = ((labels[dim], place) for view, labels in _operands(made) for dim, place in _cuts(view))
    for label, place in cuts:
        if _runs(made, label):
            operands = _changed(made, label, place.whole, lambda v, dim, place=place: _uncut(v, dim, place))
            if operands is not None:
                return _of_pieces(terms, made, operands, label, place)
    return None


def _operands(made: Whole) -> Iterator[tuple[View, Sequence[Label]]]:
    return zip(made.operands, made.rule.operands, strict=True)


def _runs(made: Whole, label: Label) -> bool:
    return label is not None and (label in made.rule.results[made.index] or made.rule.reduced.get(str(label)) == "sum")


def _changed(made: Whole, label: Label, size: int, change: Any) -> list[View] | None:
    """The operands, each of whose dimensions with a label is changed; where elements repeat there are ``size``."""
    operands = list(made.operands)
    for position, labels in enumerate(made.rule.operands):
        for dim, own in enumerate(labels):
            if own != label:
                continue
            view = operands[position]
            again = all(atom.source is None for atom in view.dims[dim])
            new = None if again and view.dims[dim] else change(view, dim)
            if new is None and again:
                new = replace(view, dims=(*view.dims[:dim], repeated(size), *view.dims[dim + 1 :]))
            if new is None:
                return None
            operands[position] = new
    return operands


def _uncut(view: View, dim: int, place: Range) -> View | None:
    return _inner(view, dim, place) if (dim, place) in _cuts(view) else None


def _of_pieces(terms: Terms, made: Whole, operands: list[View], label: Label, place: Range) -> View | None:
    full = _result(terms, made, operands, label, place.whole)
    if full is None:
        return None
    labels = made.rule.results[made.index]
    if label in labels:
        return _within(full, labels.index(label), place, place.total, lambda view, dim: piece(
            terms, view, dim, place.begin, place.length, place.step
        ))  # fmt: skip
    sums = View(full.term, 1.0, full.dims)
    term = terms.make("part of a sum", [sums, str(label), place], made.sizes)
    return View(term, full.factor, whole(made.sizes))


def _result(terms: Terms, made: Whole, operands: list[View], label: Label, size: int) -> View | None:
    """The operation on other operands, which have ``size`` elements along a dimension."""
    labels = made.rule.results[made.index]
    sizes = [size if own == label else old for own, old in zip(labels, made.sizes, strict=True)]
    return result(terms, replace(made, operands=operands, sizes=sizes))


def _within(view: View, dim: int, place: Range, size: int, change: Any) -> View | None:
    """A view whose digit of ``size`` within a dimension is changed."""
    parts = regrouped(view.dims[dim], [place.before, size, place.after])
    if parts is None:
        return None
    new = change(replace(view, dims=(*view.dims[:dim], *parts, *view.dims[dim + 1 :])), dim + 1)
    if new is None:
        return None
    again = joined(atom for each in new.dims[dim : dim + 3] for atom in each)
    return replace(new, dims=(*new.dims[:dim], again, *new.dims[dim + 3 :]))


@lemma
def what_is_linear_in_zeros_has_zeros(terms: Terms, made: Whole) -> View | None:
    """And a sum over them needs no more than what is between them."""
    for position, view in enumerate(made.operands):
        found = _padded(view)
        label = made.rule.operands[position][found[0]] if found else None
        if found is None or not _runs(made, label):
            continue
        place = found[1]
        alike = {i for i, each in enumerate(made.operands) if _zeros(each, made.rule.operands[i], label, place)}
        if not any(set(together) <= alike for together in made.rule.linear):
            continue
        operands = _changed(made, label, place.size, lambda v, dim, at=place: _shortened(terms, v, dim, at))
        short = None if operands is None else _result(terms, made, operands, label, place.size)
        labels = made.rule.results[made.index]
        if short is None or label not in labels:
            return short
        return _within(short, labels.index(label), place, place.length, lambda view, dim, at=place: padded(
            terms, view, dim, at.begin, at.total
        ))  # fmt: skip
    return None


def _zeros(view: View, labels: Sequence[Label], label: Label, place: Range) -> bool:
    found = _padded(view)
    return found is not None and labels[found[0]] == label and found[1] == place


def _shortened(terms: Terms, view: View, dim: int, place: Range) -> View | None:
    if _padded(view) == (dim, place):
        return _inner(view, dim, place)
    return _within(view, dim, place, place.total, lambda v, at: piece(terms, v, at, place.begin, place.length, 1))


# -- products and sums ----------------------------------------------------------------------------------------


@lemma
def a_product_has_no_order(terms: Terms, made: Whole) -> View | None:
    """The factors by their number, as :func:`shardgraph.proof.rules.pointwise` puts them."""
    if made.operation is not aten.mul.Tensor or len(made.operands) != 2:
        return None
    one, other = made.operands
    if one.order <= other.order:
        return None
    turned = replace(made.rule, operands=made.rule.operands[::-1])
    return result(terms, replace(made, operands=made.operands[::-1], rule=turned))


@lemma
def a_sum_has_no_order(terms: Terms, made: Whole) -> View | None:
    """Sums of the same values, and of sums of them, are one term in any order: that of pieces may be another one than
    that of what they are pieces of."""
    if made.operation != "sum":
        return None
    flat = summands = [replace(v, factor=v.factor * f) for v, f in zip(made.operands, made.constants, strict=True)]
    if any(view.term.operation == ("sum", 0) for view in summands):
        flat = [each for view in summands for each in addends(Held(view.term, view.factor, view.dims), made.sizes)]
    if len(flat) == len(summands) and made.operands == sorted(made.operands, key=lambda view: view.order):
        return None
    return sum_of(terms, collected(terms, flat), made.sizes)


@collecting
def parts_of_a_sum(terms: Terms, summands: list[View]) -> list[View]:
    """Those that follow on each other as one; each counts once."""
    parts = [view for view in summands if view.term.operation == "part of a sum"]
    for one, other in itertools.permutations(parts, 2):
        both = _followed(terms, one, other)
        if both is not None:
            return parts_of_a_sum(terms, [*(each for each in summands if each not in (one, other)), both])
    return summands


def _followed(terms: Terms, one: View, other: View) -> View | None:
    (sums, label, place), (others, same, rest) = one.term.operands, other.term.operands
    alike = (sums, label, replace(place, begin=0, length=0)) == (others, same, replace(rest, begin=0, length=0))
    if not alike or place.step != 1 or place.begin + place.length != rest.begin:
        return None
    if (one.dims, one.factor) != (other.dims, other.factor):
        return None
    both = replace(place, length=place.length + rest.length)
    if both.length == both.total:
        return View(sums.term, one.factor * sums.factor, through(one.dims, sums.dims))
    return replace(one, term=terms.make("part of a sum", [sums, label, both], one.term.shape))
