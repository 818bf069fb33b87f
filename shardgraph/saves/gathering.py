"""Ranks get from other machines what theirs has not of a checkpoint: each what it reads, into its own memory."""

from __future__ import annotations

import hashlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from shardgraph.runtime.exchange import Ranks
from shardgraph.runtime.messages import Message, Messages
from shardgraph.saves.machines import bytes_of
from shardgraph.saves.manifest import MANIFEST, DamagedError, Index, Region, index_of
from shardgraph.saves.parts import Candidate
from shardgraph.saves.reading import Reader

_Place = tuple[str, int, int]  # a file, where in it, and how many bytes


class Gathered:
    """What this rank reads of a checkpoint of which its ``folder`` may have a part. All ranks must make it: ``read``
    is what they are going to do with a :class:`Reader`.

    Bytes are not verified here but where they are read, as those of files are.
    """

    def __init__(
        self, ranks: Ranks, timeout: float, candidate: Candidate, folder: Path, read: Callable[[Reader], Any]
    ) -> None:
        self._ranks, self._candidate, self._folder = ranks, candidate, folder
        self._messages, self._got, self._fetched = Messages(timeout), dict[_Place, torch.Tensor](), 0
        self._manifest = Region(MANIFEST, 0, candidate.nbytes, None)
        self._fetch([self._manifest])
        index = None
        with suppress(Exception):  # of any kind: raised again where all ranks are told
            index = self.index()
        self._fetch(() if index is None else index.values.values())
        self._fetch(() if index is None else self._needed(index, read))

    def index(self) -> Index:
        """The description of the checkpoint.

        Raises:
            DamagedError: it is not as it was written.
        """
        data = self.part(self._manifest)
        data = (self._folder / MANIFEST).read_bytes() if data is None else data
        if hashlib.sha256(data).hexdigest() != self._candidate.manifest:
            raise DamagedError(
                f"{str(self._folder / MANIFEST)!r} is not as it was written: its checksum is another one"
            )
        return index_of(self._folder, data)

    def part(self, region: Region) -> bytes | None:
        """What another machine has sent of a file; None if it is in the folder of this one."""
        got = self._got.get(region[:3])
        return None if got is None else got.numpy().tobytes()

    def _needed(self, index: Index, read: Callable[[Reader], Any]) -> list[Region]:
        """The parts of files that ``read`` reads tensors from."""
        reader = _Survey(index, self.part)
        with suppress(Exception), warnings.catch_warnings(action="ignore"):  # likewise
            read(reader)
        return reader.regions

    def _fetch(self, regions: Iterable[Region]) -> None:
        """Get those of ``regions`` that this machine has not. All ranks must call it."""
        rank, holders = self._ranks.rank, self._candidate.holders
        wanted = list(dict.fromkeys(region[:3] for region in regions if rank not in holders[region.file]))
        self._fetched += 1
        wanted_by_all = self._ranks.gather(f"reading a checkpoint from other machines, {self._fetched}", wanted)
        loads: Counter[int] = Counter()
        messages: list[Message] = []
        places: list[_Place] = []
        for target, of_rank in enumerate(wanted_by_all):
            for file, start, length in of_rank:
                source = min(holders[file], key=lambda each: (loads[each], each))
                loads[source] += length
                places.append((file, start, length))
                messages.append(Message(source, target, length))

        def of(number: int) -> torch.Tensor:
            file, start, length = key = places[number]
            if messages[number].target == rank:
                return self._got.setdefault(key, torch.empty(length, dtype=torch.uint8, device="cpu"))
            try:
                return bytes_of(self._folder / file, start + length)[start:]
            except (OSError, RuntimeError):  # it is not there any more: what is sent has another checksum
                return torch.zeros(length, dtype=torch.uint8, device="cpu")

        if messages:
            self._messages.exchange(messages, of, "reading a checkpoint from other machines")


class _Survey(Reader):
    """Reads no tensors, but notes what is read of them."""

    def __init__(self, index: Index, elsewhere: Callable[[Region], bytes | None]) -> None:
        super().__init__(index, elsewhere)
        self.regions: list[Region] = []

    def tensor(self, key: str, like: torch.Tensor) -> torch.Tensor:
        """An empty tensor in the place of the one that is read."""
        sizes, chunks = self.chunks(key, like)
        self.regions += [chunk.region for chunk, _, _ in chunks]
        return torch.empty(sizes, dtype=self.index.tensors[key].dtype, device="meta")
