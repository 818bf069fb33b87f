"""Entries of the cache: files of a directory, each JSON and tensors, written whole and checked when they are read."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError

import shardgraph
from shardgraph.cache.values import NotStorable

_MOST_BYTES = 2 << 30  # of the directory; the oldest entries make room
_TEXT = "json:"
_LENGTH = 8  # bytes of the number that safetensors begins with


def directory() -> Path | None:
    """Where entries are kept: the directory that ``SHARDGRAPH_CACHE`` names; None if it names none, or is ``off``."""
    chosen = os.environ.get("SHARDGRAPH_CACHE", "")
    return None if chosen.lower() in ("", "off") else Path(chosen).expanduser()


def path_of(name: str) -> Path | None:
    """The file of the entry called ``name``; None if no directory is named."""
    return None if (folder := directory()) is None else folder / f"{name}.safetensors"


def versions() -> tuple[str, ...]:
    """Versions of all that makes a graph of a model, this package by its source."""
    return (
        *_installed(),
        platform.python_version(),
        platform.machine(),
        torch.__version__,
        str(torch.version.git_version),
    )


@functools.cache
def _installed() -> tuple[str, ...]:
    found = []
    for name in ("transformers", "numpy", "accelerate"):
        with suppress(metadata.PackageNotFoundError):
            found.append(f"{name} {metadata.version(name)}")
    source = hashlib.sha256()
    folders = [Path(path) for path in shardgraph.__path__]
    packages = [folders[0].parent / "passes", folders[0].parent / "cost_models"]  # beside it in the source tree
    for file in sorted(file for folder in (*folders, *packages) if folder.is_dir() for file in folder.rglob("*.py")):
        source.update(file.read_bytes())
    return source.hexdigest(), *found


def encoded(parts: Mapping[str, Any], tensors: list[torch.Tensor]) -> bytes:
    """An entry as the bytes of a file: its parts, which JSON can write, and its tensors."""
    held: dict[str, torch.Tensor] = {str(i): each.detach().cpu().contiguous() for i, each in enumerate(tensors)}
    for name, part in parts.items():
        text = zlib.compress(json.dumps(part, separators=(",", ":")).encode(), 1)
        held[_TEXT + name] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    about = {"sha256": _checksum(held, parts, len(tensors)), "parts": json.dumps([*parts])}
    return safetensors.torch.save(held, about)


def decoded(data: bytes) -> tuple[Parts, list[torch.Tensor]]:
    """The parts and tensors of an entry.

    Raises:
        NotStorable: it is not an entry, or not a whole one.
    """
    try:
        held = safetensors.torch.load(data)
        size = int.from_bytes(data[:_LENGTH], "little")  # safetensors gives the metadata of files only
        about = json.loads(data[_LENGTH : _LENGTH + size])["__metadata__"]
        names = json.loads(about["parts"])
        count = len(held) - len(names)
        if _checksum(held, names, count) != about["sha256"]:
            raise NotStorable("an entry that is damaged")
        parts = Parts({name: held[_TEXT + name].numpy().tobytes() for name in names})
        return parts, [held[str(i)] for i in range(count)]
    except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise NotStorable(f"an entry that cannot be read: {error}") from error


def _checksum(held: Mapping[str, torch.Tensor], parts: Iterable[str], tensors: int) -> str:
    digest = hashlib.sha256()
    for name in (*(_TEXT + part for part in parts), *map(str, range(tensors))):
        digest.update(held[name].reshape(-1).view(torch.uint8).numpy().tobytes() if held[name].numel() else b"")
    return digest.hexdigest()


def write(path: Path, data: bytes) -> None:
    """Write an entry, in place of any that is there: readers see one or the other. Old entries make room.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    written = path.with_name(f".{path.name}.{os.getpid()}-{id(data)}")
    try:
        written.write_bytes(data)
        written.replace(path)
    finally:
        written.unlink(missing_ok=True)
    _make_room(path.parent)


class Parts(Mapping[str, Any]):
    """The parts of an entry by name, each taken apart when it is asked for."""

    def __init__(self, texts: Mapping[str, bytes]) -> None:
        self._texts = texts

    def __getitem__(self, name: str) -> Any:
        text = self._texts[name]
        try:
            return json.loads(zlib.decompress(text))
        except (ValueError, zlib.error) as error:
            raise NotStorable(f"the part {name!r} of an entry cannot be read: {error}") from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    def __len__(self) -> int:
        return len(self._texts)


def read(path: Path) -> bytes | None:
    """The bytes of an entry, None if there is none."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    with suppress(OSError):
        os.utime(path)  # lately used
    return data


def _make_room(folder: Path) -> None:
    """Delete the entries that were used longest ago until the others take no more than the limit."""
    files = []
    for file in folder.glob("*.safetensors"):
        with suppress(OSError):  # another process has deleted it
            files.append((file.stat().st_mtime, file.stat().st_size, file))
    total = sum(size for _, size, _ in files)
    for _, size, file in sorted(files):
        if total <= _MOST_BYTES:
            break
        with suppress(OSError):
            file.unlink()
        total -= size
