"""A checkpoint is written: each rank its file, then the first rank the description, and the folder gets its name."""

from __future__ import annotations

import errno
import hashlib
import os
import pickle
import shutil
import zlib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardgraph.errors import CheckpointError
from shardgraph.runtime.exchange import Ranks
from shardgraph.saves import folders
from shardgraph.saves.assignment import Assignment, Offer, Piece, Value, assigned, rank_entry
from shardgraph.saves.contents import Contents, packed
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
from shardgraph.saves.staging import give_back, on_host, staged
from shardgraph.sizes import format_bytes
from shardgraph.torch_api import box_of, local_tensor


@dataclass
class Job:
    """What a rank writes: its own part of a step's checkpoint.

    ``tensors`` are pieces of tensors, ``values`` all else; both with their paths in nested dictionaries. If they are
    ``copied``, to host memory, training may go on meanwhile.
    """

    ranks: Ranks
    path: Path
    step: int
    keep: int | None
    nbytes: int  # of all ranks
    tensors: list[tuple[Piece, tuple[Any, ...], torch.Tensor]]
    values: list[tuple[str, tuple[Any, ...], bytes]]
    about: dict[str, Any]
    copied: bool

    @property
    def draft(self) -> Path:
        """The folder that is written to."""
        return self.path / (folders.name_of(self.step) + ".writing")

    def write(self) -> Path:
        """Write it, and return when the checkpoint of all ranks is whole and on the disk.

        Raises:
            CheckpointError: on all ranks, if one could not; nothing of it is left, and older ones are untouched.
        """
        where = f"step {self.step} of the checkpoint"
        written: dict[str, Any]
        try:
            written = {"file": _write_file(self.draft / f"__{self.ranks.rank}_0.distcp", self)}
        except Exception as error:  # of any kind: the other ranks wait for the outcome
            written = {"error": self._told(error)}
        if self.copied:
            give_back(tensor for _, _, tensor in self.tensors)
        results = self.ranks.to_first(f"{where}, written", written)
        outcome: dict[str, str] = {}
        if self.ranks.is_first:
            outcome = self._finished(results)
        outcome = self.ranks.from_first(f"{where}, whole", outcome)
        if "error" in outcome:
            raise CheckpointError(outcome["error"])
        return Path(outcome["folder"])

    def _finished(self, results: list[dict[str, Any]]) -> dict[str, str]:
        failures = {rank: result["error"] for rank, result in enumerate(results) if "error" in result}
        try:
            if failures:
                rank, told = next(iter(failures.items()))
                raise CheckpointError(told if self.ranks.count == 1 else f"rank {rank}: {told}")
            index = _described(self.draft, [result["file"] for result in results], self.about)
            try:
                index.raise_if_incomplete()
            except DamagedError as error:
                raise CheckpointError(f"{error}: give a path on a file system that all ranks share") from error
            return {"folder": str(folders.finish_draft(self.draft, self.keep))}
        except Exception as error:  # of any kind, likewise
            folders.drop_draft(self.draft)
            return {"error": str(error) if isinstance(error, CheckpointError) else self._told(error)}

    def _told(self, error: Exception) -> str:
        return cannot_write(self.path, self.step, self.nbytes, error)


def prepared(
    ranks: Ranks,
    path: Path,
    step: int,
    keep: int | None,
    contents: Contents | Exception,
    about: Mapping[str, Any],
    copy: bool,
) -> Job:
    """Agree with the other ranks on who writes what, make the folder, and ``copy`` this rank's part to host memory.

    ``contents`` may be the reason why this rank has none.

    Raises:
        CheckpointError: on all ranks, if one cannot save, or there is no room; nothing has been written.
    """
    offer, offered = _offer(contents, path, step)
    offers = ranks.to_first(f"step {step} of the checkpoint", offer)
    verdict: Any = None
    if ranks.is_first:
        verdict = _verdict([Offer.of(each) for each in offers], path, step)
    verdict = ranks.from_first(f"step {step} of the checkpoint", verdict)
    if isinstance(contents, Exception):
        raise CheckpointError(verdict) from contents
    if isinstance(verdict, str):
        raise CheckpointError(verdict)
    mine = Assignment(*verdict)
    pieces = [offered[number] for number in mine.pieces[ranks.rank]]
    own = [local_tensor(contents.tensors[piece.key]) for piece in pieces]
    if any(tensor.is_cuda for tensor in own):
        torch.cuda.synchronize()  # another thread reads them
    paths = [contents.paths[piece.key] for piece in pieces]
    tensors = list(zip(pieces, paths, staged(own) if copy else own, strict=True))
    values = [
        (name, contents.paths[key] + ((rank_entry(ranks.rank),) if name != key else ()), contents.values[key])
        for key, name in mine.values[ranks.rank]
    ]
    for index, names in enumerate(mine.groups if ranks.is_first else ()):
        group = ("optimizer", "param_groups", index, "params")
        values.append((key := ".".join(map(str, group)), group, packed(key, names)))
    return Job(ranks, path, step, keep, mine.nbytes, tensors, values, dict(about), copy)


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


def _offer(contents: Contents | Exception, path: Path, step: int) -> tuple[Offer, list[Piece]]:
    if isinstance(contents, Exception):
        told = str(contents) if isinstance(contents, CheckpointError) else f"{type(contents).__name__}: {contents}"
        return Offer(told, step, str(path), [], [], []), []
    pieces = []
    for key, tensor in contents.tensors.items():
        box = box_of(tensor) if isinstance(tensor, DTensor) else ([0] * tensor.dim(), list(tensor.shape))
        if box is not None and (local_tensor(tensor).numel() or not tensor.numel()):
            pieces.append(Piece(key, *box, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")))
    values = [Value(key, contents.digests[key], len(data)) for key, data in contents.values.items()]
    return Offer(None, step, str(path), pieces, values, contents.groups), pieces


def _verdict(offers: list[Offer], path: Path, step: int) -> Assignment | str:
    """Who writes what, with a folder for it; or why it cannot be."""
    try:
        made = assigned(offers)
    except CheckpointError as error:
        return str(error)
    try:
        folders.make_draft(path, step)
        if shutil.disk_usage(path).free < made.nbytes:
            folders.drop_draft(path / (folders.name_of(step) + ".writing"))
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        return cannot_write(path, step, made.nbytes, error)
    return made


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
    about = {**about, "number": folders.next_number(draft.parent)}
    about["metadata_sha256"] = hashlib.sha256(description).hexdigest()
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
