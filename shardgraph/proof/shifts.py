"""Sums of exponentials: what is constant within a sum goes out of its logarithm.

``log(sum(exp(x + c))) = c + log(sum(exp(x)))``, which is why a softmax may subtract any number of its operands first,
the greatest of them for its range (Milakov and Gimelshein, 2018, https://arxiv.org/abs/1805.02867).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardgraph.proof.definitions import added, addends, collected, sum_of, summed
from shardgraph.proof.held import Held, through
from shardgraph.proof.labels import Whole, lemma
from shardgraph.proof.rules import pointwise
from shardgraph.proof.terms import Atom, Terms, View

aten = torch.ops.aten


@dataclass(frozen=True)
class Among:
    """What definitions need where nothing is on a rank: the terms."""

    terms: Terms


def as_view(held: Held, dims: tuple[tuple[Atom, ...], ...] | None = None) -> View:
    """A value that is whole, through ``dims`` over its own."""
    assert not (held.partial or held.summed or held.marks), "it is not whole"
    return View(held.term, held.factor, held.dims if dims is None else through(dims, held.dims))


@lemma
def log_of_shifted(terms: Terms, made: Whole) -> View | None:
    """The logarithm of a sum of exponentials, without what is constant within the sum."""
    if made.operation is not aten.log.default:
        return None
    (total,) = made.operands
    if total.term.operation != ("sum of elements", 0) or total.factor != 1:
        return None
    (exponentials,), (over, keep) = total.term.operands
    if exponentials.term.operation != (aten.exp.default, 0) or exponentials.factor != 1:
        return None
    (inner,), _ = exponentials.term.operands
    inside = Held(inner.term, inner.factor, through(exponentials.dims, inner.dims))
    summands, positions = addends(inside, inside.shape), [int(label[1:]) for label in over]
    constant = [each for each in summands if _repeats(each, positions)]
    if not constant or len(constant) == len(summands):
        return None
    typing = Among(terms)
    rest = sum_of(terms, collected(terms, [each for each in summands if each not in constant]), inside.shape)
    smaller = summed(typing, pointwise(terms, aten.exp.default, (_held(rest),), {}), positions, keep)
    outside = [_without(each, positions, keep) for each in constant]
    shift = sum_of(terms, collected(terms, outside), outside[0].shape)
    return as_view(added(typing, pointwise(terms, aten.log.default, (smaller,), {}), _held(shift)), total.dims)


def _held(view: View) -> Held:
    """A whole value."""
    return Held(view.term, view.factor, view.dims)


def _repeats(view: View, positions: list[int]) -> bool:
    return all(atom.source is None for k in positions for atom in view.dims[k])


def _without(view: View, positions: list[int], keep: bool) -> View:
    """A value of the size of the sum."""
    dims = [() if k in positions else dim for k, dim in enumerate(view.dims) if keep or k not in positions]
    return View(view.term, view.factor, tuple(dims))
