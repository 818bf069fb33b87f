"""Values that are joined and taken apart again."""

from __future__ import annotations

import itertools

from shardgraph.proof.held import through
from shardgraph.proof.labels import Whole, lemma
from shardgraph.proof.terms import Atom, Terms, View, whole


@lemma
def a_piece_of_joined_values_is_one_of_them(terms: Terms, made: Whole) -> View | None:
    """If it begins and ends where one does."""
    if made.operation != "piece":
        return None
    (view,), (dim, begin, length, step) = made.operands, made.constants
    if view.term.operation != ("cat", 0) or step != 1:
        return None
    values, along = view.term.operands
    if view.dims[dim] != whole(view.term.shape)[along]:
        return None
    sizes = [value.shape[along] for value in values]
    for value, size, end in zip(values, sizes, itertools.accumulate(sizes), strict=True):
        if (begin, length) == (end - size, size):
            dims = list(view.dims)
            dims[dim] = (Atom(along, 1, size),) if size > 1 else ()
            return View(value.term, view.factor * value.factor, through(dims, value.dims))
    return None
