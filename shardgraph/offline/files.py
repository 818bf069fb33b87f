"""Files of whole tensors, one tensor in memory at a time; and files of ``torch.save``."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from shardgraph.errors import CheckpointError
from shardgraph.offline.stored import Stored, StoredState

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def write_whole(state: StoredState, path: Path) -> None:
    """Write a safetensors file, one tensor after the other. A file is replaced only once the new one is complete.

    As with ``safetensors.torch.save_model``, tied tensors are stored under the first of their names in alphabetical
    order, to which the metadata maps the others. ``safetensors.torch.save_file`` would need all tensors at once; the
    format is at https://huggingface.co/docs/safetensors.

    Raises:
        CheckpointError: a dtype is not one of the format, or there is no such folder; nothing has been written.
    """
    if foreign := [name for name, stored in state.tensors.items() if stored.dtype not in _NAMES]:
        raise CheckpointError(
            f"{foreign[0]!r} is {state.tensors[foreign[0]].dtype}, which a safetensors file cannot hold: convert it "
            "before you save the shards"
        )
    if not path.parent.is_dir():
        raise CheckpointError(f"there is no folder {str(path.parent)!r} to write {path.name!r} to: make it first")
    first, metadata = _alphabetical(state)
    # As the format's own writer: what has the widest elements comes first, so that all of it is aligned.
    order = sorted(state.tensors, key=lambda name: (-state.tensors[name].dtype.itemsize, first[name]))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    end = 0
    for name in order:
        stored, start = state.tensors[name], end
        end += stored.shape.numel() * stored.dtype.itemsize
        header[first[name]] = {
            "dtype": _NAMES[stored.dtype],
            "shape": list(stored.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    draft = path.with_name(path.name + ".draft")
    try:
        with draft.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for name in order:
                file.write(_bytes(state.tensors[name].read()))
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


def read_whole(path: Path, entry: str = "") -> StoredState:
    """The tensors of a safetensors file, or of one of ``torch.save``, of which ``entry`` is a model's state.

    Raises:
        CheckpointError: there is no such file or entry, or it is of another kind.
    """
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    contents = load(path)
    state = contents.get(entry, contents)
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    if not tensors or (entry and entry not in contents):
        entries = ", ".join(repr(name) for name, value in contents.items() if isinstance(value, Mapping))
        raise CheckpointError(
            f"{str(path)!r} has no tensors {f'under {entry!r}' if entry else 'by name'}: say which of its entries is "
            f"the model's state, as entry={entries or 'its name'!s}"
        )
    return plain(tensors)


def plain(tensors: Mapping[str, torch.Tensor]) -> StoredState:
    """Tensors that are there, or mapped from a file; those that share memory are tied."""
    ties = same_memory(tensors)
    kept = {name: tensor for name, tensor in tensors.items() if name not in ties}
    return StoredState({name: Stored.of(tensor) for name, tensor in kept.items()}, ties)


def same_memory(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """The first name of each tensor by its other ones."""
    first: dict[Any, str] = {}
    ties = {}
    for name, tensor in tensors.items():
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and first.setdefault(key, name) != name:
            ties[name] = first[key]
    return ties


def load(path: Path) -> Mapping[str, Any]:
    """The contents of a file of ``torch.save``, whose tensors are read when they are used.

    Raises:
        CheckpointError: there is no such file, it has other objects than tensors and plain values, or no names.
    """
    if not path.is_file():
        raise CheckpointError(f"there is no file {str(path)!r}")
    try:
        try:
            contents = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except RuntimeError:  # the format before torch 1.6 cannot be mapped
            contents = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"{str(path)!r} cannot be read ({reason}): it must be a file of torch.save that has "
            "tensors and plain values only; allow classes that you trust with torch.serialization.add_safe_globals"
        ) from error
    if not isinstance(contents, Mapping):
        raise CheckpointError(f"{str(path)!r} holds a {type(contents).__name__}, and must hold tensors by name")
    return contents


def _read_safetensors(path: Path) -> StoredState:
    if not path.is_file():
        raise CheckpointError(f"there is no file {str(path)!r}")
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            kinds = {name: (file.get_slice(name).get_shape(), file.get_slice(name).get_dtype()) for name in names}
            metadata = file.metadata() or {}
    except SafetensorError as error:
        raise CheckpointError(f"{str(path)!r} is not a safetensors file that can be read: {error}") from error
    tensors = {
        name: Stored(torch.Size(shape), _DTYPES[dtype], partial(_read_one, path, name))
        for name, (shape, dtype) in kinds.items()
    }
    return StoredState(tensors, {name: first for name, first in metadata.items() if first in names})


def _read_one(path: Path, name: str) -> torch.Tensor:
    with safe_open(path, framework="pt") as file:
        return file.get_tensor(name)


def _alphabetical(state: StoredState) -> tuple[dict[str, str], dict[str, str]]:
    """For each tensor the first of its names in alphabetical order, and for its other names that one."""
    names = {name: [name] for name in state.tensors}
    for name, first in state.tied.items():
        names[first].append(name)
    kept = {name: min(each) for name, each in names.items()}
    return kept, {other: kept[name] for name, each in names.items() for other in each if other != kept[name]}
