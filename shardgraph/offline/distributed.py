"""A checkpoint of ``torch.distributed.checkpoint``, read one tensor at a time."""

from __future__ import annotations

import warnings
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from shardgraph.errors import CheckpointError, one_line
from shardgraph.offline.stored import Stored, StoredState
from shardgraph.torch_api import read_metadata


def is_distributed(path: Path) -> bool:
    """Whether ``torch.distributed.checkpoint`` wrote this folder."""
    return (path / ".metadata").is_file()


def state_of_folder(folder: Path, entry: str = "") -> StoredState:
    """The tensors that were saved under ``entry``; by default all, if there is one model's state.

    Which names are tied is not in such a checkpoint: each has a tensor of its own.

    Raises:
        CheckpointError: a file is missing, there is no such entry, or it is not said which one is the model's.
    """
    reader = _Reader(folder)
    try:
        metadata = reader.read_metadata()
    except Exception as error:
        raise CheckpointError(f"{str(folder / '.metadata')!r} cannot be read: {error}") from error
    if missing := sorted({each.relative_path for each in metadata.storage_data.values()} - _files(folder)):
        raise CheckpointError(f"{str(folder)!r} lacks {', '.join(missing[:4])}, with shards of ranks: copy all files")
    tensors = {}
    for name, own in _names(folder, metadata, entry).items():
        stored = metadata.state_dict_metadata[name]
        if not isinstance(stored, TensorStorageMetadata):
            continue
        if sum(chunk.sizes.numel() for chunk in stored.chunks) != stored.size.numel():
            raise CheckpointError(f"{str(folder)!r} has not all of {name!r}: {list(stored.size)} in fewer elements")
        dtype = stored.properties.dtype
        tensors[own] = Stored(stored.size, dtype, partial(_read, reader, name, stored.size, dtype))
    return StoredState(tensors)


class _Reader(dcp.FileSystemReader):
    """Reads what all files have only once, and nothing but plain data; every load of a tensor asks for it."""

    @cache  # noqa: B019 - a reader lives as long as it is read from
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return read_metadata(Path(self.path))


def _read(reader: _Reader, name: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    state = {name: torch.empty(shape, dtype=dtype, device="cpu")}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # that is what no_dist asks for
            dcp.load(state, storage_reader=reader, no_dist=True)
    except (Exception, dcp.CheckpointException) as error:  # the latter, of any rank, is no Exception
        causes = [each for each, _ in error.failures.values()] if isinstance(error, dcp.CheckpointException) else []
        told = one_line((causes or [error])[0], 300)
        raise CheckpointError(f"{name!r} cannot be read from {str(reader.path)!r}: {told}") from error
    return state[name]


def _names(folder: Path, metadata: Metadata, entry: str) -> dict[str, str]:
    """The names of the model's tensors by those in the checkpoint."""
    paths = metadata.planner_data or {name: (name,) for name in metadata.state_dict_metadata}
    entries = {str(path[0]) for path in paths.values() if len(path) > 1}
    if not entry and len(entries) == 1 and all(len(path) > 1 for path in paths.values()):
        (entry,) = entries
    if not entry and entries:
        raise CheckpointError(
            f"{str(folder)!r} has {', '.join(sorted(entries))}: say which one is the model's state, as entry='...'"
        )
    names = {
        name: ".".join(map(str, path[1:] if entry else path))
        for name, path in paths.items()
        if not entry or (str(path[0]) == entry and len(path) > 1)
    }
    if not names:
        raise CheckpointError(
            f"{str(folder)!r} has no entry {entry!r}; it has {', '.join(sorted(entries)) or 'no entries'}"
        )
    return names


def _files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
