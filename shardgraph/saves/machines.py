"""Folders that each machine has for itself, such as in its memory: who shares one, and who keeps what for whom."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

_NAME = ".machine"  # the file in a folder that says whose it is


def name_of_machine(path: Path) -> str | None:
    """The name of the machine that a folder of checkpoints is of; None if it is of none, or there is no such folder."""
    try:
        return (path / _NAME).read_text()
    except (FileNotFoundError, NotADirectoryError):
        return None


def named_machine(path: Path) -> str:
    """The same, with the folder and a name made where there are none: ranks that share the folder get the same one.

    Raises:
        OSError: it cannot be made.
    """
    path.mkdir(parents=True, exist_ok=True)
    if (name := name_of_machine(path)) is None:
        with tempfile.NamedTemporaryFile("w", dir=path, prefix=_NAME) as made:
            made.write(secrets.token_hex(16))
            made.flush()
            with contextlib.suppress(FileExistsError):  # another rank was first
                os.link(made.name, path / _NAME)
        name = (path / _NAME).read_text()
    return name


def keepers(machines: Sequence[Sequence[int]], copies: int) -> list[tuple[int, int]]:
    """The ranks of other machines that keep the file of a rank: pairs of a rank and a keeper.

    ``machines`` are the ranks of each. The files of a machine are on the ``copies - 1`` after it, too, or on all.
    """
    count = len(machines)
    return [
        (rank, (after := machines[(number + distance) % count])[place % len(after)])
        for distance in range(1, min(copies, count))
        for number, ranks in enumerate(machines)
        for place, rank in enumerate(ranks)
    ]


def needed_on(machines: Sequence[Sequence[int]], copies: int, loads: Sequence[int]) -> list[int]:
    """The bytes that each machine keeps, of ``loads``, those of each rank."""
    pairs = keepers(machines, copies)
    return [
        sum(loads[rank] for rank in ranks) + sum(loads[rank] for rank, keeper in pairs if keeper in ranks)
        for ranks in machines
    ]


def new_file(file: Path, nbytes: int) -> torch.Tensor:
    """The bytes of a new file, to be filled; they have their room, so that filling them cannot fail.

    Raises:
        OSError: there is no room.
    """
    with file.open("xb") as raw:
        raw.truncate(nbytes)
        if nbytes and hasattr(os, "posix_fallocate"):  # without it, a process dies that fills what has no room
            os.posix_fallocate(raw.fileno(), 0, nbytes)
    return bytes_of(file, nbytes, write=True)


def bytes_of(file: Path, nbytes: int, write: bool = False) -> torch.Tensor:
    """The first bytes of a file, which are read when they are looked at."""
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.from_file(str(file), shared=write, size=nbytes, dtype=torch.uint8)


def synced(file: Path) -> None:
    """Have a file that was filled on the disk."""
    with file.open("rb") as raw:
        os.fsync(raw.fileno())
