"""Collectives, and copies between host and device, as nodes: start and wait are separate nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import fx

from shardgraph.ir.attributes import AXIS, SOURCE, SUBJECT
from shardgraph.ir.copies import DIRECTIONS, WAIT_COPY
from shardgraph.ir.fake_values import fake
from shardgraph.ir.rank_operations import Ranks, symbolic

_c10d = torch.ops._c10d_functional
ALL_GATHER = _c10d.all_gather_into_tensor.default
ALL_GATHER_OUT = _c10d.all_gather_into_tensor_out.default  # into a tensor that is given
REDUCE_SCATTER = _c10d.reduce_scatter_tensor.default
ALL_REDUCE = _c10d.all_reduce.default
ALL_REDUCE_ = _c10d.all_reduce_.default  # in place: what an all-reduce is where it runs, if nobody needs its operand
ALL_TO_ALL = _c10d.all_to_all_single.default
WAIT = _c10d.wait_tensor.default


# Every other collective writes to a new contiguous tensor.


@symbolic
def send(ranks: Ranks, tensor: torch.Tensor, axis: str) -> torch.Tensor:
    """Send ``tensor`` to the next rank on the ring of mesh ``axis``; returns the tensor of the previous rank.

    :mod:`shardgraph.runtime.bind` replaces it by an all-to-all in which a rank sends everything to one other.
    """
    return tensor.new_empty(tensor.shape)


@fake(ALL_GATHER)
def _(ranks: Ranks, shard: torch.Tensor, size: int, group: str) -> torch.Tensor:
    return shard.new_empty((shard.shape[0] * size, *shard.shape[1:]))


@fake(REDUCE_SCATTER)
def _(ranks: Ranks, full: torch.Tensor, operation: str, size: int, group: str) -> torch.Tensor:
    return full.new_empty((full.shape[0] // size, *full.shape[1:]))


@fake(ALL_REDUCE)
def _(ranks: Ranks, tensor: torch.Tensor, operation: str, group: str) -> torch.Tensor:
    return tensor.new_empty(tensor.shape)


@fake(ALL_TO_ALL)
def _(ranks: Ranks, rows: torch.Tensor, received: Sequence[int], sent: Sequence[int], group: str) -> torch.Tensor:
    return rows.new_empty((sum(received), *rows.shape[1:]))


@fake(WAIT)
def _(ranks: Ranks, started: torch.Tensor) -> torch.Tensor:
    return started


COLLECTIVES = frozenset({ALL_GATHER, ALL_GATHER_OUT, REDUCE_SCATTER, ALL_REDUCE, ALL_REDUCE_, ALL_TO_ALL, send})

# Every pass asks every node: by identity, since the hash of an operator is a call of Python.
_COLLECTIVES, _COPIES = (frozenset(map(id, each)) for each in (COLLECTIVES, DIRECTIONS))


def is_collective(node: fx.Node) -> bool:
    """Whether the node starts a collective (the wait is a separate node)."""
    return id(node.target) in _COLLECTIVES


def collectives(gm: fx.GraphModule) -> Iterator[fx.Node]:
    """The nodes that start a collective, in program order."""
    return (node for node in gm.graph.nodes if id(node.target) in _COLLECTIVES)


def is_copy(node: fx.Node) -> bool:
    """Whether the node starts a copy between host and device (the wait is a separate node)."""
    return id(node.target) in _COPIES


def is_started(node: fx.Node) -> bool:
    """Whether the node starts an asynchronous operation: a collective or a copy."""
    return is_collective(node) or is_copy(node)


def is_wait(node: fx.Node) -> bool:
    """Whether the node waits for the asynchronous operation that is its first argument."""
    return node.op == "call_function" and node.target in (WAIT, WAIT_COPY)


def group_of(node: fx.Node) -> str:
    """The group argument of a collective: a mesh axis before binding, a process group's name after."""
    return str(node.args[-1])


def describe_collective(node: fx.Node) -> str:
    """A readable description of a collective or a copy: the operation, the value and the source line."""
    operation = node.target.__name__.split(".")[0] if callable(node.target) else str(node.target)
    operation = operation.rstrip("_").removesuffix("_out")
    tensor = node.args[0].meta.get("val") if isinstance(node.args[0], fx.Node) else None
    shape = f" {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" if tensor is not None else ""
    where = f" ({SOURCE.get(node)})" if SOURCE.get(node) else ""
    over = f" over {AXIS.get(node, group_of(node))!r}" if is_collective(node) else ""
    return f"{operation} of {SUBJECT.get(node, node.name)}{shape}{over}{where}"
