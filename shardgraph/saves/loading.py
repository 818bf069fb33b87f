"""``shardgraph.load_checkpoint``: a job goes on from a checkpoint, verified on all ranks before anything is changed."""

from __future__ import annotations

import heapq
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardgraph.arguments import BOOL, MODEL, OBJECTS, OPTIMIZER, PATH, SECONDS, checked, sequence_of, whole
from shardgraph.errors import CheckpointError
from shardgraph.runtime.exchange import Ranks
from shardgraph.saves import folders
from shardgraph.saves.folders import found_in_all, is_checkpoint, name_of
from shardgraph.saves.gathering import Gathered
from shardgraph.saves.machines import name_of_machine
from shardgraph.saves.manifest import MANIFEST, METADATA, DamagedError, Index, read_distributed, read_manifest
from shardgraph.saves.parts import Candidate, Part, candidate_of, candidates_of, parts_in
from shardgraph.saves.reading import Reader
from shardgraph.saves.restoring import Restored, own_of
from shardgraph.saves.saving import wait_for_saves


@dataclass(frozen=True)
class Loaded:
    """What was loaded: the ``step`` it was saved at (None if others wrote it), and its folder. Step 0 and no folder if
    there was none.

    ``about`` is what the manifest says of it: the plan, the mesh, versions. ``extras`` are the ``extra`` of all ranks,
    or one if they had the same.
    """

    step: int | None
    folder: Path | None
    about: Mapping[str, Any]
    extras: list[Any]
    _rank: int = 0
    _ranks: int = 1

    @property
    def extra(self) -> Any:
        """The ``extra`` that was saved; this rank's, if ranks had different ones.

        Raises:
            CheckpointError: ranks had different ones, and there were more or fewer: see ``extras``.
        """
        if not self.extras:
            return None
        if (own := own_of(self.extras, self._rank, self._ranks)) is None:
            raise CheckpointError(
                f"each of {len(self.extras)} ranks has saved another extra, and {self._ranks} ranks have loaded: "
                "make what is needed of them from .extras"
            )
        return own[0]


_PATHS = PATH | sequence_of("several paths", PATH)


@checked(path=_PATHS, model=MODEL, optimizer=OPTIMIZER, objects=OBJECTS, step=whole(0), required=BOOL, timeout=SECONDS)
def load_checkpoint(
    path: str | Path | Sequence[str | Path],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    objects: Mapping[str, Any] | None = None,
    step: int | None = None,
    required: bool = True,
    timeout: float = 300.0,
) -> Loaded:
    """Load the checkpoint that :func:`shardgraph.save_checkpoint` wrote last, under any plan, on any number of ranks.

    All ranks must call it.

    Every rank reads what it needs into new memory and compares checksums; when all ranks have told each other that all
    of theirs are right, values are copied into the model. So after an error, nothing has been changed on any rank. A
    damaged checkpoint is left out, with a warning that says what is damaged, if there is an older one that is whole.
    What was saved with ``copies``, in folders of each machine's own, is put together from those of all machines.

    Args:
        path: the folder of the job's checkpoints; or one checkpoint, also of ``torch.distributed.checkpoint`` alone:
            it has no checksums. Or several folders of the job's checkpoints, such as one in memory and one on a disk.
        model: the model that was saved, compiled under any plan, or not.
        optimizer: of the same class and parameter groups as the one saved. None: its state is not loaded.
        objects: schedulers and others that were saved, by their names; their ``load_state_dict`` is called.
        step: the one to load, which then must be whole.
        required: False: if no rank finds a checkpoint, as at the first start of a job, nothing is loaded, and what is
            returned has the step 0.
        timeout: seconds that ranks wait for each other at most.

    Torch's generators get the state that they had, as far as as many ranks load, or all had the same.

    Raises:
        CheckpointError: on all ranks alike: there is none, files are damaged (the message names tensors and files), or
            it is of another model, optimizer or dtype. Nothing has been changed.
    """
    wait_for_saves()
    ranks, objects, paths = Ranks(timeout, CheckpointError), {} if objects is None else objects, _folders(path)

    def read(reader: Reader) -> Restored:
        return Restored(reader, model, optimizer, objects, ranks.rank, ranks.count)

    parts = parts_in(paths)
    candidates, damage = _candidates(ranks, paths, step, required, parts)
    if not candidates and not damage:
        return Loaded(0, None, {}, [])
    for number, candidate in enumerate(candidates):
        folder = _folder(candidate, parts, paths)
        restored, damaged = _read(ranks, timeout, candidate, folder, read)
        if restored is not None:
            for each in damage:
                warnings.warn(f"a damaged checkpoint was left out: {each}", stacklevel=3)
            _apply(ranks, restored[1])
            about = restored[0].about
            return Loaded(about.get("step"), folder, about, restored[1].extras, ranks.rank, ranks.count)
        damage.append(damaged if number == len(candidates) - 1 else damaged.splitlines()[0])
    raise CheckpointError("\n".join(["no whole checkpoint was found, and nothing has been changed:", *damage]))


def _folders(path: str | Path | Sequence[str | Path]) -> list[Path]:
    each = [path] if isinstance(path, (str, os.PathLike)) else path
    return [Path(os.path.abspath(one)) for one in each]


def _folder(candidate: Candidate, parts: Sequence[Part], paths: Sequence[Path]) -> Path:
    """Where a checkpoint is on this machine, or would be."""
    if not candidate.manifest:
        return Path(candidate.folder)
    here = (Path(part.folder) for part in parts if (part.place, part.manifest) == (candidate.place, candidate.manifest))
    return next(here, paths[candidate.place] / name_of(candidate.step))


def _candidates(
    ranks: Ranks, paths: list[Path], step: int | None, required: bool, parts: list[Part]
) -> tuple[list[Candidate], list[str]]:
    """What to try, in order, and what is wrong with others: in shared folders as the first rank sees them, and of the
    parts that each rank sees on its machine.

    Raises:
        CheckpointError: on all ranks: there is none, and one is ``required``.
    """
    given = ranks.to_first("loading a checkpoint", [len(paths), parts])
    answer: Any = None
    if ranks.is_first:
        try:
            if {count for count, _ in given} != {len(paths)}:
                raise CheckpointError("the ranks load from different numbers of folders: give all ranks as many")
            of_machines = candidates_of([[Part(*each) for each in of_rank] for _, of_rank in given])
            answer = _listed(paths, step, required, of_machines)
        except (CheckpointError, OSError) as error:
            answer = str(error)
    answer = ranks.from_first("loading a checkpoint", answer)
    if isinstance(answer, str):
        raise CheckpointError(answer)
    return [Candidate(*each) for each in answer[0]], answer[1]


def _listed(
    paths: list[Path], step: int | None, required: bool, of_machines: list[Candidate]
) -> tuple[list[Candidate], list[str]]:
    if len(paths) == 1 and is_checkpoint(paths[0]):
        return [Candidate(str(paths[0]), 0, "")], []
    shared = found_in_all([path for path in paths if name_of_machine(path) is None])
    of_shared = [candidate_of(each) for each in shared]
    all_of_them = [*of_machines, *of_shared]
    named = " and ".join(repr(str(path)) for path in paths)
    if not all_of_them:
        if required:
            raise CheckpointError(
                f"{named} has no checkpoint: none was finished there. Give the path that save_checkpoint was given; at "
                "the first start of a job, load with required=False, or ask shardgraph.checkpoints(path) whether there "
                "is one"
            )
        return [], []
    if step is not None:
        chosen = [each for each in all_of_them if each.step == step]
        if not chosen:
            known = ", ".join(str(each.step) for each in all_of_them)
            raise CheckpointError(f"{named} has no checkpoint {name_of(step)!r}; it has steps {known}")
        return chosen, []
    whole = ([each for each in of_kind if not each.damage] for of_kind in (of_shared, of_machines))
    damage = list(dict.fromkeys(each.damage for each in all_of_them if each.damage))
    return [*heapq.merge(*whole, key=lambda each: (each.time, each.step), reverse=True)], damage


def _read(
    ranks: Ranks, timeout: float, candidate: Candidate, folder: Path, read: Callable[[Reader], Restored]
) -> tuple[tuple[Index, Restored] | None, str]:
    """What a checkpoint has for this rank, if all ranks could read theirs; else what is damaged.

    Raises:
        CheckpointError: on all ranks, if it is whole and cannot be loaded here.
    """
    outcome, made, cause = {"damaged": "", "refused": "", "saved": ""}, None, None
    try:
        if candidate.damage:
            raise DamagedError(candidate.damage)
        gathered = Gathered(ranks, timeout, candidate, folder, read) if candidate.is_gathered(ranks.count) else None
        index = opened(folder) if gathered is None else gathered.index()
        outcome["saved"] = str(index.about.get("metadata_sha256", ""))
        if ranks.is_first and not candidate.manifest:
            index.raise_if_incomplete()
        if ranks.is_first if not candidate.manifest else ranks.rank in candidate.holders[METADATA]:
            index.raise_if_metadata_differs()
        reader = Reader(index) if gathered is None else Reader(index, gathered.part)
        made = index, read(reader)
    except DamagedError as error:
        outcome["damaged"] = str(error)
    except Exception as error:  # of any kind: the other ranks must not wait for this one
        outcome["refused"], cause = str(error) if isinstance(error, CheckpointError) else repr(error), error
    outcomes = ranks.gather("reading a checkpoint", outcome)
    damaged = {each["damaged"]: None for each in outcomes if each["damaged"]}
    if damaged:
        return None, "\n".join(damaged)
    if refused := [(rank, each["refused"]) for rank, each in enumerate(outcomes) if each["refused"]]:
        rank, told = refused[0]
        raise CheckpointError(told if len(refused) == ranks.count else f"rank {rank}: {told}") from cause
    if len({each["saved"] for each in outcomes}) > 1:
        return None, f"{str(folder)!r} is not the same on all ranks: give a path on a file system that they share"
    return made, ""


def opened(folder: Path) -> Index:
    """The description of one checkpoint.

    Raises:
        DamagedError: it is not as it was written.
    """
    if (folder / MANIFEST).is_file() or folders.step_of(folder) is not None:
        index = read_manifest(folder)
        if (step := folders.step_of(folder)) not in (None, index.about["step"]):
            raise DamagedError(f"{str(folder / MANIFEST)!r} is of step {index.about['step']}, not of {step}")
        return index
    return read_distributed(folder)


def _apply(ranks: Ranks, restored: Restored) -> None:
    failure, told = None, ""
    try:
        restored.apply()
    except Exception as error:  # of any kind, likewise
        failure, told = error, f"{type(error).__name__}: {error}"
    failures = [(rank, each) for rank, each in enumerate(ranks.gather("loading a checkpoint", told)) if each]
    if failures:
        rank, told = failures[0]
        raise CheckpointError(
            f"rank {rank} could not take what was read, and some of it has been loaded ({told}): what is given to load "
            "has another state than what was given to save"
        ) from failure


@checked(path=_PATHS)
def checkpoints(path: str | Path | Sequence[str | Path]) -> list[tuple[int, Path]]:
    """The steps and folders of the checkpoints in ``path``, or in several such folders, that have all their files, the
    one that was written last at the end; empty if there are none. Contents are not verified: :func:`load_checkpoint`
    does it."""
    return [(each.step, each.folder) for each in reversed(found_in_all(_folders(path))) if each.index is not None]
