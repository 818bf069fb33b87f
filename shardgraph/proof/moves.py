"""Operations that only move elements, or repeat them: the same term, with other dimensions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardgraph import ir
from shardgraph.plans.annotations.constrain import CONSTRAIN
from shardgraph.proof.held import Held, UntypedError, viewed
from shardgraph.proof.terms import repeated

aten = torch.ops.aten

Move = Callable[..., Held]
MOVES: dict[Any, Move] = {}
"""By operation: the result for the operand and the other arguments."""


def move(*targets: Any) -> Callable[[Move], Move]:
    """Register a function for operations."""

    def register(function: Move) -> Move:
        MOVES.update(dict.fromkeys(targets, function))
        return function

    return register


@move(
    *(
        aten.alias.default,
        aten.detach.default,
        aten.clone.default,
        aten.lift_fresh_copy.default,
        aten.lift_fresh.default,
    ),
    *(aten.contiguous.default, CONSTRAIN, ir.WAIT, ir.TO_HOST, ir.TO_DEVICE, ir.WAIT_COPY),
)
def same(held: Held, *_: Any, **__: Any) -> Held:
    """The operand."""
    return held


@move(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def view(held: Held, shape: Sequence[int]) -> Held:
    """Other sizes."""
    known = math.prod(size for size in shape if size != -1)
    return viewed(held, [math.prod(held.shape) // max(known, 1) if size == -1 else size for size in shape])


@move(aten.permute.default)
def permute(held: Held, order: Sequence[int]) -> Held:
    """Another order of dimensions."""
    return held.with_dims([held.dims[dim] for dim in order])


@move(aten.transpose.int)
def transpose(held: Held, first: int, second: int) -> Held:
    """Two dimensions exchanged."""
    dims = list(held.dims)
    dims[first], dims[second] = dims[second], dims[first]
    return held.with_dims(dims)


@move(aten.t.default)
def t(held: Held) -> Held:
    """A matrix transposed."""
    return held.with_dims(held.dims[::-1])


@move(aten.unsqueeze.default)
def unsqueeze(held: Held, dim: int) -> Held:
    """A dimension of size 1 more."""
    at = dim % (len(held.dims) + 1)
    return held.with_dims([*held.dims[:at], (), *held.dims[at:]])


@move(aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default)
def squeeze(held: Held, dims: int | Sequence[int] | None = None) -> Held:
    """Without dimensions of size 1."""
    every = range(len(held.dims)) if dims is None else [dims] if isinstance(dims, int) else dims
    gone = {dim % len(held.dims) for dim in every if held.shape[dim] == 1} if held.dims else set()
    if any(held.dims[dim] for dim in gone):
        raise UntypedError("a dimension of which each rank has one element is squeezed")
    return held.with_dims([dim for k, dim in enumerate(held.dims) if k not in gone])


@move(aten.expand.default)
def expand(held: Held, sizes: Sequence[int], **_: Any) -> Held:
    """Elements repeated along dimensions of size 1."""
    missing = len(sizes) - len(held.dims)
    dims = [repeated(size) for size in sizes[:missing]]
    for dim, own, size in zip(held.dims, held.shape, sizes[missing:], strict=True):
        dims.append((*dim, *repeated(size)) if own == 1 and size not in (-1, 1) else dim)
    return held.with_dims(dims)
