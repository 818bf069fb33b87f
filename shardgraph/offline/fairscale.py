"""Shards that FairScale's FullyShardedDataParallel saved, as whole tensors.

FairScale concatenates the parameters of a wrapped module into one vector, which it pads and cuts into equal parts; its
``local_metadata_dict`` says of which parameters, and how much of a rank's part is padding
(https://github.com/facebookresearch/fairscale, ``fairscale/nn/data_parallel/fully_sharded_data_parallel.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from shardgraph.errors import CheckpointError
from shardgraph.offline.files import same_memory
from shardgraph.offline.ranks import OfRank, clean
from shardgraph.offline.stored import Stored, StoredState


def state_of_fairscale(ranks: Sequence[OfRank]) -> StoredState:
    """The whole tensors of which ``ranks``, in their order, have parts. A buffer is that of the first rank.

    Raises:
        CheckpointError: a rank is missing, or they are not of one run.
    """
    tensors: dict[str, Stored] = {}
    tied: dict[str, str] = {}
    backing = set()
    for place, wrapped in enumerate(ranks[0].description["param_metadata"]):
        path = wrapped["fsdp_path"]
        for name in wrapped["params"]:
            backing.add(_joined(path, name))
            tensors |= _parameters(ranks, place, name)
        # Of every wrapped module: FairScale's own consolidation has those of the last one alone, without its path.
        tied |= {_joined(path, other): _joined(path, first) for first, other in wrapped.get("shared_param_info", ())}
    buffers = {name: tensor for name, tensor in ranks[0].shards.items() if name not in backing}
    ties, known = same_memory(buffers), {clean(name) for name in ranks[0].description["buffer_names"]}
    if unknown := [name for name in buffers if name not in known and ties.get(name) not in known]:
        raise CheckpointError(
            f"{ranks[0].where} has {', '.join(unknown[:4])}, of which its description knows nothing: save "
            "local_state_dict() and local_metadata_dict() of the same module, the outermost one"
        )
    tensors |= {name: Stored.of(buffer) for name, buffer in buffers.items()}
    tied |= ties
    tensors = {name: stored for name, stored in tensors.items() if name not in tied}
    return StoredState(tensors, tied, frozenset(buffers))


def _parameters(ranks: Sequence[OfRank], place: int, backing: str) -> Iterator[tuple[str, Stored]]:
    """The parameters in the vector ``backing`` of the wrapped module at ``place`` of the descriptions."""
    path, described = _described(ranks[0], place, backing)
    name, numels = _joined(path, backing), described["numels"]
    if [torch.Size(shape).numel() for shape in described["shapes"]] != list(numels):
        raise CheckpointError(f"{ranks[0].where} describes {name!r} by shapes that are not of its numbers of elements")
    parts = []
    for rank in ranks:
        other_path, other = _described(rank, place, backing)
        if other_path != path or any(other[key] != described[key] for key in ("names", "shapes", "numels")):
            raise CheckpointError(
                f"{rank.where} and {ranks[0].where} describe {name!r} as of other parameters: give the files of one run"
            )
        part = rank.shard(name).reshape(-1)
        parts.append(part[: part.numel() - other["padding"]])
    parts, ends = _complete(ranks, name, parts, sum(numels)), list(accumulate(numels))
    for each, shape, numel, end in zip(described["names"], described["shapes"], numels, ends, strict=True):
        size = torch.Size(shape)
        yield _joined(path, each), Stored(size, parts[0].dtype, partial(_cut, parts, end - numel, end, size))


def _complete(ranks: Sequence[OfRank], name: str, parts: list[torch.Tensor], numel: int) -> list[torch.Tensor]:
    """The parts that together have ``numel`` elements: those of all ranks, or the first one if each rank has all."""
    if len({part.dtype for part in parts}) > 1:
        raise CheckpointError(f"{name!r} has another dtype on other ranks: give the files of one run")
    sizes = [part.numel() for part in parts]
    if sum(sizes) == numel and sizes == sorted(sizes, reverse=True):
        return parts
    if set(sizes) == {numel}:  # wrapped with a group of one rank
        differing = [rank.where for rank, part in zip(ranks, parts, strict=True) if not torch.equal(part, parts[0])]
        if not differing:
            return parts[:1]
        raise CheckpointError(
            f"each rank has all of {name!r}, and other values, as experts that are one rank's own "
            f"({ranks[0].where} and {differing[0]}): consolidate each rank's file by itself"
        )
    raise CheckpointError(
        f"the parts of {name!r} have {' + '.join(map(str, sizes))} elements without padding, and the parameters in it "
        f"{numel}: give the file of every rank, once, in the order of the ranks"
    )


def _cut(parts: Sequence[torch.Tensor], start: int, end: int, shape: torch.Size) -> torch.Tensor:
    """Elements ``start`` to ``end`` of the parts one after the other."""
    cut, before = [], 0
    for part in parts:
        cut.append(part[max(start - before, 0) : max(end - before, 0)])
        before += part.numel()
    return torch.cat(cut).view(shape)


def _described(rank: OfRank, place: int, backing: str) -> tuple[str, Mapping[str, Any]]:
    """The path of a wrapped module, and what the rank's description says of one of its vectors."""
    try:
        wrapped = rank.description["param_metadata"][place]
        return wrapped["fsdp_path"], wrapped["params"][backing]
    except (IndexError, KeyError) as error:
        raise CheckpointError(
            f"{rank.where} does not describe {backing!r}, as the file of the first rank does: give the files of one run"
        ) from error


def _joined(path: str, name: str) -> str:
    return clean(f"{path}.{name}" if path else name)
