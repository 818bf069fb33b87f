"""Checkpoints of which machines have parts, in folders of their own: what is there, and how ranks get the rest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from shardgraph.saves.folders import Found, found_in, number_of
from shardgraph.saves.machines import name_of_machine
from shardgraph.saves.manifest import CHECKSUM, MANIFEST


class Part(NamedTuple):
    """What this machine has of a checkpoint: some of its files.

    ``place`` is the number of the folder, of several that a job saves in, ``manifest`` the checksum of the description,
    so that parts with the same one are of the same checkpoint, and ``sizes`` are those of all files.
    """

    place: int
    folder: str
    step: int
    damage: str = ""
    manifest: str = ""
    time: str = ""
    number: int = 0
    files: Sequence[str] = ()
    sizes: Mapping[str, int] = {}


class Candidate(NamedTuple):
    """A checkpoint that may be loaded, in a folder that all ranks share.

    Or one that machines have parts of: ``manifest`` is the checksum of its description, of ``nbytes``, ``holders`` are
    the ranks on machines that have a file, by its name, and ``damage`` says what nobody has.
    """

    folder: str
    step: int
    time: str
    place: int = 0
    manifest: str = ""
    nbytes: int = 0
    holders: Mapping[str, list[int]] = {}
    damage: str = ""

    def is_gathered(self, ranks: int) -> bool:
        """Whether one of so many ranks must get a file from another machine."""
        return any(len(holders) < ranks for holders in self.holders.values())


def candidate_of(found: Found) -> Candidate:
    """A checkpoint in a folder that all ranks share."""
    time = "" if found.index is None else str(found.index.about.get("time", ""))
    return Candidate(str(found.folder), found.step, time, damage=found.damage)


def parts_in(paths: Sequence[Path]) -> list[Part]:
    """What there is in those of these folders that are of this machine alone."""
    parts = []
    for place, path in enumerate(paths):
        try:
            if name_of_machine(path) is not None:
                parts += [_part(place, found) for found in found_in(path, parts=True)]
        except OSError as error:  # the other ranks must not wait for this one
            parts.append(Part(place, str(path), 0, f"{str(path)!r} cannot be read: {error.strerror}"))
    return parts


def _part(place: int, found: Found) -> Part:
    folder = found.folder
    if found.index is None:
        return Part(place, str(folder), found.step, found.damage)
    about = found.index.about
    sizes = {**found.index.files, MANIFEST: (folder / MANIFEST).stat().st_size}
    files = [name for name, size in sizes.items() if _size(folder / name) == size]
    manifest = (folder / CHECKSUM).read_text()[:64]
    written = str(about.get("time", "")), number_of(found)
    return Part(place, str(folder), found.step, "", manifest, *written, files, sizes)


def _size(file: Path) -> int | None:
    return file.stat().st_size if file.is_file() else None


def candidates_of(parts: Sequence[Sequence[Part]]) -> list[Candidate]:
    """The checkpoints of which ranks have ``parts``, the one that was written last first; damaged parts at the end."""
    known: dict[tuple[int, str], list[tuple[int, Part]]] = defaultdict(list)
    for rank, of_rank in enumerate(parts):
        for part in of_rank:
            if part.manifest:
                known[part.place, part.manifest].append((rank, part))
    last_first = sorted(known.values(), key=lambda each: (each[0][1].time, each[0][1].number), reverse=True)
    damaged = [Candidate(each.folder, each.step, "", damage=each.damage) for of_rank in parts for each in of_rank]
    return [*map(_candidate, last_first), *(each for each in damaged if each.damage)]


def _candidate(of_ranks: Sequence[tuple[int, Part]]) -> Candidate:
    _, one = of_ranks[0]
    holders = {name: [rank for rank, part in of_ranks if name in part.files] for name in one.sizes}
    lost = ", ".join(repr(name) for name, ranks in holders.items() if not ranks)
    damage = f"{one.folder!r} lacks {lost}, and no other machine of this job has a copy" if lost else ""
    return Candidate(one.folder, one.step, one.time, one.place, one.manifest, one.sizes[MANIFEST], holders, damage)
