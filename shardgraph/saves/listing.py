"""The checkpoints of a folder, for people."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from shardgraph.errors import CheckpointError
from shardgraph.saves.folders import found_in, is_checkpoint
from shardgraph.saves.loading import opened
from shardgraph.saves.machines import name_of_machine
from shardgraph.saves.manifest import Index
from shardgraph.saves.reading import Reader
from shardgraph.sizes import format_bytes


@dataclass(frozen=True)
class Listed:
    """A checkpoint: of what, and what is damaged. ``elsewhere`` is the number of files that other machines have."""

    folder: str
    step: int | None
    time: str
    model: str
    plan: str
    ranks: int | None
    nbytes: int
    verified: bool
    damage: list[str]
    elsewhere: int = 0

    def __str__(self) -> str:
        name = Path(self.folder).name
        if self.damage:
            return "\n".join([f"{name}: damaged", *(f"  {each}" for each in self.damage)])
        of = f"of {self.model.rpartition('.')[2]} under {self.plan or 'no plan'} on {self.ranks} ranks, {self.time}, "
        read = "verified" if self.time else "without checksums, all of it can be read"
        state = read if self.verified else "all files are there"
        if self.elsewhere:
            state = f"{'verified, ' * self.verified}{self.elsewhere} files are on other machines"
        return f"{name}: {of if self.time else ''}{format_bytes(self.nbytes)}, {state}"


def listed(path: str | Path, verify: bool) -> list[Listed]:
    """The checkpoints in ``path``, or that which it is, the one that was written last at the end.

    Raises:
        CheckpointError: there is no such folder.
    """
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"there is no folder {str(path)!r}: give the path that save_checkpoint was given")
    if is_checkpoint(path):
        return [_one(path, verify)]
    parts = name_of_machine(path) is not None
    return [_one(found.folder, verify) for found in reversed(found_in(path, parts))]


def _one(folder: Path, verify: bool) -> Listed:
    try:
        index = opened(folder)
        if name_of_machine(folder.parent) is not None:
            return _part(index, verify)
        index.raise_if_incomplete()
    except CheckpointError as error:
        return Listed(str(folder), None, "", "", "", None, 0, verify, [str(error)])
    return _described(index, verify, Reader(index).check_all() if verify else [])


def _part(index: Index, verify: bool) -> Listed:
    """What a machine has of a checkpoint, in a folder of its own."""
    files = {name: size for name, size in index.files.items() if (index.folder / name).is_file()}
    tensors = {
        key: replace(stored, chunks=tuple(chunk for chunk in stored.chunks if chunk.region.file in files))
        for key, stored in index.tensors.items()
    }
    values = {key: region for key, region in index.values.items() if region.file in files}
    here = replace(index, files=files, tensors=tensors, values=values)
    here.raise_if_incomplete()
    listed = _described(here, verify, Reader(here).check_all() if verify else [])
    return replace(listed, elsewhere=len(index.files) - len(files))


def _described(index: Index, verify: bool, damage: list[str]) -> Listed:
    about = index.about
    plan = (yaml.safe_load(about["plan"]) or {}).get("name", "") if about.get("plan") else ""
    size = index.nbytes or sum(each.stat().st_size for each in index.folder.iterdir() if each.is_file())
    known = about.get("step"), about.get("time", ""), about.get("model", "")
    return Listed(str(index.folder), *known, plan, about.get("ranks"), size, verify, damage)
