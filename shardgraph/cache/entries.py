"""Entries of the cache: files of a directory, each JSON and tensors, written whole and checked when they are read."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open

import shardgraph
from shardgraph.cache.values import NotStorable

_MOST_BYTES = 2 << 30  # of the directory; the oldest entries make room
_TEXT = "json:"


def directory() -> Path | None:
    """Where entries are kept: the directory that ``SHARDGRAPH_CACHE`` names; None if it names none, or is ``off``."""
    chosen = os.environ.get("SHARDGRAPH_CACHE", "")
    return None if chosen.lower() in ("", "off") else Path(chosen).expanduser()


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


def write(path: Path, parts: Mapping[str, Any], tensors: list[torch.Tensor]) -> None:
    """Write an entry, in place of any that is there: readers see one or the other. Old entries make room.

    Raises:
        OSError: it cannot be written.
    """
    held: dict[str, torch.Tensor] = {str(i): each.detach().cpu().contiguous() for i, each in enumerate(tensors)}
    digest = hashlib.sha256()
    for name, part in parts.items():
        text = zlib.compress(json.dumps(part, separators=(",", ":")).encode(), 1)
        digest.update(text)
        held[_TEXT + name] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    for i in range(len(tensors)):
        digest.update(held[str(i)].reshape(-1).view(torch.uint8).numpy().tobytes() if tensors[i].numel() else b"")
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    written = path.with_name(f".{path.name}.{os.getpid()}-{id(parts)}")
    try:
        safetensors.torch.save_file(held, written, {"sha256": digest.hexdigest(), "parts": json.dumps([*parts])})
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


def read(path: Path) -> tuple[Parts, list[torch.Tensor]] | None:
    """The parts and tensors of an entry, None if there is none.

    Raises:
        NotStorable: the file is not an entry, or not a whole one.
    """
    if not path.is_file():
        return None
    try:
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
            names = json.loads(about["parts"])
            texts = [file.get_tensor(_TEXT + name).numpy().tobytes() for name in names]
            count = len(list(file.keys())) - len(names)
            tensors = [file.get_tensor(str(i)) for i in range(count)]
        digest = hashlib.sha256()
        for text in texts:
            digest.update(text)
        for each in tensors:
            digest.update(each.reshape(-1).view(torch.uint8).numpy().tobytes() if each.numel() else b"")
        if digest.hexdigest() != about["sha256"]:
            raise NotStorable(f"{path.name} is damaged")
        parts = Parts(dict(zip(names, texts, strict=True)))
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise NotStorable(f"{path.name} cannot be read: {error}") from error
    with suppress(OSError):
        os.utime(path)  # lately used
    return parts, tensors


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
