"""Operations that only move elements: how a sharding of the operand maps to one of the result, and back.

DTensor's strategies for these handle only whole dimensions. Here a sharding keeps its blocks, so that it survives a
view that merges batch and sequence around a matrix product, or a split of a fused projection.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.distributed.tensor.placement_types import Placement

from shardgraph import ir
from shardgraph.passes.sharding.options import Operation, results
from shardgraph.passes.sharding.placements import REPLICATE, blocks, cut_of, through_view
from shardgraph.plans.annotations.constrain import CONSTRAIN

aten = torch.ops.aten


class Layout(NamedTuple):
    """``down`` maps the operands' sharding to the results', ``up`` the reverse; None if there is no such placement.

    A result may be sharded where the operand is replicated: then ``up`` returns ``Replicate()``.
    """

    down: Callable[[Operation, Placement], Placement | None]
    up: Callable[[Operation, Placement], Placement | None]


def _operand(operation: Operation) -> torch.Size:
    return _joined(operation)[0].shape


def _joined(operation: Operation) -> list[torch.Tensor]:
    """The operands that have elements; all of them if none has."""
    return [tensor for tensor in operation.tensors if tensor.numel()] or operation.tensors


def order_of(node: fx.Node) -> list[int]:
    """For each dimension of a permutation's result, the operand's dimension."""
    rank = len(results(node)[0].shape)
    order = list(range(rank))
    if node.target is aten.permute.default:
        return [dim % rank for dim in node.args[1]]
    first, second = (0, 1) if node.target is aten.t.default else (node.args[1] % rank, node.args[2] % rank)
    if rank > 1:
        order[first], order[second] = order[second], order[first]
    return order


def _permute_down(operation: Operation, cut: Placement) -> Placement | None:
    dim, count = cut_of(cut)
    return blocks(order_of(operation.node).index(dim), count)


def _permute_up(operation: Operation, cut: Placement) -> Placement | None:
    dim, count = cut_of(cut)
    return blocks(order_of(operation.node)[dim], count)


def _expand_down(operation: Operation, cut: Placement) -> Placement | None:
    dim, count = cut_of(cut)
    return blocks(dim + len(operation.result) - len(_operand(operation)), count)


def _expand_up(operation: Operation, cut: Placement) -> Placement | None:
    dim, count = cut_of(cut)
    at = dim - (len(operation.result) - len(_operand(operation)))
    return blocks(at, count) if at >= 0 and _operand(operation)[at] == operation.result[dim] else REPLICATE


def _pieces(operation: Operation, dim: int) -> int:
    """How many pieces ``dim`` is split into or concatenated from: 1 if another one is, 0 if their sizes differ."""
    joins = operation.node.target is aten.cat.default
    pieces, position = (_joined(operation), 1) if joins else (results(operation.node), 2)
    args: tuple[Any, ...] = operation.node.args
    if dim != (args[position] if len(args) > position else 0) % pieces[0].dim():
        return 1
    return len(pieces) if len({piece.shape[dim] for piece in pieces}) == 1 else 0


def _piece(operation: Operation, cut: Placement) -> Placement | None:
    """The sharding of each piece for a sharding of the whole: pieces must be whole blocks of it."""
    dim, count = cut_of(cut)
    pieces = _pieces(operation, dim)
    return blocks(dim, count // pieces) if pieces and count % pieces == 0 else None


def _whole(operation: Operation, cut: Placement) -> Placement | None:
    """The sharding of the whole for a sharding of each piece."""
    dim, count = cut_of(cut)
    pieces = _pieces(operation, dim)
    return blocks(dim, count * pieces) if pieces else None


def _split_by(operation: Operation, dim: int) -> tuple[int, int]:
    """Of a dimension of which another axis' ranks have parts: in how many blocks, and of how many ranks; else 1, 1."""
    args: tuple[Any, ...] = operation.node.args
    _, taken, count, *_ = args
    return (count, _operand(operation)[dim] // operation.result[dim]) if dim == taken else (1, 1)


def _part_down(operation: Operation, cut: Placement) -> Placement | None:
    """A part consists of whole blocks of the operand's sharding."""
    dim, count = cut_of(cut)
    taken, ranks = _split_by(operation, dim)
    return blocks(dim, count // ranks) if count % (taken * ranks) == 0 else None


def _part_up(operation: Operation, cut: Placement) -> Placement | None:
    dim, count = cut_of(cut)
    taken, ranks = _split_by(operation, dim)
    return blocks(dim, count * ranks) if count % taken == 0 else None


_VIEW = Layout(
    down=lambda operation, cut: through_view(cut, _operand(operation), operation.result, operation.parts),
    up=lambda operation, cut: through_view(cut, operation.result, _operand(operation), operation.parts),
)
_VIEWS = (
    *(aten.view.default, aten._unsafe_view.default, aten.reshape.default),
    *(aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default),
    *(aten.alias.default, aten.detach.default, aten.clone.default, aten.lift_fresh_copy.default, CONSTRAIN),
)
_PERMUTATIONS = (aten.permute.default, aten.transpose.int, aten.t.default)

LAYOUTS: dict[Any, Layout] = {
    **dict.fromkeys(_VIEWS, _VIEW),
    **dict.fromkeys(_PERMUTATIONS, Layout(_permute_down, _permute_up)),
    **dict.fromkeys((aten.split.Tensor, aten.split_with_sizes.default), Layout(_piece, _whole)),
    aten.expand.default: Layout(_expand_down, _expand_up),
    aten.cat.default: Layout(_whole, _piece),
    ir.local_part: Layout(_part_down, _part_up),
}
