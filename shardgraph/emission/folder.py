"""The files of a program in its folder: all of them or, if writing was interrupted, none."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

_FIRST = "program.py"
"""The file that a program starts with."""


def write(folder: Path, files: Mapping[str, str], tensors: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    """Write text and tensors to a folder, which is made, with those around it.

    They are written beside it first. A new folder then is there at once. In one that was there, files of the same names
    are replaced one after the other, and for that moment there is no ``program.py``, which could start on others.
    """
    missing = next((each for each in (*reversed(folder.parents), folder) if not each.exists()), None)
    with TemporaryDirectory(prefix=".shardgraph-", dir=missing.parent if missing is not None else folder) as name:
        draft = Path(name) / (folder.relative_to(missing.parent) if missing is not None else "files")
        draft.mkdir(parents=True)
        for file, text in files.items():
            (draft / file).write_text(text, encoding="utf-8")
        for file, each in tensors.items():
            torch.save({key: value.detach().cpu().contiguous().clone() for key, value in each.items()}, draft / file)
        if missing is not None:
            os.replace(Path(name) / missing.name, missing)
            return
        (folder / _FIRST).unlink(missing_ok=True)
        for file in sorted((*files, *tensors), key=lambda file: file == _FIRST):
            os.replace(draft / file, folder / file)
