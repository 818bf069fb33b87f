"""The folders of a run's checkpoints: one for each step, there only once it is whole."""

from __future__ import annotations

import heapq
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardgraph.errors import CheckpointError
from shardgraph.saves.manifest import MANIFEST, METADATA, DamagedError, Index, read_manifest

_FINISHED = re.compile(r"step-(\d+)(\.replaced(?:-\w+)?)?")
_WRITING, _REPLACED, _REMOVED = ".writing", ".replaced", ".removed"


@dataclass(frozen=True)
class Found:
    """A checkpoint in a folder of checkpoints: its description, or what is wrong with it."""

    step: int
    folder: Path
    index: Index | None
    damage: str = ""


def name_of(step: int) -> str:
    """The folder of a step, inside of the run's."""
    return f"step-{step:08}"


def draft_of(path: Path, step: int) -> Path:
    """The folder of a step that is being written."""
    return path / (name_of(step) + _WRITING)


def file_of(rank: int) -> str:
    """The file of a rank in the folder of a step, as ``torch.distributed.checkpoint`` names it."""
    return f"__{rank}_0.distcp"


def step_of(folder: Path) -> int | None:
    """The step that a folder is called after; None for other names."""
    match = _FINISHED.fullmatch(folder.name)
    return None if match is None else int(match[1])


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is one checkpoint, of ours or of ``torch.distributed.checkpoint``."""
    return (path / MANIFEST).is_file() or (path / METADATA).is_file() or step_of(path) is not None


def found_in(path: Path, parts: bool = False) -> list[Found]:
    """The finished checkpoints in a folder, the one that was written last first; damaged ones at the end.

    Files are looked for, and their sizes; their contents are not read. With ``parts`` not all files need be there:
    those of a machine's own folder, of which others have the rest.
    """
    found = [_looked_at(folder, step, parts) for step, folder in _finished(path)]
    return sorted(found, key=lambda each: (each.index is not None, number_of(each), each.step), reverse=True)


def found_in_all(paths: Sequence[Path]) -> list[Found]:
    """Those of several folders, likewise; of two folders', the later in the clock of the job, or of its steps."""
    of_each = [found_in(path) for path in paths]
    whole = ([each for each in found if each.index is not None] for found in of_each)
    damaged = [each for found in of_each for each in found if each.index is None]
    return [*heapq.merge(*whole, key=lambda each: (_time(each), each.step), reverse=True), *damaged]


def _time(found: Found) -> str:
    return "" if found.index is None else str(found.index.about.get("time", ""))


def latest_in(path: Path) -> tuple[int, str]:
    """The largest number in the order in which the checkpoints in a folder were written, and the latest time."""
    found = found_in(path, parts=True)
    return max(map(number_of, found), default=0), max(map(_time, found), default="")


def make_draft(path: Path, step: int) -> Path:
    """A new, empty folder that a checkpoint is written to, beside the finished ones. What was left of others that were
    not finished is removed.

    Raises:
        OSError: it cannot be made.
    """
    path.mkdir(parents=True, exist_ok=True)
    _tidy(path)
    draft = draft_of(path, step)
    draft.mkdir()
    return draft


def finish_draft(draft: Path) -> None:
    """Give a complete draft its name, in one step and for good. One that it replaces is there under another name."""
    final = draft.with_name(draft.name.removesuffix(_WRITING))
    sync_folder(draft)
    if final.exists():
        os.rename(final, final.with_name(f"{final.name}{_REPLACED}-{secrets.token_hex(4)}"))
    os.rename(draft, final)
    sync_folder(draft.parent)


def remove_old(path: Path, keep: int | None, parts: bool = False) -> None:
    """Remove old checkpoints but for the last ``keep``, and those that were replaced."""
    whole = [each.folder for each in found_in(path, parts) if each.index is not None and not _is_replaced(each.folder)]
    for old in whole[keep:] if keep is not None else ():
        _remove(old)
    for each in list(path.iterdir()):
        if _is_replaced(each):
            _remove(each)


def drop_draft(draft: Path) -> None:
    """Remove a draft that will not be finished."""
    shutil.rmtree(draft, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _finished(path: Path) -> Iterator[tuple[int, Path]]:
    """Steps and folders. One that was about to be replaced when its run ended is still there under another name; where
    each machine has its own folder, the new one may have been finished on some alone."""
    names = {each.name for each in path.iterdir() if each.is_dir()} if path.is_dir() else set()
    for name in sorted(names):
        if match := _FINISHED.fullmatch(name):
            yield int(match[1]), path / name


def _is_replaced(folder: Path) -> bool:
    match = _FINISHED.fullmatch(folder.name)
    return match is not None and match[2] is not None


def _looked_at(folder: Path, step: int, parts: bool) -> Found:
    try:
        index = read_manifest(folder)
        if (written := index.about.get("step")) != step:
            raise DamagedError(f"{str(folder / MANIFEST)!r} is of step {written}, not of {step}")
        if not parts:
            index.raise_if_incomplete()
    except CheckpointError as error:
        return Found(step, folder, None, str(error))
    return Found(step, folder, index)


def number_of(found: Found) -> int:
    """Its place in the order in which the checkpoints of a job were written; 0 if it is damaged."""
    number = found.index.about.get("number") if found.index is not None else 0
    return number if isinstance(number, int) else 0


def _tidy(path: Path) -> None:
    """Remove what runs that ended left behind, and give a checkpoint that was about to be replaced its name again."""
    for each in list(path.iterdir()):
        if each.name.startswith("step-") and each.name.endswith((_WRITING, _REMOVED)):
            shutil.rmtree(each, ignore_errors=True)
        elif _is_replaced(each) and not (final := each.with_name(each.name.partition(".")[0])).exists():
            os.rename(each, final)


def _remove(folder: Path) -> None:
    """Remove a checkpoint; at no moment is there half of one under its name."""
    removed = folder.with_name(folder.name + _REMOVED)
    os.rename(folder, removed)
    shutil.rmtree(removed, ignore_errors=True)
