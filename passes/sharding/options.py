"""The legal options of an operation: combinations of operand and result placements."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor.placement_types import Placement
from torch.utils import _pytree as pytree

from shardgraph.ir.operations import makes_view
from shardgraph.passes.sharding.placements import REPLICATE


@dataclass(frozen=True)
class Option:
    """One way to run an operation on local shards.

    ``operands`` has a placement for each tensor among the flattened arguments, ``results`` one for each tensor that the
    operation returns (None for a result that is not a tensor). ``lowering`` names the replacement for an operation that
    cannot simply run on local shards; see :mod:`shardgraph.passes.sharding.lowerings`. ``sent`` is the number of
    elements that the lowering reduces over the ranks, ``passed`` the number that it sends round the ring while it
    computes.
    """

    operands: tuple[Placement, ...]
    results: tuple[Placement | None, ...]
    lowering: str = ""
    sent: int = 0
    passed: int = 0


@dataclass(frozen=True)
class Operation:
    """A rule's view of a node, and the number of ranks."""

    node: fx.Node
    parts: int

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The values of the operands."""
        return [operand.meta["val"] for operand in operands(self.node)]

    @property
    def result(self) -> torch.Size:
        """The shape of the first result."""
        return results(self.node)[0].shape


Rule = Callable[[Operation], Iterable[Option]]


def is_operation(node: fx.Node) -> bool:
    """Whether the node is an operation; ``getitem`` only selects one of its results."""
    return node.op == "call_function" and node.target is not operator.getitem


def operations(gm: fx.GraphModule) -> list[fx.Node]:
    """The operations of a graph, in order."""
    return [node for node in gm.graph.nodes if is_operation(node)]


def moves_data(node: fx.Node) -> bool:
    """Whether the node is a view or a cast."""
    return makes_view(node.target) or node.target is torch.ops.aten._to_copy.default


def operands(node: fx.Node) -> list[fx.Node]:
    """The tensors among a node's arguments, in order, with repeats."""
    return [leaf for leaf in _nodes((node.args, node.kwargs)) if isinstance(leaf.meta.get("val"), torch.Tensor)]


def _nodes(value: Any) -> Iterator[fx.Node]:
    # Same as pytree.tree_leaves in a tenth of its time: rules call this all the time.
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _nodes(each)
    elif isinstance(value, dict):
        yield from _nodes(tuple(value.values()))


def named_arguments(node: fx.Node, tensors: Sequence[fx.Node] = ()) -> dict[str, Any]:
    """A node's arguments by their names in the operator's schema, with ``tensors`` replacing its own if not empty."""
    names = [argument.name for argument in node.target._schema.arguments]
    places = iter(tensors or operands(node))
    args, kwargs = pytree.tree_map_only(
        fx.Node, lambda n: next(places) if isinstance(n.meta.get("val"), torch.Tensor) else n, (node.args, node.kwargs)
    )
    return dict(zip(names, args, strict=False)) | kwargs


def results(node: fx.Node) -> list[Any]:
    """The values that a node returns; some may be None."""
    value = node.meta.get("val")
    return list(value) if isinstance(value, (tuple, list)) else [value]


def replicated(node: fx.Node) -> Option:
    """The fully replicated option, which is always legal."""
    outs = tuple(REPLICATE if isinstance(value, torch.Tensor) else None for value in results(node))
    return Option((REPLICATE,) * len(operands(node)), outs)
