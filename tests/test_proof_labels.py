"""What operands of one operation may be divided along together."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shardgraph.proof.held import Held, UntypedError, of_term, viewed
from shardgraph.proof.labels import apply, elementwise
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


def as_gathered(value: Held, ranks: int) -> Held:
    """The rows of sequences of which each rank has a part, those of a rank together."""
    sequences, positions, width = value.shape
    apart = viewed(value, [sequences, ranks, positions // ranks, width])
    order = (1, 0, 2, 3)
    return viewed(apart.with_dims([apart.dims[dim] for dim in order]), [sequences * positions, width])


@pytest.mark.parametrize("marked", [False, True], ids=["whole", "columns of ranks"])
def test_rows_as_gathered_make_the_term_that_rows_of_the_batch_make(marked):
    terms = Terms()
    x, weight = matrix(terms, "x", 4, 6, 8), matrix(terms, "w", 8, 10)
    if marked:
        weight = part(weight, 1, 1, "tp", 2)
    plain, gathered = (product(terms, rows, weight) for rows in (viewed(x, [24, 8]), as_gathered(x, 2)))
    width = plain.shape[-1]
    assert gathered.term is plain.term and gathered.dims != plain.dims
    assert gathered == as_gathered(viewed(plain, [4, 6, width]), 2)


def test_a_product_along_rows_in_one_order_is_their_sum_and_in_two_it_is_not():
    terms = Terms()
    x, y = matrix(terms, "x", 4, 6, 8), matrix(terms, "y", 4, 6, 10)
    plain_x, plain_y = viewed(x, [24, 8]), viewed(y, [24, 10])

    def summed(left: Held, right: Held) -> Held:
        return product(terms, left.with_dims(left.dims[::-1]), right)

    assert summed(as_gathered(x, 2), as_gathered(y, 2)) == summed(plain_x, plain_y)
    assert summed(as_gathered(x, 2), plain_y).term is not summed(plain_x, plain_y).term


def test_a_sum_of_rows_in_two_orders_is_another_term():
    terms = Terms()
    x, y = matrix(terms, "x", 4, 6, 8), matrix(terms, "y", 4, 6, 8)

    def added(one: Held, other: Held) -> Held:
        return elementwise(terms, aten.mul.Tensor, [one, other], None)

    plain = added(viewed(x, [24, 8]), viewed(y, [24, 8]))
    assert added(as_gathered(x, 2), as_gathered(y, 2)).term is plain.term
    assert added(as_gathered(x, 2), viewed(y, [24, 8])).term is not plain.term
