"""Ranks agree on a save before anything is written: who writes what, and where."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardgraph.errors import CheckpointError
from shardgraph.runtime.exchange import Ranks
from shardgraph.runtime.messages import Messages
from shardgraph.saves import folders
from shardgraph.saves.assignment import Assignment, Offer, Piece, Value, assigned, rank_entry
from shardgraph.saves.contents import Contents, packed
from shardgraph.saves.machines import named_machine
from shardgraph.saves.staging import staged
from shardgraph.saves.writing import Job, cannot_write
from shardgraph.torch_api import box_of, local_tensor


def prepared(
    ranks: Ranks,
    path: Path,
    step: int,
    keep: int | None,
    copies: int,
    contents: Contents | Exception,
    about: Mapping[str, Any],
    copy: bool,
    timeout: float,
) -> Job:
    """Agree with the other ranks on who writes what, make the folders, and ``copy`` this rank's part to host memory.

    ``contents`` may be the reason why this rank has none. With ``copies``, each machine may have a folder of its own.

    Raises:
        CheckpointError: on all ranks, if one cannot save, or there is no room; nothing has been written.
    """
    offer, offered = _offer(contents, path, step, copies)
    offers = ranks.to_first(f"step {step} of the checkpoint", offer)
    verdict: Any = None
    if ranks.is_first:
        verdict = _verdict([Offer.of(each) for each in offers], path, step)
    verdict = ranks.from_first(f"step {step} of the checkpoint", verdict)
    if isinstance(contents, Exception):
        raise CheckpointError(verdict) from contents
    if isinstance(verdict, str):
        raise CheckpointError(verdict)
    mine = Assignment(*verdict)
    place = next(number for number, each in enumerate(mine.machines) if ranks.rank in each)
    messages = None
    if len(mine.machines) > 1:
        _make_folders(ranks, path, step, mine.nbytes[place], ranks.rank == mine.machines[place][0])
        messages = Messages(timeout)
    pieces = [offered[number] for number in mine.pieces[ranks.rank]]
    own = [local_tensor(contents.tensors[piece.key]) for piece in pieces]
    if any(tensor.is_cuda for tensor in own):
        torch.cuda.synchronize()  # another thread reads them
    paths = [contents.paths[piece.key] for piece in pieces]
    tensors = list(zip(pieces, paths, staged(own) if copy else own, strict=True))
    values = [
        (name, contents.paths[key] + ((rank_entry(ranks.rank),) if name != key else ()), contents.values[key])
        for key, name in mine.values[ranks.rank]
    ]
    for index, names in enumerate(mine.groups if ranks.is_first else ()):
        group = ("optimizer", "param_groups", index, "params")
        values.append((key := ".".join(map(str, group)), group, packed(key, names)))
    where = mine.machines, copies, messages
    return Job(ranks, path, step, keep, mine.nbytes[place], tensors, values, dict(about), copy, *where)


def _offer(contents: Contents | Exception, path: Path, step: int, copies: int) -> tuple[Offer, list[Piece]]:
    told = machine = ""
    if isinstance(contents, Exception):
        told = str(contents) if isinstance(contents, CheckpointError) else f"{type(contents).__name__}: {contents}"
    elif copies > 1:
        try:
            machine = named_machine(path)
        except OSError as error:
            told = cannot_write(path, step, 0, error)
    if told or isinstance(contents, Exception):
        return Offer(told, step, str(path), copies, machine, [], [], []), []
    pieces = []
    for key, tensor in contents.tensors.items():
        box = box_of(tensor) if isinstance(tensor, DTensor) else ([0] * tensor.dim(), list(tensor.shape))
        if box is not None and (local_tensor(tensor).numel() or not tensor.numel()):
            pieces.append(Piece(key, *box, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")))
    values = [Value(key, contents.digests[key], len(data)) for key, data in contents.values.items()]
    return Offer(None, step, str(path), copies, machine, pieces, values, contents.groups), pieces


def _verdict(offers: list[Offer], path: Path, step: int) -> Assignment | str:
    """Who writes what, with a folder for it, if there is one for all; or why it cannot be."""
    try:
        made = assigned(offers)
        if len(made.machines) == 1:
            _make_folder(path, step, made.nbytes[0])
    except CheckpointError as error:
        return str(error)
    return made


def _make_folder(path: Path, step: int, nbytes: int) -> None:
    try:
        folders.make_draft(path, step)
        if shutil.disk_usage(path).free < nbytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        folders.drop_draft(folders.draft_of(path, step))
        raise CheckpointError(cannot_write(path, step, nbytes, error)) from error


def _make_folders(ranks: Ranks, path: Path, step: int, nbytes: int, leads: bool) -> None:
    """Make a folder on each machine, by the rank that ``leads`` there."""
    told = ""
    try:
        if leads:
            _make_folder(path, step, nbytes)
    except CheckpointError as error:
        told = str(error)
    all_told = ranks.gather(f"step {step} of the checkpoint, folders", told)
    for rank, each in enumerate(all_told):
        if each:
            if leads:
                folders.drop_draft(folders.draft_of(path, step))
            raise CheckpointError(f"rank {rank}: {each}")
