"""The files in which this machine's prices are remembered."""

from __future__ import annotations

import hashlib
import os
import warnings
from pathlib import Path


def folder() -> Path:
    """Where they are."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardgraph"


def named(kind: str, *of: object) -> Path:
    """The file of this kind for what is measured alike on machines that are equal in all of ``of``."""
    key = " ".join(map(str, of))
    return folder() / f"{kind}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.yaml"


def write(path: Path, content: str) -> None:
    """Write a file whole, whoever else does so at the same time; where none can be written, a warning says so."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.with_suffix(f".{os.getpid()}")
        written.write_text(content, encoding="utf-8")
        written.replace(path)
    except OSError as error:
        warnings.warn(f"the rates of this machine cannot be kept in {path}: {error.strerror}", stacklevel=3)
