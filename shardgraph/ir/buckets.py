"""Buckets: several tensors in one flat buffer, which one collective moves."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from shardgraph.ir.attributes import ROLE
from shardgraph.ir.collectives import ALL_GATHER
from shardgraph.ir.fake_values import arranges
from shardgraph.ir.rank_operations import pad_shard
from shardgraph.ir.roles import Parameter


@arranges
def pack(tensors: Sequence[torch.Tensor], parts: int) -> torch.Tensor:
    """A flat buffer with the tensors one after the other.

    With ``parts`` above 1, dim 0 of each is in so many equal parts, and the buffer has the first part of every tensor,
    then the second of every one: what a reduce-scatter over so many ranks gives to each.
    """
    return torch.cat([tensor.reshape(parts, -1) for tensor in tensors], 1).flatten()


@arranges
def unpack(buffer: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """The tensors of these shapes in a buffer that has them one after the other, as views."""
    pieces = buffer.split([math.prod(shape) for shape in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


@arranges
def unpack_parts(buffer: torch.Tensor, shapes: Sequence[Sequence[int]], parts: int) -> list[torch.Tensor]:
    """Copies of the tensors of these shapes in a buffer that has ``parts`` of them, part after part.

    This is what an all-gather over so many ranks gives, each of which has a part of every tensor.
    """
    pieces = buffer.view(parts, -1).split([math.prod(shape) // parts for shape in shapes], 1)
    return [piece.contiguous().view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def packed_as(node: fx.Node) -> fx.Node | None:
    """The tensor that was put into a bucket to become this one, which is taken out of it; None if it is taken of none.

    In between are collectives, waits, and what is done to the whole buffer.
    """
    bucket: Any = node.args[0] if node.target is operator.getitem else None
    if not isinstance(bucket, fx.Node) or bucket.target not in (unpack, unpack_parts):
        return None
    tensor: fx.Node = packing(bucket).args[0][node.args[1]]
    return tensor


def packing(bucket: Any) -> Any:
    """The node that packed a bucket, of which this is one, or what is unpacked of it."""
    while bucket.target is not pack:
        bucket = bucket.args[0]
    return bucket


def stored(pack: fx.Node) -> list[tuple[fx.Node, int]]:
    """The shards that are packed to be gathered just as the graph is given them, each with the elements that it takes
    in the bucket, padding included; none if anything else is packed.

    If they lie side by side, as elements say, their memory is the bucket.
    """
    if pack.args[1] != 1 or any(user.target is not ALL_GATHER for user in pack.users):
        return []
    operands: Any = pack.args[0]
    shards = [each.args[0] if each.target is pad_shard else each for each in operands]
    if any(shard.op != "placeholder" for shard in shards) or len(set(shards)) < len(shards):
        return []
    return [(shard, each.meta["val"].numel()) for shard, each in zip(shards, operands, strict=True)]


def stored_parameters(gm: fx.GraphModule) -> Iterator[dict[str, int]]:
    """The buckets of parameters whose shards a graph packs as :func:`stored`: the elements of each, by name."""
    for pack_ in gm.graph.find_nodes(op="call_function", target=pack):
        shards = [(ROLE.get(shard), elements) for shard, elements in stored(pack_)]
        named = {role.fqn: elements for role, elements in shards if isinstance(role, Parameter)}
        if named and len(named) == len(shards):
            yield named
