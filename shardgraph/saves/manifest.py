"""The description of a checkpoint: where each tensor is in its files, with what checksum, and what it is of."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from shardgraph.errors import CheckpointError
from shardgraph.torch_api import read_metadata, storage_info

FORMAT = "shardgraph.checkpoint.1"
MANIFEST, CHECKSUM, METADATA = "manifest.json", "manifest.json.sha256", ".metadata"


class DamagedError(CheckpointError):
    """Files of a checkpoint are not those that were written."""


class Region(NamedTuple):
    """Bytes of a file; without a checksum if others wrote it."""

    file: str
    start: int
    length: int
    crc32: int | None


class Chunk(NamedTuple):
    """The part of a tensor from ``offsets`` on, of these ``sizes``."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    region: Region


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in files."""

    shape: torch.Size
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Index:
    """What is in a folder. ``about`` is what it was saved of: the step, the plan, versions; empty if others wrote it.

    ``paths`` has the places in nested dictionaries of all ``tensors`` and other ``values``, ``files`` sizes of files.
    """

    folder: Path
    tensors: Mapping[str, StoredTensor]
    values: Mapping[str, Region]
    paths: Mapping[str, tuple[Any, ...]]
    files: Mapping[str, int]
    about: Mapping[str, Any]

    @property
    def nbytes(self) -> int:
        """The size of all files of ranks."""
        return sum(self.files.values())

    def raise_if_incomplete(self) -> None:
        """Raise DamagedError if a file is missing, or has another size than was written."""
        for name, size in self.files.items():
            file = self.folder / name
            if not file.is_file():
                raise DamagedError(f"{str(file)!r} is missing")
            if (found := file.stat().st_size) != size:
                raise DamagedError(f"{str(file)!r} has {found} bytes, and {size} were written")

    def raise_if_metadata_differs(self) -> None:
        """Raise DamagedError if the file that ``torch.distributed.checkpoint`` reads is not the one written."""
        if (expected := self.about.get("metadata_sha256")) is None:
            return
        data = _read(self.folder / METADATA)
        if hashlib.sha256(data).hexdigest() != expected:
            raise DamagedError(f"{str(self.folder / METADATA)!r} is not as it was written: its checksum is another one")


def manifest_text(index: Index) -> bytes:
    """The manifest as its file has it."""
    tensors = {
        key: {
            "shape": list(stored.shape),
            "dtype": str(stored.dtype).removeprefix("torch."),
            "chunks": [[each.offsets, each.sizes, list(each.region)] for each in stored.chunks],
        }
        for key, stored in index.tensors.items()
    }
    content = {
        "format": FORMAT,
        **index.about,
        "files": dict(index.files),
        "tensors": tensors,
        "values": {key: list(region) for key, region in index.values.items()},
        "paths": {key: list(path) for key, path in index.paths.items()},
    }
    return "".join(["{\n", ",\n".join(_lines(content)), "\n}\n"]).encode()


def _lines(content: Mapping[str, Any]) -> Iterator[str]:
    """An entry a line; those of dictionaries too."""
    for key, value in content.items():
        text = json.dumps(value)
        if isinstance(value, dict) and value:
            inside = ",\n".join(f"  {json.dumps(name)}: {json.dumps(each)}" for name, each in value.items())
            text = f"{{\n{inside}\n }}"
        yield f" {json.dumps(key)}: {text}"


def checksum_text(manifest: bytes) -> str:
    """What ``sha256sum -c manifest.json.sha256`` reads."""
    return f"{hashlib.sha256(manifest).hexdigest()}  {MANIFEST}\n"


def read_manifest(folder: Path) -> Index:
    """The description of a checkpoint that ``shardgraph.save_checkpoint`` wrote.

    Raises:
        DamagedError: it is not as it was written.
    """
    data, checksum = _read(folder / MANIFEST), _read(folder / CHECKSUM)
    if checksum_text(data).encode() != checksum:
        raise DamagedError(f"{str(folder / MANIFEST)!r} is not as it was written: {CHECKSUM} is of another text")
    return index_of(folder, data)


def index_of(folder: Path, manifest: bytes) -> Index:
    """What a manifest describes, of a checkpoint in ``folder``.

    Raises:
        DamagedError: it describes none.
    """
    try:
        return _index_of(folder, json.loads(manifest))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:  # nobody wrote it like that
        raise DamagedError(f"{str(folder / MANIFEST)!r} is no description of a checkpoint: {error}") from error


def _index_of(folder: Path, content: Any) -> Index:
    if content.get("format") != FORMAT:
        raise CheckpointError(
            f"{str(folder / MANIFEST)!r} is of the format {content.get('format')!r}, and this version of shardgraph "
            f"reads {FORMAT!r}: load it with the version that wrote it, {content.get('versions')}"
        )
    tensors = {
        key: StoredTensor(
            torch.Size(each["shape"]),
            getattr(torch, each["dtype"]),
            tuple(Chunk(tuple(at), tuple(sizes), Region(*region)) for at, sizes, region in each["chunks"]),
        )
        for key, each in content.pop("tensors").items()
    }
    values = {key: Region(*region) for key, region in content.pop("values").items()}
    paths = {key: tuple(path) for key, path in content.pop("paths").items()}
    files = {str(name): int(size) for name, size in content.pop("files").items()}
    return Index(folder, tensors, values, paths, files, content)


def read_distributed(folder: Path) -> Index:
    """The description of a folder that ``torch.distributed.checkpoint`` alone wrote: there are no checksums in it.

    Raises:
        DamagedError: it cannot be read.
    """
    try:
        metadata = read_metadata(folder)
        regions = {
            (index.fqn, None if index.offset is None else tuple(index.offset)): Region(
                info.relative_path, info.offset, info.length, None
            )
            for index, info in metadata.storage_data.items()
        }
        tensors, values = {}, {}
        for key, stored in metadata.state_dict_metadata.items():
            if isinstance(stored, TensorStorageMetadata):
                parts = [(tuple(each.offsets), tuple(each.sizes)) for each in stored.chunks]
                chunks = tuple(Chunk(at, sizes, regions[key, at]) for at, sizes in parts)
                tensors[key] = StoredTensor(stored.size, stored.properties.dtype, chunks)
            else:
                values[key] = regions[key, None]
        paths = metadata.planner_data or {key: (key,) for key in metadata.state_dict_metadata}
    except Exception as error:  # of any kind: whatever a damaged pickle leads to
        raise DamagedError(f"{str(folder / METADATA)!r} cannot be read: {error}") from error
    return Index(folder, tensors, values, paths, {}, {})


def metadata_of(
    tensors: Mapping[str, StoredTensor], values: Mapping[str, Region], paths: Mapping[str, Any]
) -> Metadata:
    """The same description for ``torch.distributed.checkpoint``."""
    state: dict[str, Any] = {
        key: TensorStorageMetadata(
            properties=TensorProperties(dtype=stored.dtype),
            size=stored.shape,
            chunks=[ChunkStorageMetadata(torch.Size(at), torch.Size(sizes)) for at, sizes, _ in stored.chunks],
        )
        for key, stored in tensors.items()
    }
    state |= {key: BytesStorageMetadata() for key in values}
    storage = {MetadataIndex(key): storage_info(*region[:3]) for key, region in values.items()}
    for key, stored in tensors.items():
        for at, _, region in stored.chunks:
            storage[MetadataIndex(key, at)] = storage_info(*region[:3])
    return Metadata(state, planner_data=dict(paths), storage_data=storage, version="1.0.0")


def tiled(regions: Sequence[Region]) -> bool:
    """Whether the regions of a file follow on each other from its start, so that every byte has a checksum."""
    end = 0
    for region in sorted(regions, key=lambda each: each.start):
        if region.start != end:
            return False
        end += region.length
    return True


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except FileNotFoundError:
        raise DamagedError(f"{str(file)!r} is missing") from None
    except OSError as error:
        raise DamagedError(f"{str(file)!r} cannot be read: {error.strerror}") from error
