"""Collectives, and copies between host and device, as nodes: the start and the wait are nodes of their own."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from shardgraph.ir.copies import DIRECTIONS, WAIT_COPY

_c10d = torch.ops._c10d_functional
ALL_GATHER = _c10d.all_gather_into_tensor.default
REDUCE_SCATTER = _c10d.reduce_scatter_tensor.default
ALL_REDUCE = _c10d.all_reduce.default
ALL_TO_ALL = _c10d.all_to_all_single.default
WAIT = _c10d.wait_tensor.default


def send(tensor: torch.Tensor, axis: str) -> torch.Tensor:
    """The tensor of the rank before this one, to the next of which this rank's goes, round the ring of mesh ``axis``.

    Symbolic: :mod:`shardgraph.runtime.bind` replaces it by an all-to-all in which a rank sends all to one other.
    """
    raise RuntimeError(f"send({axis!r}) has no meaning before the graph is bound to a rank")


COLLECTIVES = frozenset({ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, ALL_TO_ALL, send})


def is_collective(node: fx.Node) -> bool:
    """Whether the node starts a collective (its wait is a node of its own)."""
    return node.op == "call_function" and node.target in COLLECTIVES


def collectives(gm: fx.GraphModule) -> Iterator[fx.Node]:
    """The nodes that start a collective, in program order."""
    return (node for node in gm.graph.nodes if is_collective(node))


def is_copy(node: fx.Node) -> bool:
    """Whether the node starts a copy between host and device (its wait is a node of its own)."""
    return node.op == "call_function" and node.target in DIRECTIONS


def is_started(node: fx.Node) -> bool:
    """Whether the node starts what goes on beside the computation: a collective or a copy."""
    return is_collective(node) or is_copy(node)


def is_wait(node: fx.Node) -> bool:
    """Whether the node waits for what its first argument has started."""
    return node.op == "call_function" and node.target in (WAIT, WAIT_COPY)


def group_of(node: fx.Node) -> str:
    """The group argument of a collective: a mesh axis before binding, a process group's name after."""
    return str(node.args[-1])


def describe_collective(node: fx.Node) -> str:
    """The id of a collective, or a copy, for people: what it does, for which value, at which line."""
    what = node.target.__name__.split(".")[0] if callable(node.target) else str(node.target)
    tensor = node.args[0].meta.get("val") if isinstance(node.args[0], fx.Node) else None
    shape = f" {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" if tensor is not None else ""
    where = f" ({node.meta['source']})" if node.meta.get("source") else ""
    over = f" over {node.meta.get('axis', group_of(node))!r}" if is_collective(node) else ""
    return f"{what} of {node.meta.get('subject', node.name)}{shape}{over}{where}"
