"""Work in the background is waited for before its process ends, and if it has failed the process does not end as if all
were well: what has started it would take it for done."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing.util import Finalize
from typing import Any

from shardgraph.errors import RankFailedError, ShardGraphError

_waits: list[Callable[[], None]] = []
_process: int | None = None  # the one that they are of; a forked one has none


def call_before_end(wait: Callable[[], None]) -> None:
    """Have ``wait`` called before this process ends, or the function of a launched rank has returned.

    If it raises a :class:`ShardGraphError` then, that is the rank's error, or is written to standard error, and the
    process ends with another code than 0.
    """
    global _process
    if _process != os.getpid():
        _process = os.getpid()
        _waits.clear()
        atexit.register(_end)
        Finalize(None, _end, exitpriority=1)  # a process of multiprocessing has no atexit; before the watch is left
    if wait not in _waits:
        _waits.append(wait)


def wait_before_end() -> None:
    """Call what is to be called before the end.

    Raises:
        ShardGraphError: it has failed.
    """
    if _process == os.getpid():
        for wait in _waits:
            wait()


def _end() -> None:
    has_failed = sys.exc_info()[0] is not None or hasattr(sys, "last_value")  # so it does not end as if all were well
    try:
        wait_before_end()
    except ShardGraphError as error:
        if has_failed and isinstance(error, RankFailedError):
            return  # it is told already
        stream = sys.stderr
        if not has_failed:
            _end_with_failure()
        print(f"shardgraph.{type(error).__name__}: {error}", file=stream, flush=True)


def _end_with_failure() -> None:
    """Let this process, which is about to end, do what it does then, and end with another code than 0."""
    if multiprocessing.parent_process() is None:
        sys.stderr = _Unclean(sys.stderr)
    else:
        Finalize(None, _leave, exitpriority=-1_000_000)  # the last thing that it does but for waiting for threads


def _leave() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


class _Unclean:
    """A standard error whose last flush fails, when all else has ended: then the interpreter ends with 120, as it does
    where it cannot write what was printed. Nothing else can change the code by then without leaving out the rest."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        self._stream.flush()
        if sys.is_finalizing():
            raise OSError("this process has failed")
