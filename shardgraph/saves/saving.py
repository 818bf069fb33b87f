"""``shardgraph.save_checkpoint``: a checkpoint of a training job, which is there only once it is whole."""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardgraph
from shardgraph.arguments import BOOL, MODEL, NONE, OBJECTS, OPTIMIZER, PATH, SECONDS, WHOLE, checked, whole
from shardgraph.errors import CheckpointError, RankFailedError
from shardgraph.module.local_state import tied
from shardgraph.module.sharded import ShardedModule
from shardgraph.runtime.before_end import call_before_end
from shardgraph.runtime.exchange import Ranks
from shardgraph.runtime.start_again import StartAgain, told
from shardgraph.saves.contents import Contents, contents_of
from shardgraph.saves.optimizers import kind_of
from shardgraph.saves.preparing import prepared
from shardgraph.saves.writing import Job


class Save:
    """A checkpoint that is being written, or is there."""

    def __init__(self, job: Job) -> None:
        self.step, self._job = job.step, job
        self._folder: Path | None = None
        self._error: BaseException | None = None
        self._told = False
        # Not a daemon: a process that ends finishes it first.
        self._thread = threading.Thread(target=self._run, name=f"shardgraph save {job.step}")

    def start(self) -> None:
        """Write on a thread of its own."""
        self._thread.start()

    def _run(self) -> None:
        try:
            self._folder = self._job.write()
        except BaseException as error:
            self._error = error
        finally:
            del self._job  # and its copies of tensors

    def done(self) -> bool:
        """Whether nothing is waited for any more: it is there, or has failed."""
        return not self._thread.is_alive()

    def result(self) -> Path:
        """Wait until the checkpoint of all ranks is whole and on the disk; returns its folder.

        Raises:
            CheckpointError: it could not be written, on all ranks alike; older ones are untouched.
            RankFailedError: another rank has failed meanwhile.
        """
        self._thread.join()
        if self._error is not None:
            self._told = True
            kind = RankFailedError if isinstance(self._error, RankFailedError) else CheckpointError
            raise kind(str(self._error)) from self._error
        assert self._folder is not None
        return self._folder

    def raise_untold(self) -> None:
        """Wait, and raise the error that no one has been told."""
        self._thread.join()
        if not self._told:
            self.result()


_latest: Save | None = None


@checked(
    path=PATH,
    step=whole(0, "the number of steps that were done, a whole number"),
    model=MODEL,
    optimizer=OPTIMIZER,
    objects=OBJECTS,
    keep=WHOLE | NONE,
    copies=WHOLE,
    background=BOOL,
    timeout=SECONDS,
)
def save_checkpoint(
    path: str | Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    objects: Mapping[str, Any] | None = None,
    extra: Any = None,
    keep: int | None = 3,
    copies: int = 1,
    background: bool = False,
    timeout: float = 300.0,
) -> Save:
    """Save a training job in a new folder ``path/step-00000120``. All ranks must call it.

    It is written beside, with a checksum for every tensor, synchronized to the disk, and gets its name in one step when
    all ranks have written their parts: at any moment, the folders under such names are whole. The folder is one of
    ``torch.distributed.checkpoint``, with a description, ``manifest.json``, beside:
    :func:`shardgraph.load_checkpoint` loads it under any plan, on any number of ranks.

    Args:
        path: the folder of the job's checkpoints, on a file system that all ranks share; with ``copies``, one of each
            machine's own.
        step: the number of steps done. A checkpoint of the same step is replaced once the new one is whole.
        model: what ``shardgraph.compile`` returned, or any module, also without a process group.
        optimizer: that of ``model``, with its state.
        objects: others that have ``state_dict()`` and ``load_state_dict()``, by name: schedulers, a ``GradScaler``.
        extra: numbers, texts, tensors, lists and dictionaries: where in the data the job is. Ranks may have different
            ones; the state of torch's generators is saved anyway.
        keep: how many checkpoints there are afterwards; older ones are removed once the new one is whole. None: all.
        copies: how many machines have each part of the checkpoint, where ``path`` is a folder of each machine's own, as
            in its memory. With 2, what the ranks of a machine write is copied to another one, so that all is left when
            a machine is lost: :func:`shardgraph.load_checkpoint` gathers it. Ranks that share a folder are one machine;
            of fewer machines than copies, each has all.
        background: return as soon as this rank's part is copied to host memory, and write it on a thread. The next save
            waits for it, and uses the same memory. So does the end of the process; if the last one has failed, and
            nothing has raised its error, that is written to standard error, and the exit code is not 0.
        timeout: seconds that ranks wait for each other at most.

    Under :func:`shardgraph.elastic`, when the job can go on with more ranks, the call waits until the checkpoint is
    whole, and does not return: all ranks end there, and the job is started again.

    Returns:
        a handle, whose ``result()`` waits until the checkpoint is whole, and returns its folder.

    Raises:
        CheckpointError: on all ranks alike: a rank cannot write, there is no room, what is to be saved cannot be read
            again, or an earlier one in the background has failed, with its cause. Older ones are untouched.
        RankFailedError: another rank has failed, now or during an earlier save in the background.
    """
    global _latest
    wait_for_saves()
    objects = {} if objects is None else objects
    ranks, folder = Ranks(timeout, CheckpointError), Path(os.path.abspath(path))
    contents: Contents | Exception
    try:
        contents = contents_of(model, optimizer, objects, extra)
    except Exception as error:  # of any kind: the other ranks must not wait for this one
        contents = error
    about = _about(step, ranks.count, model, optimizer, objects)
    saving = Save(prepared(ranks, folder, step, keep, copies, contents, about, background, timeout))
    saving.start()
    start_again = told(timeout)
    if start_again or not background:
        saving.result()
    else:
        _latest = saving
        call_before_end(wait_for_saves)
    if start_again:
        raise StartAgain
    return saving


def wait_for_saves() -> None:
    """Return when nothing is written in the background any more.

    Raises:
        CheckpointError: the latest could not be written, and ``result()`` has not said so yet.
    """
    global _latest
    latest, _latest = _latest, None
    if latest is not None:
        latest.raise_untold()


def _about(
    step: int, ranks: int, model: nn.Module, optimizer: torch.optim.Optimizer | None, objects: Mapping[str, Any]
) -> dict[str, Any]:
    """What a checkpoint is of."""
    plan = model.plan if isinstance(model, ShardedModule) else None
    original = model.original if isinstance(model, ShardedModule) else model
    return {
        "step": step,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "ranks": ranks,
        "versions": {
            "shardgraph": shardgraph.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "model": _name(original),
        "plan": None if plan is None else plan.to_yaml(),
        "mesh": None if plan is None else dict(plan.whole_mesh),
        "optimizer": None if optimizer is None else kind_of(optimizer),
        "objects": {name: _name(each) for name, each in objects.items()},
        "tied": tied(original),
    }


def _name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
