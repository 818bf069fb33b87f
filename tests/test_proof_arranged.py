"""Ranks' parts of what is no one dimension of a term: computed, and of the terms that the whole has."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from shardgraph import ir
from shardgraph.proof.held import Held, of_term
from tests.proof_values import AXIS, Small

aten = torch.ops.aten


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape)))


def repeated(small: Small, heads: fx.Node, times: int) -> fx.Node:
    """Each head of ``[heads, width]`` several times."""
    count, width = small.values[heads][0].shape
    wide = small.call(aten.expand.default, small.call(aten.unsqueeze.default, heads, 1), [count, times, width])
    return small.call(aten.view.default, small.call(aten.clone.default, wide), [count * times, width])


def with_queries(divided: bool) -> Held:
    """Four heads of queries times two of keys, each twice; whole, or on four ranks with a head each."""
    small = Small(4)
    queries = small.input(numbers(4, 6), 0 if divided else None)
    keys = repeated(small, small.input(numbers(2, 6)), 2)
    keys = small.call(ir.local_part, keys, 0, 1, AXIS) if divided else keys
    return small.check(small.call(aten.mul.Tensor, queries, keys))


def test_fewer_heads_of_keys_than_ranks_are_those_of_the_whole_product():
    parts, whole = with_queries(divided=True), with_queries(divided=False)
    assert parts.shape == (1, 6) and parts.marks[AXIS].size == 4
    assert _named(parts) == _named(whole)


def _named(held: Held) -> str:
    """A term by its operation and operands, to compare those of two programs."""
    views = held.term.operands[0]
    return str([(view.term.operation, view.term.operands, view.dims) for view in views])


def exchanged(small: Small, order: list[int]) -> fx.Node:
    """``[batch, rows, heads, width]``, of which ranks have parts of the width, to a batch and a head for each rank."""
    parts = small.input(numbers(2, 3, 2, 8), 3)
    rows = small.call(aten.permute.default, parts, order)
    rows = small.call(aten.clone.default, rows, memory_format=torch.contiguous_format)
    sizes = small.values[rows][0].shape
    rows = small.call(aten.view.default, rows, [sizes[0] * sizes[1], *sizes[2:]])
    return small.call(ir.ALL_TO_ALL, rows, [1] * 4, [1] * 4, AXIS)


def test_rows_that_are_batches_and_heads_are_exchanged():
    small = Small(4)
    received = small.check(exchanged(small, [0, 2, 1, 3]))
    assert received.shape == (4, 3, 2) and received.marks[AXIS].size == 4


def test_what_is_gathered_again_is_of_the_term_that_it_was():
    small = Small(4)
    heads = small.input(numbers(2, 6))
    part = small.call(ir.local_part, repeated(small, heads, 2), 0, 1, AXIS)
    gathered = small.check(small.call(ir.ALL_GATHER, part, 4, AXIS))
    assert gathered.term is of_term(small.held[ir.Input(0)].term).term and not gathered.marks


@pytest.mark.parametrize("other", [[2, 0, 1, 3], [0, 2, 3, 1]])
def test_rows_in_another_order_are_other_values(other):
    small = Small(4)
    right, wrong = exchanged(small, [0, 2, 1, 3]), exchanged(small, other)
    assert small.check(right).term is not small.check(wrong).term
