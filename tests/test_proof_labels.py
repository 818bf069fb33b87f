"""What operands of one operation may be divided along together."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shardgraph.proof.held import Held, UntypedError, of_term
from shardgraph.proof.labels import apply
from shardgraph.proof.rules import RULES
from shardgraph.proof.shards import part
from shardgraph.proof.terms import Atom, Terms

aten = torch.ops.aten


def product(terms: Terms, left: Held, right: Held) -> Held:
    (result,) = apply(terms, aten.mm.default, *RULES[aten.mm.default](left, right))
    return result


def matrix(terms: Terms, name: str, *shape: int) -> Held:
    return of_term(terms.make("input", [name], shape))


def test_a_diagonal_of_blocks_is_no_division():
    terms = Terms()
    rows, columns = part(matrix(terms, "x", 4, 6), 0, 1, "tp", 2), part(matrix(terms, "w", 6, 8), 1, 1, "tp", 2)
    with pytest.raises(UntypedError, match="its part of two dimensions"):
        product(terms, rows, columns)


def test_each_rank_s_columns_of_its_own_summand_are_no_columns_of_the_sum():
    terms = Terms()
    summands = replace(matrix(terms, "x", 4, 6), partial=frozenset({("tp", "sum")}))
    with pytest.raises(UntypedError, match="summands of another"):
        product(terms, summands, part(matrix(terms, "w", 6, 8), 1, 1, "tp", 2))


def test_products_of_one_batch_with_another_are_not_known():
    terms = Terms()
    x, y = (terms.make("input", [name], (3, 3), ["dp"]) for name in "xy")
    batch = Atom("dp", 1, 2)
    rows = Held(x, 1.0, ((batch, Atom(0, 1, 3)), (Atom(1, 1, 3),)))
    columns = Held(y, 1.0, ((Atom(0, 1, 3),), (batch, Atom(1, 1, 3))))
    with pytest.raises(UntypedError, match="its part of two dimensions"):
        product(terms, rows, columns)
