"""The files of ``torch.distributed.checkpoint``: what their description is made of, and reading it without trust."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed import _state_dict_utils
from torch.distributed.checkpoint import state_dict
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

_ALLOWED = {
    "torch": {"Size", "device"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "_MEM_FORMAT_ENCODING",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
    },
    "pathlib": {"Path", "PosixPath", "PurePosixPath", "PureWindowsPath", "WindowsPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePosixPath", "PureWindowsPath", "WindowsPath"},
    "collections": {"OrderedDict", "ChainMap"},
}
"""What a description consists of, by module; all of it is plain data, and making it does nothing."""


class _Restricted(pickle.Unpickler):
    """Reads a pickle of these classes alone (https://docs.python.org/3/library/pickle.html#restricting-globals)."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(
            f"it asks for {module}.{name}, which is not part of a checkpoint's description and could run anything"
        )


def read_metadata(folder: Path) -> Metadata:
    """The description of a folder of ``torch.distributed.checkpoint``; nothing but plain data is unpickled.

    Raises:
        OSError: there is none.
        Exception: of any kind, if it is damaged, or has more in it.
    """
    with (folder / ".metadata").open("rb") as file:
        metadata = _Restricted(file).load()
    if not isinstance(metadata, Metadata):
        raise pickle.UnpicklingError(f"it is a {type(metadata).__name__}")
    return metadata


def storage_info(file: str, start: int, length: int) -> StorageInfo:
    """Where ``torch.distributed.checkpoint`` finds something in its files."""
    return StorageInfo(file, start, length)


def box_of(tensor: DTensor) -> tuple[list[int], list[int]] | None:
    """The offsets and sizes of this rank's shard; None if it has none, or is not in the mesh."""
    if tensor.device_mesh.get_coordinate() is None:
        return None
    (chunk,) = tensor.__create_chunk_list__()
    assert isinstance(chunk, ChunkStorageMetadata)
    return list(chunk.offsets), list(chunk.sizes)


@functools.cache
def take_blocks(part: Callable[[torch.Tensor, DTensor], torch.Tensor]) -> None:
    """From now on, where ``torch.distributed.checkpoint.state_dict`` has whole tensors from rank 0 alone
    (``broadcast_from_rank0``), shards that lie in several blocks of a dimension get what ``part`` takes for them.

    Torch copies one block, so that they would have other rows than their own.
    """
    distribute = _state_dict_utils._distribute_tensors

    @functools.wraps(distribute)
    def distributing(state: dict[str, Any], keys: list[str], *args: Any, **kwargs: Any) -> None:
        for key in [key for key in keys if isinstance(state.get(key), tuple)]:
            target, whole = state[key]
            if any(isinstance(each, _StridedShard) for each in target.placements):
                target._local_tensor.copy_(part(whole, target))
                state[key] = target
        distribute(state, keys, *args, **kwargs)

    _state_dict_utils._distribute_tensors = distributing  # type: ignore[assignment]


@functools.cache
def describe_states(described: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """From now on, ``torch.distributed.checkpoint.state_dict`` has the states of optimizers as ``described`` makes them
    of what their ``state_dict()`` returns: on all ranks, which call it together."""
    found = state_dict._state_dict_fn

    @functools.wraps(found)
    def finding(of: Any, name: str) -> Any:
        call = found(of, name)
        if name != "state_dict" or not isinstance(of, torch.optim.Optimizer):
            return call
        return lambda: described(call())

    state_dict._state_dict_fn = finding  # type: ignore[assignment]
