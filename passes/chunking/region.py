"""The region computed in chunks: the row-wise operations on scores, from the product that makes them to their last use.

A region is found from a normalization of scores (a log-softmax): up to the product of hidden states and vocabulary that
produces them, then down through forward and backward to every value with as many elements. An operation that reads such
a value must be known to be row-wise (:mod:`shardgraph.passes.sharding.by_rows`); otherwise all scores have to exist.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from shardgraph.errors import ShardGraphError
from shardgraph.ir import Output, outputs
from shardgraph.ir.attributes import SOURCE
from shardgraph.passes.sharding.by_rows import PRODUCTS, SUMMED, WHOLE, Form, form_of
from shardgraph.passes.sharding.legal import Value, value_of
from shardgraph.passes.sharding.options import operands, results
from shardgraph.sizes import format_bytes


class NotByRowsError(ShardGraphError):
    """Scores cannot be computed in chunks of rows; the message says why."""


@dataclass(frozen=True)
class Region:
    """Operations to be computed in chunks of rows.

    ``product`` makes the scores of ``rows`` tokens. ``forms`` has every operation in order; ``large`` are the nodes
    whose result is as large as the scores.
    """

    product: fx.Node
    rows: int
    forms: Mapping[fx.Node, Form]
    large: frozenset[fx.Node]

    @property
    def row_bytes(self) -> int:
        """Bytes per row of the largest value."""
        return max(node.meta["val"].nbytes for node in self.large) // self.rows


def find_region(gm: fx.GraphModule, scores: fx.Node) -> Region:
    """The operations of a joint graph to be chunked so that ``scores`` never exist in full.

    Raises:
        NotByRowsError: all scores have to exist at once.
    """
    product = _product_of(scores)
    rows, size = product.meta["val"].shape[0], product.meta["val"].numel()
    forms: dict[fx.Node, Form] = {}
    layouts: dict[Value, int] = {}
    large: set[fx.Node] = set()
    for node in gm.graph.nodes:
        known = [layouts.get(value_of(each)) for each in operands(node)] if node.op == "call_function" else []
        reached = node is product or any(each not in (None, SUMMED) for each in known)
        if not reached or node.target is operator.getitem:
            continue
        form = form_of(node, rows, [None if each == SUMMED else each for each in known])
        if form is None:
            if large.isdisjoint(operands(node)):
                continue
            line = f" ({SOURCE.get(node)})" if SOURCE.get(node) else ""
            name = str(node.target).removeprefix("aten.")
            raise NotByRowsError(f"{name}{line} reads all of them, or is not known to work row by row")
        forms[node] = form
        layouts |= {(node, index): layout for index, layout in enumerate(form.results)}
        if node is not product and node.target in PRODUCTS:
            del layouts[node, 0]  # hidden states again, or a sum over rows: the scores end here
        elif math.prod(results(node)[0].shape) >= size:
            large.add(node)
    for role, value in outputs(gm):
        if value in large and isinstance(role, Output):
            raise NotByRowsError(
                "the model returns them: return the loss alone, or use train_step, which needs no more than the loss"
            )
        if value in large:
            raise NotByRowsError(f"they are the result {role}")
    kept = _kept(forms, large)
    _add_makers(forms, kept, large, product)
    return Region(product, rows, {node: forms[node] for node in gm.graph.nodes if node in kept}, frozenset(large))


def _product_of(scores: fx.Node) -> fx.Node:
    node = scores
    while node.target not in PRODUCTS:
        computed = [each for each in operands(node) if each.op == "call_function"]
        if not computed:
            raise NotByRowsError("they are not the product of hidden states and a matrix")
        node = max(computed, key=lambda each: math.prod(results(each)[0].shape))
    return node


def _kept(forms: Mapping[fx.Node, Form], large: set[fx.Node]) -> set[fx.Node]:
    """Operations that produce or read a large value, and those between them; the rest can run for all rows."""
    kept = {node for node in forms if node in large or any(each in large for each in operands(node))}
    for node in reversed(list(forms)):
        users = [user for each in (node, *pieces(node)) for user in each.users]
        if any(user in kept for user in users) and SUMMED not in forms[node].results:
            kept.add(node)
    return kept


def pieces(node: fx.Node) -> list[fx.Node]:
    """The ``getitem`` users of a node."""
    return [user for user in node.users if user.target is operator.getitem]


def _add_makers(forms: dict[fx.Node, Form], kept: set[fx.Node], large: set[fx.Node], product: fx.Node) -> None:
    """Add constants as large as the scores that are not computed from them but only used by the region."""
    rows, size = product.meta["val"].shape[0], product.meta["val"].numel()
    stack = [each for node in kept - {product} for each in _read_by_rows(node, forms[node])]
    while stack:
        node, layout = stack.pop()
        if node in kept or node.op != "call_function" or not kept.issuperset(node.users):
            continue
        form = form_of(node, rows, [None] * len(operands(node))) if node.meta["val"].numel() >= size else None
        if form is not None and form.results == (layout,) and node.target not in PRODUCTS:
            forms[node] = form
            kept.add(node)
            large.add(node)
            stack += _read_by_rows(node, form)


def _read_by_rows(node: fx.Node, form: Form) -> list[tuple[fx.Node, int]]:
    return [(operand, take) for operand, take in zip(operands(node), form.inputs, strict=True) if take != WHOLE]


def described(region: Region) -> str:
    """The scores, described for users."""
    shape = list(region.product.meta["val"].shape)
    return (
        f"scores {shape} of the loss at {SOURCE.get(region.product) or region.product.name}, "
        f"{format_bytes(region.row_bytes * region.rows)},"
    )
