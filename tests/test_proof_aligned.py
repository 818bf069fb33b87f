"""Where a rank's coordinate stands among dimensions moves no element; operands of one operation agree on it."""

from __future__ import annotations

import torch

from shardgraph.proof.aligned import aligned
from shardgraph.proof.held import Held, of_term
from shardgraph.proof.labels import elementwise
from shardgraph.proof.moves import view
from shardgraph.proof.shards import part
from shardgraph.proof.terms import Atom, Terms

aten = torch.ops.aten


def scattered(terms: Terms) -> Held:
    """A rank's column of a [4, 2], whose coordinate stands before the rows as a view of [1, 4, 1] has left it."""
    x = terms.make("input", ["x"], (4, 2))
    return Held(x, 1.0, ((Atom(1, 1, 2, "tp"), Atom(0, 1, 4)), ()))


def bias(terms: Terms, size: int = 2) -> Held:
    return part(of_term(terms.make("input", ["b"], (size,))), 0, 1, "tp", 2)


def test_the_sum_of_columns_with_their_bias_is_the_column_of_the_whole_sum():
    terms = Terms()
    x, b = of_term(scattered(terms).term), of_term(bias(terms).term)
    whole = elementwise(terms, aten.atan2.default, [x, b], None)
    found = elementwise(terms, aten.atan2.default, [scattered(terms), bias(terms)], None)
    assert found.term is whole.term and found.dims == part(whole, 1, 1, "tp", 2).dims

    x, b = torch.randn(4, 2, dtype=torch.float64), torch.randn(2, dtype=torch.float64)
    ranks = [torch.atan2(x[:, rank : rank + 1], b[rank : rank + 1]) for rank in range(2)]
    assert torch.equal(torch.cat(ranks, 1), torch.atan2(x, b))


def test_coordinates_may_agree_at_a_dimension_where_no_operand_had_them():
    terms = Terms()
    x = terms.make("input", ["x"], (4, 2, 8))
    columns = Held(x, 1.0, ((Atom(1, 1, 2, "tp"), Atom(0, 1, 4)), (), (Atom(2, 1, 8),)))
    wide = view(bias(terms), [1, 1])
    one, other = aligned([columns, wide.with_dims([(), *wide.dims])])
    assert one.view.dims == of_term(x).dims
    assert other.view.dims == ((), (Atom(0, 1, 2),), ())


def test_operands_divided_in_other_blocks_stay_as_they_are():
    terms = Terms()
    columns, rows = scattered(terms), bias(terms, 8)
    wide = rows.with_dims([*rows.dims, ()])
    assert aligned([columns, wide]) == [columns, wide]
