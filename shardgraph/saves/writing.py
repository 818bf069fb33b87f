"""A checkpoint is written: each rank its file, then the first rank the description, and the folder gets its name."""

from __future__ import annotations

import errno
import hashlib
import os
import pickle
import shutil
import zlib
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardgraph.errors import CheckpointError
from shardgraph.runtime.exchange import Ranks
from shardgraph.runtime.messages import Messages
from shardgraph.saves import folders
from shardgraph.saves.assignment import Piece
from shardgraph.saves.copying import Copies
from shardgraph.saves.manifest import (
    CHECKSUM,
    MANIFEST,
    METADATA,
    Chunk,
    DamagedError,
    Index,
    Region,
    StoredTensor,
    checksum_text,
    manifest_text,
    metadata_of,
    tiled,
)
from shardgraph.saves.staging import give_back, on_host
from shardgraph.sizes import format_bytes


@dataclass
class Job:
    """What a rank writes: its own part of a step's checkpoint.

    ``tensors`` are pieces of tensors, ``values`` all else; both with their paths in nested dictionaries. If they are
    ``copied``, to host memory, training may go on meanwhile. ``machines`` are the ranks that share a folder, for each
    folder; where there are several, they exchange ``copies`` of files by ``messages``.
    """

    ranks: Ranks
    path: Path
    step: int
    keep: int | None
    nbytes: int  # in this folder
    tensors: list[tuple[Piece, tuple[Any, ...], torch.Tensor]]
    values: list[tuple[str, tuple[Any, ...], bytes]]
    about: dict[str, Any]
    copied: bool
    machines: list[list[int]]
    copies: int
    messages: Messages | None

    def write(self) -> Path:
        """Write it, and return when the checkpoint of all ranks is whole and on the disk.

        Raises:
            CheckpointError: on all ranks, if one could not; nothing of it is left, and older ones are untouched.
        """
        if (messages := self.messages) is None:
            self._together("whole", self._write, self._finish)
        else:
            sizes = self._together("written", self._write, self._sizes)
            copies = Copies(self.draft, self.machines, self.copies, self.ranks.rank, sizes)
            self._together("given room on other machines", copies.make_room)
            self._together("copied to other machines", lambda: copies.exchange(messages))
            # All have the new one before any removes an old one: at each moment there is one that is whole.
            self._together("whole", self._finish_here)
            self._together("whole everywhere", self._remove_old_here)
        return self.path / folders.name_of(self.step)

    @property
    def draft(self) -> Path:
        """The folder that is written to."""
        return folders.draft_of(self.path, self.step)

    @property
    def leads(self) -> bool:
        """Whether this rank does what is done once in each folder."""
        return any(ranks[0] == self.ranks.rank for ranks in self.machines)

    def _together(self, how: str, own: Callable[[], Any], combined: Callable[[list[Any]], Any] = lambda _: None) -> Any:
        """What the first rank makes of what ``own`` gives on each; an error on one rank is one on all."""
        topic = f"step {self.step} of the checkpoint, {how}"
        outcome: dict[str, Any]
        try:
            outcome = {"made": own()}
        except Exception as error:  # of any kind: the other ranks wait for the outcome
            outcome = {"error": self._told(error)}
        outcomes = self.ranks.to_first(topic, outcome)
        if self.ranks.is_first:
            outcome = self._outcome(outcomes, combined)
        outcome = self.ranks.from_first(topic, outcome)
        if "error" in outcome:
            self._drop()
            raise CheckpointError(outcome["error"])
        return outcome["made"]

    def _outcome(self, outcomes: list[dict[str, Any]], combined: Callable[[list[Any]], Any]) -> dict[str, Any]:
        try:
            for rank, each in enumerate(outcomes):
                if "error" in each:
                    raise CheckpointError(each["error"] if self.ranks.count == 1 else f"rank {rank}: {each['error']}")
            return {"made": combined([each["made"] for each in outcomes])}
        except Exception as error:  # of any kind, likewise
            self._drop()
            return {"error": self._told(error)}

    def _drop(self) -> None:
        if self.leads:
            folders.drop_draft(self.draft)

    def _told(self, error: Exception) -> str:
        known = isinstance(error, CheckpointError)
        return str(error) if known else cannot_write(self.path, self.step, self.nbytes, error)

    def _write(self) -> dict[str, Any]:
        try:
            file = _write_file(self.draft / folders.file_of(self.ranks.rank), self)
            return {**file, "latest": folders.latest_in(self.path) if self.leads else (0, "")}
        finally:
            if self.copied:
                give_back(tensor for _, _, tensor in self.tensors)

    def _describe(self, files: list[dict[str, Any]]) -> Index:
        number = max(each["latest"][0] for each in files) + 1
        # No earlier than those before it, also if another machine's clock was ahead.
        time = max(self.about["time"], *(each["latest"][1] for each in files))
        return _described(self.draft, files, {**self.about, "number": number, "time": time})

    def _finish(self, files: list[dict[str, Any]]) -> None:
        index = self._describe(files)
        try:
            index.raise_if_incomplete()
        except DamagedError as error:
            raise CheckpointError(
                f"{error}: give a path on a file system that all ranks share; or copies=2, if it is a folder of each "
                "machine's own, such as one in its memory"
            ) from error
        folders.finish_draft(self.draft)
        folders.remove_old(self.path, self.keep, parts=self.copies > 1)

    def _finish_here(self) -> None:
        if self.leads:
            folders.finish_draft(self.draft)

    def _remove_old_here(self) -> None:
        if self.leads:
            folders.remove_old(self.path, self.keep, parts=True)

    def _sizes(self, files: list[dict[str, Any]]) -> dict[str, int]:
        index = self._describe(files)
        return {**index.files, **{name: (self.draft / name).stat().st_size for name in (MANIFEST, CHECKSUM)}}


def cannot_write(path: Path, step: int, nbytes: int, error: Exception) -> str:
    """The text of an error for a checkpoint that could not be written: with bytes needed, and free."""
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    reason = error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
    remedy = "make room there" if full else "give a folder that exists or can be made, and that all ranks may write to"
    return (
        f"step {step} could not be saved in {str(path)!r} ({reason}): it takes {format_bytes(nbytes)}, and "
        f"{_free(path)} are free there. Older checkpoints are untouched. To save it, {remedy}"
    )


def _free(path: Path) -> str:
    existing = next((each for each in (path, *path.absolute().parents) if each.exists()), None)
    try:
        return "no bytes" if existing is None else format_bytes(shutil.disk_usage(existing).free)
    except OSError:
        return "an unknown number of bytes"


class _Checksummed:
    """A file to which a value after the other is written, each with its checksum."""

    def __init__(self, file: Any) -> None:
        self._file, self.end, self._checksum = file, 0, 0

    def write(self, data: Any) -> int:
        """Write bytes."""
        self._file.write(data)
        self._checksum = zlib.crc32(data, self._checksum)
        self.end += len(data)
        return len(data)

    def flush(self) -> None:
        """Nothing: the file is synchronized at its end."""

    def taken(self) -> int:
        """The checksum of what was written since the last time."""
        checksum, self._checksum = self._checksum, 0
        return checksum


def _write_file(file: Path, job: Job) -> dict[str, Any]:
    """Write a rank's file; returns what the description is made of."""
    tensors, values = [], []
    with file.open("xb") as raw:
        stream = _Checksummed(raw)
        for key, path, data in job.values:
            start = stream.end
            stream.write(data)
            values.append([key, path, Region(file.name, start, stream.end - start, stream.taken())])
        for piece, path, tensor in job.tensors:
            start = stream.end
            torch.save(on_host(tensor), stream)  # type: ignore[arg-type]  # all that it needs of a file
            tensors.append([piece, path, Region(file.name, start, stream.end - start, stream.taken())])
        raw.flush()
        os.fsync(raw.fileno())
    return {"name": file.name, "size": stream.end, "tensors": tensors, "values": values}


def _described(draft: Path, files: list[dict[str, Any]], about: dict[str, Any]) -> Index:
    """Write the descriptions: that of ``torch.distributed.checkpoint``, and the manifest with its checksum."""
    values = {key: Region(*region) for file in files for key, _, region in file["values"]}
    paths = {key: tuple(path) for file in files for key, path, _ in file["values"]}
    chunks: dict[str, list[Chunk]] = defaultdict(list)
    kinds: dict[str, Piece] = {}
    for file in files:
        for sent, path, region in file["tensors"]:
            piece = Piece(*sent)
            kinds[piece.key], paths[piece.key] = piece, tuple(path)
            chunks[piece.key].append(Chunk(tuple(piece.offsets), tuple(piece.sizes), Region(*region)))
    tensors = {
        key: StoredTensor(torch.Size(kind.shape), getattr(torch, kind.dtype), tuple(sorted(chunks[key])))
        for key, kind in kinds.items()
    }
    for other, first in about["tied"].items():  # one tensor in the file, under both names
        if f"model.{first}" not in tensors or f"model.{other}" in tensors:
            continue
        tensors[f"model.{other}"], paths[f"model.{other}"] = tensors[f"model.{first}"], ("model", other)
    for file in files:
        regions = [Region(*each[-1]) for kind in ("tensors", "values") for each in file[kind]]
        assert tiled(regions), f"{file['name']} has bytes without a checksum"
    description = pickle.dumps(metadata_of(tensors, values, paths))
    _write_synced(draft / METADATA, description)
    sizes = {file["name"]: file["size"] for file in files} | {METADATA: len(description)}
    about = {**about, "metadata_sha256": hashlib.sha256(description).hexdigest()}
    index = Index(draft, tensors, values, paths, sizes, about)
    manifest = manifest_text(index)
    _write_synced(draft / MANIFEST, manifest)
    _write_synced(draft / CHECKSUM, checksum_text(manifest).encode())
    return index


def _write_synced(file: Path, data: bytes) -> None:
    with file.open("xb") as raw:
        raw.write(data)
        raw.flush()
        os.fsync(raw.fileno())
