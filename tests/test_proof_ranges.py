"""Pieces, zeros around a value and parts of a sum: each lemma on small tensors, and chunks that are not all of it."""

from __future__ import annotations

from functools import reduce

import pytest
import torch
from torch import fx

from shardgraph.proof.held import Held
from tests.proof_values import Small

aten = torch.ops.aten

ROWS, WIDTH = 6, 4
BOUNDS = [(0, 2), (2, 4), (4, 6)]
ONE_ROW_LEFT = [(0, 5), (5, 6)]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def pieces(small: Small, whole: fx.Node, bounds: list[tuple[int, int]], dim: int = 0) -> list[fx.Node]:
    return [small.call(aten.slice.Tensor, whole, dim, start, end) for start, end in bounds]


def same(small: Small, one: fx.Node, other: fx.Node) -> bool:
    """Whether two results are proved to be one value; each is compared with what was computed, too."""
    first, second = small.check(one), small.check(other)
    assert isinstance(first, Held)
    return first == second


# -- by rows ---------------------------------------------------------------------------------------------------


def _soft(small: Small, x: fx.Node, weight: fx.Node) -> fx.Node:
    return small.call(aten._log_softmax.default, small.call(aten.mm.default, x, weight), 1, False)


@pytest.mark.parametrize("bounds", [BOUNDS, ONE_ROW_LEFT], ids=["of equal length", "the last of one row"])
def test_results_of_chunks_that_are_joined_are_those_of_the_whole(bounds):
    small = Small(1)
    x, weight = small.input(random(ROWS, WIDTH)), small.input(random(WIDTH, 5))
    joined = small.call(aten.cat.default, [_soft(small, each, weight) for each in pieces(small, x, bounds)])
    assert same(small, joined, _soft(small, x, weight))


def test_differences_of_pieces_are_those_of_the_whole_whichever_piece_is_made_first():
    small = Small(1)
    x, y = small.input(random(ROWS, WIDTH)), small.input(random(ROWS, WIDTH) + 1)

    def difference(one: fx.Node, other: fx.Node) -> fx.Node:
        return small.call(aten.sub.Tensor, one, small.call(aten.mul.Tensor, other, 0.35))

    others = pieces(small, y, BOUNDS)
    joined = small.call(aten.cat.default, list(map(difference, pieces(small, x, BOUNDS), others)))
    assert same(small, joined, difference(x, y))


@pytest.mark.parametrize(
    "bounds",
    [
        [(0, 2), (2, 4)],
        [(0, 2), (2, 4), (2, 4)],
        [(0, 2), (4, 6), (2, 4)],
        [(0, 2), (2, 5), (3, 6)],
        [(0, 3), (4, 6)],
        [(0, 5), (4, 5)],
    ],
    ids=[
        "one is missing",
        "one is there twice",
        "in another order",
        "they overlap",
        "a row is missing",
        "another row is the last",
    ],
)
def test_chunks_that_are_not_all_rows_in_order_are_not_the_whole(bounds):
    small = Small(1)
    x, weight = small.input(random(ROWS, WIDTH)), small.input(random(WIDTH, 5))
    joined = small.call(aten.cat.default, [_soft(small, each, weight) for each in pieces(small, x, bounds)])
    assert not same(small, joined, _soft(small, x, weight))


def test_operands_cut_at_different_rows_stay_apart():
    small = Small(1)
    x, y = small.input(random(ROWS, WIDTH)), small.input(random(ROWS, WIDTH) + 1)
    ((one,), (other,)) = pieces(small, x, [(0, 2)]), pieces(small, y, [(1, 3)])
    product = small.call(aten.mul.Tensor, one, other)
    (whole,) = pieces(small, small.call(aten.mul.Tensor, x, y), [(0, 2)])
    assert not same(small, product, whole)


def test_rows_of_a_flattened_value_are_cut_across_its_dimensions():
    small = Small(1)
    x, weight = small.input(random(2, 3, WIDTH)), small.input(random(WIDTH, 5))
    flat = small.call(aten.view.default, x, [ROWS, WIDTH])
    joined = small.call(aten.cat.default, [_soft(small, each, weight) for each in pieces(small, flat, BOUNDS)])
    assert same(small, joined, _soft(small, flat, weight))


# -- sums ------------------------------------------------------------------------------------------------------


def _products(small: Small, left: fx.Node, right: fx.Node, bounds: list[tuple[int, int]]) -> fx.Node:
    """The sum of products of columns with rows."""
    total = None
    for start, end in bounds:
        ((one,), (other,)) = pieces(small, left, [(start, end)], 1), pieces(small, right, [(start, end)])
        product = small.call(aten.mm.default, one, other)
        total = product if total is None else small.call(aten.add.Tensor, total, product)
    assert total is not None
    return total


@pytest.mark.parametrize("bounds", [[(2, 4), (4, 6), (0, 2)], [(5, 6), (0, 5)]])
def test_sums_over_chunks_are_the_sum(bounds):
    small = Small(1)
    left, right = small.input(random(3, ROWS)), small.input(random(ROWS, WIDTH))
    total = _products(small, left, right, bounds)
    assert same(small, total, small.call(aten.mm.default, left, right))


@pytest.mark.parametrize(
    "bounds",
    [[(0, 2), (2, 4)], [(0, 2), (2, 4), (4, 6), (2, 4)], [(0, 3), (2, 6)], [(0, 2), (3, 6)], [(0, 5), (4, 5)]],
    ids=["one is missing", "one is there twice", "they overlap", "a row is missing", "another row is the last"],
)
def test_sums_over_chunks_that_are_not_each_row_once_are_not_the_sum(bounds):
    small = Small(1)
    left, right = small.input(random(3, ROWS)), small.input(random(ROWS, WIDTH))
    assert not same(small, _products(small, left, right, bounds), small.call(aten.mm.default, left, right))


@pytest.mark.parametrize("bounds", [BOUNDS, ONE_ROW_LEFT], ids=["of equal length", "the last of one row"])
def test_sums_of_elements_of_chunks_are_the_sum(bounds):
    small = Small(1)
    x = small.input(random(ROWS, WIDTH))
    first, *rest = (small.call(aten.sum.dim_IntList, each, [0]) for each in pieces(small, x, bounds))
    total = reduce(lambda one, other: small.call(aten.add.Tensor, one, other), rest, first)
    assert same(small, total, small.call(aten.sum.dim_IntList, x, [0]))


def test_one_row_of_a_value_and_one_of_another_are_not_a_row_of_their_product():
    small = Small(1)
    x, y = small.input(random(ROWS, WIDTH)), small.input(random(ROWS, WIDTH) + 1)
    ((one,), (other,)) = pieces(small, x, [(1, 2)]), pieces(small, y, [(2, 3)])
    (whole,) = pieces(small, small.call(aten.mul.Tensor, x, y), [(1, 2)])
    assert not same(small, small.call(aten.mul.Tensor, one, other), whole)


def test_a_row_is_not_a_column():
    small = Small(1)
    x = small.input(random(ROWS, ROWS))
    ((row,), (column,)) = pieces(small, x, [(1, 2)]), pieces(small, x, [(1, 2)], 1)
    assert not same(small, small.call(aten.mm.default, row, x), small.call(aten.mm.default, row, small.call(
        aten.mul.Tensor, x, column
    )))  # fmt: skip


def test_the_greatest_of_a_chunk_is_not_the_greatest():
    small = Small(1)
    x = small.input(random(ROWS, WIDTH))
    (piece,) = pieces(small, x, [(0, 2)])
    assert not same(small, small.call(aten.amax.default, piece, [0]), small.call(aten.amax.default, x, [0]))


# -- zeros around a value --------------------------------------------------------------------------------------


def _padded(small: Small, x: fx.Node, start: int = 0) -> fx.Node:
    return small.call(aten.slice_backward.default, x, [ROWS + 2, WIDTH], 0, start, start + ROWS, 1)


def test_products_with_zeros_are_zeros():
    small = Small(1)
    x, weight = small.input(random(ROWS, WIDTH)), small.input(random(WIDTH, WIDTH))
    first = small.call(aten.mm.default, _padded(small, x), weight)
    assert same(small, first, _padded(small, small.call(aten.mm.default, x, weight)))


@pytest.mark.parametrize("start", [0, 1])
def test_a_sum_with_zeros_is_one_over_what_is_between(start):
    small = Small(1)
    x, other = small.input(random(ROWS, WIDTH)), small.input(random(ROWS + 2, 3))
    (between,) = pieces(small, other, [(0, ROWS)])
    sums = [small.call(aten.mm.default, small.call(aten.t.default, a), b) for a, b in (
        (_padded(small, x, start), other), (x, between)
    )]  # fmt: skip
    assert same(small, *sums) == (start == 0)


def test_what_is_not_linear_in_zeros_has_none():
    small = Small(1)
    x = small.input(random(ROWS, WIDTH))
    exponentials = small.call(aten.exp.default, _padded(small, x))
    assert not same(small, exponentials, _padded(small, small.call(aten.exp.default, x)))


def test_a_number_added_to_zeros_is_not_left_out():
    small = Small(1)
    x, bias = small.input(random(ROWS, WIDTH)), small.input(random(WIDTH))
    after = small.call(aten.add.Tensor, _padded(small, x), bias)
    assert not same(small, after, _padded(small, small.call(aten.add.Tensor, x, bias)))


# -- shifts, and what is written in place ----------------------------------------------------------------------


@pytest.mark.parametrize("dim", [0, 1])
def test_only_what_is_constant_within_a_sum_of_exponentials_goes_out_of_it(dim):
    small = Small(1)
    x, shift = small.input(random(ROWS, WIDTH)), small.input(random(ROWS, 1))
    shifted = small.call(aten.exp.default, small.call(aten.add.Tensor, x, shift))
    logarithm = small.call(aten.log.default, small.call(aten.sum.dim_IntList, shifted, [dim], True))
    plain = small.call(aten.sum.dim_IntList, small.call(aten.exp.default, x), [dim], True)
    outside = small.call(aten.add.Tensor, small.call(aten.log.default, plain), shift)
    if dim == 1:
        assert same(small, logarithm, outside)
    else:
        assert small.check(logarithm) != small.typed(outside)


def test_a_value_that_is_read_again_may_not_be_written_in_place():
    small = Small(1)
    left, right = small.input(random(ROWS, WIDTH)), small.input(random(WIDTH, 3))
    product = small.call(aten.mm.default, left, right)
    written = small.call(aten.addmm_.default, product, left, right)
    assert small.check(written)
    small.call(aten.mul.Tensor, product, product)
    assert small.typed(written) is None


def test_an_input_may_not_be_written_in_place():
    small = Small(1)
    total, left, right = (small.input(random(*shape)) for shape in ((ROWS, 3), (ROWS, WIDTH), (WIDTH, 3)))
    assert small.typed(small.call(aten.addmm_.default, total, left, right)) is None
