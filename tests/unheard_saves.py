"""A process whose last checkpoint, saved in the background, fails when nothing of it is waited for any more.

``python -m tests.unheard_saves FOLDER HOW``, for :mod:`tests.test_saves`.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import multiprocessing
import sys
import time
from typing import Any

from torch import nn

import shardgraph
from shardgraph.saves import writing


def _full(*_: Any) -> None:
    time.sleep(0.5)
    raise OSError(errno.ENOSPC, "No space left on device")


def save_unheard(folder: str) -> None:
    """Save a checkpoint on a disk that is full by the time it is written."""
    writing._write_file = _full  # type: ignore[assignment]
    shardgraph.save_checkpoint(folder, 1, nn.Linear(4, 4), background=True)


def main(folder: str, how: str) -> None:
    atexit.register(print, "what else is done at the end")
    if how == "a process of multiprocessing":
        child = multiprocessing.get_context("spawn").Process(target=save_unheard, args=(folder,))
        child.start()
        child.join()
        sys.exit(child.exitcode)
    save_unheard(folder)
    if how == "heard":
        with contextlib.suppress(shardgraph.CheckpointError):
            shardgraph.wait_for_saves()
    elif how == "an error of its own":
        raise ValueError("a bad batch")


if __name__ == "__main__":
    main(*sys.argv[1:])
