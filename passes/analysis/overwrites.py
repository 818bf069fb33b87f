"""Which operations write their result into their operand, which nobody reads any more.

Graphs are functional, so that passes may move and prove what they do. As they run, a gradient is reduced and divided
where it is: a new tensor for each would be another pass over memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from shardgraph import ir
from shardgraph.torch_api import OpOverload

aten = torch.ops.aten

WRITES: dict[Any, Any] = {ir.ALL_REDUCE: ir.ALL_REDUCE_, aten.div.Tensor: aten.div_.Tensor}
"""Operations with the one that does the same in place."""


def overwrites(gm: fx.GraphModule, held: Mapping[fx.Node, Sequence[Any]], start: int = 0) -> Iterator[fx.Node]:
    """The nodes whose result may be in the memory of their first operand.

    That memory is the graph's own, and dies there. ``held`` are the storages of each node's value, with their deaths if
    nothing works in place; ``start`` is the point of the first node.
    """
    made: dict[Any, bool] = {}
    for point, node in enumerate(gm.graph.nodes, start):
        for storage in held[node]:
            if storage not in made:
                made[storage] = _is_made(node)
        if _has_form(node):
            (storage,) = held[node.args[0]]
            if made[storage] and storage.death == point:
                yield node


def _has_form(node: fx.Node) -> bool:
    """Whether an operation has a form that works in place, and its operand is laid out as its result."""
    if node.target not in WRITES or any(isinstance(other, fx.Node) for other in node.args[1:]):
        return False
    operand, result = node.args[0].meta["val"], node.meta["val"]
    same = operand.dtype == result.dtype and operand.shape == result.shape
    whole = operand.untyped_storage().nbytes() == operand.nbytes  # else the result would hold more than it needs
    return whole and same and operand.is_contiguous() and result.is_contiguous()


def _is_made(node: fx.Node) -> bool:
    """Whether the first of what is in some memory made it, by what is known of its operation."""
    if ir.is_collective(node) or node.target is ir.buckets.pack:
        return True
    return isinstance(node.target, OpOverload) and node.target.namespace == "aten"
