"""Arrangements of elements as terms of their own, where ranks share elements of which the term has no one digit.

Such as rows of images and heads together, or heads that are repeated: ``[2 heads, each twice]`` among four ranks. They
live from where ranks take their parts to the next operation that computes something, whose operands are the elements'
own terms again.
"""

from __future__ import annotations

from dataclasses import replace

from shardgraph.proof.held import Held, UntypedError, divided, patterns, through
from shardgraph.proof.terms import Terms, View

_ARRANGED = "arranged"


def arranged(terms: Terms, held: Held) -> Held:
    """The same elements on the same ranks, each dimension of the whole as one digit of a term."""
    if held.uneven is not None:
        raise UntypedError("unequal rows are arranged")
    view = replace(held.view, factor=1.0)
    term = terms.make(_ARRANGED, [view], view.shape)
    return replace(held, term=term, dims=tuple(divided(k, patterns(dim)) for k, dim in enumerate(held.dims)))


def is_arranged(held: Held) -> bool:
    """Whether it is of such a term."""
    return bool(held.term.operation == _ARRANGED)


def unarranged(view: View) -> View:
    """The view of the term that has the elements."""
    while view.term.operation == _ARRANGED:
        (inner,) = view.term.operands
        view = View(inner.term, view.factor * inner.factor, through(view.dims, inner.dims))
    return view


def settled(held: Held) -> Held:
    """What ranks hold of the term that has the elements, if they share digits of that."""
    if not is_arranged(held):
        return held
    (inner,) = held.term.operands
    try:
        dims = through(held.dims, inner.dims)
    except UntypedError:
        return held
    return settled(replace(held, term=inner.term, factor=held.factor * inner.factor, dims=dims))
