"""Elements looked up by index."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from shardgraph.proof.definitions import Typing, define
from shardgraph.proof.held import Held, UntypedError, divided, patterns, whole_size
from shardgraph.proof.labels import Label, Pattern, Rule, apply, jointly, linear
from shardgraph.proof.shards import divided_by
from shardgraph.proof.terms import Atom, repeated

aten = torch.ops.aten


@dataclass(frozen=True)
class Places:
    """Where a tensor is looked up: ``own`` has the place's label of each dimension that counts its own positions.

    ``held`` are the labels of the tensor's dimensions, ``found`` those of what is looked up, ``sizes`` its sizes, and
    ``labels`` those of ``indices``, which are all other indices.
    """

    own: Mapping[int, Label]
    held: list[Label]
    found: list[Label]
    indices: list[Held]
    labels: list[list[Label]]
    sizes: tuple[int, ...]

    @property
    def constants(self) -> list[Any]:
        """What tells one lookup from others of the same operands."""
        return [self.held, self.found, self.labels]


def _places(held: Held, indices: Sequence[Held | None]) -> Places:
    given = {dim: each for dim, each in enumerate(indices) if each is not None}
    width = max(len(each.dims) for each in given.values())
    own: dict[int, Label] = {}
    for dim, each in given.items():
        place = _own_positions(each, held.shape[dim])
        if place is not None and held.dims[dim]:
            own[dim] = f"i{place + width - len(each.dims)}"
    if len(set(own.values())) < len(own):
        raise UntypedError("a diagonal is looked up")
    others = {dim: each for dim, each in given.items() if dim not in own}
    places: list[Label] = [f"i{k}" for k in range(width)]
    labels: list[Label] = [own.get(k, None if k in given else f"d{k}") for k in range(len(held.dims))]
    rest = [label for k, label in enumerate(labels) if k not in given]
    front = _front(given)
    sizes = torch.broadcast_shapes(*(each.shape for each in given.values()))
    sizes_of_rest = [size for k, size in enumerate(held.shape) if k not in given]
    return Places(
        own,
        labels,
        [*rest[:front], *places, *rest[front:]],
        list(others.values()),
        [places[width - len(each.dims) :] for each in others.values()],
        (*sizes_of_rest[:front], *sizes, *sizes_of_rest[front:]),
    )


def _front(given: Collection[int]) -> int:
    """The position of what is looked up: that of the first index, or 0 if they are not neighbours."""
    return min(given) if list(given) == list(range(min(given), max(given) + 1)) else 0


@define(aten.index.Tensor)
def index(typing: Typing, node: fx.Node, held: Held, indices: Sequence[Held | None]) -> Held:
    """Elements at places of some dimensions; one that is looked up at its own positions runs through."""
    given = {dim: each for dim, each in enumerate(indices) if each is not None}
    found = [_own_positions(each, held.shape[dim]) for dim, each in given.items()]
    own = [place for place in found if place is not None]
    width = {len(each.dims) for each in given.values()}
    several = [place for place, dim in zip(own, given, strict=False) if held.dims[dim]]
    if len(own) < len(given) or len(set(several)) < len(several) or len(width) > 1:
        return _looked_up(typing, held, indices)
    places = [repeated(max(sizes)) for sizes in zip(*(each.shape for each in given.values()), strict=True)]
    for (dim, each), place in zip(given.items(), own, strict=True):
        if held.dims[dim]:
            places[place] = tuple(_shared(held.dims[dim], patterns(each.dims[place])))
    rest = [dim for k, dim in enumerate(held.dims) if k not in given]
    front = _front(given)
    return held.with_dims([*rest[:front], *places, *rest[front:]])


def _looked_up(typing: Typing, held: Held, indices: Sequence[Held | None]) -> Held:
    places = _places(held, indices)
    _check_undivided(places, indices)
    rule = Rule([places.held, *places.labels], [places.found], linear=linear(0))
    (result,) = apply(typing.terms, aten.index.Tensor, [held, *places.indices], places.constants, rule)
    return result


@define(aten.index_put.default)
def index_put(
    typing: Typing, node: fx.Node, held: Held, indices: Sequence[Held | None], rows: Held, accumulate: bool = False
) -> Held:
    """Rows added at places of some dimensions.

    Without ``accumulate`` it is not determined which of several rows of one place stays, so ranks could keep parts of
    different ones.
    """
    if not accumulate:
        raise UntypedError("values that ranks share are put in place of others")
    places = _places(held, indices)
    _check_undivided(places, indices)
    if rows.shape != places.sizes:
        raise UntypedError("a row that is added at several places")
    kept = {*places.own.values(), *places.held} - {None}
    operands = [[label if label in kept else None for label in each] for each in (places.found, *places.labels)]
    result: list[Label] = [
        size if label is None else label for label, size in zip(places.held, held.shape, strict=True)
    ]
    rule = Rule([places.held, *operands], [result], linear=jointly(0, 1))
    (made,) = apply(typing.terms, node.target, [held, rows, *places.indices], places.constants, rule)
    return made


def _check_undivided(places: Places, indices: Sequence[Held | None]) -> None:
    """A rank's own positions are counted from 0."""
    own = [indices[dim] for dim in places.own]
    if any(each is not None and not each.replicated for each in own):
        raise UntypedError("ranks look up their own positions, and others")


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
