"""Operations with which tokens reach experts and come back: rows looked up and put by index, and batched products."""

from __future__ import annotations

import torch
from torch import fx

from shardgraph.proof.definitions import Typing, added, define
from shardgraph.proof.held import Held, UntypedError
from shardgraph.proof.labels import Label, Rule, apply, jointly, linear
from shardgraph.proof.rules import RULES, Ruled, names, rule

aten = torch.ops.aten


@define(aten.baddbmm.default)
def _baddbmm(
    typing: Typing, node: fx.Node, bias: Held, left: Held, right: Held, *, beta: float = 1, alpha: float = 1
) -> Held:
    """The product of each expert's matrices, and a bias added to it."""
    (product,) = apply(typing.terms, aten.bmm.default, *RULES[aten.bmm.default](left, right))
    return added(typing, product.scaled(alpha), bias.scaled(beta))


@rule(aten.index_select.default)
def _index_select(held: Held, dim: int, index: Held) -> Ruled:
    """Row ``i`` of the result is row ``index[i]``: the other dimensions, and the places, may be divided."""
    dim %= len(held.dims)
    labels = names(held)
    results = [*labels[:dim], "i", *labels[dim + 1 :]]
    labels[dim] = None
    return [held, index], dim, Rule([labels, ["i"]], [results], linear=linear(0))


@rule(aten.index_add.default)
def _index_add(held: Held, dim: int, index: Held, rows: Held, *, alpha: float = 1) -> Ruled:
    """Rows added at places of a dimension; each column by itself."""
    return _rows_added(held, dim % len(held.dims), index, rows, alpha)


def _rows_added(held: Held, dim: int, index: Held, rows: Held, alpha: float) -> Ruled:
    if rows.shape != (*held.shape[:dim], *index.shape, *held.shape[dim + 1 :]):
        raise UntypedError("a row that is added at several places")
    columns = names(held)
    own: list[Label] = [*columns[:dim], None, *columns[dim + 1 :]]
    places: list[Label] = [None] * len(index.dims)
    result: list[Label] = [held.shape[dim] if k == dim else label for k, label in enumerate(columns)]
    operands = [own, [*own[:dim], *places, *own[dim + 1 :]], places]
    return [held, rows, index], [dim, alpha], Rule(operands, [result], linear=jointly(0, 1))
