"""Forms of terms: what a term is but for which inputs it is of.

Two terms have one form if one becomes the other when inputs are renamed, as those of equal layers of a model do. What
is derived of a term for all values of its inputs holds for each term of its form.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any, NamedTuple

from shardgraph.proof.terms import Term, Terms, View, key_of, views_of

Leaves = tuple[Term, ...]

_MOST = 64
"""Inputs of a term with a form: more have values of many layers, which no other value is like."""


class Formed(NamedTuple):
    """A number for the form, and the inputs in the order in which the form has them."""

    form: int
    leaves: Leaves


class Forms:
    """The forms of ``terms``."""

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self._numbers: dict[Any, int] = {}
        self._formed: dict[Term, Formed | None] = {}
        self._made: dict[Formed, Term] = {}

    def of(self, term: Term) -> Formed | None:
        """The form of a term; None if it has too many inputs."""
        if term not in self._formed:
            formed = self._formed[term] = self._of_leaf(term) if term.is_leaf else self._of_operation(term)
            if formed is not None:
                self._made[formed] = term
        return self._formed[term]

    def number(self, key: Any) -> int:
        """A number for what is equal to ``key``."""
        return self._numbers.setdefault(key, len(self._numbers))

    def term(self, like: Term, leaves: Leaves) -> Term:
        """The term of the form of ``like`` with other inputs."""
        formed = self._formed[like]
        assert formed is not None
        if formed.leaves == leaves:
            return like
        wanted = Formed(formed.form, leaves)
        if wanted not in self._made:
            renamed = dict(zip(formed.leaves, leaves, strict=True))
            self._made[wanted] = made = self._terms.like(like, self._renamed(like.operands, renamed))
            self.of(made)
        return self._terms.current(self._made[wanted])

    def _renamed(self, value: Any, renamed: dict[Term, Term]) -> Any:
        if isinstance(value, View):
            formed = self._formed[value.term]
            assert formed is not None
            term = self.term(value.term, tuple([renamed[leaf] for leaf in formed.leaves]))
            return value if term is value.term else View(term, value.factor, value.dims)
        if isinstance(value, (list, tuple)):
            made = [self._renamed(each, renamed) for each in value]
            return value if all(map(is_, made, value)) else getattr(type(value), "_make", type(value))(made)
        if isinstance(value, dict):
            return {name: self._renamed(each, renamed) for name, each in value.items()}
        return value

    def _of_leaf(self, term: Term) -> Formed:
        return Formed(self.number(("leaf", term.shape, term.varies)), (term,))

    def _of_operation(self, term: Term) -> Formed | None:
        operands = [(view, self.of(view.term)) for view in views_of(term.operands)]
        places: dict[Term, int] = {}
        read = []
        for _, formed in operands:
            if formed is None:
                return None
            read.append((formed.form, places_of(formed.leaves, places)))
        if len(places) > _MOST:
            return None
        rest = key_of(term.operands, lambda view: (view.factor, view.dims))
        return Formed(self.number((term.operation, rest, term.shape, term.varies, tuple(read))), tuple(places))


def places_of(leaves: Sequence[Term], places: dict[Term, int]) -> tuple[int, ...]:
    """For each leaf its number in ``places``, which get those that they have not."""
    return tuple([places.setdefault(leaf, len(places)) for leaf in leaves])
