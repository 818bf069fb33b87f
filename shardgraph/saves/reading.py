"""A checkpoint is read: every tensor into new memory, with its checksum, before anything of the model is touched."""

from __future__ import annotations

import io
import math
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardgraph.errors import CheckpointError
from shardgraph.saves.contents import unpacked
from shardgraph.saves.manifest import Chunk, DamagedError, Index, Region, StoredTensor, tiled
from shardgraph.saves.shards import Shard, boxed
from shardgraph.torch_api import box_of

_Slices = tuple[slice, ...]


class Reader:
    """Reads from the files of a checkpoint. What is damaged raises DamagedError, which names it and its file.

    ``elsewhere`` has what was read of files that are not in the folder.
    """

    def __init__(self, index: Index, elsewhere: Callable[[Region], bytes | None] = lambda region: None) -> None:
        self.index, self._elsewhere = index, elsewhere

    def tensor(self, key: str, like: torch.Tensor) -> torch.Tensor:
        """This rank's shard of the tensor called ``key``, placed as ``like``, in host memory and the dtype of the file,
        bit for bit."""
        stored, (sizes, chunks) = self.index.tensors[key], self.chunks(key, like)
        made = torch.empty(sizes, dtype=stored.dtype, device="cpu")
        missing = made.numel()
        for chunk, ours, theirs in chunks:
            part = self._chunk(key, stored, chunk)[theirs]
            made[ours].copy_(part)
            missing -= part.numel()
        if missing:
            raise DamagedError(f"{str(self.index.folder)!r} lacks {missing} elements of {key!r}")
        return made

    def chunks(self, key: str, like: torch.Tensor) -> tuple[list[int], list[tuple[Chunk, _Slices, _Slices]]]:
        """The sizes of this rank's shard of a tensor, and the chunks that it is read from: with the places of what they
        have in common, in the shard and in the chunk."""
        stored = self.index.tensors[key]
        box = box_of(like) if isinstance(like, DTensor) else ([0] * len(stored.shape), list(stored.shape))
        offsets, sizes = box if box is not None else ([0] * len(stored.shape), [0] * len(stored.shape))
        overlaps = ((chunk, _overlap(offsets, sizes, chunk)) for chunk in stored.chunks if math.prod(sizes))
        return sizes, [(chunk, *overlap) for chunk, overlap in overlaps if overlap is not None]

    def shard(self, key: str, target: torch.Tensor) -> Shard:
        """What ``target`` is to have, with :meth:`tensor`."""
        like = boxed(target)
        return Shard(self.tensor(key, like), like, target)

    def plain(self, key: str) -> Any:
        """A whole tensor, or another value."""
        if key not in self.index.tensors:
            return self.value(key)
        return self.tensor(key, torch.empty(self.index.tensors[key].shape, device="meta"))

    def value(self, key: str) -> Any:
        """The value called ``key`` that is no tensor."""
        region = self.index.values[key]
        data = self._bytes(key, region)
        try:
            return unpacked(data)
        except Exception as error:  # of any kind: whatever a damaged or malicious file leads to
            raise CheckpointError(
                f"{key!r} in {region.file!r} cannot be read without running code of the file: {error}. If you trust "
                "it, read it with torch.distributed.checkpoint.load"
            ) from error

    def _chunk(self, key: str, stored: StoredTensor, chunk: Chunk) -> torch.Tensor:
        data = self._bytes(key, chunk.region)
        try:
            tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:  # of any kind, likewise
            raise DamagedError(f"{key!r} in {str(self.index.folder / chunk.region.file)!r} cannot be read") from error
        if not isinstance(tensor, torch.Tensor) or tensor.shape != torch.Size(chunk.sizes):
            raise DamagedError(f"{key!r} in {str(self.index.folder / chunk.region.file)!r} is another tensor")
        if tensor.dtype != stored.dtype:
            raise DamagedError(f"{key!r} is {tensor.dtype} in {chunk.region.file!r}, and {stored.dtype} was written")
        return tensor

    def _bytes(self, key: str, region: Region) -> bytes:
        file = self.index.folder / region.file
        try:
            if (data := self._elsewhere(region)) is None:
                with file.open("rb") as raw:
                    raw.seek(region.start)
                    data = raw.read(region.length)
        except FileNotFoundError:
            raise DamagedError(f"{str(file)!r} is missing, with {key!r}") from None
        except OSError as error:
            raise DamagedError(f"{key!r} cannot be read from {str(file)!r}: {error.strerror}") from error
        if len(data) != region.length:
            raise DamagedError(f"{str(file)!r} ends before {key!r} does")
        if region.crc32 is not None and zlib.crc32(data) != region.crc32:
            raise DamagedError(f"{key!r} in {str(file)!r} is not as it was written: its checksum is another one")
        return data

    def check_all(self) -> list[str]:
        """Read everything; returns what is damaged, in words. Without checksums only what cannot be read is found."""
        found = []

        def tried(check: Any, *args: Any) -> None:
            try:
                check(*args)
            except CheckpointError as error:
                found.append(str(error))

        tried(self.index.raise_if_incomplete)
        tried(self.index.raise_if_metadata_differs)
        regions: Mapping[str, list[Region]] = defaultdict(list)
        for key, stored in self.index.tensors.items():
            for chunk in stored.chunks:
                regions[chunk.region.file].append(chunk.region)
                tried(self._chunk, key, stored, chunk)
        for key, region in self.index.values.items():
            regions[region.file].append(region)
            if region.crc32 is None:
                tried(self.value, key)
            else:
                tried(self._bytes, key, region)
        for file, each in regions.items():
            if self.index.about and not tiled(list({*each})):
                found.append(f"{file!r} has bytes that belong to nothing")
        return list(dict.fromkeys(found))


def _overlap(offsets: list[int], sizes: list[int], chunk: Chunk) -> tuple[_Slices, _Slices] | None:
    """Where a box and a chunk have elements in common: in the box, and in the chunk; None if nowhere."""
    ours, theirs = [], []
    for start, size, other, length in zip(offsets, sizes, chunk.offsets, chunk.sizes, strict=True):
        first, last = max(start, other), min(start + size, other + length)
        if first >= last:
            return None
        ours.append(slice(first - start, last - start))
        theirs.append(slice(first - other, last - other))
    return tuple(ours), tuple(theirs)
