"""Elements looked up by index."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from shardgraph.proof.definitions import Typing, define
from shardgraph.proof.held import Held, UntypedError, divided, patterns, whole_size
from shardgraph.proof.labels import Pattern, apply
from shardgraph.proof.rules import RULES
from shardgraph.proof.shards import divided_by
from shardgraph.proof.terms import Atom, repeated

aten = torch.ops.aten


@define(aten.index.Tensor)
def index(typing: Typing, node: fx.Node, held: Held, indices: Sequence[Held | None]) -> Held:
    """Dimensions that are all looked up at their own positions stay as they are, or as ranks share the positions."""
    given = {dim: each for dim, each in enumerate(indices) if each is not None}
    found = [_own_positions(each, held.shape[dim]) for dim, each in given.items()]
    own = [place for place in found if place is not None]
    width = {len(each.dims) for each in given.values()}
    several = [place for place, dim in zip(own, given, strict=False) if held.dims[dim]]
    if len(own) < len(given) or len(set(several)) < len(several) or len(width) > 1:
        (result,) = apply(typing.terms, aten.index.Tensor, *RULES[aten.index.Tensor](held, indices))
        return result
    places = [repeated(max(sizes)) for sizes in zip(*(each.shape for each in given.values()), strict=True)]
    for (dim, each), place in zip(given.items(), own, strict=True):
        if held.dims[dim]:
            places[place] = tuple(_shared(held.dims[dim], patterns(each.dims[place])))
    rest = [dim for k, dim in enumerate(held.dims) if k not in given]
    neighbours = list(given) == list(range(min(given), max(given) + 1))
    front = min(given) if neighbours else 0  # where the looked-up dimensions go
    return held.with_dims([*rest[:front], *places, *rest[front:]])


def _shared(dim: Sequence[Atom], pattern: Pattern) -> Sequence[Atom]:
    """A dimension of which ranks take the positions that they have by ``pattern``."""
    if all(kind == "own" for kind, _, _ in pattern):
        return dim
    if any(kind != "own" for kind, _, _ in patterns(dim)):
        raise UntypedError("ranks look up their own positions in parts of a dimension")
    shared = divided_by(dim, pattern)
    if sum(atom.axis is not None for atom in shared) != sum(kind == "mark" for kind, _, _ in pattern):
        raise UntypedError("ranks look up parts of a dimension that are not parts of one of its term")
    return shared


_COUNTS = {aten.arange.default: 0, aten.arange.start: 1, aten.arange.start_step: 1}
"""By operation: which argument is the end."""


def _own_positions(held: Held, size: int) -> int | None:
    """The dimension along which an index counts 0, 1, ... up to ``size``; None if it is any other.

    Ranks may each have their part of the count.
    """
    operation = held.term.operation
    if held.factor != 1 or held.partial or not isinstance(operation, tuple) or operation[0] not in _COUNTS:
        return None
    end, arguments = _COUNTS[operation[0]], held.term.operands[0]
    starts_at_0 = end == 0 or arguments[0] == 0
    if not starts_at_0 or arguments[end] != size or (len(arguments) > 2 and arguments[2] != 1):
        return None
    along = [k for k, dim in enumerate(held.dims) if dim]
    if not along and size == 1:
        return 0
    if len(along) != 1 or held.dims[along[0]] != divided(0, patterns(held.dims[along[0]])):
        return None
    return along[0] if whole_size(patterns(held.dims[along[0]])) == size else None
