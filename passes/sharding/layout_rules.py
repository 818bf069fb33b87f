"""Operations that only move elements: how a sharding of the operand maps to one of the result, and back.

DTensor's strategies for these handle only whole dimensions. Here a sharding keeps its blocks, so that it survives a
view that merges batch and sequence around a matrix product, or a split of a fused projection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.distributed.tensor.placement_types import Placement

from shardgraph.passes.sharding.options import Operation, operands, results
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
    values = [operand.meta["val"] for operand in operands(operation.node)]
    return [value for value in values if value.numel()] or values


def _view_down(operation: Operation, cut: Placement) -> Placement | None:
    return through_view(cut, _operand(operation), operation.result, operation.parts)


def _view_up(operation: Operation, cut: Placement) -> Placement | None:
    return through_view(cut, operation.result, _operand(operation), operation.parts)


# -- permutations ------------------------------------------------------------------------------------------


def order_of(node: fx.Node) -> list[int]:
    """For each dimension of the result, the operand's dimension."""
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


# -- broadcasts --------------------------------------------------------------------------------------------


def _expand_down(operation: Operation, cut: Placement) -> Placement | None:
    dim, count = cut_of(cut)
    return blocks(dim + len(operation.result) - len(_operand(operation)), count)


def _expand_up(operation: Operation, cut: Placement) -> Placement | None:
    dim, count = cut_of(cut)
    at = dim - (len(operation.result) - len(_operand(operation)))
    return blocks(at, count) if at >= 0 and _operand(operation)[at] == operation.result[dim] else REPLICATE


# -- split and cat -----------------------------------------------------------------------------------------


def _pieces(operation: Operation, dim_of: Callable[[Sequence[Any]], Any], tensors: Sequence[Any]) -> tuple[int, int]:
    """The dimension that is split or joined and the number of pieces, which is 0 if their sizes differ."""
    rank = len(tensors[0].shape)
    dim = dim_of(operation.args) % rank
    equal = len({tensor.shape[dim] for tensor in tensors}) == 1
    return dim, len(tensors) if equal else 0


def _of_split(operation: Operation) -> tuple[int, int]:
    return _pieces(operation, lambda args: args[2] if len(args) > 2 else 0, results(operation.node))


def _of_cat(operation: Operation) -> tuple[int, int]:
    return _pieces(operation, lambda args: args[1] if len(args) > 1 else 0, _joined(operation))


def _apart(operation: Operation, cut: Placement, of: Callable[[Operation], tuple[int, int]]) -> Placement | None:
    """The sharding of each piece for a sharding of the whole: pieces must be whole blocks of it."""
    (dim, count), (along, pieces) = cut_of(cut), of(operation)
    if dim != along:
        return cut
    return blocks(dim, count // pieces) if pieces and count % pieces == 0 else None


def _together(operation: Operation, cut: Placement, of: Callable[[Operation], tuple[int, int]]) -> Placement | None:
    (dim, count), (along, pieces) = cut_of(cut), of(operation)
    if dim != along:
        return cut
    return blocks(dim, count * pieces) if pieces else None


_VIEW = Layout(_view_down, _view_up)
_PERMUTE = Layout(_permute_down, _permute_up)
_SPLIT = Layout(lambda o, cut: _apart(o, cut, _of_split), lambda o, cut: _together(o, cut, _of_split))
_CAT = Layout(lambda o, cut: _together(o, cut, _of_cat), lambda o, cut: _apart(o, cut, _of_cat))

LAYOUTS: dict[Any, Layout] = {
    aten.view.default: _VIEW,
    aten._unsafe_view.default: _VIEW,
    aten.reshape.default: _VIEW,
    aten.squeeze.dim: _VIEW,
    aten.squeeze.dims: _VIEW,
    aten.unsqueeze.default: _VIEW,
    aten.alias.default: _VIEW,
    aten.detach.default: _VIEW,
    aten.clone.default: _VIEW,
    aten.lift_fresh_copy.default: _VIEW,
    CONSTRAIN: _VIEW,
    aten.permute.default: _PERMUTE,
    aten.transpose.int: _PERMUTE,
    aten.t.default: _PERMUTE,
    aten.expand.default: Layout(_expand_down, _expand_up),
    aten.split.Tensor: _SPLIT,
    aten.split_with_sizes.default: _SPLIT,
    aten.cat.default: _CAT,
}
