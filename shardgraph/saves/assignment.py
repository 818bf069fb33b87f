"""Which rank writes what: every value once, and of what several ranks have, alike, about as much on each."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from shardgraph.errors import CheckpointError
from shardgraph.saves.contents import OF_RANKS
from shardgraph.saves.machines import needed_on

OVERHEAD = 2048  # bytes that the format adds to a value, at most, but for names


class Piece(NamedTuple):
    """The part of a tensor that a rank has; ``dtype`` without ``torch.``, so that it can be sent."""

    key: str
    offsets: list[int]
    sizes: list[int]
    shape: list[int]
    dtype: str

    @property
    def nbytes(self) -> int:
        """The size of its elements."""
        return math.prod(self.sizes) * getattr(torch, self.dtype).itemsize


class Value(NamedTuple):
    """What is no tensor. Equal values have equal digests."""

    key: str
    digest: str
    nbytes: int


class Offer(NamedTuple):
    """What a rank has, and what all ranks must have alike; ``error`` says why it cannot save.

    ``machine`` is the name of the one that the folder is of, if each machine has its own.
    """

    error: str | None
    step: int
    path: str
    copies: int
    machine: str
    pieces: list[Piece]
    values: list[Value]
    groups: list[list[str]]

    @classmethod
    def of(cls, sent: Sequence[Any]) -> Offer:
        """What :class:`Offer` is after it was sent."""
        offer = cls(*sent)
        pieces, values = [Piece(*each) for each in offer.pieces], [Value(*each) for each in offer.values]
        return offer._replace(pieces=pieces, values=values)


class Assignment(NamedTuple):
    """The numbers of the pieces that each rank writes, the keys of its values with those that they get, the ranks that
    share a folder and the bytes there, for each folder, and the names in the optimizer's groups, of all ranks."""

    pieces: list[list[int]]
    values: list[list[tuple[str, str]]]
    machines: list[list[int]]
    nbytes: list[int]
    groups: list[list[str]]


def assigned(offers: Sequence[Offer]) -> Assignment:
    """Divide the work of a save.

    Raises:
        CheckpointError: the ranks do not save the same, or a rank cannot.
    """
    for rank, offer in enumerate(offers):
        if offer.error is not None:
            raise CheckpointError(offer.error if len(offers) == 1 else f"rank {rank}: {offer.error}")
        if offer.copies != offers[0].copies:
            raise CheckpointError(
                f"rank {rank} saves with copies={offer.copies}, and rank 0 with copies={offers[0].copies}: give all "
                "ranks the same"
            )
        if offer.step != offers[0].step or (offer.copies == 1 and offer.path != offers[0].path):
            raise CheckpointError(
                f"rank {rank} saves step {offer.step} to {offer.path!r}, and rank 0 step {offers[0].step} to "
                f"{offers[0].path!r}: give all ranks the same"
            )
    loads = [0] * len(offers)
    pieces = _pieces(offers, loads)
    values = _values(offers, loads)
    machines: dict[str, list[int]] = defaultdict(list)
    for rank, offer in enumerate(offers):
        machines[offer.machine].append(rank)
    shared = [*machines.values()]
    return Assignment(pieces, values, shared, needed_on(shared, offers[0].copies, loads), _groups(offers))


def _pieces(offers: Sequence[Offer], loads: list[int]) -> list[list[int]]:
    holders: dict[tuple[str, tuple[int, ...]], list[tuple[int, int]]] = defaultdict(list)
    known: dict[str, Piece] = {}
    for rank, offer in enumerate(offers):
        for number, piece in enumerate(offer.pieces):
            first = known.setdefault(piece.key, piece)
            if (first.shape, first.dtype) != (piece.shape, piece.dtype):
                raise CheckpointError(
                    f"{piece.key!r} is {piece.dtype} {piece.shape} on rank {rank}, and {first.dtype} {first.shape} on "
                    "another: all ranks must have the same model and optimizer"
                )
            holders[piece.key, tuple(piece.offsets)].append((rank, number))
    covered: dict[str, int] = defaultdict(int)
    mine: list[list[int]] = [[] for _ in offers]

    def size(item: Any) -> int:
        rank, number = item[1][0]
        return offers[rank].pieces[number].nbytes

    for (key, _), ranks in sorted(holders.items(), key=size, reverse=True):
        rank, number = min(ranks, key=lambda each: (loads[each[0]], each))
        piece = offers[rank].pieces[number]
        mine[rank].append(number)
        loads[rank] += piece.nbytes + OVERHEAD
        covered[key] += math.prod(piece.sizes)
    for key, count in covered.items():
        if count != math.prod(known[key].shape):
            raise CheckpointError(
                f"the ranks have {count} elements of {key!r}, which has the shape {known[key].shape}: all ranks of the "
                "model's mesh must save"
            )
    return [sorted(numbers) for numbers in mine]


def _values(offers: Sequence[Offer], loads: list[int]) -> list[list[tuple[str, str]]]:
    by_key: dict[str, dict[int, Value]] = defaultdict(dict)
    for rank, offer in enumerate(offers):
        for value in offer.values:
            by_key[value.key][rank] = value
    mine: list[list[tuple[str, str]]] = [[] for _ in offers]
    for key, of_ranks in by_key.items():
        if len({value.digest for value in of_ranks.values()}) == 1:
            chosen = {min(of_ranks, key=lambda rank: (loads[rank], rank)): key}
        elif key.split(".")[0] in OF_RANKS:
            chosen = {rank: of_rank(key, rank) for rank in of_ranks}
        else:
            raise CheckpointError(f"the ranks have different values of {key!r}, and a checkpoint has one of them")
        for rank, name in chosen.items():
            mine[rank].append((key, name))
            loads[rank] += of_ranks[rank].nbytes
    return mine


def of_rank(key: str, rank: int) -> str:
    """The key of a rank's own value, where ranks have different ones."""
    return f"{key}.{rank_entry(rank)}"


def rank_entry(rank: int) -> str:
    """The last part of the key of a rank's own value."""
    return f"rank-{rank:05}"


def _groups(offers: Sequence[Offer]) -> list[list[str]]:
    """The names in each of an optimizer's groups, of all ranks: those of a pipeline have different ones."""
    count = len(offers[0].groups)
    if any(len(offer.groups) != count for offer in offers):
        raise CheckpointError("the ranks' optimizers have different numbers of parameter groups: make them alike")
    return [list(dict.fromkeys(name for offer in offers for name in offer.groups[i])) for i in range(count)]
