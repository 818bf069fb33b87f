"""Shards that ranks saved with shardgraph's ``local_metadata_dict``, as whole tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch

from shardgraph.errors import CheckpointError
from shardgraph.mesh import Mesh
from shardgraph.offline.ranks import OfRank
from shardgraph.offline.stored import Stored, StoredState
from shardgraph.plans.parameter_plan import ParameterPlan
from shardgraph.plans.shards import indices_of

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def state_of_shards(ranks: Sequence[OfRank]) -> StoredState:
    """The whole tensors of which ``ranks`` have shards. A buffer is that of the first rank that has it.

    Raises:
        CheckpointError: a rank is missing, or they are not of one run.
    """
    _check_complete(ranks)
    ranks = sorted(ranks, key=lambda rank: rank.description["rank"])
    tensors: dict[str, Stored] = {}
    tied: dict[str, str] = {}
    for name in dict.fromkeys(name for rank in ranks for name in rank.description["parameters"]):
        tensors[name] = _parameter(name, [rank for rank in ranks if name in rank.description["parameters"]])
    for rank in ranks:
        for name in rank.description["buffers"]:
            tensors.setdefault(name, Stored.of(rank.shard(name)))
        tied |= rank.description["tied"]
    for rank in ranks:
        if unknown := rank.shards.keys() - tensors.keys() - tied.keys():
            raise CheckpointError(
                f"{rank.where} has {_listed(sorted(unknown))}, which no description names: save local_state_dict() and "
                "local_metadata_dict() of the same module, at the same time"
            )
    return StoredState(tensors, tied, frozenset(name for rank in ranks for name in rank.description["buffers"]))


def _check_complete(ranks: Sequence[OfRank]) -> None:
    first = ranks[0]
    for rank in ranks[1:]:
        for key in ("ranks", "mesh"):
            if rank.description[key] != first.description[key]:
                raise CheckpointError(
                    f"{rank.where} is of a run with {key} {rank.description[key]} and {first.where} of one with "
                    f"{first.description[key]}: give the files of one run"
                )
    numbers, wanted = [rank.description["rank"] for rank in ranks], range(first.description["ranks"])
    if twice := [rank.where for rank in ranks if numbers.count(rank.description["rank"]) > 1]:
        raise CheckpointError(f"{_listed(twice)} are of the same rank: give one file of each rank of one run")
    if missing := sorted(set(wanted) - set(numbers)):
        raise CheckpointError(
            f"the run had {len(wanted)} ranks, and there are files of {len(numbers)}: add those of rank "
            f"{', '.join(map(str, missing))}"
        )


def _parameter(name: str, holders: Sequence[OfRank]) -> Stored:
    """The parameter whose shards ``holders`` have."""
    described, mesh = holders[0].description["parameters"][name], _mesh(holders[0])
    shape, entry = torch.Size(described["shape"]), ParameterPlan(tuple(described["placements"]))
    dtype = holders[0].shard(name).dtype
    for rank in holders:
        here, shard = tuple(rank.description["coordinates"]), rank.shard(name)
        expected = [len(indices) for indices in indices_of(shape, entry, mesh, here)]
        other = rank.description["parameters"][name]
        if other != described or list(shard.shape) != expected or shard.dtype != dtype:
            raise CheckpointError(
                f"the shard of {name!r} in {rank.where} is {list(shard.shape)} of {shard.dtype}, for {_told(other)}; "
                f"with {holders[0].where} it would be {expected} of {dtype}, for {_told(described)}: give files that "
                "ranks of one run wrote at the same time"
            )
    places = {_place(entry, rank) for rank in holders}
    if len(places) < _parts(entry, mesh):
        raise CheckpointError(
            f"{name!r} is in {_parts(entry, mesh)} shards, and only {len(places)} are in {_listed(_where(holders))}: "
            "give the files of all ranks"
        )
    return Stored(shape, dtype, partial(_assembled, name, shape, entry, holders))


def _assembled(name: str, shape: torch.Size, entry: ParameterPlan, holders: Sequence[OfRank]) -> torch.Tensor:
    """The whole parameter. Ranks that have the same shard must have the same values.

    Raises:
        CheckpointError: they have not.
    """
    whole = torch.empty(shape, dtype=holders[0].shard(name).dtype, device="cpu")
    bits, by_place = _as_bits(whole), dict[tuple[int, ...], OfRank]()
    for rank in holders:
        at = _index(indices_of(shape, entry, _mesh(rank), tuple(rank.description["coordinates"])))
        shard, first = _as_bits(rank.shard(name)), by_place.setdefault(_place(entry, rank), rank)
        if first is rank:
            bits[at] = shard
        elif not torch.equal(bits[at], shard):
            raise CheckpointError(
                f"{first.where} and {rank.where} have the same shard of {name!r}, with other values: give files that "
                "ranks of one run wrote at the same time; replicas of 'local-sgd' must be averaged before they save"
            )
    return whole


def _index(indices: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """An index of a tensor that selects these positions of every dimension: a view, if they follow on each other."""
    if all(len(each) == 0 or int(each[-1]) - int(each[0]) == len(each) - 1 for each in indices):
        return tuple(slice(int(each[0]), int(each[-1]) + 1) if len(each) else slice(0) for each in indices)
    return tuple(each.view(-1, *[1] * (len(indices) - 1 - dim)) for dim, each in enumerate(indices))


def _as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as integers of its width: nan equals nan, and every dtype can be indexed."""
    return tensor.detach().view(_BITS[tensor.dtype.itemsize])


def _place(entry: ParameterPlan, rank: OfRank) -> tuple[int, ...]:
    """Where the rank is along the axes that shard the parameter."""
    return tuple(each for axis, each in enumerate(rank.description["coordinates"]) if axis in _axes(entry))


def _parts(entry: ParameterPlan, mesh: Mesh) -> int:
    return torch.Size(mesh[axis][1] for axis in _axes(entry)).numel()


def _axes(entry: ParameterPlan) -> set[int]:
    return {*entry.splits, *([] if entry.shard_axis is None else [entry.shard_axis])}


def _mesh(rank: OfRank) -> Mesh:
    return tuple((name, size) for name, size in rank.description["mesh"])


def _told(described: dict[str, Any]) -> str:
    return f"{described['shape']} placed {', '.join(described['placements']) or 'whole'}"


def _where(ranks: Iterable[OfRank]) -> list[str]:
    return [rank.where for rank in ranks]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
