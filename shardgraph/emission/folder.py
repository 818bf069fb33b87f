"""The files of a program in its folder: all of them or, if writing was interrupted, none."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from shardgraph.errors import ShardGraphError

_FIRST = "program.py"
"""The file that a program starts with."""

_SEAL = "# What is above is as it was emitted if this is its hash: "


def write(folder: Path, files: Mapping[str, str], tensors: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    """Write text and tensors to a folder, which is made, with those around it.

    They are written beside it first. A new folder then is there at once. In one that was there, files of the same names
    are replaced one after the other, and for that moment there is no ``program.py``, which could start on others.

    Raises:
        ShardGraphError: a file that would be replaced is another one than was written here, as if it had been edited.
    """
    for file in files:
        if (folder / file).exists() and not _is_as_written((folder / file).read_bytes()):
            raise ShardGraphError(
                f"{file} in {str(folder)!r} was edited after it was emitted, or never was: emit into another folder, "
                "or move it away"
            )
    missing = next((each for each in (*reversed(folder.parents), folder) if not each.exists()), None)
    with TemporaryDirectory(prefix=".shardgraph-", dir=missing.parent if missing is not None else folder) as name:
        draft = Path(name) / (folder.relative_to(missing.parent) if missing is not None else "files")
        draft.mkdir(parents=True)
        for file, text in files.items():
            (draft / file).write_text(f"{text}{_SEAL}{_digest(text)}\n", encoding="utf-8")
        for file, each in tensors.items():
            torch.save({key: value.detach().cpu().contiguous().clone() for key, value in each.items()}, draft / file)
        if missing is not None:
            os.replace(Path(name) / missing.name, missing)
            return
        (folder / _FIRST).unlink(missing_ok=True)
        for file in sorted((*files, *tensors), key=lambda file: file == _FIRST):
            os.replace(draft / file, folder / file)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _is_as_written(content: bytes) -> bool:
    above, _, digest = content.decode(errors="replace").rpartition(_SEAL)
    return digest.strip() == _digest(above)
