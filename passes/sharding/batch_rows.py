"""Finds along which dimension of what a graph draws the rows of the batch lie."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import fx

from shardgraph.errors import PlanError
from shardgraph.ir import Input, JointGraph, placeholders
from shardgraph.ir.attributes import SOURCE
from shardgraph.passes.sharding.legal import Legal, Value, draws, reached, value_of
from shardgraph.passes.sharding.options import results
from shardgraph.passes.sharding.placements import Placement, blocks, cut_of

aten = torch.ops.aten

OF_SHAPE = (
    aten.native_dropout.default,
    aten.rand_like.default,
    aten.randn_like.default,
    aten.randint_like.default,
    aten.randint_like.low_dtype,
    aten.bernoulli.p,
)
"""Operations that draw in the shape of their operand, whatever its values are."""


@dataclass(frozen=True)
class Rows:
    """Where rows lie in a tensor: ``dim`` has so many ``blocks``, each of which is ``each`` entries for every row."""

    dim: int
    blocks: int
    each: int


def drawn_rows(joint: JointGraph) -> dict[str, Rows | None]:
    """For each operation that draws, by name, where the batch's rows lie in what it draws; None: it has no rows, and is
    the same for every batch.

    Raises:
        PlanError: that cannot be told of one; the message has its line.
    """
    gm = joint.module
    inputs = [node for role, node in placeholders(gm).items() if isinstance(role, Input)]
    starts = [node for node in inputs if _rows_of(node) == joint.rows]
    legal = Legal(gm, 1, {}, Counter())
    followed = _followed(legal, starts)
    if joint.rows == 1 and len(starts) > 1:  # is it one row of the batch, or one for all rows?
        of_first = _followed(legal, starts[:1])
        unsure = {value for value in followed if followed[value] != of_first.get(value)}
    else:
        unsure = set()
    depends = _downstream(gm, inputs)
    return {
        node.name: _drawn(node, joint.rows, followed, unsure, node in depends) for node in gm.graph.nodes if draws(node)
    }


def _rows_of(node: fx.Node) -> int | None:
    value = node.meta.get("val")
    return value.shape[0] if isinstance(value, torch.Tensor) and value.dim() else None


def _followed(legal: Legal, starts: list[fx.Node]) -> dict[Value, set[Placement]]:
    return reached(legal, {(node, 0): {blocks(0, 1)} for node in starts})


def _downstream(gm: fx.GraphModule, inputs: list[fx.Node]) -> set[fx.Node]:
    """What is computed from inputs of the call."""
    found = set(inputs)
    for node in gm.graph.nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _drawn(
    node: fx.Node, rows: int, followed: dict[Value, set[Placement]], unsure: set[Value], depends: bool
) -> Rows | None:
    shape = results(node)[0].shape
    if not depends and node.all_input_nodes:
        return None  # in the shape of a parameter or a buffer
    if not shape:
        return None  # one number for all
    if node.target in OF_SHAPE and (value := value_of(node.all_input_nodes[0])) not in unsure:
        cuts = [cut_of(placement) for placement in followed.get(value, ())]
        if len(cuts) == 1:
            dim, count = cuts[0]
            if shape[dim] % (count * rows) == 0:
                return Rows(dim, count, shape[dim] // (count * rows))
    raise PlanError(
        f"random='samples' draws the numbers of all ranks' batches, and cannot tell which of those that "
        f"{node.name} of shape {tuple(shape)} ({SOURCE.get(node) or 'no line known'}) draws are of which row of the "
        "batch: draw in the shape of something that is computed for each row, with dropout, torch.rand_like, "
        "randn_like or randint_like, or leave random out"
    )
